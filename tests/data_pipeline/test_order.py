import numpy as np
import pytest

from data_pipeline.order import SampleOrder


@pytest.mark.parametrize("num_windows", [*range(1, 70), 255, 256, 257, 1_000, 4_096, 4_097, 65_537, 100_003])
def test_each_epoch_is_a_permutation(num_windows: int) -> None:
    order = SampleOrder(num_windows, seed=7)
    for epoch in (0, 1):
        windows = order.windows(epoch * num_windows, num_windows)
        assert np.array_equal(np.sort(windows), np.arange(num_windows))


@pytest.mark.parametrize("num_windows", [1, 2, 3, 16, 17, 1_000, 97_656_250, 2**40 + 1])
def test_vectorised_order_equals_the_scalar_definition(num_windows: int) -> None:
    order = SampleOrder(num_windows, seed=2**63 + 5)
    for start in (0, 5, num_windows - 3 if num_windows > 3 else 0, 3 * num_windows):
        expected = [order.locate(index)[1] for index in range(start, start + 50)]
        assert order.windows(start, 50).tolist() == expected


def test_order_is_pinned() -> None:
    # A change here would silently reorder every resumed run.
    assert SampleOrder(1_000, seed=1234).windows(0, 8).tolist() == [874, 503, 785, 513, 829, 410, 311, 298]
    assert SampleOrder(1_000, seed=1234).windows(1_000, 4).tolist() == [518, 223, 798, 726]


def test_epochs_and_seeds_differ() -> None:
    first = SampleOrder(10_000, seed=1)
    # Two random permutations of n agree in about one place.
    assert np.sum(first.windows(0, 10_000) == first.windows(10_000, 10_000)) < 10
    assert np.sum(first.windows(0, 10_000) == SampleOrder(10_000, seed=2).windows(0, 10_000)) < 10


def test_order_has_no_visible_trend() -> None:
    windows = SampleOrder(100_000, seed=3).windows(0, 100_000).astype(np.float64)
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(windows, np.arange(100_000))[0, 1]) < 0.02


def test_locate_names_the_epoch() -> None:
    order = SampleOrder(10, seed=0)
    assert [order.locate(index)[0] for index in (0, 9, 10, 29, 30)] == [0, 0, 1, 2, 3]


def test_any_batching_gives_the_same_sequence() -> None:
    order = SampleOrder(37, seed=11)
    whole = order.windows(0, 200)
    pieces = [order.windows(start, 8) for start in range(0, 200, 8)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert order.windows(5, 0).shape == (0,)


@pytest.mark.parametrize(("num_windows", "seed"), [(0, 0), (-1, 0), (5, -1), (5, 2**64)])
def test_out_of_range_arguments_are_refused(num_windows: int, seed: int) -> None:
    with pytest.raises(ValueError, match=r"num_windows|seed"):
        SampleOrder(num_windows, seed)


def test_negative_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="count from 0"):
        SampleOrder(5, 0).locate(-1)
    with pytest.raises(ValueError, match="count from 0"):
        SampleOrder(5, 0).windows(-1, 2)
