"""Files that survive a crash: written aside, synced, then renamed into place."""

import hashlib
import json
import os
from pathlib import Path


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and sync it; for files inside a directory that is renamed later."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new one.

    For one writer at a time; the file that a killed writer left aside is overwritten by the next.
    """
    aside = path.with_name(f"{path.name}.tmp")
    write_synced(aside, data)
    os.replace(aside, path)
    sync_directory(path.parent)


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value: sorted keys, two-space indent, ASCII, a newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()
