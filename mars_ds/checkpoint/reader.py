"""Reads any range of any parameter out of a checkpoint, whatever stage and world size wrote it."""

import hashlib
import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mars_ds.checkpoint.layout import (
    FORMAT_VERSION,
    INDEX,
    MARKER,
    MASTER,
    MODULE,
    REPLACED,
    STEP_PATTERN,
    Slice,
    sha256_of,
)
from mars_ds.errors import CheckpointError


def find_checkpoints(root: Path) -> list[Path]:
    """Committed checkpoints under `root`, oldest first.

    One that was set aside counts as long as the one that replaces it is not committed.
    """
    committed = {path.name: path for path in root.glob(STEP_PATTERN) if (path / MARKER).exists()}
    for path in root.glob(REPLACED + STEP_PATTERN):
        if (path / MARKER).exists():
            committed.setdefault(path.name.removeprefix(REPLACED), path)
    return [committed[name] for name in sorted(committed)]


def choose_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest committed checkpoint whose index and files are there, and what is wrong with newer ones.

    File contents are hashed when it is loaded, not here.
    """
    passed_over: list[str] = []
    for path in reversed(find_checkpoints(root)):
        try:
            CheckpointReader(path)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        return path, passed_over
    return None, passed_over


def newest_checkpoint(root: Path) -> Path | None:
    """The newest intact checkpoint under `root`, or None."""
    return choose_checkpoint(root)[0]


class CheckpointReader:
    """An open checkpoint.

    Args:
        folder: A committed checkpoint folder.
        verify: Also hash every data file.

    Attributes:
        index: The parsed index.

    Raises:
        CheckpointError: Missing marker, damaged index or file, or another format version.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        if not (self.folder / MARKER).is_file():
            found = find_checkpoints(self.folder / "checkpoints") or find_checkpoints(self.folder)
            hint = f"; nearest: {found[-1]}" if found else ""
            raise CheckpointError(f"{self.folder}: not a checkpoint (no {MARKER} marker){hint}")
        try:
            text = (self.folder / INDEX).read_bytes()
            marker = (self.folder / MARKER).read_bytes().strip().decode("ascii", "replace")
        except OSError as error:
            raise CheckpointError(f"{self.folder}: damaged ({error})") from error
        if hashlib.sha256(text).hexdigest() != marker:
            raise CheckpointError(f"{self.folder / INDEX}: damaged (its hash is not the one in {MARKER})")
        self.index: dict[str, Any] = json.loads(text)
        if self.index.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.folder}: format version {self.index.get('version')}, this code reads {FORMAT_VERSION}"
            )
        for name, facts in self.index["files"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != facts["bytes"]:
                raise CheckpointError(f"{path}: missing or not {facts['bytes']} bytes long")
            if verify and sha256_of(path) != facts["sha256"]:
                raise CheckpointError(
                    f"{path}: damaged (its hash is not the one in the index); remove {self.folder} to continue from "
                    "an earlier checkpoint"
                )
        self._slices: dict[tuple[str, str], list[Slice]] = defaultdict(list)
        for entry in self.index["slices"]:
            self._slices[entry["name"], entry["buffer"]].append(Slice(**entry))
        for entries in self._slices.values():
            entries.sort(key=lambda s: s.start)
        self._open: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """Optimizer steps applied when it was written."""
        return int(self.index["step"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """True shapes of the parameters by name."""
        return {name: tuple(shape) for name, shape in self.index["shapes"].items()}

    def has(self, name: str, buffer: str) -> bool:
        """True when some elements of that buffer are stored."""
        return (name, buffer) in self._slices

    def read(self, name: str, buffer: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened buffer, in its stored dtype, on the CPU.

        Raises:
            CheckpointError: Some of them are not stored.
        """
        parts, at = [], start
        for entry in self._slices.get((name, buffer), ()):
            stop = min(entry.start + entry.numel, start + numel)
            if entry.start <= at < stop:
                view = self._file(entry.file).get_slice(entry.key)
                parts.append(view[at - entry.start : stop - entry.start])
                at = stop
        if at != start + numel:
            raise CheckpointError(f"{self.folder}: {buffer} of {name} lacks elements {at}..{start + numel}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self, name: str, buffer: str = MASTER) -> Tensor:
        """A whole tensor in its true shape."""
        shape = self.shapes[name]
        return self.read(name, buffer, 0, prod(shape)).view(shape)

    def model_state(self) -> dict[str, Tensor]:
        """fp32 weights by name, with persistent buffers and frozen parameters as they were stored."""
        state = {name: self.whole(name) for name in self.shapes}
        for name, shape in self.index["module_shapes"].items():
            state[name] = self.read(name, MODULE, 0, prod(shape)).view(shape)
        return state

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt", device="cpu")
        return self._open[name]
