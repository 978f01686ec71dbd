"""Block hashes: what a worker reads is what the plan has hashed, whatever happened to the file in between.

A file is hashed once, when the plan is made: SHA-256 over all of it, its identity, and XXH3-128 over each block
of `BLOCK_BYTES`. A `VerifiedFile` then reads whole blocks only and holds each against its hash, so a flipped bit,
a truncation or a change by somebody else stops the build before a single wrong token is written.
"""

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from data_pipeline.errors import DataError

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True)
class FileHashes:
    """The hashes of one file.

    Attributes:
        size_bytes: its size.
        sha256: of the whole file, in hexadecimal.
        blocks: XXH3-128 of each block of `BLOCK_BYTES`, the last one shorter, 16 bytes each, joined.
    """

    size_bytes: int
    sha256: str
    blocks: bytes


def hash_file(path: Path, watch: Callable[[memoryview], None] | None = None) -> FileHashes:
    """Hash a file in one pass; both hash functions release the interpreter's lock, so threads run in parallel.

    Args:
        path: the file.
        watch: called with each block, in order, for whoever needs the bytes of the same pass.
    """
    whole = hashlib.sha256()
    blocks = bytearray()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    size = 0
    with open(path, "rb", buffering=0) as file:
        while count := _read_into(file, buffer):
            block = buffer[:count]
            whole.update(block)
            blocks += xxhash.xxh3_128_digest(block)
            size += count
            if watch:
                watch(block)
    return FileHashes(size, whole.hexdigest(), bytes(blocks))


def _read_into(file: io.FileIO, buffer: memoryview) -> int:
    """Fill ``buffer`` as far as the file goes; returns the bytes read."""
    filled = 0
    while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
        filled += count
    return filled


class VerifiedFile(io.RawIOBase):
    """A file for reading, each block held against its hash before any of its bytes are seen.

    Attributes:
        path: the file.
        hashes: what it must hold.
    """

    def __init__(self, path: Path, hashes: FileHashes) -> None:
        """Open ``path``.

        Raises:
            DataError: its size is another one.
        """
        super().__init__()
        self.path = path
        self.hashes = hashes
        self._position = 0
        self._block = -1
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close
        size = os.fstat(self._file.fileno()).st_size
        if size != hashes.size_bytes:
            self.close()
            raise self._changed(f"it has {size:,} bytes and had {hashes.size_bytes:,}")

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; returns the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.hashes.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, target: object) -> int:
        """Fill ``target`` as far as the file goes; returns the bytes read.

        Raises:
            DataError: the file is not what was hashed.
        """
        out = memoryview(target).cast("B")  # type: ignore[arg-type]
        filled = 0
        while filled < len(out) and self._position < self.hashes.size_bytes:
            number, inside = divmod(self._position, BLOCK_BYTES)
            block = self._load(number)
            count = min(len(out) - filled, len(block) - inside)
            out[filled : filled + count] = block[inside : inside + count]
            filled += count
            self._position += count
        return filled

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()

    def _load(self, number: int) -> memoryview:
        size = min(BLOCK_BYTES, self.hashes.size_bytes - number * BLOCK_BYTES)
        block = self._buffer[:size]
        if number != self._block:
            self._block = -1
            self._file.seek(number * BLOCK_BYTES)
            if _read_into(self._file, block) != size:
                raise self._changed(f"it ends inside block {number}")
            expected = self.hashes.blocks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if xxhash.xxh3_128_digest(block) != expected:
                raise self._changed(f"block {number} of {BLOCK_BYTES:,} bytes differs")
            self._block = number
        return block

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"{self.path}: changed since the plan was made ({how}); nothing of it was used after that. Restore the "
            "file and run the same command, or name a new --output for the new content"
        )
