"""What a person sees of a run, and what must never stop one."""

import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mars_ds.telemetry.bar import Bar, bar_line
from mars_ds.telemetry.jsonl import read_jsonl
from tests.conftest import write_config
from tests.training.launching import REPOSITORY, Launch


@pytest.fixture(scope="module")
def config(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen")
    return write_config(folder / "tiny.yaml", dataset, folder / "runs")


def test_a_dead_tracker_never_stops_a_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases online, at an address that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        name = "wandb"
        launch = Launch(
            config,
            [
                f"run.name={name}",
                "schedule.steps=4",
                "telemetry.wandb.mode=online",
                "telemetry.wandb.deadline_seconds=4",
            ],
            1,
            tmp_path / name,
        )
        began = time.monotonic()
        assert launch.wait(150) == [0], launch.output()
    assert time.monotonic() - began < 60
    assert "done: 4 steps" in launch.output()
    run = config.parent / "runs" / name
    assert [r["step"] for r in read_jsonl(run / "log.jsonl") if r["kind"] == "train"] == [1, 2, 3, 4]
    assert "wandb" in launch.output().lower()


@pytest.fixture(scope="module")
def piped(config: Path) -> Launch:
    """A run on two ranks whose output is a file."""
    overrides = ["run.name=piped", "schedule.steps=40", "telemetry.log_interval_steps=10"]
    launch = Launch(config, overrides, 2, config.parent / "piped.out")
    assert launch.wait() == [0, 0], launch.output()
    return launch


@pytest.fixture(scope="module")
def terminal(config: Path) -> str:
    """What a run with another optimizer shows on a terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "launch/pretrain.py", "--config", str(config), "run.name=terminal", "schedule.steps=200"]
    command += ["telemetry.log_interval_steps=100", "evaluation.interval_steps=100", "checkpoint.interval_steps=0"]
    command += ["optimizer.kind=adamw", "optimizer.ns_dtype=null"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=slave, stderr=slave)
    os.close(slave)
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunks.append(os.read(master, 65_536))
            except OSError:
                return

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(120) == 0, b"".join(chunks).decode()
    reader.join(10)
    os.close(master)
    return b"".join(chunks).decode()


def test_plain_when_piped_and_nothing_from_deepspeed(piped: Launch) -> None:
    output = piped.output()
    assert "\x1b" not in output
    assert "\r" not in output
    assert not re.search(r"\[(INFO|WARNING|ERROR)\]|FutureWarning|UserWarning", output), output
    steps = [int(match) for match in re.findall(r"^\s*(\d+)/40 ", output, flags=re.MULTILINE)]
    assert steps == [*range(1, 21), 30, 40]
    assert re.search(r"first loss", output)
    assert re.search(
        r"^detected   2 ranks over gloo, cpu \(\d+ threads a rank\) on \S+; torch 2\.13", output, re.MULTILINE
    )
    assert "step" not in piped.output(1)


def test_a_bar_on_a_terminal(terminal: str) -> None:
    assert re.search(r"\r\x1b\[K\[#*-*\] \d+/200  \d+ %", terminal), terminal
    assert "done: 200 steps" in terminal


def test_bar_line() -> None:
    assert bar_line(100, 400, 2.0) == "[#######-----------------------] 100/400  25 %  ETA 10m 00s"
    assert bar_line(0, 400, 0.0) == "[------------------------------] 0/400  0 %"
    stream = open(os.devnull, "w")  # noqa: SIM115 - no terminal: nothing is written
    Bar(10, stream).update(3, 1.0)
    assert stream.tell() == 0


def test_the_report_command(config: Path, piped: Launch, terminal: str, tmp_path: Path) -> None:
    runs = config.parent / "runs"
    command = [sys.executable, "launch/report.py", str(runs / "piped"), str(runs / "terminal")]
    done = subprocess.run([*command, "--output", str(tmp_path / "c")], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "comparison.md",
        "comparison.png",
        "comparison_time.png",
    }
    text = (runs / "piped" / "report.md").read_text()
    assert "![Correction, clipped tensors and update size by role](optimizer.png)" in text
    assert (runs / "piped" / "optimizer.png").stat().st_size > 10_000
    assert "| State | finished |" in text
    nothing = subprocess.run([sys.executable, "launch/report.py", str(tmp_path)], cwd=REPOSITORY, capture_output=True)
    assert nothing.returncode == 2
    assert b"is not a run folder" in nothing.stderr
