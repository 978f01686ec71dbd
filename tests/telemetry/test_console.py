"""Every printed form, character by character."""

from __future__ import annotations

import math

import pytest

from mars_ds.telemetry.console import (
    CARD_WIDTH,
    StepLine,
    card,
    first_loss_line,
    format_bytes,
    format_count,
    format_seconds,
    step_header,
    step_line,
)

ROW = StepLine(
    step=1200,
    total_steps=100_000,
    tokens=589_824_000,
    loss=3.41237,
    lr=0.003,
    grad_norm=0.2314,
    loss_zscore=-0.42,
    clip_rate=0.03,
    tokens_per_second=1_512_345.0,
    mfu=0.4071,
    memory_bytes=int(71.3 * 2**30),
    eta_seconds=32_400,
)


def test_step_line_under_its_header() -> None:
    assert step_header() == (
        "         step  tokens     loss       z      grad  clip        lr   tok/s    MFU     memory      ETA"
    )
    assert step_line(ROW) == (
        "  1200/100000  589.8M   3.4124   -0.42    0.2314    3%  3.00e-03    1.5M  40.7%   71.3 GiB   9h 00m"
    )


def test_what_is_not_known_is_a_dash_or_no_column() -> None:
    bare = StepLine(step=1, total_steps=20, tokens=512, loss=math.nan, lr=0.0)
    assert step_line(bare).split() == ["1/20", "512", "nan", "-", "-", "-", "0.00e+00", "-", "-", "-", "-"]
    without = ("mfu", "memory_bytes")
    assert "MFU" not in step_header(without) and "memory" not in step_header(without)
    assert len(step_header(without)) == len(step_line(bare, without)) == len(step_line(ROW, without))
    with pytest.raises(ValueError, match="no such columns: \\['flops'\\]"):
        step_header(("flops",))


def test_a_wild_gradient_keeps_its_column() -> None:
    row = StepLine(step=1, total_steps=20, tokens=512, loss=10.8, lr=0.0, grad_norm=123456.0)
    assert "1.23e+05" in step_line(row)
    assert len(step_line(row)) == len(step_header())


def test_card() -> None:
    rows = [("model", "gpt2 small"), ("global batch", "480 x 1024\n= 491,520 tokens")]
    assert card("Plan", rows).split("\n") == [
        "┌─ Plan ─────────────────────────┐",
        "│ model         gpt2 small       │",
        "│ global batch  480 x 1024       │",
        "│               = 491,520 tokens │",
        "└────────────────────────────────┘",
    ]


def test_card_edges_are_straight_and_long_values_wrap() -> None:
    text = card("Optimizer", [("rule", "word " * 60), ("", ""), ("a longer label", "x")])
    lines = text.split("\n")
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= CARD_WIDTH
    assert lines[0].startswith("┌─ Optimizer ─") and lines[-1].startswith("└─")
    assert sum("word" in line for line in lines) > 1
    assert card("Only a title", []).count("\n") == 1


def test_first_loss_line() -> None:
    assert first_loss_line(10.84, 50304) == "expected first loss 10.83 (ln 50304), got 10.84: as it should be"
    assert first_loss_line(7.0, 50304).startswith("expected first loss 10.83 (ln 50304), got 7.00: check")
    assert "check" in first_loss_line(math.nan, 50304)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (950, "950"),
        (1200, "1.2k"),
        (491_520, "491.5k"),
        (999_960, "1.0M"),
        (49.2e9, "49.2B"),
        (3.5, "3.5"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (71.3 * 2**30, "71.3 GiB")],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0.354, "0.35s"),
        (9.999, "10s"),
        (42.4, "42s"),
        (59.7, "1m 00s"),
        (185, "3m 05s"),
        (3599.9, "1h 00m"),
        (25_920, "7h 12m"),
        (86_399, "1d 00h"),
        (273_600, "3d 04h"),
        (math.inf, "-"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert format_seconds(value) == text
