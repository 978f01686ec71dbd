"""The data pipeline on several nodes through the shipped script, and the chain data -> train -> evaluate."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from data_pipeline.build import prepare
from data_pipeline.plan import BuildOptions
from tests.cluster.conftest import SCRIPTS, Lab
from tests.corpora import write_jsonl

FILES = 24
PART_TOKENS = 1_000_000


def identity(data_set: Path) -> str:
    """SHA-256 of a data set's manifest, which names every byte."""
    return hashlib.sha256((data_set / "manifest.json").read_bytes()).hexdigest()


def test_three_nodes_one_of_them_lost(lab: Lab) -> None:
    sources = lab.folder / "sources"
    sources.mkdir()
    first = write_jsonl(sources / "00.jsonl", documents=16_000)
    for number in range(1, FILES):
        shutil.copy(first, sources / f"{number:02d}.jsonl")
    output = lab.folder / "together"
    job = lab.submit(
        "data.sbatch",
        *("--source", sources, "--output", output, "--val-fraction", "0.01", "--part-tokens", PART_TOKENS),
        *("--engine", "tiktoken", "--workers", "1"),  # the slow engine, so that there is a middle to be lost in
        options=("--nodes=3",),
    )

    def all_at_work() -> bool:
        claims = [path.read_text() for path in output.glob(".build/claims/unit-*")]
        return {"n1", "n2", "n3"} <= {json.loads(text)["host"].split()[0] for text in claims if text}

    job.until(all_at_work, 90, "a claim of each node at the same time")
    job.until(lambda: len(list(output.glob(".build/unit-*"))) >= 4, 90, "some units")
    lab.cluster.power_off(3)
    at_the_loss = len(list(output.glob(".build/unit-*")))
    options = BuildOptions(val_fraction=0.01, part_tokens=PART_TOKENS)
    prepare([str(sources)], lab.folder / "alone", options=options, workers=1)
    job.until(lambda: job.restarts == 1, 90, "the requeue")
    lab.cluster.power_on(3)
    job.wait_for("COMPLETED", timeout=240)
    assert 0 < at_the_loss < FILES - 3, "it was lost in the middle"
    assert identity(output) == identity(lab.folder / "alone")
    assert f"is whole: {identity(output)}" in job.log()
    lab.assert_clean()


def test_data_then_training_then_evaluation(lab: Lab) -> None:
    source = write_jsonl(lab.folder / "chain.jsonl", documents=500)
    environment = {
        **lab.environment(1),
        "DATA_OPTIONS": f"--nodes=2 --output={lab.folder}/%x-%j.out",
        "TRAIN_OPTIONS": f"--nodes=2 --output={lab.folder}/%x-%j.out",
        "EVALUATE_OPTIONS": f"--nodes=1 --output={lab.folder}/%x-%j.out",
    }
    data = lab.folder / "chain"
    command = [
        "bash",
        SCRIPTS / "chain.sh",
        lab.config,
        "run.name=chained",
        "schedule.steps=20",
        f"data.path={data}",
        "--",
    ]
    prepared = ["--source", source, "--output", data, "--tokenizer", "bytes", "--val-fraction", "0.1", "--workers", "1"]
    said = lab.cluster.run(*command, *prepared, environment=environment).stdout
    jobs = re.fullmatch(r"data (\d+), train (\d+), evaluate (\d+); .*\n", said)
    assert jobs, said
    run = lab.run("chained")
    lab.until_queue_is_empty()
    assert run.state == ["done", "20"]
    result = json.loads((run.folder / "evaluation.json").read_text())
    assert result["step"] == 20
    assert result["sets"]["val"]["loss"] == pytest.approx(run.ends[-1]["validation_loss"], rel=1e-6)
    lab.assert_clean()


def test_a_chain_whose_data_fails_trains_nothing(lab: Lab) -> None:
    environment = {**lab.environment(1), "DATA_OPTIONS": f"--nodes=1 --output={lab.folder}/%x-%j.out"}
    for job in ("TRAIN", "EVALUATE"):
        environment[f"{job}_OPTIONS"] = f"--nodes=1 --output={lab.folder}/%x-%j.out"
    command = ["bash", SCRIPTS / "chain.sh", lab.config, "run.name=unchained", "--"]
    lab.cluster.run(*command, "--source", "/gone.jsonl", "--output", lab.folder / "gone", environment=environment)
    lab.until_queue_is_empty()
    assert not lab.run("unchained").folder.exists()
