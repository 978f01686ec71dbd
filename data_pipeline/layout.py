"""Where the tokens and windows of a split lie: parts laid end to end, windows at a fixed stride in each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SplitLayout:
    """Token positions count over the bodies of all parts of a split, in order, as if they were one file.

    Attributes:
        part_tokens: tokens of each part, int64, shape ``(parts,)``.
        starts: position of each part's first token, int64, shape ``(parts,)``.
        sequence_length: inputs per window; a window has one token more.
        num_tokens: tokens of the split.
        windows_per_part: int64, shape ``(parts,)``.
        num_windows: windows of the split.
    """

    def __init__(self, part_tokens: Sequence[int], sequence_length: int, spare_tokens: int = 0) -> None:
        """Lay windows at a stride of ``sequence_length``, never across parts.

        Args:
            part_tokens: tokens of each part.
            sequence_length: inputs per window.
            spare_tokens: tokens that stay free at the end of each part, so that all of its windows may be
                shifted by up to so many.
        """
        self.sequence_length = sequence_length
        self.part_tokens = np.array(part_tokens, dtype=np.int64)
        self._ends = np.cumsum(self.part_tokens, dtype=np.int64)
        self.starts = self._ends - self.part_tokens
        self.num_tokens = int(self.part_tokens.sum())
        self.windows_per_part = np.maximum(0, self.part_tokens - 1 - spare_tokens) // sequence_length
        self._window_ends = np.cumsum(self.windows_per_part, dtype=np.int64)
        self.num_windows = int(self.windows_per_part.sum())

    def positions(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position of the first token of each window; same shape as ``windows``."""
        parts = np.searchsorted(self._window_ends, windows, side="right")
        before = self._window_ends[parts] - self.windows_per_part[parts]
        positions: NDArray[np.int64] = self.starts[parts] + (windows - before) * self.sequence_length
        return positions

    def position(self, window: int) -> int:
        """The scalar definition of `positions`."""
        for start, count in zip(self.starts.tolist(), self.windows_per_part.tolist(), strict=True):
            if window < count:
                return int(start) + window * self.sequence_length
            window -= count
        raise IndexError(f"the split has {self.num_windows} windows")

    def parts_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the part that holds each token position."""
        return np.searchsorted(self._ends, positions, side="right")
