import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.layout import SplitLayout


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 8))
def test_windows_lie_in_one_part_and_leave_the_spare_tokens(parts: list[int], length: int, spare: int) -> None:
    layout = SplitLayout(parts, length, spare)
    expected = []
    start = 0
    for tokens in parts:
        # By definition: windows at the stride, as long as one of them shifted by the spare tokens still fits.
        first = 0
        while first + spare + length + 1 <= tokens:
            expected.append(start + first)
            first += length
        start += tokens
    assert layout.num_windows == len(expected)
    assert layout.num_tokens == start
    assert layout.positions(np.arange(len(expected))).tolist() == expected
    assert [layout.position(window) for window in range(len(expected))] == expected
    owner = [part for part, tokens in enumerate(parts) for _ in range(tokens)]
    assert layout.parts_at(np.arange(start)).tolist() == owner


def test_a_window_out_of_range_has_no_position() -> None:
    with pytest.raises(IndexError, match="the split has 2 windows"):
        SplitLayout([9], 4).position(2)
