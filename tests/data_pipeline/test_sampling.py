from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.sampling import SAMPLINGS, make_sampling

T = 8
PARTS = [5 * T + 3, 3, 0, 9 * T, 2 * T + 1, T + 1]


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.integers(0, 100), min_size=1, max_size=5),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**40),
    count=st.integers(0, 30),
    group=st.integers(1, 7),
    kind=st.sampled_from([*SAMPLINGS, "epoch_offset"]),
)
def test_vectorised_positions_equal_the_scalar_definition(
    parts: list[int], length: int, seed: int, start: int, count: int, group: int, kind: str
) -> None:
    offset = kind == "epoch_offset"
    name = "permutation" if offset else kind
    try:
        sampling = make_sampling(name, parts, length, seed, epoch_offset=offset, group_size=group)
    except DataError:
        longest = sum(parts) if kind == "random_offsets" else max(parts)
        assert longest < length + 1 + (length - 1 if offset else 0)
        return
    positions = sampling.positions(start, count)
    places = [sampling.locate(index) for index in range(start, start + count)]
    assert positions.dtype == np.int64
    assert positions.tolist() == [place.position for place in places]
    assert all(0 <= place.position <= sum(parts) - length - 1 for place in places)
    assert [place.epoch for place in places] == [(start + at) // sampling.epoch_samples for at in range(count)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("permutation", [126, 24, 135, 78, 8, 70, 102, 118]),
        ("random_offsets", [108, 19, 28, 30, 44, 89, 68, 72]),
        ("random_part", [98, 57, 121, 123, 135, 135, 8, 13]),
    ],
)
def test_samplings_are_pinned(kind: str, expected: list[int]) -> None:
    # A change here would silently reorder every resumed run.
    sampling = make_sampling(kind, PARTS, T, 1234, group_size=2)
    assert sampling.positions(16, 8).tolist() == expected


def test_an_epoch_offset_is_pinned_and_differs_between_epochs_and_seeds() -> None:
    sampling = make_sampling("permutation", [16 * 40], 16, 7, epoch_offset=True)
    n = sampling.epoch_samples
    offsets = [int(sampling.positions(epoch * n, 1)[0]) % 16 for epoch in range(400)]
    assert offsets[:8] == [7, 11, 9, 2, 1, 6, 9, 1]
    assert set(offsets) == set(range(16))
    assert max(Counter(offsets).values()) < 50  # 25 expected, standard deviation 5
    other = make_sampling("permutation", [16 * 40], 16, 8, epoch_offset=True)
    assert [int(other.positions(epoch * n, 1)[0]) % 16 for epoch in range(8)] != offsets[:8]


