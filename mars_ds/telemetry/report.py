"""The written end of a run: `report.md` with a summary and plots; the same for several runs at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mars_ds.telemetry.console import format_bytes, format_count, format_seconds
from mars_ds.telemetry.plots import plot_comparison, plot_loss, plot_optimizer, plot_training, smooth
from mars_ds.telemetry.run_log import RunLog, load_run

REPORT_NAME = "report.md"
COMPARISON_NAME = "comparison.md"


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.md`, `loss.png` and `training.png` into a run folder, over earlier ones.

    Args:
        run_dir: A folder with `log.jsonl` and, normally, `config.yaml`.

    Returns:
        Path of the report.

    Raises:
        ValueError: No log, or no training step in it.
    """
    run = load_run(run_dir)
    plot_loss(run, run.directory / "loss.png")
    plot_training(run, run.directory / "training.png")
    optimizer = plot_optimizer(run, run.directory / "optimizer.png")
    lines = [
        f"# {run.name}",
        "",
        *_table(("", "value"), summary_rows(run)),
        "",
        "## Loss",
        "",
        "![Training and validation loss over tokens](loss.png)",
        "",
        "The axis starts after the first twentieth of the tokens; the strong training curve is smoothed.",
        "",
        "## Training",
        "",
        "![Learning rate, gradient norm and throughput over tokens](training.png)",
        "",
        *(
            ["## Optimizer", "", "![Correction, clipped tensors and update size by role](optimizer.png)", ""]
            if optimizer
            else []
        ),
        "## Files",
        "",
        *(f"- [{path.name}]({path.name})" for path in _linked_files(run.directory)),
        "",
    ]
    path = run.directory / REPORT_NAME
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], output_dir: str | os.PathLike[str]) -> Path:
    """Writes `comparison.md` and two figures: several runs in one table, best first, over tokens and over time.

    Runs are ordered by their last validation loss; runs without one follow, by smoothed training loss.

    Args:
        run_dirs: Run folders, at least one.
        output_dir: Where to write; it is made.

    Returns:
        Path of the comparison.

    Raises:
        ValueError: No folder, the same folder twice, or a folder without a readable log.
    """
    if not run_dirs:
        raise ValueError("a comparison needs at least one run folder")
    if len({Path(run_dir).resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise ValueError("the same run folder is given twice")
    runs = sorted((load_run(run_dir) for run_dir in run_dirs), key=_rank)
    labels = _labels(runs)
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    plot_comparison(runs, labels, output / "comparison.png")
    plot_comparison(runs, labels, output / "comparison_time.png", over="hours")
    header = (
        "run",
        "optimizer",
        "tokens",
        "validation loss",
        "behind the first",
        "best",
        "train loss",
        "tokens/s",
    )
    lines = [
        "# Comparison of runs",
        "",
        *_table(header, _comparison_rows(runs, labels)),
        "",
        "![Training and validation loss of all runs over tokens](comparison.png)",
        "",
        "![The same over hours in training steps](comparison_time.png)",
        "",
        "Losses in nats per token: the last validation loss, and the end of the smoothed training curve.",
        "",
    ]
    path = output / COMPARISON_NAME
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def summary_rows(run: RunLog) -> list[tuple[str, str]]:
    """(label, value) of what a reader asks first about a run; also fit for a console card."""
    loss, tokens = run.train["loss"], run.train["tokens"]
    learning_rate = run.setting("optimizer.lr")
    optimizer = str(run.setting("optimizer.kind") or "unknown")
    rows = [
        ("Optimizer", optimizer if learning_rate is None else f"{optimizer}, lr {float(learning_rate):g}"),
        ("Parameters", "unknown" if run.num_parameters is None else f"{run.num_parameters:,}"),
        ("Steps", f"{int(run.train['step'][-1]):,}"),
        ("Tokens", f"{int(tokens[-1]):,} ({format_count(float(tokens[-1]))})"),
        ("First training loss", f"{loss[0]:.4f}"),
        ("Last training loss", f"{loss[-1]:.4f} ({smooth(loss)[-1]:.4f} smoothed)"),
    ]
    validation = run.evaluation["loss"]
    if np.isfinite(validation).any():
        best = int(np.nanargmin(validation))
        best_at = format_count(float(run.evaluation["tokens"][best]))
        rows += [
            ("First validation loss", f"{validation[0]:.4f}"),
            ("Last validation loss", f"{validation[-1]:.4f}"),
            ("Best validation loss", f"{validation[best]:.4f} at {best_at} tokens"),
        ]
        if np.isfinite(run.evaluation["bits_per_byte"][-1]):
            rows.append(("Last bits per byte", f"{run.evaluation['bits_per_byte'][-1]:.4f}"))
    if np.isfinite(run.train["tokens_per_second"]).any():
        median = float(np.nanmedian(run.train["tokens_per_second"]))
        rows.append(("Throughput, median", f"{format_count(median)} tokens/s"))
    if np.isfinite(run.train["memory_bytes"]).any():
        rows.append(("Peak memory", format_bytes(float(np.nanmax(run.train["memory_bytes"])))))
    if run.training_seconds is not None:
        rows.append(("Time in training steps", format_seconds(run.training_seconds)))
    if isinstance(run.end.get("seconds"), (int, float)):
        rows.append(("Wall time since the last start", format_seconds(run.end["seconds"])))
    rows.append(
        (
            "State",
            str(run.end.get("reason", "finished")) if run.end else "no end in the log: running, or killed",
        )
    )
    return rows


def _comparison_rows(runs: Sequence[RunLog], labels: Sequence[str]) -> list[tuple[str, ...]]:
    first = _last_validation(runs[0])
    rows: list[tuple[str, ...]] = []
    for run, label in zip(runs, labels, strict=True):
        last = _last_validation(run)
        known = np.isfinite(last)
        rates = run.train["tokens_per_second"]
        rows.append(
            (
                label,
                str(run.setting("optimizer.kind") or "unknown"),
                format_count(float(run.train["tokens"][-1])),
                f"{last:.4f}" if known else "-",
                f"{last - first:+.4f}" if known else "-",
                f"{np.nanmin(run.evaluation['loss']):.4f}" if known else "-",
                f"{smooth(run.train['loss'])[-1]:.4f}",
                format_count(float(np.nanmedian(rates))) if np.isfinite(rates).any() else "-",
            )
        )
    return rows


def _rank(run: RunLog) -> tuple[bool, float]:
    last = _last_validation(run)
    return (False, last) if np.isfinite(last) else (True, float(smooth(run.train["loss"])[-1]))


def _last_validation(run: RunLog) -> float:
    finite = run.evaluation["loss"][np.isfinite(run.evaluation["loss"])]
    return float(finite[-1]) if len(finite) else float("nan")


def _labels(runs: Sequence[RunLog]) -> list[str]:
    """Run names, told apart by their folders where they repeat."""
    names = [run.name for run in runs]
    return [
        f"{name} ({run.directory.resolve().name})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _linked_files(directory: Path) -> list[Path]:
    """What else a reader of the report may open, configuration and logs first."""
    ours = {REPORT_NAME, "loss.png", "training.png", "optimizer.png"}
    texts = sorted(
        path
        for path in directory.iterdir()
        if path.suffix in (".yaml", ".jsonl", ".json", ".txt", ".md") and path.name not in ours
    )
    return sorted(
        texts,
        key=lambda path: (".yaml", ".jsonl").index(path.suffix) if path.suffix in (".yaml", ".jsonl") else 2,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first two columns are words, the others numbers, set to the right."""
    align = ["---", "---"] + ["---:"] * (len(header) - 2)
    lines = [header, align, *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
