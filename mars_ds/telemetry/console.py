"""What is printed, as strings: aligned step lines, cards, and numbers that a person reads at a glance.

Everything here is pure. Nothing uses colour or the cursor, so that a piped log looks like the terminal did.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

CARD_WIDTH = 100
"""Widest card, in characters; longer values are wrapped."""

_MISSING = "-"


@dataclass(frozen=True)
class StepLine:
    """The numbers of one step's line; None is shown as a dash.

    Args:
        step: Optimizer steps done.
        total_steps: Steps of the whole run.
        tokens: Tokens consumed since the beginning of the run.
        loss: Mean over the step's tokens, in nats.
        lr: Learning rate of the step.
        grad_norm: Global gradient norm before clipping.
        loss_zscore: Of the loss among recent ones.
        clip_rate: Share of recent steps whose gradient was clipped, a fraction.
        tokens_per_second: Of all devices together.
        mfu: Model FLOPs utilization, a fraction.
        memory_bytes: Peak device memory.
        eta_seconds: Estimated time to the last step.
    """

    step: int
    total_steps: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float | None = None
    loss_zscore: float | None = None
    clip_rate: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    eta_seconds: float | None = None


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    text: Callable[[StepLine], str]


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return _MISSING if value is None else text(value)


_COLUMNS: dict[str, _Column] = {
    "step": _Column("step", 13, lambda row: f"{row.step}/{row.total_steps}"),
    "tokens": _Column("tokens", 6, lambda row: format_count(row.tokens)),
    "loss": _Column("loss", 7, lambda row: f"{row.loss:.4f}"),
    "loss_zscore": _Column("z", 6, lambda row: _optional(row.loss_zscore, "{:+.2f}".format)),
    "grad_norm": _Column("grad", 8, lambda row: _optional(row.grad_norm, _short_float)),
    "clip_rate": _Column("clip", 4, lambda row: _optional(row.clip_rate, "{:.0%}".format)),
    "lr": _Column("lr", 8, lambda row: f"{row.lr:.2e}"),
    "tokens_per_second": _Column("tok/s", 6, lambda row: _optional(row.tokens_per_second, format_count)),
    "mfu": _Column("MFU", 5, lambda row: _optional(row.mfu, "{:.1%}".format)),
    "memory_bytes": _Column("memory", 9, lambda row: _optional(row.memory_bytes, format_bytes)),
    "eta_seconds": _Column("ETA", 7, lambda row: _optional(row.eta_seconds, format_seconds)),
}


def step_header(without: Iterable[str] = ()) -> str:
    """Column titles, aligned with `step_line`.

    Args:
        without: Fields of `StepLine` to leave out for the whole run, e.g. `("mfu", "memory_bytes")` on a
            device of unknown peak without memory of its own.

    Raises:
        ValueError: A name that is not a column.
    """
    return "  ".join(column.title.rjust(column.width) for column in _chosen(without))


def step_line(row: StepLine, without: Iterable[str] = ()) -> str:
    """One step in aligned columns, under the header made with the same `without`."""
    return "  ".join(column.text(row).rjust(column.width) for column in _chosen(without))


def card(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A titled box of labelled lines, at most `CARD_WIDTH` wide.

    Args:
        title: Set into the upper edge.
        rows: (label, value); a value may have several lines, and an empty label continues the row above. The
            row `("", "")` is a blank line.
    """
    label_width = max((len(label) for label, _ in rows), default=0)
    room = CARD_WIDTH - label_width - 6
    lines: list[str] = []
    for label, value in rows:
        wrapped = [part for line in value.split("\n") for part in (textwrap.wrap(line, room) or [""])]
        for position, part in enumerate(wrapped):
            lines.append(f"{label if position == 0 else '':<{label_width}}  {part}".rstrip())
    inner = max([len(title) + 2, *(len(line) for line in lines)])
    top = f"┌─ {title} " + "─" * (inner - len(title) - 1) + "┐"
    body = [f"│ {line:<{inner}} │" for line in lines]
    return "\n".join([top, *body, "└" + "─" * (inner + 2) + "┘"])


def first_loss_line(loss: float, vocab_size: int, tolerance: float = 0.3) -> str:
    """Turns the first loss into a check: an untrained model is close to guessing uniformly.

    Args:
        loss: Loss of the first step of a run that starts from random weights, in nats.
        vocab_size: Rows of the softmax, padding included.
        tolerance: Largest distance that passes without a remark, in nats.
    """
    expected = math.log(vocab_size)
    line = f"expected first loss {expected:.2f} (ln {vocab_size}), got {loss:.2f}"
    if math.isfinite(loss) and abs(loss - expected) <= tolerance:
        return line + ": as it should be"
    return line + ": check initialization, tokenizer and labels before you trust this run"


def format_count(count: float) -> str:
    """A count in at most six characters: 950, 1.2k, 491.5k, 49.2B."""
    return _scaled(count, 1000.0, ("", "k", "M", "B", "T", "P"))


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units: 512 B, 1.5 KiB, 71.3 GiB."""
    return _scaled(num_bytes, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def format_seconds(seconds: float) -> str:
    """A duration by its two largest units: 0.35s, 42s, 3m 05s, 7h 12m, 3d 04h."""
    if not math.isfinite(seconds):
        return _MISSING
    if seconds < 10 and round(seconds, 2) < 10:
        return f"{seconds:.2f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def _chosen(without: Iterable[str]) -> list[_Column]:
    left_out = set(without)
    unknown = left_out - _COLUMNS.keys()
    if unknown:
        raise ValueError(f"no such columns: {sorted(unknown)}; there are {list(_COLUMNS)}")
    return [column for name, column in _COLUMNS.items() if name not in left_out]


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    if not math.isfinite(value):
        return _MISSING
    for position, unit in enumerate(units):
        digits = 0 if position == 0 and float(value).is_integer() else 1
        text = f"{value:.{digits}f}"
        # Compared after rounding: 999,960 must become 1.0M and not 1000.0k.
        if abs(float(text)) < base or position == len(units) - 1:
            return text + unit
        value /= base
    raise AssertionError("the last unit takes any value")


def _short_float(value: float) -> str:
    """Four digits where they fit the column, scientific beyond."""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2e}"
