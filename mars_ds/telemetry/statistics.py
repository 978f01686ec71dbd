"""How unusual the newest loss or gradient norm is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any


class RunningZScore:
    """z-score of each new value within the last `window` values, itself included, as llm.c logs it.

    Because the value is part of its own statistics, |z| cannot exceed sqrt(n - 1) for n values: 3.9 at 16,
    11.3 at 128. The standard deviation is that of the population.

    Args:
        window: Values remembered.
        minimum: Values needed before there is a score.

    Raises:
        ValueError: Unless 2 <= minimum <= window.
    """

    def __init__(self, window: int = 128, minimum: int = 16) -> None:
        if not 2 <= minimum <= window:
            raise ValueError(f"expected 2 <= minimum <= window, got minimum {minimum} and window {window}")
        self.window = window
        self.minimum = minimum
        self._values: deque[float] = deque(maxlen=window)

    def update(self, value: float) -> float | None:
        """Remembers a value and scores it.

        Returns:
            (value - mean) / standard deviation; 0 when all values are equal; None with too few values or for
            a value that is not finite, which is not remembered: one NaN would blind the next `window` scores.
        """
        value = float(value)
        if not math.isfinite(value):
            return None
        self._values.append(value)
        count = len(self._values)
        if count < self.minimum:
            return None
        mean = math.fsum(self._values) / count
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in self._values) / count)
        # Equal values leave a rounding residue in the mean, which must not become a score.
        if deviation <= 1e-12 * abs(mean):
            return 0.0
        return (value - mean) / deviation

    def state_dict(self) -> dict[str, Any]:
        """The remembered values, oldest first, in plain JSON types."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over remembered values; of more than `window`, the newest."""
        self._values = deque((float(value) for value in state["values"]), maxlen=self.window)