def test_with_an_epoch_offset_each_epoch_reads_each_token_at_most_once() -> None:
    sampling = make_sampling("permutation", PARTS, T, 5, epoch_offset=True)
    n = sampling.epoch_samples
    assert n == sum(max(0, tokens // T - 1) for tokens in PARTS) == 4 + 8 + 1
    ends = np.cumsum(PARTS)
    seen = set()
    for epoch in range(40):
        positions = np.sort(sampling.positions(epoch * n, n))
        inputs = (positions[:, None] + np.arange(T)).ravel()
        assert len(set(inputs.tolist())) == n * T
        # The targets too lie in the part of the first token.
        assert np.array_equal(
            np.searchsorted(ends, positions, side="right"), np.searchsorted(ends, positions + T, side="right")
        )
        seen.update(inputs.tolist())
    # Over the epochs every token of the first part is an input but those that its length leaves over.
    assert seen & set(range(43)) == set(range(43 - 3 - 1))


@pytest.mark.parametrize("kind", ["random_offsets", "random_part"])
def test_random_samplings_are_uniform_and_reach_both_ends(kind: str) -> None:
    sampling = make_sampling(kind, [T + 20], T, 3, group_size=5)
    counts = np.bincount(sampling.positions(0, 20_000), minlength=20)
    # As torch.randint(n - T): the last window ends with the last token.
    assert len(counts) == 20
    assert np.sum((counts - 1_000) ** 2 / 1_000) < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    lagged = sampling.positions(0, 20_000).astype(float)
    assert abs(np.corrcoef(lagged[:-1], lagged[1:])[0, 1]) < 0.03


def test_random_offsets_cross_parts_and_random_parts_do_not() -> None:
    ends = np.cumsum(PARTS)

    def crossing(kind: str) -> int:
        positions = make_sampling(kind, PARTS, T, 3, group_size=4).positions(0, 2_000)
        first, last = (np.searchsorted(ends, at, side="right") for at in (positions, positions + T))
        return int(np.sum(first != last))

    assert crossing("random_offsets") > 300
    assert crossing("random_part") == 0


def test_a_micro_batch_shares_a_part_and_parts_are_drawn_whatever_their_size() -> None:
    sampling = make_sampling("random_part", PARTS, T, 3, group_size=6)
    parts = np.searchsorted(np.cumsum(PARTS), sampling.positions(0, 6_000), side="right").reshape(-1, 6)
    assert np.all(parts == parts[:, :1])
    counts = Counter(parts[:, 0].tolist())
    assert set(counts) == {0, 3, 4, 5}  # those that hold a window
    assert all(190 < count < 310 for count in counts.values())
    # Within a group the offsets differ: 65 choices in the part of 72 tokens.
    group = int(np.argmax(parts[:, 0] == 3))
    assert len(set(sampling.positions(6 * group, 6).tolist())) > 3


@pytest.mark.parametrize("kind", ["permutation", "random_offsets", "random_part"])
def test_any_batching_gives_the_same_sequence(kind: str) -> None:
    sampling = make_sampling(kind, PARTS, T, 11, group_size=4)
    whole = sampling.positions(0, 200)
    for size in (1, 3, 8):
        pieces = [sampling.positions(start, min(size, 200 - start)) for start in range(0, 200, size)]
        assert np.array_equal(np.concatenate(pieces), whole)


def test_draws_are_exact_for_splits_beyond_32_bits() -> None:
    parts = [2**31 - 1] * 60  # 129 G tokens
    sampling = make_sampling("random_offsets", parts, 1024, 1)
    positions = sampling.positions(0, 1_000)
    assert positions.tolist() == [sampling.locate(index).position for index in range(1_000)]
    assert int(positions.max()) > 2**36
    assert abs(positions.mean() / sum(parts) - 0.5) < 0.05


def test_mistakes_are_told() -> None:
    with pytest.raises(DataError, match=r"unknown sampling 'shuffle'; expected permutation, random_offsets"):
        make_sampling("shuffle", PARTS, T, 0)
    with pytest.raises(DataError, match="epoch_offset with sampling random_part"):
        make_sampling("random_part", PARTS, T, 0, epoch_offset=True, group_size=1)
    with pytest.raises(DataError, match="give the micro-batch"):
        make_sampling("random_part", PARTS, T, 0)
    with pytest.raises(DataError, match="group_size is 0"):
        make_sampling("random_part", PARTS, T, 0, group_size=0)
    with pytest.raises(DataError, match=r"no window of 9; use a sequence_length of at most 7"):
        make_sampling("random_offsets", [8], T, 0)
    with pytest.raises(DataError, match=r"window of 16 tokens \(epoch_offset needs .* at most 5"):
        make_sampling("permutation", [11, 3], T, 0, epoch_offset=True)
    for kind in SAMPLINGS:
        sampling = make_sampling(kind, PARTS, T, 0, group_size=1)
        with pytest.raises(ValueError, match="count from 0"):
            sampling.positions(-1, 2)
        with pytest.raises(ValueError, match="count from 0"):
            sampling.locate(-1)
        with pytest.raises(ValueError, match="seed is -1"):
            make_sampling(kind, PARTS, T, -1, group_size=1)
