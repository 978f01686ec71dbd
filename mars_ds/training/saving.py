"""Checkpoints of a run: when they are written and which are kept."""

import time
from typing import TYPE_CHECKING

from mars_ds.checkpoint.api import save_checkpoint
from mars_ds.checkpoint.writer import prune
from mars_ds.config import RunConfig
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.certificate import checkpoint_extra
from mars_ds.training.stop import Reason

if TYPE_CHECKING:
    from mars_ds.training.trainer import Outcome, Trainer


class Checkpoints(Callback):
    """Saves at the interval, at the last step, and once when the run is asked to stop.

    Attributes:
        seconds: What the last save took: time that a stop must leave.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.checkpoint
        self.seconds = 0.0
        self._saved_step = -1

    def start(self, trainer: "Trainer") -> None:
        """The state at the start is on the disk already, or is the seed's."""
        self._saved_step = trainer.step

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Saves when it is time and the state is healthy."""
        if trainer.is_due(self._config.interval_steps):
            self._save_if_healthy(trainer, result)
        self._last = result

    def end(self, trainer: "Trainer", outcome: "Outcome") -> None:
        """A stop on request saves what no interval has saved."""
        if outcome.reason not in (Reason.NONE, Reason.UNHEALTHY) and self._saved_step != trainer.step:
            self._save_if_healthy(trainer, self._last)

    def _save_if_healthy(self, trainer: "Trainer", result: StepResult) -> None:
        if trainer.health.is_healthy(result):
            self._save(trainer)
        else:
            trainer.print(f"step {trainer.step}: not saved, because its loss or gradient is not finite")

    def _save(self, trainer: "Trainer") -> None:
        started = time.perf_counter()
        root = trainer.folder.checkpoints
        with trainer.heartbeat.phase("saving"), trainer.log.clock_paused():
            path = save_checkpoint(trainer.engine, root, trainer.step, checkpoint_extra(trainer))
            if trainer.rank == 0:
                prune(root, self._config.keep_last, path)
        self.seconds = time.perf_counter() - started
        self._saved_step = trainer.step
        trainer.print(f"step {trainer.step}: checkpoint {path} ({self.seconds:.1f} s)")
