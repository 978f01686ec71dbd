"""Chooses the checkpoint to continue from: the newest whose every byte is what was written."""

from pathlib import Path

import torch.distributed as dist

from mars_ds.checkpoint.layout import sha256_of
from mars_ds.checkpoint.reader import CheckpointReader, find_checkpoints
from mars_ds.errors import CheckpointError


def newest_verified(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint under `root` that is intact; all ranks call it together and share the hashing.

    Returns:
        Its folder, None where none is intact, and what is wrong with the newer ones.
    """
    passed_over: list[str] = []
    for path in reversed(find_checkpoints(root)):
        problem = _problem(path)
        if problem is None:
            return path, passed_over
        passed_over.append(problem)
    return None, passed_over


def _problem(path: Path) -> str | None:
    """What is wrong with a checkpoint; the same answer on every rank."""
    mine: str | None = None
    try:
        reader = CheckpointReader(path)
        files = sorted(reader.index["files"].items())
        for name, facts in files[dist.get_rank() :: dist.get_world_size()]:
            if sha256_of(path / name) != facts["sha256"]:
                mine = f"{path / name}: damaged (its hash is not the one in the index)"
    except (CheckpointError, OSError) as error:
        mine = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    return next((problem for problem in problems if problem is not None), None)
