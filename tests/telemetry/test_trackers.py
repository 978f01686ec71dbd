"""Trackers write what they are given, and no trouble of theirs reaches the run."""

from __future__ import annotations

import builtins
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mars_ds.telemetry.trackers import BackgroundTracker, TensorBoardTracker, WandbTracker


class Recorder:
    """Remembers every call; raises or hangs where it is told to."""

    def __init__(self, raises: str = "", hangs: str = "") -> None:
        self.raises, self.hangs = raises, hangs
        self.calls: list[Any] = []
        self.released = threading.Event()

    def _enter(self, name: str) -> None:
        if self.hangs == name:
            self.released.wait(20)
        if self.raises == name:
            raise RuntimeError(f"{name}\nis broken")

    def start(self, config: Mapping[str, Any]) -> None:
        self._enter("start")
        self.calls.append(("start", dict(config)))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._enter("log")
        self.calls.append((step, dict(metrics)))

    def finish(self) -> None:
        self._enter("finish")
        self.calls.append("finish")


def _drive(inner: Recorder, **options: Any) -> tuple[list[str], float]:
    """A whole run of 20 steps; the warnings it gave and the seconds it took."""
    warnings: list[str] = []
    tracker = BackgroundTracker(inner, warn=warnings.append, **options)
    began = time.monotonic()
    tracker.start({"lr": 0.1})
    for step in range(20):
        tracker.log({"loss": float(step)}, step)
    tracker.finish()
    tracker.finish()
    took = time.monotonic() - began
    inner.released.set()
    return warnings, took


def test_everything_arrives_in_order() -> None:
    inner = Recorder()
    warnings, _ = _drive(inner)
    assert warnings == []
    assert inner.calls == [
        ("start", {"lr": 0.1}),
        *((step, {"loss": float(step)}) for step in range(20)),
        "finish",
    ]


def test_a_failing_start_is_one_line() -> None:
    warnings, took = _drive(Recorder(raises="start"))
    assert warnings[0] == "Recorder could not start and is left out: RuntimeError: start is broken"
    assert len(warnings) <= 2 and took < 2


def test_failing_logs_are_reported_once_and_counted() -> None:
    inner = Recorder(raises="log")
    warnings, _ = _drive(inner)
    assert warnings == [
        "Recorder failed at step 0: RuntimeError: log is broken",
        "Recorder lost the metrics of 20 steps; the log file has them all",
    ]
    assert inner.calls[-1] == "finish"


def test_a_failing_finish_is_one_line() -> None:
    assert _drive(Recorder(raises="finish"))[0] == ["Recorder could not finish: RuntimeError: finish is broken"]


def test_an_urgent_stop_waits_no_longer_than_it_says() -> None:
    warnings: list[str] = []
    inner = Recorder(hangs="finish")
    tracker = BackgroundTracker(inner, finish_seconds=60, warn=warnings.append)
    tracker.start({})
    began = time.monotonic()
    tracker.finish(0.2)
    assert time.monotonic() - began < 2
    inner.released.set()
    assert warnings == ["Recorder did not finish within 0.2 s and was left behind"]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_hanging_tracker_costs_its_deadline_and_no_more(where: str) -> None:
    warnings, took = _drive(Recorder(hangs=where), finish_seconds=0.3)
    assert warnings[0] == "Recorder did not finish within 0.3 s and was left behind"
    assert 0.25 < took < 2


def test_a_start_past_its_deadline_is_given_up_during_the_run() -> None:
    warnings: list[str] = []
    inner = Recorder(hangs="start")
    tracker = BackgroundTracker(inner, start_seconds=0.05, warn=warnings.append)
    tracker.start({})
    time.sleep(0.1)
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    assert warnings == ["Recorder did not start within 0.05 s; the run goes on without it"]
    tracker.finish()
    inner.released.set()


def test_a_full_queue_drops_and_counts() -> None:
    warnings, took = _drive(Recorder(hangs="log"), capacity=4, finish_seconds=0.2)
    assert any(line.startswith("Recorder does not keep up: metrics from step") for line in warnings)
    assert warnings[-1].startswith("Recorder lost the metrics of ")
    assert took < 2


def test_without_start_nothing_happens() -> None:
    tracker = BackgroundTracker(Recorder())
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()


def test_wandb_offline_writes_a_run_folder_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Any] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith("127."):
            reached.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.chdir(tmp_path)
    warnings: list[str] = []
    inner = WandbTracker("mars", name="debug", mode="offline", tags=("test",), directory=tmp_path / "tracking")
    tracker = BackgroundTracker(inner, warn=warnings.append)
    tracker.start({"optimizer": {"kind": "mars-m", "lr": 3e-3}})
    for step in range(1, 4):
        tracker.log({"train/loss": 10.0 / step}, step)
    tracker.finish()
    assert warnings == [] and reached == []
    runs = list((tmp_path / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    # wandb's own process may write a moment after its finish has returned.
    deadline = time.monotonic() + 10
    while b"train/loss" not in runs[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    content = runs[0].read_bytes()
    assert b"mars-m" in content and b"train/loss" in content and b"debug" in content


def test_wandb_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disabled = WandbTracker("mars", mode="disabled", directory=tmp_path)
    disabled.start({})
    disabled.log({"loss": 1.0}, 1)
    disabled.finish()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="online, offline or disabled"):
        WandbTracker("mars", mode="dryrun")  # type: ignore[arg-type]


def test_wandb_online_without_a_key_says_so_and_does_not_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **options: not options["prompt"] and False)
    with pytest.raises(RuntimeError, match="no wandb API key"):
        WandbTracker("mars").start({})


def test_a_missing_tensorboard_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    warnings: list[str] = []
    tracker = BackgroundTracker(TensorBoardTracker(tmp_path), warn=warnings.append)
    tracker.start({})
    tracker.finish()
    assert warnings == [
        "TensorBoardTracker could not start and is left out: ImportError: tensorboard is not installed: "
        "pip install tensorboard"
    ]


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({"lr": 0.1})
    tracker.log({"train/loss": 2.0}, 1)
    tracker.finish()
    assert b"train/loss" in next(tmp_path.glob("events.*")).read_bytes()
