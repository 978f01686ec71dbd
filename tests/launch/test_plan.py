"""launch/plan.py: the card without data or accelerator, as JSON too, and a run that cannot fit."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/plan.py", "--config", "configs/xl_mars_m.yaml", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_card_of_xl_on_64_ranks_without_data() -> None:
    result = plan("--world-size", "64", "--device", "h100", "--all-stages", "data.path=data/none")
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.split("note:")[0].splitlines())) <= 100
    for part in (
        "1,556,840,000 parameters",
        "512 sequences = 8 micro-batch x 1 accumulation x 64 ranks",
        "192 matrices, each on one owner: 48 of 1600 x 1600",
        "491.5 MB sent a step, 15.4 MB by the busiest rank",
        "on 64 x h100: 2.9M tokens/s",
        "17.4 GiB each",
        "peak, activations recomputed",
        "note: data/none: no such data set",
    ):
        assert part in result.stdout


def test_json() -> None:
    found = json.loads(plan("--world-size", "8", "--json").stdout)
    assert found["parameters"] == 1_556_840_000
    items = {item["name"]: item["num_bytes"] for item in found["memory"]["items"]}
    assert items["fp32 masters"] == 1_556_840_000 * 4 // 8
    assert found["memory"]["peak_bytes"] > found["memory"]["at_least_bytes"] > sum(items.values()) // 4
    assert found["epochs"] is None


def test_what_cannot_fit_exits_with_2_and_the_change_that_would() -> None:
    result = plan("--world-size", "8", "--device", "l4", "batch.micro_batch=1", "zero.stage=1", "model.num_layers=96")
    assert result.returncode == 2
    assert "error: the run cannot fit: rank 0, state and gradients alone are" in result.stderr
    assert "would fit: zero.stage=" in result.stderr
