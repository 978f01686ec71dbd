"""Writes a checkpoint from all ranks: a file a rank, index, rename, marker, `latest`; each durable before the next."""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mars_ds.checkpoint.layout import (
    FORMAT_VERSION,
    INDEX,
    LATEST,
    MARKER,
    REPLACED,
    WRITING,
    rank_file,
    sha256_of,
    step_folder,
    sync_file,
    write_durably,
)
from mars_ds.checkpoint.rank_file import Held, HostBuffers, Piece, take, write_rank_file
from mars_ds.errors import CheckpointError

# For the headers and the index beside the values, as a share of the values and at least.
_SPARE_SHARE, _SPARE_BYTES = 0.02, 1 << 20


def write_checkpoint(root: Path, step: int, held: Held, description: Mapping[str, Any]) -> Path:
    """Writes what every rank holds as one checkpoint; all ranks call it together.

    Args:
        root: Folder of checkpoints.
        step: Optimizer steps applied; names the folder.
        held: This rank's slices; each element of each buffer is held by exactly one rank.
        description: What rank 0 puts into the index: shapes, groups, scalars, trainer state.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: On every rank, when any rank could not write; earlier checkpoints are untouched.
    """
    pieces, failure = take_safely(held)
    return write_pieces(root, step, pieces, description, failure=failure)


def take_safely(held: Held, buffers: HostBuffers | None = None) -> tuple[list[Piece], str | None]:
    """This rank's slices, or what went wrong: the other ranks must hear of it from `write_pieces`."""
    try:
        return take(held, dist.get_rank(), buffers), None
    except Exception as error:
        return [], f"rank {dist.get_rank()}: {error}"


def write_pieces(
    root: Path,
    step: int,
    pieces: Sequence[Piece],
    description: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    failure: str | None = None,
) -> Path:
    """The same with slices that were taken before.

    Args:
        root: Folder of checkpoints.
        step: Optimizer steps applied.
        pieces: This rank's slices, which do not change meanwhile.
        description: For the index.
        group: Of all ranks, over which they agree; None is the default one.
        failure: Why this rank has no slices: then no rank writes.

    Raises:
        CheckpointError: As above.
    """
    rank = dist.get_rank()
    final = step_folder(root, step)
    temporary = root / f"{WRITING}{final.name}"
    plan = {"error": failure} if failure else {"bytes": sum(piece.num_bytes for piece in pieces)}
    planned = _gather(plan, group)
    ready: dict[str, Any] = {}
    problem = _first_error(planned)
    if rank == 0 and problem is None:
        try:
            _prepare(root, temporary, sum(plan["bytes"] for plan in planned))
        except (OSError, CheckpointError) as error:
            ready = {"error": f"rank 0: {error}"}
    problem = problem or _first_error(_gather(ready, group))
    report: dict[str, Any] = {}
    if problem is None:
        try:
            facts = write_rank_file(temporary / rank_file(rank), pieces)
            report = {"file": rank_file(rank), "slices": [piece.entry.to_json() for piece in pieces], **facts}
        except Exception as error:
            report = {"error": f"rank {rank}: {error}"}
        reports = _gather(report, group)
        problem = _first_error(reports)
    committed: dict[str, Any] = {}
    if rank == 0 and problem is None:
        try:
            _commit(temporary, final, reports, {**description, "step": step, "world_size": dist.get_world_size()})
        except OSError as error:
            committed = {"error": f"rank 0: {error}"}
    problem = problem or _first_error(_gather(committed, group))
    if problem is not None:
        if rank == 0:
            _clear(temporary, final)
        raise CheckpointError(f"{final}: not written ({problem}); earlier checkpoints are untouched")
    return final


def _gather(mine: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _first_error(reports: list[dict[str, Any]]) -> str | None:
    return next((report["error"] for report in reports if "error" in report), None)


def _prepare(root: Path, temporary: Path, num_bytes: int) -> None:
    """Makes the folder to write into, after what killed writers have left is gone and there is room."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{WRITING}*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in root.glob(f"{REPLACED}*"):
        final = root / left.name.removeprefix(REPLACED)
        if (final / MARKER).exists() or not (left / MARKER).exists():
            _remove(left)
        else:
            shutil.rmtree(final, ignore_errors=True)
            left.rename(final)
    needed = num_bytes + max(_SPARE_BYTES, int(_SPARE_SHARE * num_bytes))
    disk = shutil.disk_usage(root)
    # Some network file systems tell no size at all.
    if disk.total and disk.free < needed:
        raise CheckpointError(
            f"{root}: needs {needed / 1e6:,.1f} MB, {disk.free / 1e6:,.1f} MB are free; make room, or lower "
            "checkpoint.keep_last"
        )
    temporary.mkdir()


def _commit(temporary: Path, final: Path, reports: list[dict[str, Any]], description: dict[str, Any]) -> None:
    index = {
        "format": "mars_ds checkpoint",
        "version": FORMAT_VERSION,
        **description,
        "files": {r["file"]: {"sha256": r["sha256"], "bytes": r["bytes"]} for r in reports},
        "slices": [entry for r in reports for entry in r["slices"]],
    }
    (temporary / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    sync_file(temporary / INDEX)
    sync_file(temporary)
    aside = final.with_name(f"{REPLACED}{final.name}")
    if (final / MARKER).exists():
        # A run that went back writes a step again. The old one counts until the new one is committed.
        if aside.exists():
            _remove(aside)
        final.rename(aside)
    elif final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    sync_file(final.parent)
    write_durably(final / MARKER, sha256_of(final / INDEX) + "\n")
    try:
        write_durably(final.parent / LATEST, final.name + "\n")
    except OSError:
        # It is committed all the same; no name is better than an old one.
        with contextlib.suppress(OSError):
            (final.parent / LATEST).unlink(missing_ok=True)
    if aside.exists():
        _remove(aside)


def _clear(temporary: Path, final: Path) -> None:
    """Gives back the room that a failed save has taken."""
    shutil.rmtree(temporary, ignore_errors=True)
    if not (final / MARKER).exists():
        shutil.rmtree(final, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Deletes a checkpoint, its marker first, so that a half-deleted one is never taken for whole."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
