"""Whole runs on gloo ranks: losses, resume, other world sizes and stages, another model, trackers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mars_ds.telemetry.jsonl import read_jsonl
from tests.ranks import run_on_ranks


def train(config_file: str, overrides: list[str]) -> Any:
    """One run in this process group."""
    import logging

    import torch.distributed as dist

    from mars_ds.config import load_config
    from mars_ds.planning.batch import plan_batch
    from mars_ds.training.run_folder import open_run_folder
    from mars_ds.training.trainer import Trainer
    from mars_ds.zero.distributed import join

    logging.disable(logging.WARNING)
    join()
    config = load_config(config_file, overrides)
    batch = plan_batch(config.global_batch, config.batch.micro_batch, dist.get_world_size())
    trainer = Trainer(config, batch, open_run_folder(config), lambda text: None)
    return trainer.train()


def runs(rank: int, world_size: int, config_file: str, script: list[tuple]) -> None:
    """Carries out `("train", overrides)`, `("copy", from, to)` and `("forget", run, step)` in order."""
    import torch.distributed as dist

    for action, *arguments in script:
        if action == "train":
            train(config_file, arguments[0])
        elif rank == 0 and action == "copy":
            shutil.copytree(*arguments)
        elif rank == 0 and action == "forget":
            for path in (Path(arguments[0]) / "checkpoints").glob("step_*"):
                if int(path.name.removeprefix("step_")) > arguments[1]:
                    shutil.rmtree(path)
        dist.barrier()


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(run / "log.jsonl") if r["kind"] == "train"}


def evaluations(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(run / "log.jsonl") if r["kind"] == "eval"}


def end(run: Path) -> dict[str, Any]:
    return [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "end"][-1]


POISON = "model.factory_arguments={vocab_size: 320, backward: 7}"
BF16 = "precision.dtype=bfloat16"


@pytest.fixture(scope="module")
def two_ranks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs that need two ranks, in one spawn; returns the folder of runs."""
    from tests.conftest import write_config

    folder = tmp_path_factory.mktemp("two_ranks")
    root = folder / "runs"
    config = write_config(folder / "tiny.yaml", dataset, root)
    llama = [
        "run.name=llama",
        "model.factory=tests.training.factories:tiny_llama",
        "model.factory_arguments={vocab_size: 320}",
        "schedule.steps=4",
    ]
    script: list[tuple] = [
        ("train", ["run.name=whole", "model.dropout=0.1"]),
        ("copy", str(root / "whole"), str(root / "resumed")),
        ("forget", str(root / "resumed"), 8),
        ("train", ["run.name=resumed", "model.dropout=0.1"]),
        ("train", ["run.name=twice", "schedule.steps=12"]),
        ("copy", str(root / "twice"), str(root / "stage2")),
        ("forget", str(root / "stage2"), 4),
        ("train", ["run.name=stage2", "zero.stage=2", "batch.micro_batch=3"]),
        ("copy", str(root / "twice"), str(root / "stage0")),
        ("forget", str(root / "stage0"), 4),
        ("train", ["run.name=stage0", "zero.stage=0"]),
        ("copy", str(root / "twice"), str(root / "stage3")),
        ("forget", str(root / "stage3"), 4),
        ("train", ["run.name=stage3", "zero.stage=3", "zero.offload=optimizer", "zero.sub_group_elements=20000"]),
        ("train", ["run.name=exact", "optimizer.mode=exact", "model.dropout=0.1"]),
        ("copy", str(root / "exact"), str(root / "exact_resumed")),
        ("forget", str(root / "exact_resumed"), 8),
        ("train", ["run.name=exact_resumed", "optimizer.mode=exact", "model.dropout=0.1"]),
        ("copy", str(root / "twice"), str(root / "three_ranks")),
        ("forget", str(root / "three_ranks"), 4),
        ("train", llama),
        # Backward 7 of each rank is in step 3: three micro-batches a step.
        ("train", [*llama, "run.name=skip", "model.factory=tests.training.factories:poisoned_llama", POISON, BF16]),
        ("train", ["run.name=quiet", "evaluation.interval_steps=0"]),
        ("train", ["run.name=wandb", "telemetry.wandb.mode=offline", "schedule.steps=2"]),
        ("train", ["run.name=bf16", "precision.dtype=bfloat16"]),
        ("copy", str(root / "bf16"), str(root / "bf16_resumed")),
        ("forget", str(root / "bf16_resumed"), 4),
        ("train", ["run.name=bf16_resumed", "precision.dtype=bfloat16"]),
        ("train", ["run.name=taken", f"run.init_from={root / 'twice' / 'checkpoints' / 'step_00000012'}"]),
    ]
    run_on_ranks(2, runs, str(config), script)
    run_on_ranks(3, runs, str(config), [("train", ["run.name=three_ranks", "zero.stage=2"])])
    return root


def test_the_loss_falls_and_everything_is_logged(two_ranks: Path) -> None:
    seen = losses(two_ranks / "twice")
    assert list(seen) == list(range(1, 13))
    assert seen[1] == pytest.approx(5.77, abs=0.1)  # ln 320
    assert seen[12] < 0.75 * seen[1]
    first = next(r for r in read_jsonl(two_ranks / "twice" / "log.jsonl") if r["kind"] == "train")
    assert first["lr"] == 0.0
    assert first["grad_norm"] > 0
    assert list(evaluations(two_ranks / "twice")) == [0, 6, 12]


