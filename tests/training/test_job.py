"""The contract with a scheduler's script: world size, stop file, state, logs; and the evaluation after it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ds.errors import LaunchError
from mars_ds.telemetry.jsonl import read_jsonl
from mars_ds.training.job import EXPECTED_WORLD_SIZE, LOG_FOLDER, STATE_FILE, STOP_FILE, Job
from tests.conftest import write_config
from tests.training.launching import BEAT, REPOSITORY, Launch, end_record, saved_steps


def test_state_is_one_line_that_is_never_half_written(tmp_path: Path) -> None:
    file = tmp_path / "state"
    job = Job.from_environment({STATE_FILE: str(file)}, rank=0)
    job.running(1200)
    assert file.read_text() == "running 1200\n"
    before = file.stat().st_ino
    job.ended("stopped", "SIGUSR1")
    assert file.read_text() == "stopped 1200 SIGUSR1\n"
    assert file.stat().st_ino != before  # another file by rename, never one that is written over
    assert list(tmp_path.iterdir()) == [file]


def test_only_rank_0_tells(tmp_path: Path) -> None:
    Job.from_environment({STATE_FILE: str(tmp_path / "state")}, rank=3).ended("done")
    assert not list(tmp_path.iterdir())


def test_a_state_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(state_file=tmp_path / "gone" / "state").running(3)
    assert "gone/state: No such file or directory" in capsys.readouterr().err


def test_another_world_size_is_refused() -> None:
    job = Job.from_environment({EXPECTED_WORLD_SIZE: "16"}, rank=0)
    job.check_world_size(16)
    with pytest.raises(LaunchError, match="the launcher made 8 ranks, but the job's script expects 16"):
        job.check_world_size(8)
    Job.from_environment({}, rank=0).check_world_size(8)


@pytest.mark.parametrize("value", ["", "0", "two", "-1"])
def test_an_expected_world_size_that_is_none(value: str) -> None:
    with pytest.raises(LaunchError, match="expected a positive number of ranks"):
        Job.from_environment({EXPECTED_WORLD_SIZE: value}, rank=0)


@pytest.fixture(scope="module")
def config(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    return write_config(folder / "tiny.yaml", dataset, folder / "runs")


def test_a_job_from_its_stop_to_its_end(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, stop, logs = tmp_path / "state", tmp_path / "stop", tmp_path / "logs"
    logs.mkdir()
    for variable, value in {STATE_FILE: state, STOP_FILE: stop, LOG_FOLDER: logs, EXPECTED_WORLD_SIZE: 2}.items():
        monkeypatch.setenv(variable, str(value))
    run = config.parent / "runs" / "job"
    steps = ["run.name=job", BEAT, "checkpoint.interval_steps=10", "batch.micro_batch=2"]
    # A request from before the run had its handlers, or its folder: it must not be lost in the start.
    stop.touch()
    started = Launch(config, [*steps, "schedule.steps=400"], 2, tmp_path / "out")
    assert started.wait() == [0, 0], started.output()
    assert stop.exists(), "the script owns this file"
    assert state.read_text() == f"stopped {end_record(run)['step']} STOP_FILE\n"
    stop.unlink()

    killed = Launch(config, [*steps, "schedule.steps=400"], 2, tmp_path / "out")
    killed.until(lambda: len(saved_steps(run)) > 1)
    killed.send(signal.SIGKILL, [1])
    assert killed.wait()[0] not in (0, 75)
    word, step = state.read_text().split()
    assert word == "running", "a rank that dies is never done"
    # Told at the step after the commit: at most one checkpoint behind, never ahead of the disk.
    assert saved_steps(run)[-1] - int(step) in (0, 10)

    last = saved_steps(run)[-1] + 5
    finished = Launch(config, [*steps, f"schedule.steps={last}"], 2, tmp_path / "out")
    assert finished.wait() == [0, 0], finished.output()
    assert state.read_text() == f"done {last}\n"
    # Every rank has its own log, and each start was added to it.
    texts = [(logs / f"rank_{rank:05d}.log").read_text() for rank in range(2)]
    assert texts[0].count("detected   2 ranks over gloo") == 3
    assert finished.output() == ""

    evaluation = subprocess.run(
        [sys.executable, "launch/evaluate.py", str(run)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != LOG_FOLDER},
    )
    assert evaluation.returncode == 0, evaluation.stderr
    result = json.loads((run / "evaluation.json").read_text())
    logged = [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "eval"][-1]
    assert result["step"] == logged["step"] == last
    # One rank instead of two adds the windows' losses in another order.
    assert result["sets"]["val"]["loss"] == pytest.approx(logged["loss"], rel=1e-6)


def test_a_launch_that_came_up_too_small_trains_nothing(config: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(EXPECTED_WORLD_SIZE, "4")
    monkeypatch.setenv(STATE_FILE, str(tmp_path / "state"))
    refused = Launch(config, ["run.name=small"], 1, tmp_path / "out")
    assert refused.wait() == [2]
    assert "the launcher made 1 ranks, but the job's script expects 4" in refused.output()
    assert (tmp_path / "state").read_text() == "failed 0 BAD_INPUT\n"
    assert not (config.parent / "runs" / "small").exists()


def test_a_sigterm_during_the_imports_is_a_request(config: Path, tmp_path: Path) -> None:
    started = Launch(config, ["run.name=early", "schedule.steps=400"], 1, tmp_path / "out")

    def handler_is_there() -> bool:
        status = Path(f"/proc/{started.processes[0].pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    started.until(handler_is_there)
    started.send(signal.SIGTERM)
    assert started.wait() == [75], started.output()
    assert end_record(config.parent / "runs" / "early")["reason"] == "SIGTERM"
