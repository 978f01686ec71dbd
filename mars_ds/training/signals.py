"""Requests to stop that reach this process as signals, noted from its first moment on.

Only the standard library is imported: `launch/pretrain.py` takes the handlers over before the imports that last
seconds, so that a SIGTERM in them is a request and not a death.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import FrameType
from typing import Any

STOPPED_STATUS, INTERRUPTED_STATUS = 75, 130
# What is left to do after the save of an urgent stop (copies, trackers) may take so long each.
URGENT_SECONDS = 5.0


class Reason(IntEnum):
    """Why a run stops, the strongest last: that one is what all ranks agree on."""

    NONE = 0
    TIME_LIMIT = 1
    STOP_FILE = 2
    SIGUSR1 = 3
    SIGTERM = 4
    SIGINT = 5
    UNHEALTHY = 6

    @property
    def words(self) -> str:
        """For messages."""
        return {Reason.TIME_LIMIT: "the time limit", Reason.STOP_FILE: "the stop file"}.get(self, self.name)

    @property
    def is_urgent(self) -> bool:
        """Whoever sends these kills soon: launchers and Slurm after 30 seconds."""
        return self in (Reason.SIGTERM, Reason.SIGINT)


_SIGNALS = {signal.SIGUSR1: Reason.SIGUSR1, signal.SIGTERM: Reason.SIGTERM, signal.SIGINT: Reason.SIGINT}


def launched_rank(environ: Mapping[str, str]) -> int:
    """This process's rank, as any launcher tells it; 0 without one."""
    return int(environ.get("RANK") or environ.get("SLURM_PROCID") or 0)


class SignalWatch:
    """Notes signals from `install` on: also while the ranks are still importing, joining or compiling.

    Only the note is taken in the handler. A second Ctrl-C ends the process at once, also while its main thread waits
    in a collective of a dead peer: Python runs no handler then, so a thread counts what the interpreter's C handler
    reports.

    Attributes:
        reason: The strongest request so far.
    """

    def __init__(self, rank: int) -> None:
        self.reason = Reason.NONE
        self._rank = rank  # 0 tells the console
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = (-1, -1)  # write end of our pipe, and the descriptor that was set before
        self._heard = threading.Event()

    def install(self) -> None:
        """Takes the handlers over, once; only in the main thread, elsewhere signals are not ours."""
        if self._before:
            return
        try:
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        except ValueError:
            self._before = {}
            return
        reports, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        self._wakeup = (wakeup, signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False))
        threading.Thread(target=self._listen, args=(reports,), name="signals", daemon=True).start()

    def restore(self) -> None:
        """Gives the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            wakeup, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(wakeup)
        self._before = {}

    @contextlib.contextmanager
    def impatient(self, seconds: float) -> Iterator[None]:
        """Inside, a request is answered within so long, by an end with `STOPPED_STATUS` if need be.

        For phases in which nothing can be lost, and the main thread may wait in C code for peers that never come.
        """
        over = threading.Event()

        def leave() -> None:
            while not over.wait(0.2):
                if self._heard.is_set() and not over.wait(seconds):
                    os.write(2, b"stopped while waiting for the other ranks; nothing was begun\n")
                    os._exit(STOPPED_STATUS)

        threading.Thread(target=leave, name="impatience", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        reason = _SIGNALS[signal.Signals(number)]
        if self.reason == Reason.NONE and self._rank == 0:
            # print() could be what was interrupted.
            os.write(2, f"{reason.name}: stopping after this step, with a checkpoint\n".encode())
        self.reason = max(self.reason, reason)

    def _listen(self, reports: int) -> None:
        """Reads one byte a signal, its number, until the other end is closed."""
        interrupts = 0
        with open(reports, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in _SIGNALS:
                    self._heard.set()
                interrupts += number[0] == signal.SIGINT
                if interrupts == 2:
                    os.write(2, b"second Ctrl-C: quitting at once; the newest checkpoint is what remains\n")
                    os._exit(INTERRUPTED_STATUS)
