"""Checkpoints of a run: when they are written, which are healthy, and what a failed save means."""

import time
from typing import TYPE_CHECKING

from mars_ds.checkpoint.copying import Place
from mars_ds.checkpoint.engine_state import describe, held_slices
from mars_ds.checkpoint.reader import find_checkpoints
from mars_ds.checkpoint.saver import Retention, Saved, Saver
from mars_ds.checkpoint.uploads import Uploads
from mars_ds.config import RunConfig
from mars_ds.errors import CheckpointError
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.certificate import checkpoint_extra
from mars_ds.training.signals import URGENT_SECONDS, Reason

if TYPE_CHECKING:
    from mars_ds.training.trainer import Outcome, Trainer

# How long a save is waited for, where there is nothing else to do; after an error; and copies after the last save.
_COMMIT_SECONDS, _CLOSE_SECONDS = 1800.0, 60.0
_COPY_SECONDS, _COPY_SECONDS_OF_A_STOP = 600.0, 30.0


class Checkpoints(Callback):
    """Saves at the interval, at the last step, and once when the run is asked to stop.

    A state whose loss or gradient is not finite is not saved; one after a spike of the loss is, marked as not healthy.
    A save that fails is told, and tried again at the next interval; at the end of the run, or for a stop, it ends the
    run with an error.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.checkpoint
        self._seconds = 0.0
        self._saved_step, self._failed_step, self._failures = -1, -1, 0
        self._problem: str | None = None
        self._saver: Saver | None = None
        self._uploads: Uploads | None = None
        self._last: StepResult | None = None
        if self._config.copy_to is not None:
            Place.open(self._config.copy_to)  # what cannot work is refused before the first step, on every rank

    @property
    def seconds(self) -> float:
        """Time that a stop must leave: for a save as long as the last one, and for one that is in flight."""
        return self._seconds * (2 if self._saver is not None and self._saver.writing else 1)

    def start(self, trainer: "Trainer") -> None:
        """The state at the start is on the disk already, or is the seed's."""
        keep = Retention(self._config.keep_last, self._config.keep_every_steps)
        self._saver = Saver(trainer.folder.checkpoints, keep, self._config.asynchronous)
        self._saved_step = trainer.step
        if self._config.copy_to is not None and trainer.rank == 0:
            self._uploads = Uploads(self._config.copy_to)
            for path in find_checkpoints(trainer.folder.checkpoints)[-1:]:
                self._uploads.add(path)  # its copy may have been interrupted; what is there already costs little

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Saves when it is time and the state is healthy."""
        self._last = result
        if self._saver is not None:
            self._take(trainer, self._saver.taken())
        if trainer.is_due(self._config.interval_steps):
            self._save_if_finite(trainer, result)

    def end(self, trainer: "Trainer", outcome: "Outcome") -> None:
        """Waits for the commit; a stop on request saves what no interval has saved.

        Raises:
            CheckpointError: The state at the end could not be saved, the second time if it was due; on every rank.
        """
        self._settle(trainer)
        stopping = outcome.reason not in (Reason.NONE, Reason.UNHEALTHY) and self._saved_step != trainer.step
        if (stopping or self._failed_step == trainer.step) and self._last is not None:
            self._save_if_finite(trainer, self._last)
            self._settle(trainer)
            if self._failed_step == trainer.step:
                raise CheckpointError(
                    f"step {trainer.step}: {self._problem}; with that out of the way the same command goes on"
                )
        if self._uploads:
            with trainer.heartbeat.phase("copying checkpoints"):
                missing = self._uploads.wait(_copy_seconds(outcome.reason))
            self._tell_copies(trainer)
            for line in missing:
                trainer.print(f"warning: {line}")
            if missing:
                command = f"python launch/checkpoints.py copy {trainer.folder.path} {self._config.copy_to} --all"
                trainer.print(f"to copy what is missing: {command}")

    def close(self) -> None:
        """After an error a save in flight has some time to commit."""
        if self._saver:
            self._saver.close(_CLOSE_SECONDS)
        if self._uploads:
            self._uploads.close()

    def _save_if_finite(self, trainer: "Trainer", result: StepResult) -> None:
        if trainer.health.is_healthy(result):
            self._save(trainer, healthy=not trainer.guard.last_is_spike())
        else:
            trainer.print(f"step {trainer.step}: not saved, because its loss or gradient is not finite")

    def _save(self, trainer: "Trainer", healthy: bool) -> None:
        assert self._saver is not None
        started = time.perf_counter()
        with trainer.heartbeat.phase("saving"), trainer.log.clock_paused():
            if self._saver.writing:
                self._settle(trainer)
                waited = time.perf_counter() - started
                trainer.print(f"step {trainer.step}: waited {waited:.1f} s for the checkpoint before this one")
            self._settle(trainer)
            description = {**describe(trainer.engine), **checkpoint_extra(trainer), "healthy": healthy}
            busy = self._uploads.busy if self._uploads else ()
            self._saved_step = trainer.step
            self._saver.begin(trainer.step, held_slices(trainer.engine), description, busy, started)
            if not self._config.asynchronous:
                self._settle(trainer)
        if not healthy:
            trainer.print(f"step {trainer.step}: its loss is a spike; the checkpoint is marked as not healthy")

    def _settle(self, trainer: "Trainer") -> None:
        """Waits for the save in flight, at steps where every rank does."""
        if self._saver is not None:
            with trainer.heartbeat.phase("saving"):
                saved = self._saver.wait(_COMMIT_SECONDS)
            self._take(trainer, saved)

    def _take(self, trainer: "Trainer", saved: Saved | None) -> None:
        """Tells what came of a save. The ranks may be here at different steps, and decide nothing here."""
        if saved is not None:
            self._account(trainer, saved)
        self._tell_copies(trainer)

    def _account(self, trainer: "Trainer", saved: Saved) -> None:
        for note in saved.notes:
            trainer.print(f"warning: {note}")
        if saved.path is None:
            self._failures += 1
            self._failed_step, self._problem = saved.step, saved.problem
            if self._saved_step == saved.step:
                self._saved_step = -1
            times = f" ({self._failures} times in a row)" if self._failures > 1 else ""
            trainer.print(f"warning: step {saved.step}: no checkpoint{times}: {saved.problem}")
            return
        self._failures, self._failed_step = 0, -1
        self._seconds = saved.seconds
        trainer.job.running(saved.step)
        trainer.print(
            f"step {saved.step}: checkpoint {saved.path} (training waited {saved.blocked_seconds:.2f} s, on disk after "
            f"{saved.seconds:.1f} s)"
        )
        if self._uploads:
            self._uploads.add(saved.path)

    def _tell_copies(self, trainer: "Trainer") -> None:
        for line in self._uploads.news() if self._uploads else ():
            trainer.print(line)


def _copy_seconds(reason: Reason) -> float:
    """How long copies are waited for at the end; what is missing is copied by the next start."""
    if reason.is_urgent:
        return URGENT_SECONDS
    return _COPY_SECONDS if reason == Reason.NONE else _COPY_SECONDS_OF_A_STOP
