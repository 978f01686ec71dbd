"""Reads windows of a finished data set: exact, in any order, with memory that does not grow."""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.binformat import HEADER_BYTES
from data_pipeline.errors import DataError
from data_pipeline.layout import SplitLayout
from data_pipeline.manifest import MANIFEST_FILE, MANIFEST_HASH_FILE
from data_pipeline.pages import PAGE_BYTES, PageSums
from data_pipeline.split_parts import SplitInfo, SplitPart, split_of_foreign_parts, split_of_manifest

# Parts that are held open: far below the usual limit of 1,024 descriptors per process.
_MAX_OPEN_PARTS = 128
ACCESSES = ("pread", "mmap")


class _Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` of the batch, of this row, which lie at byte ``offset`` of a part."""

    row: int
    begin: int
    end: int
    part: int
    offset: int


class _OpenPart(NamedTuple):
    """One part that is open: its descriptor, its sums, and the bytes that its header promises."""

    descriptor: int
    sums: PageSums | None
    part_bytes: int

    def close(self) -> None:
        os.close(self.descriptor)
        if self.sums:
            self.sums.close()


def open_dataset(
    path: str | Path, split: str, sequence_length: int, access: str = "pread", verify_reads: bool = True
) -> "TokenWindows":
    """Open one split of a data set.

    A directory that `prepare` made has a manifest, whose SHA-256 is the identity. A directory without one
    may hold parts in llm.c's format, ``*_train_*.bin`` and ``*_val_*.bin``, made by others; they are taken
    as GPT-2 tokens, and the identity is the SHA-256 over name, size and header of every part.

    Args:
        path: directory of the data set.
        split: ``train`` or ``val``.
        sequence_length: tokens per sample, the shift by one for the targets not counted.
        access: ``pread`` reads into a buffer that is used again, and memory stays flat. ``mmap`` maps the parts,
            without read-ahead; pages that were read stay in the process's memory as long as the kernel likes.
        verify_reads: hold every page that is read against its sum (see `data_pipeline.pages`), where there are sums:
            parts of others and data sets of version 1 have none.

    Raises:
        DataError: there is no such data set, a part is missing or damaged, or the split holds no window.
    """
    path = Path(path)
    if split not in ("train", "val"):
        raise DataError(f"unknown split {split!r}; expected train or val")
    if sequence_length < 1:
        raise DataError(f"sequence_length is {sequence_length}; expected 1 or more")
    if access not in ACCESSES:
        raise DataError(f"unknown access {access!r}; expected {' or '.join(ACCESSES)}")
    make = f"python -m data_pipeline prepare --source YOUR_TEXT_FILES --output {path}"
    if not path.is_dir():
        raise DataError(f"{path}: no such data set; make it with: {make}")
    if (path / MANIFEST_FILE).exists():
        info, parts = split_of_manifest(path, split)
    elif (path / MANIFEST_HASH_FILE).exists():
        raise DataError(
            f"{path}: {MANIFEST_FILE} is gone, though {MANIFEST_HASH_FILE} is there; make it again with: {make}"
        )
    elif any(path.glob("*_train_*.bin")) or any(path.glob("*_val_*.bin")):
        info, parts = split_of_foreign_parts(path, split)
    else:
        raise DataError(f"{path}: neither a {MANIFEST_FILE} nor parts are in it; make the data set with: {make}")
    if not parts:
        raise DataError(
            f"{path}: the {split} split is empty; make it with: {make} (--val-fraction sets the share of val)"
        )
    if not verify_reads:
        parts = [part._replace(sums_file=None) for part in parts]
    return TokenWindows(path, split, sequence_length, info, parts, access)


class TokenWindows:
    """Windows of ``sequence_length + 1`` tokens at a stride of ``sequence_length``, never across parts.

    A part of n tokens has ``floor((n - 1) / sequence_length)`` windows. An instance belongs to one thread;
    it may be pickled or copied (`copy.copy`), and each copy opens its own files.

    Attributes:
        path: directory of the data set.
        split: ``train`` or ``val``.
        sequence_length: inputs per window; a window has one token more.
        info: see `SplitInfo`; its fields are attributes here too.
        access: ``pread`` or ``mmap``.
        layout: where the parts and windows lie among the split's tokens.
        num_tokens: tokens of the split.
        num_windows: windows of the split.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        sequence_length: int,
        info: SplitInfo,
        parts: Sequence[SplitPart],
        access: str = "pread",
    ) -> None:
        """Lay windows over parts; use `open_dataset`."""
        self.path = path
        self.split = split
        self.sequence_length = sequence_length
        self.info = info
        self.access = access
        self._parts = parts
        self._dtype = parts[0].header.dtype
        self._open_parts: dict[int, _OpenPart] = {}
        self._open_maps: dict[int, mmap.mmap] = {}
        self._pages = memoryview(bytearray())
        self._buffer: NDArray[Any] = np.empty((0, sequence_length + 1), dtype=self._dtype)
        self.layout = SplitLayout(self.part_tokens, sequence_length)
        self.num_tokens = self.layout.num_tokens
        self.num_windows = self.layout.num_windows
        if self.num_windows == 0:
            longest = max(part.header.num_tokens for part in parts)
            raise DataError(
                f"{path}: the {split} split has no window of {sequence_length + 1:,} tokens: its longest "
                f"part has {longest:,}. A sequence_length of at most {longest - 1:,} works, or more text"
            )

    @property
    def part_tokens(self) -> list[int]:
        """Tokens of each part, in order."""
        return [part.header.num_tokens for part in self._parts]

    @property
    def part_files(self) -> list[str]:
        """File name of each part, in order."""
        return [part.file for part in self._parts]

    @property
    def manifest_sha256(self) -> str:
        """Identity of the data set."""
        return self.info.manifest_sha256

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer."""
        return self.info.tokenizer_name

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id that is read lies below it."""
        return self.info.vocab_size

    @property
    def max_token_id(self) -> int:
        """The largest id of the split."""
        return self.info.max_token_id

    @property
    def num_documents(self) -> int | None:
        """Documents of the split; None where there is no manifest."""
        return self.info.num_documents

    @property
    def bytes_of_text(self) -> int | None:
        """UTF-8 bytes of the split's text, for bits per byte; None where there is no manifest."""
        return self.info.bytes_of_text

    def read(
        self, windows: Sequence[int] | NDArray[np.integer[Any]], out: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Read windows.

        Args:
            windows: window numbers, 0 to ``num_windows - 1``, in any order, repeats allowed.
            out: filled and returned where given: int64, shape ``(len(windows), sequence_length + 1)``.

        Returns:
            Tokens, int64, shape ``(len(windows), sequence_length + 1)``.

        Raises:
            IndexError: a window is out of range.
            DataError: a part was truncated since it was opened, differs from its page sums, or holds an id outside the
                vocabulary.
        """
        numbers = np.asarray(windows, dtype=np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= self.num_windows):
            raise IndexError(f"windows {int(numbers.min())} to {int(numbers.max())}: the split has {self.num_windows}")
        return self._read(self.layout.positions(numbers), out, numbers, "window")

    def read_at(
        self, positions: Sequence[int] | NDArray[np.integer[Any]], out: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Read ``sequence_length + 1`` tokens from each position, across parts where they end sooner.

        Args:
            positions: positions in the split, 0 to ``num_tokens - sequence_length - 1``, in any order; see
                `SplitLayout`.
            out: as in `read`.

        Returns:
            As `read`.

        Raises:
            IndexError: a position is out of range.
            DataError: as in `read`.
        """
        starts = np.asarray(positions, dtype=np.int64)
        last = self.num_tokens - self.sequence_length - 1
        if starts.size and (int(starts.min()) < 0 or int(starts.max()) > last):
            raise IndexError(f"positions {int(starts.min())} to {int(starts.max())}: the last window starts at {last}")
        return self._read(starts, out, starts, "the window at token")

    def _read(
        self, positions: NDArray[np.int64], out: NDArray[np.int64] | None, names: NDArray[np.int64], kind: str
    ) -> NDArray[np.int64]:
        if len(self._buffer) < len(positions):
            self._buffer = np.empty((len(positions), self.sequence_length + 1), dtype=self._dtype)
        buffer = self._buffer[: len(positions)]
        pieces = list(self._pieces(positions))
        batch = buffer.reshape(-1).view(np.uint8).data
        if self.access == "mmap":
            self._fetch_mapped(pieces, batch)
        else:
            self._fetch(pieces, batch)
        if buffer.size and int(buffer.max()) >= self.vocab_size:
            bad = int(np.argmax(buffer.max(axis=1) >= self.vocab_size))
            file = self.path / self._parts[next(piece.part for piece in pieces if piece.row == bad)].file
            raise DataError(
                f"{file}: {kind} {names[bad]} holds id {buffer[bad].max()}, outside the vocabulary "
                f"of {self.vocab_size:,}; `python -m data_pipeline verify {self.path}` names damage"
            )
        if out is None:
            return buffer.astype(np.int64)
        if out.shape != buffer.shape or out.dtype != np.int64:
            raise ValueError(f"out is {out.dtype} {out.shape}; expected int64 {buffer.shape}")
        out[...] = buffer
        return out

    def close(self) -> None:
        """Close the open parts; a later `read` opens them again."""
        while self._open_maps:
            self._open_maps.popitem()[1].close()
        while self._open_parts:
            self._open_parts.popitem()[1].close()

    def __del__(self) -> None:
        """Close the open parts."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what defines the windows, without descriptors and buffers."""
        return TokenWindows, (self.path, self.split, self.sequence_length, self.info, self._parts, self.access)

    def _pieces(self, positions: NDArray[np.int64]) -> Iterator[_Piece]:
        """Where each row's bytes are; more than one piece for a row that crosses parts."""
        parts = self.layout.parts_at(positions)
        itemsize = self._dtype.itemsize
        row_bytes = (self.sequence_length + 1) * itemsize
        inside = (positions - self.layout.starts[parts]) * itemsize
        left = self.layout.part_tokens[parts] * itemsize - inside
        places = zip(parts.tolist(), inside.tolist(), left.tolist(), strict=True)
        for row, (part, offset, available) in enumerate(places):
            begin, end = row * row_bytes, (row + 1) * row_bytes
            while end - begin > available:
                if available:
                    yield _Piece(row, begin, begin + available, part, HEADER_BYTES + offset)
                begin += available
                part, offset = part + 1, 0
                available = self._parts[part].header.num_tokens * itemsize
            yield _Piece(row, begin, end, part, HEADER_BYTES + offset)

    def _fetch(self, pieces: list[_Piece], batch: memoryview) -> None:
        """Take what the page cache holds, then tell the kernel of all the rest before the first wait."""
        waiting = [piece for piece in pieces if not self._read_piece(piece, batch, os.RWF_NOWAIT)]
        for _, begin, end, part, offset in waiting:
            os.posix_fadvise(self._open(part).descriptor, offset, end - begin, os.POSIX_FADV_WILLNEED)
        for piece in waiting:
            self._read_piece(piece, batch)

    def _read_piece(self, piece: _Piece, batch: memoryview, flags: int = 0) -> bool:
        """Read one piece; False where ``flags`` forbid to wait and it is not in the page cache."""
        _, begin, end, part, offset = piece
        descriptor, sums, part_bytes = self._open(part)
        if sums is None:
            first_page, target, start = 0, batch[begin:end], offset
        else:
            first_page, stop = offset // PAGE_BYTES, offset + end - begin
            start = first_page * PAGE_BYTES
            size = min(stop + -stop % PAGE_BYTES, part_bytes) - start
            if len(self._pages) < size:
                self._pages = memoryview(bytearray(size))
            target = self._pages[:size]
        try:
            count = os.preadv(descriptor, [target], start, flags)
        except OSError as error:
            # Some file systems always may wait.
            if flags and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return False
            raise
        if count != len(target):
            if flags:
                return False
            raise self._truncated(part)
        if sums is not None:
            sums.check(first_page, target)
            batch[begin:end] = target[offset - start : offset - start + end - begin]
        return True

    def _fetch_mapped(self, pieces: list[_Piece], batch: memoryview) -> None:
        for _, begin, end, part, offset in pieces:
            first = offset - offset % mmap.PAGESIZE
            mapped = self._map(part)
            # A page beyond the end of the file would kill the process instead of raising.
            if mapped.size() < offset + end - begin:
                raise self._truncated(part)
            mapped.madvise(mmap.MADV_WILLNEED, first, offset + end - begin - first)
        for _, begin, end, part, offset in pieces:
            sums = self._open(part).sums
            with memoryview(self._map(part)) as whole:
                if sums is not None:
                    first_page, stop = offset // PAGE_BYTES, offset + end - begin
                    with whole[first_page * PAGE_BYTES : stop + -stop % PAGE_BYTES] as pages:
                        sums.check(first_page, pages)
                batch[begin:end] = whole[offset : offset + end - begin]

    def _truncated(self, part: int) -> DataError:
        return DataError(f"{self.path / self._parts[part].file}: truncated since it was opened; copy it anew")

    def _open(self, part: int) -> _OpenPart:
        opened = self._open_parts.get(part)
        if opened is None:
            while len(self._open_parts) >= _MAX_OPEN_PARTS:
                self._open_parts.pop(next(iter(self._open_parts))).close()
            file, sums_file, header = self._parts[part]
            sums = PageSums(self.path / sums_file, self.path / file, header.file_bytes) if sums_file else None
            opened = _OpenPart(os.open(self.path / file, os.O_RDONLY), sums, header.file_bytes)
            self._open_parts[part] = opened
        return opened

    def _map(self, part: int) -> mmap.mmap:
        mapped = self._open_maps.get(part)
        if mapped is None:
            while len(self._open_maps) >= _MAX_OPEN_PARTS:
                self._open_maps.pop(next(iter(self._open_maps))).close()
            with open(self.path / self._parts[part].file, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            if mapped.size() < self._parts[part].header.file_bytes:
                raise self._truncated(part)
            self._open_maps[part] = mapped
        return mapped
