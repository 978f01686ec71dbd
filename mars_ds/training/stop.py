"""Stopping on request: signals, a stop file, a time limit; all ranks stop after the same step.

A request may reach one rank only, or all of them at different moments. Each rank notes it, and at every boundary (a
step, a pass of an evaluation) the ranks take the maximum of their notes over a CPU process group of its own. The sum
is started at one boundary and read at the next, so nobody waits for it.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist

from mars_ds.training.signals import Reason, SignalWatch

_STOP_FILE_SECONDS = 1.0


class StopWatch:
    """The one decision of all ranks.

    Args:
        signals: Noted on this rank.
        stop_files: Looked for by rank 0, about once a second.
        deadline_seconds: Of `time.monotonic`, when the run must have ended; None without a time limit.
        reserve_seconds: Time that ending takes, asked at every boundary: a save and a step.

    Attributes:
        agreed: What the ranks have agreed on so far.
    """

    def __init__(
        self,
        signals: SignalWatch,
        stop_files: Collection[Path],
        deadline_seconds: float | None = None,
        reserve_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.agreed = Reason.NONE
        self._signals, self._stop_files = signals, stop_files
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
            if any(file.exists() for file in self._stop_files):
                wanted = max(wanted, Reason.STOP_FILE)
        return wanted
