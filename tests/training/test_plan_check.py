"""The plan held against a real run: one record in the log, equal to the byte, ignored by the report."""

from pathlib import Path
from typing import Any

import pytest

from mars_ds.telemetry.jsonl import read_jsonl
from mars_ds.telemetry.run_log import load_run
from mars_ds.training.plan_check import describe
from tests.ranks import run_on_ranks


def trained(rank: int, world_size: int, config_file: str) -> None:
    from tests.training.test_trainer import train

    train(config_file, ["schedule.steps=3", "schedule.warmup_steps=1", "evaluation.interval_steps=0"])
    train(config_file, ["run.name=three", "zero.stage=3", "precision.dtype=bfloat16", "schedule.steps=22"])


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import write_config

    folder = tmp_path_factory.mktemp("plan_check")
    run_on_ranks(2, trained, str(write_config(folder / "tiny.yaml", dataset, folder)))
    return folder


def records(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "plan"]


@pytest.mark.parametrize("run, step", [("tiny", 3), ("three", 20)])
def test_one_record_whose_state_is_equal_to_the_byte(runs: Path, run: str, step: int) -> None:
    (record,) = records(runs / run)
    assert record["step"] == step
    assert record["state_bytes_live"] == record["state_bytes_planned"]
    assert {"weights", "fp32 masters", "exp_avg", "last_grad"} <= record["state_bytes_live"].keys()
    assert record["tokens_per_second_planned"] is None
    assert record["tokens_per_second_seen"] > 0
    assert record["peak_bytes_seen"] is None


def test_the_report_passes_the_record_over(runs: Path) -> None:
    assert list(load_run(runs / "tiny").train["step"]) == [1, 2, 3]


def test_what_differs_is_named() -> None:
    record = {
        "step": 20,
        "state_bytes_planned": {"weights": 1024, "exp_avg": 2048},
        "state_bytes_live": {"weights": 1024, "exp_avg": 4096},
        "peak_bytes_planned": 1000,
        "peak_bytes_seen": 1100,
        "tokens_per_second_planned": 2000.0,
        "tokens_per_second_seen": 1000.0,
    }
    assert describe(record).splitlines() == [
        "plan against reality after step 20, rank 0:",
        "  state     3.0 KiB planned, 5.0 KiB live: exp_avg 2,048 planned, 4,096 live (bytes)",
        "  peak      1000 B planned, 1.1 KiB seen: +10.0%",
        "  tokens/s  2.0k planned, 1.0k seen: -50.0%",
    ]
