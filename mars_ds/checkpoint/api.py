"""Save and load for anyone's DeepSpeed loop: the trainer's own road, in two calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_ds.checkpoint.engine_state import describe, held_slices, restore, restore_group_settings, restore_rng
from mars_ds.checkpoint.reader import CheckpointReader, newest_checkpoint
from mars_ds.checkpoint.writer import write_checkpoint
from mars_ds.errors import CheckpointError


def save_checkpoint(engine: Any, root: str | Path, step: int, extra: Mapping[str, Any] | None = None) -> Path:
    """Writes weights, optimizer state and generators as a checkpoint that any stage and world size reads.

    Args:
        engine: Made by `mars_ds.initialize`; all ranks call this together.
        root: Folder of checkpoints; this one becomes `root/step_NNNNNNNN`.
        step: Optimizer steps applied.
        extra: More entries of the index, in JSON types; the same on every rank.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: On every rank, when any rank could not write.
    """
    return write_checkpoint(Path(root), step, held_slices(engine), {**describe(engine), **(extra or {})})


def load_checkpoint(
    engine: Any, path: str | Path, *, weights_only: bool = False, group_settings: bool = True, verify: bool = True
) -> CheckpointReader:
    """Puts a checkpoint of any stage and world size into an engine.

    Args:
        engine: Made by `mars_ds.initialize`, freshly; all ranks call this together.
        path: A checkpoint folder, or a folder of checkpoints (the newest intact one is taken).
        weights_only: Leave optimizer state and generators at their start.
        group_settings: Also restore lr, betas, weight decay, gamma ... of each param group, by parameter name;
            False keeps those of the engine (the trainer's config decides there).
        verify: Hash every file first; False where `newest_verified` has just done so.

    Returns:
        The reader; `reader.step` and `reader.index` hold the rest.

    Raises:
        CheckpointError: None there, damaged, of another model, or without a buffer that the optimizer needs.
    """
    folder = newest_checkpoint(Path(path)) or Path(path)
    reader = CheckpointReader(folder, verify=verify)
    restore(engine, reader, weights_only=weights_only)
    if not weights_only:
        restore_rng(reader)
        if group_settings:
            restore_group_settings(engine, reader)
    return reader


__all__ = ["CheckpointError", "load_checkpoint", "save_checkpoint"]
