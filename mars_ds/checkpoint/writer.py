"""Writes a checkpoint from all ranks: temporary folder, hashes, index, rename, marker last."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mars_ds.checkpoint.layout import (
    FORMAT_VERSION,
    INDEX,
    MARKER,
    Slice,
    rank_file,
    sha256_of,
    step_folder,
    sync_file,
    write_durably,
)
from mars_ds.checkpoint.reader import find_checkpoints
from mars_ds.errors import CheckpointError

# (buffer, parameter name, first element, flat values)
Held = Iterable[tuple[str, str, int, Tensor]]


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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    final = step_folder(root, step)
    temporary = root / f".writing_{final.name}"
    report: dict[str, Any] = {}
    if rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            # Left by a writer that was killed; a folder without the marker is not a checkpoint either.
            for left in root.glob(".writing_*"):
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
        except OSError as error:
            report = {"error": f"rank 0: {error}"}
    dist.barrier()
    # Every rank goes through its slices, since making them may be collective.
    try:
        written = _write_rank_file(temporary, rank, held)
        report = report or written
    except Exception as error:
        report = report or {"error": f"rank {rank}: {error}"}
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, report)
    outcome: list[str | None] = [next((r["error"] for r in reports if "error" in r), None)]
    if rank == 0 and outcome[0] is None:
        try:
            _commit(temporary, final, reports, {**description, "step": step, "world_size": world_size})
        except OSError as error:
            outcome[0] = f"rank 0: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final}: not written ({outcome[0]}); earlier checkpoints are untouched")
    return final


def _write_rank_file(folder: Path, rank: int, held: Held) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    slices: list[Slice] = []
    for buffer, name, start, values in held:
        flat = values.detach().reshape(-1).cpu()
        entry = Slice(name, buffer, start, flat.numel(), str(flat.dtype).removeprefix("torch."), rank_file(rank))
        # safetensors refuses views of one storage.
        tensors[entry.key] = flat.clone() if flat.data_ptr() == values.data_ptr() else flat
        slices.append(entry)
    path = folder / rank_file(rank)
    save_file(tensors, path)
    sync_file(path)
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        "slices": [entry.to_json() for entry in slices],
    }


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
    if final.exists():
        # Only an uncommitted or identical step can be here: a run writes each step once.
        (final / MARKER).unlink(missing_ok=True)
        shutil.rmtree(final)
    temporary.rename(final)
    sync_file(final.parent)
    write_durably(final / MARKER, sha256_of(final / INDEX) + "\n")


def prune(root: Path, keep_last: int, newest: Path) -> list[Path]:
    """Deletes all but the last `keep_last` committed checkpoints up to `newest`; rank 0 only.

    Later ones than `newest` are not this run's to judge: they are damaged, or the run went back on purpose. The
    marker goes first, so that a half-deleted folder is never taken for a checkpoint.
    """
    committed = [path for path in find_checkpoints(root) if path.name <= newest.name]
    removed = committed[:-keep_last]
    for path in removed:
        (path / MARKER).unlink()
        shutil.rmtree(path)
    return removed
