"""Text from a trained model, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


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


@torch.no_grad()
def generate(
    model_hf: nn.Module,
    tokenizer: TextTokenizer,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> str:
    """Continues a prompt; the same arguments give the same text on the same device.

    Padding ids (`tokenizer.vocab_size` and above) are never drawn. Each token reruns the whole window:
    learned positions shift when the window slides, so keys and values could not be kept past it anyway.

    Args:
        model_hf: A Hugging Face causal model, or our `GPT2`; its training mode is put back afterwards.
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
    start_ids = prompt_ids or ([] if stop_id is None else [stop_id])
    if not start_ids:
        raise ValueError("the prompt has no tokens; give some text, or stop_id to start a new document")
    if max(start_ids) >= tokenizer.vocab_size:
        raise ValueError(f"prompt id {max(start_ids)} is not below tokenizer.vocab_size {tokenizer.vocab_size}")

    device = next(model_hf.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    context_tokens = _context_tokens(model_hf)
    ids = torch.tensor([start_ids], dtype=torch.int64, device=device)
    was_training = model_hf.training
    model_hf.eval()
    try:
        for _ in range(max_new_tokens):
            logits = model_hf(input_ids=ids[:, -context_tokens:]).logits[0, -1, : tokenizer.vocab_size]
            drawn = _draw(logits.float(), temperature, top_k, generator)
            if stop_id is not None and drawn.item() == stop_id:
                break
            ids = torch.cat((ids, drawn.view(1, 1)), dim=1)
    finally:
        model_hf.train(was_training)
    new_ids = ids[0, len(start_ids) :].tolist()
    return tokenizer.decode(prompt_ids + new_ids)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One id from fp32 logits (vocab,)."""
    if temperature == 0.0:
        return logits.argmax()
    # Taken as indices, not as a threshold: ties with the k-th logit would let more than k tokens in.
    kept, candidates = logits.topk(logits.numel() if top_k is None else min(top_k, logits.numel()))
    choice = torch.multinomial(torch.softmax(kept / temperature, dim=0), 1, generator=generator)
    return candidates[choice]


def _context_tokens(model: Any) -> int:
    """Longest input of a model: our name for it, then the names that Hugging Face configurations use."""
    for name in ("sequence_length", "n_positions", "max_position_embeddings"):
        if getattr(model.config, name, None):
            return int(getattr(model.config, name))
    raise ValueError(f"{type(model.config).__name__} does not say how many positions the model has")
