"""Progress on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple, TextIO

_TERMINAL_SECONDS = 0.25
_PLAIN_SECONDS = 10.0


class Reading(NamedTuple):
    """Where a job stands.

    Attributes:
        done_bytes: text of the sources done.
        total_bytes: text in all, roughly.
        tokens: tokens written.
        seconds: worker time spent in each stage.
        fetched_bytes: arrived from the hub.
    """

    done_bytes: int
    total_bytes: int
    tokens: int
    seconds: Mapping[str, float] = {}
    fetched_bytes: int = 0


def progress_line(start: Reading, now: Reading, elapsed_seconds: float) -> str:
    """One line of progress; rates count what was done since ``start``."""
    seconds = max(elapsed_seconds, 1e-9)
    rate = (now.done_bytes - start.done_bytes) / seconds
    tokens_rate = (now.tokens - start.tokens) / seconds
    share = 100 * now.done_bytes / max(now.total_bytes, 1)
    eta = duration((now.total_bytes - now.done_bytes) / rate) if rate > 0 else "unknown"
    stages = {stage: spent - start.seconds.get(stage, 0.0) for stage, spent in now.seconds.items()}
    limit = max(stages, key=stages.__getitem__, default="")
    of_all = sum(stages.values())
    tail = f" | limit: {limit} ({100 * stages[limit] / of_all:.0f} % of the workers' time)" if of_all > 0 else ""
    if now.fetched_bytes:
        tail += f" | fetched {now.fetched_bytes / 1e6:,.1f} MB"
    return (
        f"{share:5.1f} % of {now.total_bytes / 1e6:,.1f} MB | {rate / 1e6:,.1f} MB/s | "
        f"{tokens_rate / 1e6:.2f} Mtok/s | ETA {eta}{tail}"
    )


def duration(seconds: float) -> str:
    """Seconds as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Progress:
    """Context manager that prints `progress_line` from a thread of its own while a job runs."""

    def __init__(self, read: Callable[[], Reading], stream: TextIO) -> None:
        """Report what ``read`` returns on ``stream``."""
        self._read = read
        self._stream = stream
        self._terminal = stream.isatty()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started_seconds = time.monotonic()
        self._start = read()

    def __enter__(self) -> "Progress":
        """Start reporting."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report a last time and stop."""
        self._finished.set()
        self._thread.join()
        self._print()
        if self._terminal:
            self._stream.write("\n")

    def _run(self) -> None:
        while not self._finished.wait(_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS):
            self._print()

    def _print(self) -> None:
        line = progress_line(self._start, self._read(), time.monotonic() - self._started_seconds)
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()
