"""Feeds each rank its windows in the one global order.

The position is one integer, the samples consumed: sample k of the run is the same window at any world
size, micro-batch or accumulation.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import DataError, TokenWindows, WindowHash, open_dataset
from data_pipeline.prefetch import Fill, Prefetcher
from data_pipeline.sampling import Sampling, make_sampling
from mars_ds.config import DataSection, RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan
from mars_ds.training.model import TrainableModel

# What checkpoints held before these were options.
_OLDER_STATE = {"split": "train", "sampling": "permutation", "epoch offset": False, "sampling group": None}


class WindowLoader:
    """This rank's micro-batches.

    Args:
        windows: Training split.
        sampling: Sample index -> place in the split.
        batch: How a step is cut.
        rank: This data-parallel rank.
        device: Where batches are put.
        options: `data` section: how far to read ahead, and a changed data set to accept.
        printed: Console, for what a person should know of a resume.

    Attributes:
        position: Samples consumed by all ranks since the start of the run.

    Raises:
        ConfigError: `data.accept_changed` is not the hash of this data set.
    """

    def __init__(
        self,
        windows: TokenWindows,
        sampling: Sampling,
        batch: BatchPlan,
        rank: int,
        device: torch.device,
        options: DataSection | None = None,
        printed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.windows, self.sampling, self.batch, self.rank, self.device = windows, sampling, batch, rank, device
        self.options = options or DataSection(path=str(windows.path))
        self.printed = printed
        self.position = 0
        self._before_resume = WindowHash()
        self._consumed = WindowHash()
        accepted = self.options.accept_changed
        if accepted is not None and not windows.manifest_sha256.startswith(accepted):
            raise ConfigError(
                f"data.accept_changed {accepted} is not the data set in {windows.path}, whose hash is "
                f"{windows.manifest_sha256}; give that hash (12 digits or more of it), or take the key away"
            )
        self._steps = self._read_ahead()

    def next_step(self) -> Iterator[Tensor]:
        """The micro-batches of this rank for the next step, (micro_batch, sequence_length + 1) int64.

        Consuming the last one moves `position` on by the global batch.
        """
        for index, tokens in enumerate(self._steps.get(self.position)):
            first = self.position + (index * self.batch.world_size + self.rank) * self.batch.micro_batch
            for offset, window in enumerate(tokens):
                self._consumed.add(first + offset, window)
            yield self._on_device(tokens)
        self.position += self.batch.global_batch
        self._steps.release_before(self.position)

    def peek_step(self, ahead: int) -> Iterator[Tensor]:
        """The same for the step that comes `ahead` steps after the next; nothing is consumed."""
        for tokens in self._steps.get(self.position + ahead * self.batch.global_batch):
            yield self._on_device(tokens)

    def read_step(self, position: int) -> Iterator[Tensor]:
        """The micro-batches of this rank of the step that began at sample `position`, on the CPU; consumes nothing."""
        for index in range(self.batch.accumulation_steps):
            first = position + (index * self.batch.world_size + self.rank) * self.batch.micro_batch
            yield torch.from_numpy(self.windows.read_at(self.sampling.positions(first, self.batch.micro_batch)))

    def close(self) -> None:
        """Ends the reading ahead; a later step starts it again."""
        self._steps.close()
        self.windows.close()

    def _read_ahead(self) -> Prefetcher:
        batch = self.batch
        shape = (batch.accumulation_steps, batch.micro_batch, self.windows.sequence_length + 1)
        # The thread gets open files and buffers of its own.
        fill = _step_filler(copy.copy(self.windows), self.sampling, batch, self.rank)
        return Prefetcher(fill, shape, batch.global_batch, self.options.prefetch_steps)

    def _on_device(self, tokens: np.ndarray) -> Tensor:
        """A copy: the buffer that `tokens` is a view of is filled again while the caller may still hold the batch."""
        host = torch.from_numpy(tokens)
        if self.device.type == "cpu":
            return host.clone()
        if self.device.type == "cuda":
            # Copied into pinned memory, which PyTorch does not use again before the transfer is over.
            return host.pin_memory().to(self.device, non_blocking=True)
        return host.clone().to(self.device)

    def epoch(self) -> float:
        """Passes over the training windows so far; for random samplings, samples in units of a pass."""
        return self.position / self.sampling.epoch_samples

    def state(self) -> dict[str, Any]:
        """Position, order and the hash of all windows consumed by all ranks; all ranks call it."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, self._consumed.value)
        total = self._before_resume
        for value in values:
            total = total + WindowHash(value)
        return {
            **self._identity(),
            "sampling group": self.sampling.group_size,
            "epoch": self.position // self.sampling.epoch_samples,
            "position": self.position,
            "window_hash": total.hexdigest(),
            "tokenizer": self.windows.tokenizer_name,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues where a checkpoint stopped.

        Raises:
            ConfigError: Another data set (unless `data.accept_changed` names it), split, sequence length, seed or
                sampling: the order would not be continued.
        """
        state = {**_OLDER_STATE, **state}
        self._check_data_set(state["data set"])
        for key, value in self._identity().items():
            if key != "data set" and state[key] != value:
                raise ConfigError(
                    f"resume: the checkpoint was trained with {key} {state[key]}, this run has {value}; restore it, "
                    "or start a new run with run.init_from"
                )
        if state["sampling group"] != self.sampling.group_size:
            self.sampling = make_sampling(
                self.sampling.name,
                self.windows.part_tokens,
                self.windows.sequence_length,
                self.sampling.seed,
                group_size=state["sampling group"],
            )
        self.position = int(state["position"])
        self._before_resume = WindowHash(int(state["window_hash"], 16))
        self._consumed = WindowHash()
        self._steps.close()
        self._steps = self._read_ahead()

    def _check_data_set(self, before: str) -> None:
        now = self.windows.manifest_sha256
        if before == now:
            return
        if self.options.accept_changed is None:
            raise ConfigError(
                f"resume: the checkpoint was trained with data set {before}, this run has {now}; restore it in "
                f"{self.windows.path}, or go on from the same position in the new one with data.accept_changed={now}"
            )
        self.printed(
            f"data set changed: the checkpoint was trained with {before}; data.accept_changed goes on with {now} from "
            "the same position"
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "data set": self.windows.manifest_sha256,
            "split": self.windows.split,
            "sequence length": self.windows.sequence_length,
            "seed": self.sampling.seed,
            "sampling": self.sampling.name,
            "epoch offset": self.sampling.epoch_offset,
        }


def _step_filler(windows: TokenWindows, sampling: Sampling, batch: BatchPlan, rank: int) -> Fill:
    """Reads the windows of one rank for the step that begins at a position, micro-batch by micro-batch."""
    micro, passes = batch.micro_batch, range(batch.accumulation_steps)

    def fill(position: int, out: np.ndarray) -> None:
        # Of the whole step at once: most of the cost of the order is that of a call.
        step = sampling.positions(position, batch.global_batch)
        firsts = [(index * batch.world_size + rank) * micro for index in passes]
        places = np.concatenate([step[first : first + micro] for first in firsts])
        windows.read_at(places, out.reshape(len(places), -1))

    return fill


def run_sampling(config: RunConfig, windows: TokenWindows) -> Sampling:
    """The order in which a run reads its training split.

    Raises:
        data_pipeline.DataError: The split is too short for it.
    """
    return make_sampling(
        config.data.sampling,
        windows.part_tokens,
        windows.sequence_length,
        config.run.seed,
        epoch_offset=config.data.epoch_offset,
        group_size=config.batch.micro_batch,
    )


def open_split(config: RunConfig, split: str) -> TokenWindows:
    """Opens a split of the config's data set.

    Raises:
        data_pipeline.DataError: With the command that makes the data, when it is missing.
    """
    try:
        data = config.data
        return open_dataset(data.path, split, config.model.sequence_length, data.access, data.verify_reads)
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
