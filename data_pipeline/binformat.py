"""The two files of a part: ``.bin`` as llm.c reads it, ``.idx`` as Megatron-LM reads it.

``.bin``: 1,024 bytes of header (256 little-endian int32), then the tokens, little-endian.

====  ===================================================================
int   meaning
====  ===================================================================
0     magic: 20240520 (uint16 tokens) or 20240801 (uint32 tokens)
1     version: 1 with uint16, 7 with uint32
2     number of tokens
3     our tag, `HEADER_TAG`; readers of llm.c's format ignore this and the rest
4     number of documents
5     end-of-text id, which starts every document
6     vocabulary size
====  ===================================================================

``.idx``: Megatron's MMIDIDX, one sequence per document, its byte pointers counted from the start of the
``.bin`` file, so that the first is 1,024 and Megatron steps over the header.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError

HEADER_BYTES = 1_024
HEADER_TAG = 0x4D415253  # "MARS"
MAX_FILE_BYTES = 2**31 - 1  # llm.c seeks with a C int
MAX_UINT16_VOCABULARY = 65_535

_MAGIC = {2: (20240520, 1), 4: (20240801, 7)}  # token bytes: magic, version
_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
# Megatron's code 8 is uint16 and 4 is int32: it has none for uint32, and ids stay below 2^31.
_IDX_DTYPE_CODE = {2: 8, 4: 4}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """``<u2`` for vocabularies of at most 65,535 ids, ``<u4`` above."""
    return np.dtype("<u2") if vocab_size <= MAX_UINT16_VOCABULARY else np.dtype("<u4")


@dataclass(frozen=True)
class BinHeader:
    """The header of a ``.bin`` file.

    Attributes:
        num_tokens: tokens in the body.
        itemsize: bytes per token, 2 or 4.
        num_documents: documents, 0 where another program wrote the file.
        eot_id: end-of-text id, 0 where another program wrote the file.
        vocab_size: number of ids, 0 where another program wrote the file.
    """

    num_tokens: int
    itemsize: int
    num_documents: int = 0
    eot_id: int = 0
    vocab_size: int = 0

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + self.num_tokens * self.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The tokens' dtype."""
        return np.dtype(f"<u{self.itemsize}")

    def to_bytes(self) -> bytes:
        """The 1,024 bytes."""
        ints = np.zeros(256, dtype="<i4")
        magic, version = _MAGIC[self.itemsize]
        ints[:7] = (
            magic,
            version,
            self.num_tokens,
            HEADER_TAG,
            self.num_documents,
            self.eot_id,
            self.vocab_size,
        )
        return ints.tobytes()


def read_header(path: Path) -> BinHeader:
    """Read the header of a ``.bin`` and hold the file's size against it.

    Raises:
        DataError: the file is missing, is no such file, or is not as long as its header says.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataError(f"{path}: the part is missing; run prepare again or copy the data set anew") from None
    if len(data) < HEADER_BYTES:
        raise DataError(f"{path}: {size:,} bytes are too few for the {HEADER_BYTES:,}-byte header of a part")
    ints = np.frombuffer(data, dtype="<i4")
    kinds = {kind: itemsize for itemsize, kind in _MAGIC.items()}
    itemsize = kinds.get((int(ints[0]), int(ints[1])))
    if itemsize is None:
        raise DataError(
            f"{path}: magic {ints[0]} version {ints[1]} is not that of a part; expected 20240520 version 1 "
            "(uint16) or 20240801 version 7 (uint32). Prepare a headerless nanoGPT file from its text"
        )
    ours = ints[3] == HEADER_TAG
    documents, eot, vocab = (int(value) for value in ints[4:7]) if ours else (0, 0, 0)
    header = BinHeader(int(ints[2]), itemsize, documents, eot, vocab)
    if size != header.file_bytes:
        raise DataError(
            f"{path}: {size:,} bytes, but its header promises {header.num_tokens:,} tokens = "
            f"{header.file_bytes:,} bytes; the file is damaged: copy it anew or run prepare again"
        )
    return header


def stored_documents(
    ids: NDArray[np.uint32], offsets: NDArray[np.int64], eot_id: int, vocab_size: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Documents as stored: before the ids of each its end-of-text, in the part's dtype.

    Args:
        ids: the tokenizer's ids of all documents, joined, shape ``(tokens,)``.
        offsets: document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``, shape ``(documents + 1,)``.
        eot_id: end-of-text id.
        vocab_size: every id must lie below it.
        dtype: dtype of the part.

    Returns:
        Shape ``(tokens + documents,)``.

    Raises:
        ValueError: an id lies outside the vocabulary (a cast would wrap it silently), or is end-of-text.
    """
    if ids.size and int(ids.max()) >= vocab_size:
        raise ValueError(f"token id {int(ids.max())} is outside the vocabulary of {vocab_size}")
    if bool((ids == eot_id).any()):
        raise ValueError("the text produced the end-of-text id")
    num_documents = len(offsets) - 1
    stored = np.empty(ids.size + num_documents, dtype=dtype)
    is_text = np.ones(stored.size, dtype=bool)
    starts = offsets[:-1] + np.arange(num_documents)
    is_text[starts] = False
    stored[starts] = eot_id
    stored[is_text] = ids
    return stored


def idx_bytes(lengths: NDArray[np.int32], itemsize: int) -> bytes:
    """The ``.idx`` file of documents with these token counts (end-of-text included)."""
    pointers = np.full(len(lengths), HEADER_BYTES, dtype="<i8")
    pointers[1:] += np.cumsum(lengths[:-1], dtype=np.int64) * itemsize
    boundaries = np.arange(len(lengths) + 1, dtype="<i8")
    header = _IDX_HEADER.pack(_IDX_MAGIC, 1, _IDX_DTYPE_CODE[itemsize], len(lengths), len(boundaries))
    return header + lengths.astype("<i4").tobytes() + pointers.tobytes() + boundaries.tobytes()


def read_document_lengths(path: Path) -> NDArray[np.int32]:
    """Token counts of the documents in an ``.idx`` file, shape ``(documents,)``.

    Raises:
        DataError: the file is missing, is no such file, or is not as long as its header says.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: the index is missing; run prepare again or copy the data set anew") from None
    count = -1
    if len(data) >= _IDX_HEADER.size and data[:9] == _IDX_MAGIC:
        _, _, _, count, boundaries = _IDX_HEADER.unpack_from(data)
        if len(data) != _IDX_HEADER.size + 12 * count + 8 * boundaries:
            count = -1
    if count < 0:
        raise DataError(f"{path}: not a whole Megatron MMIDIDX file; copy it anew or run prepare again")
    return np.frombuffer(data, dtype="<i4", count=count, offset=_IDX_HEADER.size)
