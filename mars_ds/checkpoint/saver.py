"""Saves while training goes on: the loop waits for a copy in host memory, a thread on each rank does the rest.

The threads agree (on the room, on each other's files, on the commit) over a gloo group that nothing else uses. They all
write the same saves in the same order, so their collectives always match; those of training are on other groups, in
other threads, and neither waits for the other. A rank that dies closes its connections, which ends the wait of the
others with an error, and the folder stays uncommitted. No decision of the loop depends on how far a thread is: all
ranks wait at the same steps (the next save, the end), and between them only messages are taken. The threads are
daemons: they keep no process alive.
"""

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mars_ds.checkpoint.rank_file import Held, HostBuffers, Piece
from mars_ds.checkpoint.retention import prune
from mars_ds.checkpoint.writer import take_safely, write_pieces
from mars_ds.errors import CheckpointError

# Nobody waits on the group without a bound of its own, and ranks may differ by much on a slow disk.
_GROUP_TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class Retention:
    """What is kept; see `mars_ds.checkpoint.retention.kept`."""

    keep_last: int
    keep_every_steps: int = 0


@dataclass
class Saved:
    """What became of a save; the same on every rank.

    Attributes:
        step: Optimizer steps.
        path: The committed folder; None where it could not be written.
        problem: Why not.
        blocked_seconds: What the loop has waited for the copy, and for the whole where it is synchronous.
        seconds: From its beginning to the commit.
        notes: What else a person should know, on rank 0.
    """

    step: int
    path: Path | None = None
    problem: str | None = None
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Saver:
    """Writes one checkpoint at a time; all ranks make one together and call `begin` and `wait` at the same steps.

    Args:
        root: Folder of checkpoints.
        retention: What to keep.
        asynchronous: False writes everything inside `begin`, from where the state is, without a copy.
    """

    def __init__(self, root: Path, retention: Retention, asynchronous: bool = True) -> None:
        self._root, self._retention, self._asynchronous = root, retention, asynchronous
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self, step: int, held: Held, description: Mapping[str, Any], busy: Collection[Path] = (), started: float = 0.0
    ) -> None:
        """Starts a save; what came of it is told by `taken` or `wait`.

        Args:
            step: Optimizer steps applied.
            held: This rank's slices.
            description: For the index.
            busy: Checkpoints that must not be deleted now.
            started: Of `time.perf_counter`, when the loop began to wait; 0 is now.

        Raises:
            CheckpointError: The one before is still being written: `wait` first.
        """
        if self.writing:
            raise CheckpointError(f"{self._root}: a checkpoint is still being written")
        started = started or time.perf_counter()
        saved = self._saved = Saved(step)
        pieces, failure = take_safely(held, self._buffers if self._asynchronous else None)
        arguments = (saved, pieces, failure, dict(description), frozenset(busy), started)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
            saved.blocked_seconds = time.perf_counter() - started
            self._thread.start()
        else:
            self._write(*arguments)
            saved.blocked_seconds = saved.seconds

    def taken(self) -> Saved | None:
        """What became of the last save, once and without waiting; None while it is being written."""
        if self.writing:
            return None
        saved, self._saved, self._thread = self._saved, None, None
        return saved

    def wait(self, seconds: float) -> Saved | None:
        """The same after it is committed or has failed; None where there is nothing to wait for.

        Raises:
            CheckpointError: It took longer than `seconds`.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._root}: the checkpoint of step {self._saved.step if self._saved else '?'} is not written "
                    f"after {seconds:.0f} s; the disk hangs or another rank is gone; the one before is untouched"
                )
        return self.taken()

    def close(self, seconds: float) -> None:
        """Gives a save in flight some time to commit; never raises."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(
        self,
        saved: Saved,
        pieces: list[Piece],
        failure: str | None,
        description: dict[str, Any],
        busy: Collection[Path],
        started: float,
    ) -> None:
        try:
            saved.path = write_pieces(self._root, saved.step, pieces, description, self._group, failure)
        # Whatever it is, the loop hears of it; a thread's traceback would only be printed.
        except Exception as error:
            saved.problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        saved.seconds = time.perf_counter() - started
        if saved.path is not None and dist.get_rank() == 0:
            keep = self._retention
            prune(self._root, keep.keep_last, saved.path, keep.keep_every_steps, busy, saved.notes.append)
