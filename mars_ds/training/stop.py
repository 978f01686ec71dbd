"""Stopping on request: signals, a stop file, a time limit; all ranks stop after the same step.

A request may reach one rank only, or all of them at different moments. Each rank notes it, and at every boundary (a
step, a pass of an evaluation) the ranks take the maximum of their notes over a CPU process group of its own. The sum
is started at one boundary and read at the next, so nobody waits for it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_STOP_FILE_SECONDS = 1.0
INTERRUPTED_STATUS = 130


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


_SIGNALS = {signal.SIGUSR1: Reason.SIGUSR1, signal.SIGTERM: Reason.SIGTERM, signal.SIGINT: Reason.SIGINT}


class SignalWatch:
    """Notes signals from the moment it is made: also while the ranks are still joining or compiling.

    Only the note is taken in the handler. A second Ctrl-C ends the process at once, also while its main thread waits
    in a collective of a dead peer: Python runs no handler then, so a thread counts what the interpreter's C handler
    reports.

    Attributes:
        reason: The strongest request so far.
    """

    def __init__(self, rank: int) -> None:
        self.reason = Reason.NONE
        self._rank = rank
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = (-1, -1)  # write end of our pipe, and the descriptor that was set before

    def install(self) -> None:
        """Takes the handlers over; only in the main thread, elsewhere signals are not ours."""
        try:
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        except ValueError:
            self._before = {}
            return
        reports, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        self._wakeup = (wakeup, signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False))
        threading.Thread(target=_quit_at_second_interrupt, args=(reports,), name="second Ctrl-C", daemon=True).start()

    def restore(self) -> None:
        """Gives the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            wakeup, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(wakeup)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        reason = _SIGNALS[signal.Signals(number)]
        if self.reason == Reason.NONE and self._rank == 0:
            # print() could be what was interrupted.
            os.write(2, f"{reason.name}: stopping after this step, with a checkpoint\n".encode())
        self.reason = max(self.reason, reason)


def _quit_at_second_interrupt(reports: int) -> None:
    """Reads one byte a signal, its number, until the other end is closed."""
    interrupts = 0
    with open(reports, "rb", buffering=0) as pipe:
        while number := pipe.read(1):
            interrupts += number[0] == signal.SIGINT
            if interrupts == 2:
                os.write(2, b"second Ctrl-C: quitting at once; the newest checkpoint is what remains\n")
                os._exit(INTERRUPTED_STATUS)


class StopWatch:
    """The one decision of all ranks.

    Args:
        signals: Noted on this rank.
        stop_file: Looked for by rank 0, about once a second.
        deadline_seconds: Of `time.monotonic`, when the run must have ended; None without a time limit.
        reserve_seconds: Time that ending takes, asked at every boundary: a save and a step.

    Attributes:
        agreed: What the ranks have agreed on so far.
    """

    def __init__(
        self,
        signals: SignalWatch,
        stop_file: Path,
        deadline_seconds: float | None = None,
        reserve_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.agreed = Reason.NONE
        self._signals, self._stop_file = signals, stop_file
        self._deadline, self._reserve = deadline_seconds, reserve_seconds
        self._looked = float("-inf")
        self._note = torch.zeros((), dtype=torch.int32)
        self._pending: dist.Work | None = None
        # Apart from the training's collectives, and on the CPU: nothing on the device is waited for.
        self._group = dist.new_group(backend="gloo")

    def request(self, reason: Reason) -> None:
        """A request from inside, for instance by the health watch."""
        self._signals.reason = max(self._signals.reason, reason)

    def poll(self) -> Reason:
        """Every rank calls it at the same boundaries; returns what is agreed, at the latest one boundary later."""
        self._collect()
        if self.agreed == Reason.NONE:
            self._note.fill_(int(self._wanted()))
            self._pending = dist.all_reduce(self._note, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return self.agreed

    def settle(self) -> Reason:
        """The same without delay, where waiting is no matter: after a save, at the end."""
        self.poll()
        self._collect()
        return self.agreed

    def _collect(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.agreed = Reason(int(self._note))

    def _wanted(self) -> Reason:
        now = time.monotonic()
        wanted = self._signals.reason
        if wanted == Reason.NONE and self._deadline is not None and now + self._reserve() > self._deadline:
            wanted = Reason.TIME_LIMIT
        if dist.get_rank() == 0 and now - self._looked > _STOP_FILE_SECONDS:
            self._looked = now
            if self._stop_file.exists():
                wanted = max(wanted, Reason.STOP_FILE)
        return wanted
