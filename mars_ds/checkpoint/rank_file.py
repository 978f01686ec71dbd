"""A rank's slices in memory, and their safetensors file, hashed while it is written.

The file is written here and not by the safetensors package for two reasons: slices of one flat tensor share their
storage, which the package takes only as copies, and what is hashed on the way out need not be read again. The package's
`safe_open` reads the file.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mars_ds.checkpoint.layout import Slice, rank_file
from mars_ds.errors import CheckpointError

# (buffer, parameter name, first element, flat values)
Held = Iterable[tuple[str, str, int, Tensor]]

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A slice and its values, flat."""

    entry: Slice
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return self.values.numel() * self.values.element_size()


class HostBuffers:
    """Copies of slices in host memory that are used again by the next save; page-locked for slices on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, key: str, values: Tensor) -> Tensor:
        """A copy of flat values; of those on a GPU it is whole only after `settle`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() != values.numel() or buffer.dtype != values.dtype:
            buffer = self._buffers[key] = _host_like(values)
        return buffer.copy_(values, non_blocking=values.is_cuda)

    @staticmethod
    def settle() -> None:
        """Waits for the copies from the GPU."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _host_like(values: Tensor) -> Tensor:
    if values.is_cuda:
        try:
            return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        except RuntimeError:
            pass  # no more memory may be locked: slower, and as good
    return torch.empty(values.shape, dtype=values.dtype)


def take(held: Held, rank: int, buffers: HostBuffers | None = None) -> list[Piece]:
    """Goes through this rank's slices, which all ranks do together, since making them may be collective.

    Args:
        held: The slices.
        rank: Names the file.
        buffers: Where to copy them; None leaves them where they are: nothing may change before they are written.
    """
    pieces = []
    for buffer, name, start, values in held:
        flat = values.detach().reshape(-1)
        entry = Slice(name, buffer, start, flat.numel(), str(flat.dtype).removeprefix("torch."), rank_file(rank))
        pieces.append(Piece(entry, buffers.copy(entry.key, flat) if buffers else flat))
    if buffers:
        buffers.settle()
    return pieces


def write_rank_file(path: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Writes and syncs the file.

    Returns:
        Its `sha256` and length in `bytes`: of what was meant to be written, so that a reader sees what the disk made
        of it.

    Raises:
        OSError: The disk is full or broken.
        CheckpointError: A dtype that the format does not have.
    """
    # Wide elements first: then each tensor is aligned.
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    digest, written = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in (_header(ordered), *(_bytes_of(piece.values) for piece in ordered)):
            view = memoryview(block)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
                written += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": written}


def _header(pieces: Sequence[Piece]) -> bytes:
    if sys.byteorder != "little":
        raise CheckpointError("the checkpoint format is little-endian, this machine is not")
    fields, at = {}, 0
    for piece in pieces:
        if piece.values.dtype not in _DTYPES:
            raise CheckpointError(f"{piece.entry.key}: {piece.values.dtype} cannot be stored in safetensors")
        stop = at + piece.num_bytes
        fields[piece.entry.key] = {
            "dtype": _DTYPES[piece.values.dtype],
            "shape": [piece.values.numel()],
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(values: Tensor) -> Any:
    return values.cpu().contiguous().view(torch.uint8).numpy()
