"""Writes a stream of documents as parts: whole documents, at most ``part_tokens`` tokens each."""

import array
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_pipeline.binformat import HEADER_BYTES, BinHeader, idx_bytes
from data_pipeline.durable import file_sha256, write_synced
from data_pipeline.pages import hash_pages

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class PartRecord:
    """What the manifest says of one part.

    Attributes:
        file: name of the ``.bin``; the ``.idx`` has the same stem.
        split: ``train`` or ``val``.
        tokens: tokens, one end-of-text per document included.
        documents: documents.
        max_token_id: the largest id in the part.
        sha256: of the ``.bin``.
        idx_sha256: of the ``.idx``.
        sums_sha256: of the ``.sums``, see `data_pipeline.pages`; empty in data sets of version 1, which have none.
    """

    file: str
    split: str
    tokens: int
    documents: int
    max_token_id: int
    sha256: str
    idx_sha256: str
    sums_sha256: str = ""

    @property
    def idx_file(self) -> str:
        """Name of the ``.idx`` file."""
        return str(Path(self.file).with_suffix(".idx"))

    @property
    def sums_file(self) -> str:
        """Name of the ``.sums`` file."""
        return str(Path(self.file).with_suffix(".sums"))


@dataclass(frozen=True)
class PartFormat:
    """What all parts of a data set share.

    Attributes:
        dtype: of the tokens.
        eot_id: end-of-text id.
        vocab_size: number of ids.
        part_tokens: a document that would carry a part beyond this starts the next one. A document that
            is longer than this on its own becomes a part on its own.
    """

    dtype: np.dtype[Any]
    eot_id: int
    vocab_size: int
    part_tokens: int


class PartSeries:
    """Parts ``SPLIT-NNNNNN.bin``, ``.idx`` and ``.sums`` in one directory; nothing is renamed or synced upward here."""

    def __init__(self, directory: Path, split: str, part_format: PartFormat) -> None:
        """Start an empty series of ``split`` in ``directory``."""
        self.records: list[PartRecord] = []
        self._directory = directory
        self._split = split
        self._format = part_format
        self._file: BinaryIO | None = None
        self._lengths = array.array("i")
        self._tokens = 0
        self._max_token_id = 0

    def add(self, documents: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append whole documents as stored, end-of-text first.

        Args:
            documents: joined, in the part's dtype, shape ``(sum(lengths),)``.
            lengths: tokens of each, at least one, shape ``(documents,)``.
        """
        ends = np.cumsum(lengths)
        first, taken = 0, 0
        while first < len(lengths):
            room = self._format.part_tokens - self._tokens
            last = int(np.searchsorted(ends, taken + room, side="right"))
            if last <= first:
                if self._file:
                    self._close_part()
                    continue
                last = first + 1  # longer than a part: a part on its own
            stop = int(ends[last - 1])
            self._write(documents[taken:stop], lengths[first:last])
            first, taken = last, stop

    def _write(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        if self._file is None:
            self._file = open(self._path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by _close_part
            self._file.write(bytes(HEADER_BYTES))
        self._file.write(np.ascontiguousarray(tokens).data)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._tokens += len(tokens)
        self._max_token_id = max(self._max_token_id, int(tokens.max()))

    def close(self) -> list[PartRecord]:
        """Finish the open part; returns the records of all parts, in order."""
        if self._file:
            self._close_part()
        return self.records

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._split}-{len(self.records):06d}.bin"

    def _close_part(self) -> None:
        assert self._file is not None
        itemsize = self._format.dtype.itemsize
        header = BinHeader(self._tokens, itemsize, len(self._lengths), self._format.eot_id, self._format.vocab_size)
        self._file.seek(0)
        self._file.write(header.to_bytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = self._path
        # Hashed as read back, so that the hashes speak for the file and not for our intention.
        sha256, sums = hash_pages(path)
        index = path.with_suffix(".idx")
        write_synced(path.with_suffix(".sums"), sums)
        write_synced(index, idx_bytes(np.array(self._lengths, dtype=np.int32), itemsize))
        self.records.append(
            PartRecord(
                file=path.name,
                split=self._split,
                tokens=self._tokens,
                documents=len(self._lengths),
                max_token_id=self._max_token_id,
                sha256=sha256,
                idx_sha256=file_sha256(index),
                sums_sha256=hashlib.sha256(sums).hexdigest(),
            )
        )
        self._file = None
        self._lengths = array.array("i")
        self._tokens = self._max_token_id = 0
