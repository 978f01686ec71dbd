"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TextTokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of real ids; the model's rows from here on are padding."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (tokens,), any integer dtype."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


def generate(
    model: PreTrainedModel,
    tokenizer: TextTokenizer,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> str:
    """Continues a prompt by Hugging Face's own generation; equal arguments, equal text.

    Padding ids (`tokenizer.vocab_size` and above) are never drawn. Where the text outgrows the model's positions, it
    goes on from its last half: learned positions cannot slide.

    Args:
        model: A Hugging Face causal model; its training mode is put back afterwards.
        tokenizer: Encodes the prompt and decodes the result.
        prompt: Text to continue. An empty one starts from `stop_id`, as documents do.
        max_new_tokens: Tokens to draw at most.
        temperature: Divides the logits; 0 takes the most likely token each time.
        top_k: Draw among this many most likely tokens; None is all.
        seed: Of the sampler.
        stop_id: The end-of-text id: drawing it ends the text, and it is not part of it. None draws on.

    Returns:
        The prompt and its continuation.

    Raises:
        ValueError: A negative temperature or length, `top_k` below 1, an empty prompt without `stop_id`, or a
            prompt with ids that the tokenizer itself calls padding.
    """
    if max_new_tokens < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            "expected max_new_tokens >= 0, temperature >= 0 and top_k >= 1 (or None), got "
            f"{max_new_tokens}, {temperature}, {top_k}"
        )
    prompt_ids = [int(token) for token in tokenizer.encode(prompt)]
    ids = prompt_ids or ([] if stop_id is None else [stop_id])
    if not ids:
        raise ValueError("the prompt has no tokens; give some text, or stop_id to start a new document")
    if max(ids) >= tokenizer.vocab_size:
        raise ValueError(f"prompt id {max(ids)} is not below tokenizer.vocab_size {tokenizer.vocab_size}")

    positions = int(model.config.max_position_embeddings)
    padding = list(range(tokenizer.vocab_size, model.config.vocab_size)) or None
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
    how = sampling if temperature > 0 else {"do_sample": False}
    was_training = model.training
    model.eval()
    drawn: list[int] = []
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            while len(drawn) < max_new_tokens:
                context = (ids + drawn)[-positions:]
                if len(context) == positions:
                    context = context[-max(1, positions // 2) :]
                room = min(max_new_tokens - len(drawn), positions - len(context))
                window = torch.tensor([context], dtype=torch.int64, device=model.device)
                output = model.generate(
                    window,
                    attention_mask=torch.ones_like(window),
                    max_new_tokens=room,
                    suppress_tokens=padding,
                    eos_token_id=stop_id,
                    pad_token_id=stop_id if stop_id is not None else 0,
                    **how,
                )
                new = output[0, len(context) :].tolist()
                drawn += new
                if stop_id is not None and new and new[-1] == stop_id:
                    drawn.pop()
                    break
    finally:
        model.train(was_training)
    return tokenizer.decode(prompt_ids + drawn)
