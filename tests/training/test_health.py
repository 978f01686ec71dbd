"""Steps that must not be applied, and runs that must not go on."""

import json
import math
from pathlib import Path

import pytest
import torch

from mars_ds.config import HealthSection
from mars_ds.telemetry.jsonl import read_jsonl
from mars_ds.training.health import LossGuard
from mars_ds.training.heartbeat import diagnose
from mars_ds.training.replay import replay
from tests.conftest import write_config
from tests.ranks import run_on_ranks
from tests.training.test_trainer import losses, runs

MODEL = "model.factory=tests.training.factories:"


def spoilt(name: str, factory: str, forward: int, *overrides: str) -> tuple:
    arguments = f"model.factory_arguments={{vocab_size: 320, forward: {forward}}}"
    return ("train", [f"run.name={name}", MODEL + factory, arguments, *overrides])


@pytest.fixture(scope="module")
def root(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs on two ranks, in one spawn; three micro-batches a step."""
    folder = tmp_path_factory.mktemp("health")
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    quiet = "evaluation.interval_steps=0"
    few = [quiet, "health.max_skipped_in_a_row=3", "checkpoint.interval_steps=1"]
    long = [quiet, "schedule.steps=45", "checkpoint.interval_steps=0", "telemetry.log_interval_steps=100"]
    skip = "health.spike_policy=skip"
    script: list[tuple] = [
        spoilt("broken", "broken_llama", 14, *few),
        spoilt("broken3", "broken_llama", 14, *few, "zero.stage=3"),
        spoilt("lying", "lying_llama", 8, quiet, "schedule.steps=5"),
        spoilt("spike", "spiky_llama", 40 * 3, *long, skip),
        spoilt("warned", "spiky_llama", 40 * 3, *long),
    ]
    run_on_ranks(2, runs, str(config), script)
    return folder / "runs"


@pytest.mark.parametrize("name", ["broken", "broken3"])
def test_a_broken_run_stops_and_leaves_a_bundle(root: Path, name: str) -> None:
    run = root / name
    (end,) = [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "end"]
    # Pass 14 is in step 5; three skipped steps in a row are enough.
    assert (end["step"], end["reason"]) == (7, "UNHEALTHY")
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert saved[-1] == "step_00000004"
    bundle = run / "unhealthy" / "step_00000007"
    facts = json.loads((bundle / "bundle.json").read_text())
    assert (facts["first_sample"], len(facts["samples"]), facts["world_size"]) == (72, 12, 2)
    assert [sample["sample"] for sample in facts["samples"]] == list(range(72, 84))
    assert all(isinstance(sample["text"], str) and sample["text"] for sample in facts["samples"])
    assert facts["last_records"][-1]["kind"] == "train"
    for rank in facts["ranks"]:
        first = next(r for r in rank["layers"] if not math.isfinite(r["norm"]))
        assert (first["layer"], first["pass"]) == ("model.layers.1.mlp", "forward") or first["layer"].startswith(
            "model.layers.1"
        )
    lines = list(replay(bundle))
    assert lines[0] == "step 7 of 2 ranks: 3 updates in a row were skipped"
    # In a fresh process the model is whole again (it broke with the count of passes), so now all is finite.
    assert "then model.layers.1" in lines[2]
    assert "now none" in lines[2]
    losses_again = [float(value) for value in lines[1].split("losses ")[1].split(", ")]
    assert len(losses_again) == 3
    assert all(0 < loss < 7 for loss in losses_again)


def test_an_infinite_loss_is_not_applied_though_its_gradient_is_finite(root: Path) -> None:
    records = [r for r in read_jsonl(root / "lying" / "log.jsonl") if r["kind"] == "train"]
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1]
    assert math.isfinite(losses(root / "lying")[5])


def test_a_spike_is_skipped_or_told(root: Path) -> None:
    ends = {}
    for name in ("spike", "warned"):
        records = [r for r in read_jsonl(root / name / "log.jsonl") if r["kind"] == "train"]
        ends[name] = records[-1]["skipped_steps"]
    assert ends == {"spike": 1, "warned": 0}


def beat(rank: int, step: int, phase: str, time: float) -> dict:
    return {"rank": rank, "host": f"n{rank // 2}", "pid": 100 + rank, "step": step, "phase": phase, "time": time}


def test_the_rank_to_blame_is_named() -> None:
    beats = {rank: beat(rank, 7, "training", 1_000.0) for rank in range(4)}
    beats[2] = beat(2, 6, "waiting for data", 1_000.0)
    lines = diagnose(beats, 5, 321.0, 10.0)
    assert lines == [
        "no progress for 321 s; what the ranks last said:",
        "  ranks [4] have no heartbeat at all: they never started",
        "  ranks 2: waiting for data of step 6  <- behind",
        "  ranks 0-1,3: training of step 7",
    ]
    beats[2]["time"] = 700.0
    assert diagnose(beats, 4, 321.0, 10.0) == [
        "no progress for 321 s; what the ranks last said:",
        "  rank 2 (n1, process 102) is silent since 300 s: it died or its node is cut off; last in waiting for data of "
        "step 6",
        "  ranks 0-1,3: training of step 7",
    ]


def follow_losses(rank: int, world_size: int, policy: str) -> None:
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(rank)
    guard = LossGuard(HealthSection(spike_policy=policy), device)
    off = LossGuard(HealthSection(spike_policy=policy, spike_zscore=0.0), device)

    def take(loss: float) -> bool:
        window = torch.tensor(loss)
        factors = [each.factor(torch.tensor(4.0), window) for each in (guard, off)]
        assert not off.last_is_spike() and factors[1] == 1.0
        spike = guard.last_is_spike()
        # Only the policy `skip` keeps the gradient of a spike from being used.
        assert bool(torch.isnan(factors[0])) == (spike and policy == "skip")
        return spike

    for step in range(200):
        assert not take(4.0 - step / 200 + 0.1 * float(torch.randn((), generator=generator))), step
    resumed = LossGuard(HealthSection(spike_policy=policy), device)
    resumed.load_state(guard.state())
    for loss, spike in ((5.5, True), (3.1, False), (float("nan"), False), (9.0, True), (3.0, False)):
        assert take(loss) == spike, loss
    resumed.factor(torch.tensor(4.0), torch.tensor(5.5))
    assert resumed.last_is_spike()  # without a second warm-up


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_the_guard_sees_a_spike_and_forgives_noise(policy: str) -> None:
    run_on_ranks(2, follow_losses, policy)
