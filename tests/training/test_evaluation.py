"""Validation: the same windows for any world size, several sets, an honest interval, and nothing disturbed."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline import open_dataset
from mars_ds.telemetry.jsonl import read_jsonl
from tests.conftest import write_config
from tests.corpora import byte_dataset
from tests.ranks import run_on_ranks
from tests.training.test_trainer import evaluations, losses, runs


@pytest.fixture(scope="module")
def root(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with several sets, with one, and with none, on two ranks and on three."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    (folder / "other").mkdir()
    other = byte_dataset(folder / "other")
    sets = f"evaluation.sets={{other: {other}, again: {dataset}}}"
    few = ["schedule.steps=6", "checkpoint.interval_steps=0", "model.dropout=0.1"]
    script = [
        ("train", ["run.name=several", sets, "evaluation.interval_steps=3", *few]),
        ("train", ["run.name=often", "evaluation.interval_steps=1", *few]),
        ("train", ["run.name=never", "evaluation.interval_steps=0", *few]),
    ]
    run_on_ranks(2, runs, str(config), script)
    three = ["run.name=three", sets, "evaluation.interval_steps=3", *few, "schedule.steps=2"]
    run_on_ranks(3, runs, str(config), [("train", three)])
    return folder / "runs"


def test_evaluation_never_disturbs_training(root: Path) -> None:
    assert losses(root / "several") == losses(root / "often") == losses(root / "never")


def test_named_sets_are_logged_beside_the_own_one(root: Path) -> None:
    records = list(read_jsonl(root / "several" / "log.jsonl"))
    own = [(r["step"], r["set"], r["loss"]) for r in records if r["kind"] == "eval"]
    others = [(r["step"], r["set"]) for r in records if r["kind"] == "eval_set"]
    assert [(step, name) for step, name, _ in own] == [(0, "val"), (3, "val"), (6, "val")]
    assert others == [(step, name) for step in (0, 3, 6) for name in ("other", "again")]
    again = [r["loss"] for r in records if r["kind"] == "eval_set" and r["set"] == "again"]
    assert again == [loss for _, _, loss in own]


def test_the_loss_does_not_depend_on_the_world_size(root: Path) -> None:
    assert evaluations(root / "three")[0] == pytest.approx(evaluations(root / "several")[0], rel=1e-6)
    counts = {
        r["evaluated_tokens"]
        for run in ("three", "several")
        for r in read_jsonl(root / run / "log.jsonl")
        if r["kind"] == "eval"
    }
    assert counts == {21 * 32}


def test_the_interval_is_that_of_the_spread_between_batches(root: Path, dataset: Path) -> None:
    """Recomputed here from the model at step 0, batch by batch."""
    from mars_ds.config import load_config
    from mars_ds.training.data import evaluation_windows
    from mars_ds.training.model import build_model

    config = load_config(root / "several" / "config.yaml")
    model = build_model(config)
    model.module.eval()
    windows = open_dataset(dataset, "val", 32)
    chosen = evaluation_windows(windows.num_windows, 21)
    means, sizes = [], []
    for at in range(0, 21, 2):
        tokens = torch.from_numpy(windows.read(chosen[at : at + 2]))
        inputs, labels = model.inputs(tokens)
        with torch.no_grad():
            means.append(float(model.module(input_ids=inputs, labels=labels).loss))
        sizes.append(len(tokens))
    mean = np.average(means, weights=sizes)
    spread = np.average((np.array(means) - mean) ** 2, weights=sizes)
    record = next(r for r in read_jsonl(root / "several" / "log.jsonl") if r["kind"] == "eval")
    assert record["loss"] == pytest.approx(mean, rel=1e-6)
    assert record["half_width"] == pytest.approx(1.959964 * math.sqrt(spread / (len(means) - 1)), rel=1e-3)
    per_byte = record["loss"] / math.log(2) * windows.num_tokens / windows.bytes_of_text
    assert record["bits_per_byte"] == pytest.approx(per_byte)
