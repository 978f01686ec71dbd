"""Figures of one run and of several, drawn without a display and without global state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mars_ds.telemetry.console import format_count
from mars_ds.telemetry.run_log import RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers and in grey print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TRAIN_COLOR, VALIDATION_COLOR = COLORS[0], COLORS[1]
INK, GRID = "#333333", "#DDDDDD"
DPI = 150


def smooth(values: np.ndarray, half_width: int | None = None) -> np.ndarray:
    """Centred moving median, then centred moving mean: no lag where a loss falls, no trace of single spikes.

    Windows shrink evenly towards the beginning; at the end they keep reaching back, so that the last value,
    which is quoted, does not rest on one point. NaN and infinite values are passed over.

    Args:
        values: (points,), fp64.
        half_width: Points on each side; default a fiftieth of all, between 1 and 100.
    """
    half = min(100, max(1, len(values) // 50)) if half_width is None else half_width
    return _moving(_moving(values, half, np.median), half, np.mean)


def _moving(values: np.ndarray, half: int, statistic: Callable[[np.ndarray], Any]) -> np.ndarray:
    result = np.full(len(values), np.nan)
    finite = np.isfinite(values)
    for index in range(len(values)):
        near = slice(index - min(half, index), index + min(half, index) + 1)
        window = values[near][finite[near]]
        if len(window):
            result[index] = statistic(window)
    return result


def loss_limits(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float] | None:
    """Limits of a loss axis that show where a run is won, not the fall from ln(vocab) at its beginning.

    Everything after the first twentieth of the tokens fits, with a margin; what lies above runs out of the
    top.

    Args:
        curves: (tokens, loss) pairs.

    Returns:
        (low, high), or None when there is nothing finite.
    """
    last = max((float(np.nanmax(tokens)) for tokens, _ in curves if len(tokens)), default=0.0)
    late = [loss[(tokens >= 0.05 * last) & np.isfinite(loss)] for tokens, loss in curves]
    values = np.concatenate(late) if late else np.empty(0)
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    margin = max(0.06 * (high - low), 0.005 * abs(high), 1e-6)
    return low - margin, high + margin


def robust_limits(values: np.ndarray) -> tuple[float, float] | None:
    """Limits from 0 that a few spikes do not decide: a half more than the 99th percentile, or the maximum."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return 0.0, max(min(float(finite.max()) * 1.05, float(np.percentile(finite, 99)) * 1.5), 1e-12)


def plot_loss(run: RunLog, path: str | os.PathLike[str]) -> Path:
    """Training loss (raw faint, smoothed strong) and validation loss over tokens, as a PNG."""
    figure = _figure(9.0, 5.4)
    axes = figure.add_subplot()
    tokens, loss = run.train["tokens"], run.train["loss"]
    smoothed = smooth(loss)
    axes.plot(tokens, loss, color=TRAIN_COLOR, alpha=0.22, linewidth=0.8)
    axes.plot(tokens, smoothed, color=TRAIN_COLOR, linewidth=1.8, label=f"train, smoothed ({_last(smoothed):.3f})")
    validation_tokens, validation = run.evaluation["tokens"], run.evaluation["loss"]
    if np.isfinite(validation).any():
        _plot_validation(axes, validation_tokens, validation, VALIDATION_COLOR, f"validation ({_last(validation):.3f})")
    limits = loss_limits([(tokens, smoothed), (validation_tokens, validation)])
    if limits:
        axes.set_ylim(*limits)
    _title(axes, run.name, _subtitle(run))
    _decorate(axes, "loss (nats per token)", float(tokens[-1]), legend=True)
    return _save(figure, path)


