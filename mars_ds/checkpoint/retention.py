"""Which checkpoints are kept, and the deleting of the others."""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from mars_ds.checkpoint.layout import MARKER, REPLACED, STEP_PATTERN
from mars_ds.checkpoint.reader import CheckpointReader, find_checkpoints
from mars_ds.errors import CheckpointError


def step_of(path: Path) -> int:
    """Optimizer steps in a checkpoint folder's name."""
    return int(path.name.removeprefix(REPLACED).removeprefix("step_"))


def last_healthy(committed: list[Path]) -> Path | None:
    """The newest whose index says healthy (or nothing, as of older runs) and whose files are there."""
    for path in reversed(committed):
        try:
            if CheckpointReader(path).index.get("healthy", True):
                return path
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return None


def kept(committed: list[Path], keep_last: int, keep_every_steps: int = 0) -> set[Path]:
    """The last ones, every so many steps one for good, and the last healthy one.

    Args:
        committed: Oldest first.
        keep_last: How many of the newest.
        keep_every_steps: 0 keeps none for good.
    """
    keep = set(committed[-keep_last:])
    keep |= {path for path in committed if keep_every_steps and step_of(path) % keep_every_steps == 0}
    healthy = last_healthy(committed)
    return keep | ({healthy} if healthy else set())


def prune(
    root: Path,
    keep_last: int,
    newest: Path,
    keep_every_steps: int = 0,
    busy: Collection[Path] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Deletes the committed checkpoints up to `newest` that are not kept; rank 0 only, and it never raises.

    Later ones than `newest` are not this run's to judge: they are damaged, or the run went back on purpose. The
    marker goes first, so that a half-deleted folder is never taken for a checkpoint; what is left of one is deleted
    the next time.

    Args:
        root: Folder of checkpoints.
        keep_last: See `kept`.
        newest: Just committed.
        keep_every_steps: See `kept`.
        busy: Being copied, to be deleted another time.
        tell: Gets what could not be deleted.

    Returns:
        What was deleted.
    """
    removed = []
    try:
        committed = [path for path in find_checkpoints(root) if step_of(path) <= step_of(newest)]
        keep = kept(committed, keep_last, keep_every_steps)
        half_deleted = [
            path for path in root.glob(STEP_PATTERN) if step_of(path) < step_of(newest) and not (path / MARKER).exists()
        ]
        for path in (*half_deleted, *(path for path in committed if path not in keep and path not in busy)):
            try:
                (path / MARKER).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:
                tell(f"{path}: could not be deleted ({error}); tried again after the next save")
            else:
                removed.append(path)
    except OSError as error:
        tell(f"{root}: old checkpoints could not be deleted ({error}); tried again after the next save")
    return removed
