"""Feeds each rank its windows in the one global order.

The position is one integer, the samples consumed: sample k of the run is the same window at any world
size, micro-batch or accumulation.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import DataError, SampleOrder, TokenWindows, WindowHash, open_dataset
from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan
from mars_ds.training.model import TrainableModel


class WindowLoader:
    """This rank's micro-batches.

    Args:
        windows: Training split.
        order: Sample index -> window.
        batch: How a step is cut.
        rank: This data-parallel rank.
        device: Where batches are put.

    Attributes:
        position: Samples consumed by all ranks since the start of the run.
    """

    def __init__(
        self, windows: TokenWindows, order: SampleOrder, batch: BatchPlan, rank: int, device: torch.device
    ) -> None:
        self.windows, self.order, self.batch, self.rank, self.device = windows, order, batch, rank, device
        self.position = 0
        self._before_resume = WindowHash()
        self._consumed = WindowHash()

    def next_step(self) -> Iterator[Tensor]:
        """The micro-batches of this rank for the next step, (micro_batch, sequence_length + 1) int64.

        Consuming the last one moves `position` on by the global batch.
        """
        for first, tokens in self._micro_batches(self.position):
            for offset, window in enumerate(tokens):
                self._consumed.add(first + offset, window)
            yield self._on_device(tokens)
        self.position += self.batch.global_batch

    def peek_step(self, ahead: int) -> Iterator[Tensor]:
        """The same for the step that comes `ahead` steps after the next; nothing is consumed."""
        for _, tokens in self._micro_batches(self.position + ahead * self.batch.global_batch):
            yield self._on_device(tokens)

    def _micro_batches(self, position: int) -> Iterator[tuple[int, np.ndarray]]:
        micro, world_size = self.batch.micro_batch, self.batch.world_size
        for index in range(self.batch.accumulation_steps):
            first = position + (index * world_size + self.rank) * micro
            yield first, self.windows.read(self.order.windows(first, micro))

    def _on_device(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(tokens).to(self.device, non_blocking=True)

    def epoch(self) -> float:
        """Passes over the training windows so far."""
        return self.position / self.windows.num_windows

    def state(self) -> dict[str, Any]:
        """Position, order and the hash of all windows consumed by all ranks; all ranks call it."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, self._consumed.value)
        total = self._before_resume
        for value in values:
            total = total + WindowHash(value)
        return {
            **self._identity(),
            "position": self.position,
            "window_hash": total.hexdigest(),
            "tokenizer": self.windows.tokenizer_name,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues where a checkpoint stopped.

        Raises:
            ConfigError: Another data set, sequence length or seed: the order would not be continued.
        """
        for key, value in self._identity().items():
            if state[key] != value:
                raise ConfigError(
                    f"resume: the checkpoint was trained with {key} {state[key]}, this run has {value}; restore it, "
                    "or start a new run with run.init_from"
                )
        self.position = int(state["position"])
        self._before_resume = WindowHash(int(state["window_hash"], 16))
        self._consumed = WindowHash()

    def _identity(self) -> dict[str, Any]:
        return {
            "data set": self.windows.manifest_sha256,
            "sequence length": self.windows.sequence_length,
            "seed": self.order.seed,
        }


def open_split(config: RunConfig, split: str) -> TokenWindows:
    """Opens a split of the config's data set.

    Raises:
        data_pipeline.DataError: With the command that makes the data, when it is missing.
    """
    try:
        return open_dataset(config.data.path, split, config.model.sequence_length)
    except DataError as error:
        if split != "val":
            raise
        raise DataError(f"{error}; or train without validation: evaluation.interval_steps: 0") from error


def check_vocabulary(windows: TokenWindows, model: TrainableModel) -> None:
    """Refuses token ids that the embedding does not have.

    Raises:
        ConfigError: With both numbers and the nearest padded size.
    """
    if model.vocab_size is not None and windows.max_token_id >= model.vocab_size:
        padded = -(-windows.vocab_size // 64) * 64
        raise ConfigError(
            f"model.vocab_size {model.vocab_size} is too small: the data holds token id {windows.max_token_id} "
            f"(tokenizer {windows.tokenizer_name}, {windows.vocab_size} ids); nearest: {padded}"
        )


def evaluation_windows(num_windows: int, wanted: int) -> np.ndarray:
    """The fixed validation windows: evenly spaced over the split, at most all of them, ascending int64."""
    count = min(num_windows, wanted)
    return np.arange(count, dtype=np.int64) * num_windows // count
