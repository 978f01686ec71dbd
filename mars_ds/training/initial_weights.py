"""`run.init_from`: the weights, and nothing else, of something that was trained before."""

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_ds.checkpoint.api import load_checkpoint
from mars_ds.checkpoint.engine_state import restore
from mars_ds.checkpoint.layout import MASTER
from mars_ds.errors import ConfigError
from mars_ds.export.huggingface import from_huggingface
from mars_ds.export.proof import compare_logits
from mars_ds.model.gpt2 import GPT2
from mars_ds.training.run_folder import HUGGING_FACE


def load_initial_weights(engine: Any, source: str) -> str:
    """Puts the weights of `source` into an engine; all ranks call it together.

    Args:
        engine: Made by `mars_ds.initialize`, freshly.
        source: A checkpoint folder, a folder of checkpoints, or `hf:` and a folder (or hub name) of a Hugging Face
            GPT-2.

    Returns:
        A line for the console.

    Raises:
        CheckpointError: Nothing there, damaged, or of another model.
        ConfigError: Not a GPT-2 that ours computes, or its logits differ in ours.
    """
    if not source.startswith(HUGGING_FACE):
        reader = load_checkpoint(engine, source, weights_only=True)
        return f"weights of {source} (step {reader.step}); the optimizer starts anew"
    weights, line = read_huggingface(source.removeprefix(HUGGING_FACE), _vocab_size(engine))
    restore(engine, WholeWeights(source, weights), weights_only=True)  # type: ignore[arg-type]
    return line


def read_huggingface(name: str, vocab_size: int | None) -> tuple[dict[str, Tensor], str]:
    """The weights of a Hugging Face GPT-2 by our names, after its logits were found in ours.

    Rows of the embedding beyond its vocabulary, up to `vocab_size`, become the mean of its rows: an id that no text has
    then gets a small probability, where a row of zeros would get nearly all of it.

    Args:
        name: Folder or hub name.
        vocab_size: Rows of this run's embedding; None keeps theirs.

    Raises:
        ConfigError: It cannot be read, is another kind of model, or its logits differ.
    """
    from transformers import GPT2LMHeadModel

    try:
        theirs = GPT2LMHeadModel.from_pretrained(name, torch_dtype=torch.float32).eval()
        config, weights = from_huggingface(theirs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"run.init_from: {HUGGING_FACE}{name}: {error}") from error
    ours = GPT2(config, seed=0).eval()
    ours.load_state_dict(weights)
    proof = compare_logits(theirs, ours, config.vocab_size, config.sequence_length)
    if not proof.equal:
        raise ConfigError(f"run.init_from: {HUGGING_FACE}{name}: {proof.line}; it is not the GPT-2 that ours computes")
    embedding = weights["transformer.wte.weight"]
    if vocab_size is not None and vocab_size > len(embedding):
        padding = embedding.mean(dim=0, keepdim=True).expand(vocab_size - len(embedding), -1)
        weights["transformer.wte.weight"] = torch.cat([embedding, padding])
    return weights, f"weights of {HUGGING_FACE}{name}; {proof.line}; the optimizer starts anew"


class WholeWeights:
    """Whole tensors in the guise of a checkpoint: what `restore` needs of one.

    Args:
        name: For messages.
        weights: By parameter name.
    """

    def __init__(self, name: str, weights: dict[str, Tensor]) -> None:
        self.folder = Path(name)
        self.shapes = {key: tuple(value.shape) for key, value in weights.items()}
        self.index: dict[str, Any] = {"module_shapes": {}, "optimizer": {"kind": "nothing"}}
        self._weights = weights

    def has(self, name: str, buffer: str) -> bool:
        """True for the masters."""
        return buffer == MASTER and name in self._weights

    def read(self, name: str, buffer: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened tensor."""
        assert buffer == MASTER
        assert start + numel <= prod(self.shapes[name])
        return self._weights[name].reshape(-1)[start : start + numel]


def _vocab_size(engine: Any) -> int | None:
    config = getattr(engine.module, "config", None)
    return getattr(config, "vocab_size", None)
