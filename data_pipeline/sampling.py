"""Samplings: which tokens a sample index means. Pure functions of counters; nothing is stored or advanced.

`Permutation` is the default. `RandomOffsets` and `RandomPart` draw as the two trainers of the MARS papers do,
with replacement, so that their runs can be reproduced in distribution; the draws are hashes of the sample
index, where the trainers have a generator per rank, so they are the same at any world size and after any resume.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.layout import SplitLayout
from data_pipeline.order import SampleOrder, mix64, mix64_array

SAMPLINGS = ("permutation", "random_offsets", "random_part")
_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment (Steele, Lea, Flood 2014)


@dataclass(frozen=True)
class Place:
    """Where one sample is.

    Attributes:
        epoch: passes over the split before it; random samplings count one after so many samples as the split
            has windows.
        window: number of the window in the epoch's layout; None where windows start anywhere.
        position: position in the split of its first token.
    """

    epoch: int
    window: int | None
    position: int


class Sampling(Protocol):
    """Sample index -> token position, with a readable scalar twin.

    Attributes:
        name: one of `SAMPLINGS`.
        seed: 0 to 2^64 - 1.
        epoch_samples: samples of one epoch, the same for every epoch.
        epoch_offset: whether windows are shifted by another offset in each epoch.
        group_size: samples in a row that share a part; None except for `RandomPart`.
    """

    name: str
    seed: int
    epoch_samples: int
    epoch_offset: bool
    group_size: int | None

    def positions(self, start: int, count: int) -> NDArray[np.int64]:
        """Positions of the first tokens of samples ``start`` to ``start + count - 1``, shape ``(count,)``."""
        ...

    def locate(self, sample_index: int) -> Place:
        """The place of one sample: the definition that `positions` vectorises."""
        ...


def make_sampling(
    name: str,
    part_tokens: Sequence[int],
    sequence_length: int,
    seed: int,
    *,
    epoch_offset: bool = False,
    group_size: int | None = None,
) -> Sampling:
    """The sampling that ``name`` means over parts of these sizes.

    Args:
        name: one of `SAMPLINGS`.
        part_tokens: tokens of each part of the split, in order.
        sequence_length: inputs per window.
        seed: 0 to 2^64 - 1.
        epoch_offset: see `Permutation`.
        group_size: see `RandomPart`.

    Raises:
        DataError: no such sampling, options that it does not read, or a split too short for it.
    """
    if epoch_offset and name in ("random_offsets", "random_part"):
        raise DataError(f"epoch_offset with sampling {name}: its windows start anywhere already; use permutation")
    if name == "permutation":
        return Permutation(part_tokens, sequence_length, seed, epoch_offset)
    if name == "random_offsets":
        return RandomOffsets(part_tokens, sequence_length, seed)
    if name == "random_part":
        if group_size is None:
            raise DataError("sampling random_part draws a part for each micro-batch: give the micro-batch")
        return RandomPart(part_tokens, sequence_length, seed, group_size)
    raise DataError(f"unknown sampling {name!r}; expected {', '.join(SAMPLINGS)}")


class Permutation:
    """Every window exactly once an epoch, in the order of `SampleOrder`.

    With ``epoch_offset`` all windows of epoch e are shifted by o(e) in [0, T), a hash of (seed, e), so that
    documents are cut at other places each time. So that every epoch has the same number of windows whatever
    its offset, a part of n tokens then has ``n // T - 1`` windows instead of ``(n - 1) // T``: at most one window
    per part is given up. Each token is an input at most once an epoch either way, and the last ``n % T + 1``
    tokens of a part never are.
    """

    name = "permutation"
    group_size: int | None = None

    def __init__(self, part_tokens: Sequence[int], sequence_length: int, seed: int, epoch_offset: bool = False) -> None:
        """Define the order; raises `DataError` where no part holds a window."""
        spare_tokens = sequence_length - 1 if epoch_offset else 0
        self._layout = SplitLayout(part_tokens, sequence_length, spare_tokens)
        if self._layout.num_windows == 0:
            raise DataError(
                f"no part holds a window of {sequence_length + 1 + spare_tokens:,} tokens"
                + (" (epoch_offset needs 2 x sequence_length); switch epoch_offset off" if epoch_offset else "")
                + f", or use a sequence_length of at most {_longest(part_tokens, epoch_offset):,}"
            )
        self._order = SampleOrder(self._layout.num_windows, seed)
        self.seed = seed
        self.epoch_offset = epoch_offset
        self.epoch_samples = self._layout.num_windows
        self._key = _key(seed, "epoch offset")

    def positions(self, start: int, count: int) -> NDArray[np.int64]:
        """See `Sampling.positions`."""
        positions = self._layout.positions(self._order.windows(start, count))
        if self.epoch_offset:
            epochs = np.arange(start, start + count, dtype=np.uint64) // np.uint64(self.epoch_samples)
            positions += _draw_array(self._key, epochs, self._layout.sequence_length)
        return positions

    def locate(self, sample_index: int) -> Place:
        """See `Sampling.locate`."""
        epoch, window = self._order.locate(sample_index)
        offset = _draw(self._key, epoch, self._layout.sequence_length) if self.epoch_offset else 0
        return Place(epoch, window, self._layout.position(window) + offset)


class RandomOffsets:
    """Uniform offsets in [0, n - T) over the split's n tokens, with replacement: the OpenWebText trainer.

    The trainer reads one file without parts, so a window may begin in one part and end in the next.
    """

    name = "random_offsets"
    epoch_offset = False
    group_size: int | None = None

    def __init__(self, part_tokens: Sequence[int], sequence_length: int, seed: int) -> None:
        """Define the draws; raises `DataError` where the split is shorter than a window."""
        self._choices = sum(part_tokens) - sequence_length
        if self._choices < 1:
            raise DataError(
                f"the split of {sum(part_tokens):,} tokens has no window of {sequence_length + 1:,}; "
                f"use a sequence_length of at most {sum(part_tokens) - 1:,}"
            )
        self.seed = seed
        self.epoch_samples = (sum(part_tokens) - 1) // sequence_length
        self._key = _key(seed, "offset")

    def positions(self, start: int, count: int) -> NDArray[np.int64]:
        """See `Sampling.positions`."""
        return _draw_array(self._key, _counters(start, count), self._choices)

    def locate(self, sample_index: int) -> Place:
        """See `Sampling.locate`."""
        _check_counts(sample_index, 0)
        return Place(sample_index // self.epoch_samples, None, _draw(self._key, sample_index, self._choices))


class RandomPart:
    """A part for each micro-batch, uniform over the parts whatever their size, then uniform offsets in it: the
    FineWeb-Edu trainer.

    A micro-batch is ``group_size`` samples in a row of the run: a property of the sample index, so that no rank
    or accumulation changes it. Where a run's micro-batch is that of its start, each forward pass reads one part.
    A run that goes on with another micro-batch keeps the group size it began with.
    """

    name = "random_part"
    epoch_offset = False

    def __init__(self, part_tokens: Sequence[int], sequence_length: int, seed: int, group_size: int) -> None:
        """Define the draws; raises `DataError` where no part holds a window."""
        if group_size < 1:
            raise DataError(f"group_size is {group_size}; expected 1 or more")
        layout = SplitLayout(part_tokens, sequence_length)
        if layout.num_windows == 0:
            raise DataError(
                f"no part holds a window of {sequence_length + 1:,} tokens; use a sequence_length of at most "
                f"{_longest(part_tokens, False):,}"
            )
        usable = layout.windows_per_part > 0
        self._starts = layout.starts[usable]
        self._choices = layout.part_tokens[usable] - sequence_length
        self.seed = seed
        self.group_size: int | None = group_size
        self._group_size = group_size
        self.epoch_samples = layout.num_windows
        self._part_key, self._offset_key = _key(seed, "part"), _key(seed, "offset")

    def positions(self, start: int, count: int) -> NDArray[np.int64]:
        """See `Sampling.positions`."""
        counters = _counters(start, count)
        parts = _draw_array(self._part_key, counters // np.uint64(self._group_size), len(self._starts))
        offsets = _draw_array(self._offset_key, counters, self._choices[parts].astype(np.uint64))
        positions: NDArray[np.int64] = self._starts[parts] + offsets
        return positions

    def locate(self, sample_index: int) -> Place:
        """See `Sampling.locate`."""
        _check_counts(sample_index, 0)
        part = _draw(self._part_key, sample_index // self._group_size, len(self._starts))
        offset = _draw(self._offset_key, sample_index, int(self._choices[part]))
        return Place(sample_index // self.epoch_samples, None, int(self._starts[part]) + offset)


def _key(seed: int, purpose: str) -> int:
    if not 0 <= seed <= _MASK64:
        raise ValueError(f"seed is {seed}; expected 0 to 2^64 - 1")
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _draw(key: int, counter: int, choices: int) -> int:
    """Draw number ``counter`` of the SplitMix64 stream ``key``, in [0, choices); its bias is choices / 2^64."""
    return mix64((key + (counter + 1) * _GOLDEN_GAMMA) & _MASK64) % choices


def _draw_array(key: int, counters: NDArray[np.uint64], choices: int | NDArray[np.uint64]) -> NDArray[np.int64]:
    """`_draw` of each counter."""
    divisor: Any = np.uint64(choices) if isinstance(choices, int) else choices
    values = mix64_array((counters + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA) + np.uint64(key))
    draws: NDArray[np.int64] = (values % divisor).astype(np.int64)
    return draws


def _counters(start: int, count: int) -> NDArray[np.uint64]:
    _check_counts(start, count)
    return np.arange(start, start + count, dtype=np.uint64)


def _check_counts(start: int, count: int) -> None:
    if start < 0 or count < 0:
        raise ValueError(f"start is {start} and count is {count}; both count from 0")


def _longest(part_tokens: Sequence[int], epoch_offset: bool) -> int:
    longest = max(part_tokens, default=0)
    return max(0, longest // 2 if epoch_offset else longest - 1)
