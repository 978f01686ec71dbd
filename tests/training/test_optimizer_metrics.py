"""What is logged of the optimizer, against values computed from whole tensors."""

from pathlib import Path

import pytest
import torch

from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.telemetry.jsonl import read_jsonl
from tests.conftest import write_config
from tests.ranks import run_on_ranks
from tests.training.test_trainer import runs


@pytest.fixture(scope="module")
def root(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    few = ["schedule.steps=6", "evaluation.interval_steps=0", "checkpoint.interval_steps=0"]
    script = [("train", [f"run.name=stage{stage}", f"zero.stage={stage}", *few]) for stage in (0, 1, 3)]
    script += [
        ("train", ["run.name=adamw", "optimizer.kind=mars-adamw", "optimizer.ns_dtype=null", *few]),
        ("train", ["run.name=plain", "optimizer.kind=adamw", "optimizer.ns_dtype=null", *few]),
    ]
    run_on_ranks(2, runs, str(config), script)
    run_on_ranks(1, runs, str(config), [("train", ["run.name=alone", "zero.stage=0", *few])])
    return folder / "runs"


def metrics(run: Path, step: int) -> dict[str, float]:
    records = [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "train"]
    record = next(r for r in records if r["step"] == step)
    return {key.removeprefix("optimizer/"): value for key, value in record.items() if key.startswith("optimizer/")}


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage3"])
def test_equal_at_every_stage_and_world_size(root: Path, name: str) -> None:
    """The start-up proof has the observer in the first steps."""
    ours, alone = metrics(root / name, 6), metrics(root / "alone", 6)
    assert (
        ours.keys()
        == alone.keys()
        == {
            "correction/matrix",
            "clipped/matrix",
            "update_rms/matrix",
            "update_rms/embedding",
            "update_rms/vector",
        }
    )
    assert ours == pytest.approx(alone, rel=2e-3)
    assert 0.1 < ours["correction/matrix"] < 10
    # Moonlight's scale: an orthogonal matrix times 0.2 sqrt(max(rows, columns)) has an RMS of about 0.2.
    assert 0.15 < ours["update_rms/matrix"] < 0.25
    assert ours["clipped/matrix"] == round(ours["clipped/matrix"] * 8) / 8


def test_what_a_kind_does_not_do_is_not_logged(root: Path) -> None:
    assert "correction/matrix" in metrics(root / "adamw", 6)
    assert not any(key.startswith(("correction", "clipped")) for key in metrics(root / "plain", 6))
    assert metrics(root / "plain", 6)["update_rms/matrix"] == pytest.approx(1.0, abs=0.9)


def test_the_correction_and_the_clip_are_those_of_the_formula() -> None:
    """On one device, by hand: c = g + gamma beta1 / (1 - beta1) (g - last)."""
    from types import SimpleNamespace

    from mars_ds.training.optimizer_metrics import OptimizerMetrics

    torch.manual_seed(0)
    weights = {
        "h.0.attn.weight": torch.randn(6, 4, requires_grad=True),
        "h.0.mlp.weight": torch.randn(4, 4, requires_grad=True),
    }
    config = OptimizerConfig(kind="mars-adamw", lr=1e-3, gamma=0.025, betas=(0.95, 0.99))
    optimizer = build_optimizer(weights.items(), config)
    gradients = [{name: torch.randn_like(w) * size for name, w in weights.items()} for size in (0.05, 0.4)]
    run_config = SimpleNamespace(telemetry=SimpleNamespace(log_interval_steps=1), schedule=SimpleNamespace(steps=9))
    watch = OptimizerMetrics(run_config)
    sharding = optimizer._sharding
    sharding.layout = SimpleNamespace(replicated=True)
    engine = SimpleNamespace(mars=optimizer, mars_sharding=sharding)
    trainer = SimpleNamespace(engine=engine, step=0, device=torch.device("cpu"))
    watch.start(trainer)
    for batch in gradients:
        for name, weight in weights.items():
            weight.grad = batch[name].clone()
        watch.before_step(trainer)
        optimizer.step()
        watch.after_step(trainer, None)
    factor = 0.025 * 0.95 / 0.05
    first, second = gradients
    corrected = {name: second[name] + factor * (second[name] - first[name]) for name in weights}
    difference = sum((corrected[name] - second[name]).square().sum() for name in weights).sqrt()
    norm = sum(second[name].square().sum() for name in weights).sqrt()
    assert watch.values["correction/matrix"] == pytest.approx(float(difference / norm), rel=1e-5)
    clipped = sum(float(corrected[name].norm()) > 1.0 for name in weights) / 2
    assert watch.values["clipped/matrix"] == clipped
