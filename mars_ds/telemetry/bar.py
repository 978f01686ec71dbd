"""A progress bar below the log lines, on a terminal only."""

import sys
import time
from typing import TextIO

from mars_ds.telemetry.console import format_seconds

CLEAR = "\r\x1b[K"
_WIDTH = 30
_SECONDS = 0.2


class Bar:
    """One line that is written over; it reads nothing from the device.

    Args:
        total_steps: Steps of the run.
        stream: Where it is shown, if that is a terminal.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._shown = 0.0

    def update(self, step: int, seconds_per_step: float) -> None:
        """Shows `step`, at most a few times a second."""
        now = time.monotonic()
        if not self._is_terminal or now - self._shown < _SECONDS:
            return
        self._shown = now
        self._stream.write(CLEAR + bar_line(step, self._total, seconds_per_step))
        self._stream.flush()

    def clear(self) -> None:
        """Takes the line away."""
        if self._is_terminal:
            self._stream.write(CLEAR)
            self._stream.flush()


def bar_line(step: int, total_steps: int, seconds_per_step: float) -> str:
    """[########------] 1200/4000  30 %  ETA 12m 3s."""
    filled = _WIDTH * step // max(total_steps, 1)
    eta = f"  ETA {format_seconds(seconds_per_step * (total_steps - step))}" if seconds_per_step else ""
    return f"[{'#' * filled}{'-' * (_WIDTH - filled)}] {step}/{total_steps}  {100 * step // max(total_steps, 1)} %{eta}"
