"""Validation loss over a fixed set of windows, shared between the ranks."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from data_pipeline import TokenWindows
from mars_ds.training.data import evaluation_windows
from mars_ds.training.model import IGNORED_LABEL, TrainableModel


@dataclass(frozen=True)
class Evaluation:
    """Result over one split.

    Attributes:
        loss: Mean over all target tokens, nats.
        bits_per_byte: The same per byte of text; None when the data set does not know its bytes.
        tokens: Target tokens.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int


class Evaluator:
    """Evaluates the same windows every time, whatever the world size.

    Args:
        windows: Validation split.
        model: Convention of labels.
        sequences: Windows at most.
        micro_batch: Windows of one forward pass on one rank.
        device: Where batches are put.
    """

    def __init__(
        self,
        windows: TokenWindows,
        model: TrainableModel,
        sequences: int,
        micro_batch: int,
        device: torch.device,
    ) -> None:
        self.windows, self.model, self.micro_batch, self.device = windows, model, micro_batch, device
        self.chosen = evaluation_windows(windows.num_windows, sequences)

    @torch.no_grad()
    def run(self, engine: Any) -> Evaluation:
        """Evaluates; every rank makes the same number of passes, the last ones perhaps on masked windows."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        per_pass = self.micro_batch * world_size
        targets = self.model.targets_per_window(self.windows.sequence_length)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        was_training = engine.training
        engine.eval()
        for first in range(0, len(self.chosen), per_pass):
            at = first + rank * self.micro_batch
            mine = self.chosen[at : at + self.micro_batch]
            padded = list(mine) + [self.chosen[0]] * (self.micro_batch - len(mine))
            tokens = torch.from_numpy(self.windows.read(padded)).to(self.device)
            inputs, labels = self.model.inputs(tokens)
            labels[len(mine) :] = IGNORED_LABEL
            loss = engine(input_ids=inputs, labels=labels).loss
            if len(mine):
                count = len(mine) * targets
                total += torch.stack([loss.double() * count, torch.full_like(loss, count).double()])
        engine.train(was_training)
        dist.all_reduce(total)
        loss, count = float(total[0] / total[1]), int(total[1])
        return Evaluation(loss, self._bits_per_byte(loss), count)

    def _bits_per_byte(self, loss: float) -> float | None:
        if not self.windows.bytes_of_text:
            return None
        return loss / math.log(2) * self.windows.num_tokens / self.windows.bytes_of_text
