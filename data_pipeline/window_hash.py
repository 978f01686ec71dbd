"""A running hash of the windows that a run has consumed.

The sum modulo 2^128 of a keyed BLAKE2b-128 of (sample index, tokens). A sum has no order, so the value does
not depend on ranks, micro-batches or batch sizes; hashes of ranks are added to get that of the run.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KEY = b"data_pipeline window"
_MODULUS = 1 << 128


@dataclass
class WindowHash:
    """The running hash.

    Attributes:
        value: 0 to 2^128 - 1; 0 when nothing was consumed. `int(hexdigest, 16)` restores it.
    """

    value: int = 0

    def add(self, sample_index: int, tokens: NDArray[Any]) -> None:
        """Count one window.

        Args:
            sample_index: position in the run's sequence of samples, from 0.
            tokens: the window's ids, shape ``(sequence_length + 1,)``, any integer dtype; ids below 2^32.
        """
        hasher = hashlib.blake2b(int(sample_index).to_bytes(8, "little"), digest_size=16, key=_KEY)
        hasher.update(np.ascontiguousarray(tokens, dtype="<u4").data)
        self.value = (self.value + int.from_bytes(hasher.digest(), "little")) % _MODULUS

    def __add__(self, other: "WindowHash") -> "WindowHash":
        """The hash of what both have consumed."""
        return WindowHash((self.value + other.value) % _MODULUS)

    def hexdigest(self) -> str:
        """The value as 32 hexadecimal digits."""
        return f"{self.value:032x}"
