"""Validation loss over fixed sets of windows, shared between the ranks."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from data_pipeline import DataError, TokenWindows, open_dataset
from mars_ds.config import RunConfig
from mars_ds.telemetry.console import format_count
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.data import check_vocabulary, evaluation_windows, open_split
from mars_ds.training.model import IGNORED_LABEL, TrainableModel

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

# The data set's own validation split, the one that the outcome and the report speak of.
OWN_SET = "val"
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Evaluation:
    """Result over one set.

    Attributes:
        loss: Mean over all target tokens, nats.
        bits_per_byte: The same per byte of text; None when the data set does not know its bytes.
        tokens: Target tokens.
        half_width: Of the 95 % confidence interval of the loss, nats, from the spread between batches: what another
            choice of windows would change; None for a single batch. Evaluations of one run share their windows, so a
            difference between them is known far better than this.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    half_width: float | None = None

    def line(self, name: str) -> str:
        """For the console; `name` is the set's."""
        title = "validation loss" if name == OWN_SET else f"loss on {name}"
        interval = f" +- {self.half_width:.4f}" if self.half_width is not None else ""
        per_byte = f", {self.bits_per_byte:.4f} bits per byte" if self.bits_per_byte is not None else ""
        return f"{title} {self.loss:.4f}{interval}{per_byte} over {format_count(self.tokens)} tokens"


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
    def run(self, engine: Any, is_stopped: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluates; every rank makes the same number of passes, the last ones perhaps on masked windows.

        Args:
            engine: The engine.
            is_stopped: Asked before every pass, on all ranks alike; None is returned when it says so.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        per_pass = self.micro_batch * world_size
        targets = self.model.targets_per_window(self.windows.sequence_length)
        # Windows, sum of their losses, sum over the batches of windows x mean loss squared, batches.
        total = torch.zeros(4, dtype=torch.float64, device=self.device)
        with _undisturbed(engine):
            for first in range(0, len(self.chosen), per_pass):
                if is_stopped():
                    return None
                at = first + rank * self.micro_batch
                total += self._sums(engine, self.chosen[at : at + self.micro_batch])
        dist.all_reduce(total)
        windows, sum_of_losses, sum_of_squares, batches = (float(value) for value in total)
        loss = sum_of_losses / windows
        half_width = None
        if batches > 1:
            # The model tells the mean of a batch only: batches are the independent units.
            spread = max(0.0, sum_of_squares / windows - loss * loss)
            half_width = _NORMAL_QUANTILE * math.sqrt(spread / (batches - 1))
        return Evaluation(loss, self._bits_per_byte(loss), int(windows) * targets, half_width)

    def _sums(self, engine: Any, mine: Any) -> torch.Tensor:
        padded = list(mine) + [self.chosen[0]] * (self.micro_batch - len(mine))
        tokens = torch.from_numpy(self.windows.read(padded)).to(self.device)
        inputs, labels = self.model.inputs(tokens)
        labels[len(mine) :] = IGNORED_LABEL
        loss = engine(input_ids=inputs, labels=labels).loss.double()
        if not len(mine):
            return torch.zeros(4, dtype=torch.float64, device=self.device)
        count = torch.full_like(loss, len(mine))
        return torch.stack([count, count * loss, count * loss * loss, torch.ones_like(loss)])

    def _bits_per_byte(self, loss: float) -> float | None:
        if not self.windows.bytes_of_text:
            return None
        return loss / math.log(2) * self.windows.num_tokens / self.windows.bytes_of_text


@contextlib.contextmanager
def _undisturbed(engine: Any) -> Iterator[None]:
    """Evaluation mode, with the training mode and all generators put back afterwards."""
    was_training, state = engine.training, torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    engine.eval()
    try:
        yield
    finally:
        engine.train(was_training)
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)


class Evaluations(Callback):
    """Evaluates at step 0, at the interval and at the last step.

    Attributes:
        last_loss: Of the data set's own validation split; None before the first evaluation.
    """

    def __init__(self, config: RunConfig, model: TrainableModel, micro_batch: int, device: torch.device) -> None:
        self._interval = config.evaluation.interval_steps
        self.last_loss: float | None = None
        self.evaluators: dict[str, Evaluator] = {}
        if self._interval > 0:
            self.evaluators = open_evaluators(config, model, micro_batch, device)

    def start(self, trainer: "Trainer") -> None:
        """A new run is evaluated before its first step."""
        if trainer.step == 0:
            self._run(trainer)

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Evaluates when it is time."""
        if trainer.is_due(self._interval):
            self._run(trainer)

    def _run(self, trainer: "Trainer") -> None:
        for name, evaluator in self.evaluators.items():
            with trainer.heartbeat.phase(f"evaluation of {name}"), trainer.log.clock_paused():
                result = evaluator.run(trainer.engine, lambda: bool(trainer.stop.poll()))
            if result is None:
                trainer.print(f"step {trainer.step}: evaluation given up for the stop")
                return
            if name == OWN_SET:
                self.last_loss = result.loss
            trainer.log.evaluation(trainer.step, name, result)


def open_evaluators(
    config: RunConfig, model: TrainableModel, micro_batch: int, device: torch.device
) -> dict[str, Evaluator]:
    """The data set's own validation split, then the sets of `evaluation.sets`.

    Raises:
        data_pipeline.DataError, ConfigError: A set is not there, or does not fit the model.
    """
    splits = {OWN_SET: open_split(config, "val")}
    for name, path in config.evaluation.sets.items():
        splits[name] = open_set(path, config.model.sequence_length)
    for windows in splits.values():
        check_vocabulary(windows, model)
    sequences = config.evaluation.sequences
    return {name: Evaluator(windows, model, sequences, micro_batch, device) for name, windows in splits.items()}


def open_set(path: str, sequence_length: int) -> TokenWindows:
    """The validation split of a data set, or its training split where it has no other."""
    try:
        return open_dataset(path, "val", sequence_length)
    except DataError as error:
        if "split is empty" not in str(error):
            raise
        return open_dataset(path, "train", sequence_length)
