"""What keeps the loop fast, and shows where its time goes: garbage collection at chosen moments, and a profiler."""

import gc
from typing import TYPE_CHECKING

import torch

from mars_ds.config import TelemetrySection
from mars_ds.training.callbacks import Callback, StepResult

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

TRACE_FOLDER = "trace"


class GarbageCollection(Callback):
    """Collects every so many steps, on all ranks at once; Python's own moments would stop one rank after another.

    Args:
        interval_steps: Between two collections; 0 leaves it to Python.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval = interval_steps
        self._was_enabled = gc.isenabled()

    def start(self, trainer: "Trainer") -> None:
        """Takes over; what the start has left is collected now."""
        if self._interval:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.disable()

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Collects the young objects only: the old ones are the model, and do not go away."""
        if self._interval and trainer.step % self._interval == 0:
            gc.collect(1)

    def close(self) -> None:
        """Gives it back to Python."""
        if self._was_enabled:
            gc.enable()


class Profiler(Callback):
    """Records chosen steps with `torch.profiler`, a trace a rank, for Perfetto or chrome://tracing.

    Args:
        section: `profile_first_step` and `profile_steps`.
    """

    def __init__(self, section: TelemetrySection) -> None:
        self._first, self._count = section.profile_first_step, section.profile_steps
        self._profile: torch.profiler.profile | None = None

    def before_step(self, trainer: "Trainer") -> None:
        """Begins with the first chosen step."""
        if self._count and trainer.step + 1 == self._first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Ends with the last chosen step and writes the trace."""
        if self._profile is None or trainer.step < self._first + self._count - 1:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        folder = trainer.folder.path / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{trainer.rank:05d}_steps_{self._first}-{trainer.step}.json.gz"
        with trainer.log.clock_paused():
            self._profile.export_chrome_trace(str(file))
        self._profile = None
        trainer.print(f"step {trainer.step}: trace {file} (open it at ui.perfetto.dev)")

    def close(self) -> None:
        """Lets an unfinished recording go."""
        if self._profile is not None:
            self._profile.stop()
