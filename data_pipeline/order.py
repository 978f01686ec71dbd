"""The order of samples: a seeded permutation of all windows per epoch, computed and never stored.

A Feistel network permutes the smallest domain of an even number of bits that holds all windows; a value
outside them is sent through again until it falls inside (cycle walking). The keys are a hash of (seed,
epoch), so the window of any sample is a pure function of (num_windows, seed, sample index): the position of
a run is one integer, the same at any world size.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK64 = (1 << 64) - 1
# The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


class SampleOrder:
    """Which window a sample index means.

    Attributes:
        num_windows: windows in the data set, at least 1.
        seed: 0 to 2^64 - 1.
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        """Define the order.

        Raises:
            ValueError: ``num_windows`` or ``seed`` is out of range.
        """
        if num_windows < 1:
            raise ValueError(f"num_windows is {num_windows}; an order needs at least one window")
        if not 0 <= seed <= _MASK64:
            raise ValueError(f"seed is {seed}; expected 0 to 2^64 - 1")
        self.num_windows = num_windows
        self.seed = seed
        self._half_bits = max(1, ((num_windows - 1).bit_length() + 1) // 2)

    def locate(self, sample_index: int) -> tuple[int, int]:
        """The epoch and the window of one sample: the definition that `windows` vectorises."""
        if sample_index < 0:
            raise ValueError(f"sample_index is {sample_index}; samples count from 0")
        epoch, window = divmod(sample_index, self.num_windows)
        keys = self._keys(epoch)
        half_mask = (1 << self._half_bits) - 1
        while True:
            left, right = window >> self._half_bits, window & half_mask
            for key in keys:
                left, right = right, left ^ (mix64(right ^ key) & half_mask)
            window = left << self._half_bits | right
            if window < self.num_windows:
                return epoch, window

    def windows(self, start: int, count: int) -> NDArray[np.int64]:
        """The windows of samples ``start`` to ``start + count - 1``, across epochs, shape ``(count,)``."""
        if start < 0 or count < 0:
            raise ValueError(f"start is {start} and count is {count}; both count from 0")
        result = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, position = divmod(start + done, self.num_windows)
            length = min(count - done, self.num_windows - position)
            result[done : done + length] = self._epoch_windows(epoch, position, length)
            done += length
        return result

    def _epoch_windows(self, epoch: int, position: int, length: int) -> NDArray[np.uint64]:
        keys = np.array(self._keys(epoch), dtype=np.uint64)
        windows = np.arange(position, position + length, dtype=np.uint64)
        outside: Any = np.arange(length)
        while outside.size:
            windows[outside] = self._permuted(windows[outside], keys)
            outside = outside[windows[outside] >= np.uint64(self.num_windows)]
        return windows

    def _permuted(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half_bits = np.uint64(self._half_bits)
        half_mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> half_bits, values & half_mask
        for key in keys:
            left, right = right, left ^ (mix64_array(right ^ key) & half_mask)
        return left << half_bits | right

    def _keys(self, epoch: int) -> list[int]:
        counter = self.seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        digest = hashlib.blake2b(counter, digest_size=8 * _ROUNDS).digest()
        return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]


def mix64(value: int) -> int:
    """The finaliser of SplitMix64: a bijection of 0 to 2^64 - 1 that mixes every bit into every other."""
    value = (value ^ value >> 30) * _MULTIPLIER_1 & _MASK64
    value = (value ^ value >> 27) * _MULTIPLIER_2 & _MASK64
    return value ^ value >> 31


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of each element."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(_MULTIPLIER_1)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_MULTIPLIER_2)
    return values ^ values >> np.uint64(31)