@pytest.mark.parametrize(
    ("whole", "resumed", "at"), [("whole", "resumed", 8), ("bf16", "bf16_resumed", 4), ("exact", "exact_resumed", 8)]
)
def test_resume_continues_the_identical_curve(two_ranks: Path, whole: str, resumed: str, at: int) -> None:
    """Bit for bit at the same world size, dropout masks included."""
    want, got = losses(two_ranks / whole), losses(two_ranks / resumed)
    assert got == want
    assert end(two_ranks / resumed)["window_hash"] == end(two_ranks / whole)["window_hash"]
    starts = [r["step"] for r in read_jsonl(two_ranks / resumed / "log.jsonl") if r["kind"] == "start"]
    assert starts == [0, at]


@pytest.mark.parametrize("other", ["stage0", "stage2", "stage3", "three_ranks"])
def test_resume_at_another_stage_micro_batch_and_world_size(two_ranks: Path, other: str) -> None:
    """The same windows in the same order; losses differ by fp32 summation order alone."""
    want, got = losses(two_ranks / "twice"), losses(two_ranks / other)
    assert got == pytest.approx(want, rel=2e-5)
    assert end(two_ranks / other)["window_hash"] == end(two_ranks / "twice")["window_hash"]
    assert end(two_ranks / other)["position"] == 144
    norms = [
        [r["grad_norm"] for r in read_jsonl(two_ranks / run / "log.jsonl") if r["kind"] == "train"]
        for run in ("twice", other)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_exact_mode_sees_the_same_windows_and_another_optimizer(two_ranks: Path) -> None:
    assert end(two_ranks / "exact")["window_hash"] == end(two_ranks / "whole")["window_hash"]
    exact, approx = losses(two_ranks / "exact"), losses(two_ranks / "whole")
    # The first update has lr 0 and the masks belong to the batch, so the curves part only later.
    assert [exact[step] for step in (1, 2)] == [approx[step] for step in (1, 2)]
    assert exact[12] != approx[12]


def test_the_card_and_the_proof_are_in_the_run_folder(two_ranks: Path) -> None:
    text = (two_ranks / "twice" / "optimizer_card.txt").read_text(encoding="utf-8")
    text = " ".join(text.replace("│", " ").split())
    assert "transformer.h.*.attn.c_attn.weight x2" in text
    assert "8 matrices, each orthogonalized by one rank" in text
    assert "each element is stored 1.000 times over all ranks" in text
    assert "equals the reference within" in text
    assert "correction |c - g| / |g|" in text


def test_evaluation_disturbs_nothing_and_counts_every_window_once(two_ranks: Path) -> None:
    assert losses(two_ranks / "quiet") == losses(two_ranks / "twice")
    records = [r for r in read_jsonl(two_ranks / "twice" / "log.jsonl") if r["kind"] == "eval"]
    assert {r["evaluated_tokens"] for r in records} == {21 * 32}
    assert evaluations(two_ranks / "three_ranks")[12] == pytest.approx(evaluations(two_ranks / "twice")[12], rel=1e-4)


def test_a_factory_model_trains(two_ranks: Path) -> None:
    seen = losses(two_ranks / "llama")
    assert seen[1] == pytest.approx(5.77, abs=0.15)
    assert seen[4] < seen[1]


def test_a_skipped_step_is_counted_and_the_run_goes_on(two_ranks: Path) -> None:
    records = [r for r in read_jsonl(two_ranks / "skip" / "log.jsonl") if r["kind"] == "train"]
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1]
    assert all(isinstance(r["loss"], float) for r in records)


def test_init_from_takes_the_weights_only(two_ranks: Path) -> None:
    taken, source = evaluations(two_ranks / "taken"), evaluations(two_ranks / "twice")
    assert taken[0] == pytest.approx(source[12], rel=1e-6)
    assert end(two_ranks / "taken")["position"] == 144


def test_wandb_offline_leaves_a_run_to_sync(two_ranks: Path) -> None:
    assert list((two_ranks / "wandb").glob("**/*.wandb"))


def test_the_checkpoint_holds_what_design_says(two_ranks: Path) -> None:
    folder = two_ranks / "twice" / "checkpoints" / "step_00000012"
    index = json.loads((folder / "index.json").read_text())
    elements: dict[tuple[str, str], int] = {}
    for entry in index["slices"]:
        key = (entry["name"], entry["buffer"])
        elements[key] = elements.get(key, 0) + entry["numel"]
    name = "transformer.h.1.mlp.c_fc.weight"
    for buffer in ("master", "exp_avg", "last_grad"):
        assert elements[name, buffer] == 128 * 32
    assert (name, "exp_avg_sq") not in elements
    assert elements["transformer.wte.weight", "exp_avg_sq"] == 320 * 32
    assert index["scalars"]["step"][name] == 12
    assert index["data"]["position"] == 144
    assert not list(folder.glob("*.pt"))
    assert {g["role"]: g["rule"] for g in index["groups"]} == {
        "matrix": "orthogonal",
        "embedding": "adamw",
        "vector": "adamw",
    }
