"""The running z-score against numpy, and its edges."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mars_ds.telemetry.statistics import RunningZScore


def test_equals_the_definition_over_the_last_values() -> None:
    values = np.random.default_rng(0).normal(3.0, 0.2, 300)
    score = RunningZScore(window=128, minimum=16)
    for index, value in enumerate(values):
        window = values[max(0, index - 127) : index + 1]
        expected = None if index < 15 else (value - window.mean()) / window.std()
        assert score.update(value) == (expected if expected is None else pytest.approx(expected, abs=1e-9))


def test_a_spike_stands_out_up_to_the_bound() -> None:
    score = RunningZScore()
    for index in range(127):
        score.update(3.0 + 0.01 * (index % 2))
    assert score.update(50.0) == pytest.approx(math.sqrt(127), rel=1e-4)


def test_nan_and_infinity_have_no_score_and_leave_no_trace() -> None:
    score, clean = RunningZScore(), RunningZScore()
    for index in range(20):
        value = float(index)
        assert score.update(math.nan) is None and score.update(math.inf) is None
        assert score.update(value) == clean.update(value)


def test_equal_values_score_zero() -> None:
    score = RunningZScore(window=20, minimum=2)
    assert [score.update(0.1) for _ in range(20)] == [None] + [0.0] * 19


def test_state_goes_through_json() -> None:
    score, restored = RunningZScore(), RunningZScore()
    for index in range(200):
        score.update(math.sin(index))
    restored.load_state_dict(json.loads(json.dumps(score.state_dict())))
    assert restored.update(0.5) == score.update(0.5)
    smaller = RunningZScore(window=4, minimum=2)
    smaller.load_state_dict({"values": [1, 2, 3, 4, 5, 6]})
    assert smaller.state_dict() == {"values": [3.0, 4.0, 5.0, 6.0]}


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="minimum <= window"):
        RunningZScore(window=8, minimum=16)
