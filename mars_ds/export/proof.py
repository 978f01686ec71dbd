"""The proof of an export or import: both models give the same logits for the same ids."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Two implementations of one float32 network differ by the order of their sums, far below this; a wrong transposition or
# activation differs far above it (tests/export/test_folder.py has both).
TOLERANCE = 1e-4
_SEQUENCES = 2
_LONGEST = 128


@dataclass(frozen=True)
class LogitProof:
    """What the comparison has shown.

    Attributes:
        difference: Largest absolute difference of two logits, over the largest absolute logit.
        positions: Positions that were compared, each over the whole vocabulary.
    """

    difference: float
    positions: int

    @property
    def equal(self) -> bool:
        """Whether the two compute the same, up to the order of float32 sums."""
        return self.difference <= TOLERANCE

    @property
    def line(self) -> str:
        """For a person."""
        difference = f"{self.difference:.1e} of the largest (allowed {TOLERANCE:.0e})"
        return f"logits at {self.positions} positions differ by {difference}"


@torch.no_grad()
def compare_logits(
    one: nn.Module, other: nn.Module, vocab_size: int, sequence_length: int, seed: int = 0
) -> LogitProof:
    """Runs both models, in evaluation mode, on the same random ids.

    Args:
        one: Called as `model(input_ids=...)`, returns `.logits` (batch, tokens, vocab).
        other: Likewise.
        vocab_size: Ids are drawn below it.
        sequence_length: Longest input of both.
        seed: Of the ids.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (_SEQUENCES, min(sequence_length, _LONGEST))
    ids = torch.randint(0, vocab_size, shape, generator=generator)
    first, second = (_logits(model, ids) for model in (one, other))
    difference = float((first - second).abs().max() / first.abs().max().clamp_min(1e-30))
    return LogitProof(difference if difference == difference else float("inf"), ids.numel())


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    was_training = model.training
    model.eval()
    try:
        logits: torch.Tensor = model(input_ids=ids).logits.float()
    finally:
        model.train(was_training)
    return logits
