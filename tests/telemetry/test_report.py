"""Reports and comparisons: the numbers in the text, sensible axes, and pictures that are pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mars_ds.telemetry.jsonl import JsonlLog
from mars_ds.telemetry.plots import loss_limits, robust_limits, smooth
from mars_ds.telemetry.report import write_comparison, write_report
from mars_ds.telemetry.run_log import load_run

TOKENS_PER_STEP = 491_520
STEPS = 400


def make_run(directory: Path, kind: str = "mars-m", floor: float = 2.9, ended: bool = True) -> Path:
    """A made-up run shaped like a real one: a fall from ln(vocab), noise, a spike, a warm-up, a cosine."""
    generator = np.random.default_rng(0)
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"run:\n  name: {kind}-small\noptimizer:\n  kind: {kind}\n  lr: 3.0e-3\n")
    with JsonlLog(directory / "log.jsonl") as log:
        log.write({"kind": "start", "num_parameters": 124_373_760})
        for step in range(1, STEPS + 1):
            clean = floor + 7.9 * np.exp(-step / 8) + 1.2 * np.exp(-step / 90)
            lr = 3e-3 * min(step / 20, 0.5 + 0.5 * np.cos(np.pi * step / STEPS))
            log.write(
                {
                    "kind": "train",
                    "step": step,
                    "tokens": step * TOKENS_PER_STEP,
                    "loss": clean + generator.normal(0, 0.05),
                    "grad_norm": 90.0 if step == 250 else 0.25 + 2.0 / step + generator.exponential(0.03),
                    "lr": lr,
                    "tokens_per_second": 1.0e6,
                    "memory_bytes": 40 * 2**30,
                }
            )
            if step % 40 == 0:
                tokens = step * TOKENS_PER_STEP
                log.write(
                    {
                        "kind": "eval",
                        "step": step,
                        "tokens": tokens,
                        "loss": clean + 0.02,
                        "bits_per_byte": 0.98,
                    }
                )
        if ended:
            log.write({"kind": "end", "seconds": 260.0})
    return directory


def _png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_report_states_the_numbers_of_the_log(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    path = write_report(run_dir)
    text = path.read_text(encoding="utf-8")
    assert path == run_dir / "report.md"
    run = load_run(run_dir)
    for line in (
        "# mars-m-small",
        "| Optimizer | mars-m, lr 0.003 |",
        "| Parameters | 124,373,760 |",
        "| Steps | 400 |",
        "| Tokens | 196,608,000 (196.6M) |",
        f"| First training loss | {run.train['loss'][0]:.4f} |",
        f"| Best validation loss | {run.evaluation['loss'].min():.4f} at 196.6M tokens |",
        "| Last bits per byte | 0.9800 |",
        "| Throughput, median | 1.0M tokens/s |",
        "| Peak memory | 40.0 GiB |",
        "| Time in training steps | 3m 17s |",
        "| Wall time since the last start | 4m 20s |",
        "| State | finished |",
        "![Training and validation loss over tokens](loss.png)",
        "- [config.yaml](config.yaml)",
        "- [log.jsonl](log.jsonl)",
    ):
        assert line in text.splitlines(), line
    assert _png_size(run_dir / "loss.png") == (1350, 810)
    assert _png_size(run_dir / "training.png") == (1350, 1140)


def test_a_run_without_configuration_evaluation_or_end_still_reports(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.write({"kind": "train", "step": 1, "tokens": 1024, "loss": float("nan")})
        log.write({"kind": "train", "step": 2, "tokens": 2048, "loss": 10.5})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert f"# {tmp_path.name}" in text
    assert "| Optimizer | unknown |" in text and "validation" not in text.split("## Loss")[0]
    assert "no end in the log" in text
    assert _png_size(tmp_path / "training.png")[0] == 1350


def test_an_end_before_a_restart_is_not_the_end(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with JsonlLog(run_dir / "log.jsonl") as log:
        log.write({"kind": "start"})
    assert load_run(run_dir).end == {}


def test_comparison_is_ordered_by_the_last_validation_loss(tmp_path: Path) -> None:
    worse = make_run(tmp_path / "a", kind="adamw", floor=3.0)
    better = make_run(tmp_path / "b", kind="mars-m", floor=2.9)
    again = make_run(tmp_path / "c", kind="mars-m", floor=2.95, ended=False)
    path = write_comparison([worse, better, again], tmp_path / "out")
    rows = [line.split(" | ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| mars-m-small (b)", "| mars-m-small (c)", "| adamw-small"]
    assert [row[4] for row in rows] == ["+0.0000", "+0.0500", "+0.1000"]
    assert _png_size(tmp_path / "out" / "comparison.png") == (1950, 810)
    with pytest.raises(ValueError, match="given twice"):
        write_comparison([worse, tmp_path / "b" / ".." / "a"], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one"):
        write_comparison([], tmp_path / "out")


def test_missing_and_empty_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder: it has no log\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="no training step yet: none of its 0 lines"):
        write_report(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1, "loss": 10.8}\n')
    with pytest.raises(ValueError, match="a training line has no 'tokens'"):
        write_report(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1, "tokens": 1, "loss": "high"}\n')
    with pytest.raises(ValueError, match="field 'loss' is not a number"):
        write_report(tmp_path)


def test_smoothing_does_not_lag_and_forgets_single_spikes() -> None:
    line = np.linspace(10.0, 3.0, 201)
    # Half a window is 4 points, and two passes reach 8 points back from the end.
    assert smooth(line)[:193] == pytest.approx(line[:193])
    spiked = np.full(101, 0.3)
    spiked[60] = 90.0
    assert smooth(spiked) == pytest.approx(np.full(101, 0.3))


def test_smoothing_skips_what_is_not_finite() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf])
    assert smooth(values, half_width=1) == pytest.approx([1.0, 2.0, 8 / 3, 3.0])
    assert np.isnan(smooth(np.array([np.nan, 2.0]))[0])


def test_the_first_loss_does_not_decide_the_axis() -> None:
    tokens = np.arange(1, 101, dtype=np.float64)
    loss = np.where(tokens < 5, 10.8, 3.0)
    low, high = loss_limits([(tokens, loss), (np.empty(0), np.empty(0))]) or (0, 0)
    assert 2.9 < low < 3.0 < high < 3.1
    assert loss_limits([(tokens, np.full(100, np.nan))]) is None


def test_one_spike_does_not_decide_the_axis() -> None:
    values = np.full(1000, 0.2)
    values[500] = 90.0
    assert robust_limits(values) == pytest.approx((0.0, 0.3))
    assert robust_limits(np.full(3, np.nan)) is None
