"""Names and small shared pieces of the checkpoint format."""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
INDEX = "index.json"
MARKER = "COMPLETE"
# Beside the checkpoints: a file with the name of the one that was committed last.
LATEST = "latest"
# Prefixes of folders: one that is being written, and one that another of its step is about to replace.
WRITING, REPLACED = ".writing_", ".replaced_"
MASTER = "master"
MODULE = "module"
RNG = "rng"
SEPARATOR = "|"
STEP_PATTERN = "step_" + "[0-9]" * 8


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + numel) of the flattened `buffer` of parameter `name`, in `file`."""

    name: str
    buffer: str
    start: int
    numel: int
    dtype: str
    file: str

    @property
    def key(self) -> str:
        """Key of the tensor inside its safetensors file."""
        return SEPARATOR.join((self.buffer, self.name, str(self.start)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def step_folder(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return root / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """File that rank writes."""
    return f"rank_{rank:05d}.safetensors"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Writes a small text file under a temporary name, syncs it, and renames it into place."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    temporary.rename(path)
    sync_file(path.parent)