def plot_training(run: RunLog, path: str | os.PathLike[str]) -> Path:
    """Learning rate, gradient norm and throughput over tokens, one panel each, as a PNG.

    A panel whose field the log does not have is left out.
    """
    fields = [field for field in ("lr", "grad_norm", "tokens_per_second") if np.isfinite(run.train[field]).any()]
    figure = _figure(9.0, 1.0 + 2.2 * max(1, len(fields)))
    if not fields:
        _title(figure.add_subplot(), run.name, "no learning rate, gradient norm or throughput in the log")
        return _save(figure, path)
    labels = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens / second"}
    panels = figure.subplots(len(fields), 1, sharex=True, squeeze=False)[:, 0]
    for axes, field, color in zip(panels, fields, (COLORS[2], COLORS[3], COLORS[4]), strict=False):
        tokens, values = run.train["tokens"], run.train[field]
        if field == "lr":
            axes.plot(tokens, values, color=color, linewidth=1.8)
        else:
            axes.plot(tokens, values, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(tokens, smooth(values), color=color, linewidth=1.8)
        limits = robust_limits(values)
        if limits:
            axes.set_ylim(*limits)
        _decorate(axes, labels[field], float(tokens[-1]), bottom=axes is panels[-1])
        if field == "tokens_per_second":
            axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    _title(panels[0], run.name, _subtitle(run))
    return _save(figure, path)


def plot_optimizer(run: RunLog, path: str | os.PathLike[str]) -> Path | None:
    """Correction, clipped tensors and update size by role over tokens, a panel each, as a PNG; None without them."""
    kinds = [kind for kind in _OPTIMIZER_PANELS if any(name.startswith(f"{kind}/") for name in run.optimizer)]
    if not kinds:
        return None
    figure = _figure(9.0, 1.0 + 2.2 * len(kinds))
    panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    tokens = run.train["tokens"]
    for axes, kind in zip(panels, kinds, strict=True):
        names = [name for name in run.optimizer if name.startswith(f"{kind}/")]
        for index, name in enumerate(names):
            axes.plot(
                tokens,
                smooth(run.optimizer[name]),
                color=COLORS[index % len(COLORS)],
                linewidth=1.6,
                label=f"{name.split('/', 1)[1]} ({_last(run.optimizer[name]):.3g})",
            )
        limits = robust_limits(np.concatenate([run.optimizer[name] for name in names]))
        if kind == "clipped":
            limits = (-0.02, 1.02)
        if limits:
            axes.set_ylim(*limits)
        _decorate(axes, _OPTIMIZER_PANELS[kind], float(tokens[-1]), legend=True, bottom=axes is panels[-1])
    _title(panels[0], run.name, _subtitle(run))
    return _save(figure, path)


_OPTIMIZER_PANELS = {
    "correction": "correction |c - g| / |g|",
    "clipped": "share of tensors clipped",
    "update_rms": "RMS of the update",
}


def plot_comparison(
    runs: Sequence[RunLog], labels: Sequence[str], path: str | os.PathLike[str], over: str = "tokens"
) -> Path:
    """Smoothed training loss and validation loss of several runs, side by side on one scale, as a PNG.

    Args:
        runs: In order.
        labels: Of the runs.
        path: File to write.
        over: `tokens`, or `hours` in training steps; runs without a throughput are left out of the latter.
    """
    pairs = [(run, label) for run, label in zip(runs, labels, strict=True) if _axis(run, run.train, over) is not None]
    with_validation = any(np.isfinite(run.evaluation["loss"]).any() for run, _ in pairs)
    figure = _figure(13.0 if with_validation else 9.0, 5.4)
    panels = figure.subplots(1, 2 if with_validation else 1, sharey=True, squeeze=False)[0]
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for index, (run, label) in enumerate(pairs):
        color = COLORS[index % len(COLORS)]
        style = ("-", "--", ":")[index // len(COLORS) % 3]
        smoothed, places = smooth(run.train["loss"]), _axis(run, run.train, over)
        assert places is not None
        curves.append((places, smoothed))
        text = f"{label} ({_last(smoothed):.3f})"
        panels[0].plot(places, smoothed, style, color=color, linewidth=1.6, label=text)
        validation, places = run.evaluation["loss"], _axis(run, run.evaluation, over)
        if np.isfinite(validation).any() and places is not None:
            curves.append((places, validation))
            _plot_validation(panels[1], places, validation, color, f"{label} ({_last(validation):.3f})", style)
    limits = loss_limits(curves)
    if limits:
        panels[0].set_ylim(*limits)
    last = max((float(places[-1]) for places, _ in curves if len(places)), default=1.0)
    _title(panels[0], "Training loss", "smoothed; last value in brackets")
    _decorate(panels[0], "loss (nats per token)", last, legend=True, xlabel=over)
    if with_validation:
        _title(panels[1], "Validation loss", "last value in brackets")
        _decorate(panels[1], "", last, legend=True, xlabel=over)
    return _save(figure, path)


def _axis(run: RunLog, columns: Mapping[str, np.ndarray], over: str) -> np.ndarray | None:
    return columns["tokens"] if over == "tokens" else run.hours(columns["tokens"])


def _plot_validation(
    axes: Axes, tokens: np.ndarray, loss: np.ndarray, color: str, label: str, style: str = "-"
) -> None:
    # Markers on hundreds of evaluations would hide the curve under them.
    marker = "o" if len(loss) <= 60 else None
    axes.plot(tokens, loss, style, color=color, linewidth=1.6, marker=marker, markersize=4, label=label, zorder=3)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def _title(axes: Axes, title: str, subtitle: str) -> None:
    """A bold line and a quiet line above the axes."""
    axes.set_title(title + "\n", loc="left", fontsize=13, fontweight="bold", color=INK)
    axes.annotate(
        subtitle,
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color="#666666",
    )


def _decorate(
    axes: Axes, ylabel: str, last: float, legend: bool = False, bottom: bool = True, xlabel: str = "tokens"
) -> None:
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_xlim(0, (last or 1.0) * 1.02)
    if xlabel == "tokens":
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.set_ylabel(ylabel, color=INK)
    if bottom:
        axes.set_xlabel(xlabel, color=INK)
    if legend:
        axes.legend(frameon=False, fontsize=9, loc="upper right")


def _tick(value: float) -> str:
    """25M rather than 25.0M on an axis."""
    return format_count(value).replace(".0", "")


def _subtitle(run: RunLog) -> str:
    parts = [str(run.setting("optimizer.kind") or "")]
    if run.num_parameters:
        parts.append(f"{format_count(run.num_parameters)} parameters")
    parts.append(f"{format_count(float(run.train['tokens'][-1]))} tokens")
    return "  ·  ".join(part for part in parts if part)


def _last(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def _save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
    return Path(path)
