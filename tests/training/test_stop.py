"""A run that is asked to stop, in every phase: it saves once, tells the scheduler, and goes on as if nothing was."""

import signal
import threading
import time
from pathlib import Path

import pytest

from mars_ds.training.signals import Reason, SignalWatch
from tests.conftest import write_config
from tests.training.launching import BEAT, Launch, end_record, saved_steps, train_losses

STEPS = 400
LONG = [f"schedule.steps={STEPS}", "evaluation.interval_steps=5", "evaluation.sequences=60", BEAT]


@pytest.fixture(scope="module")
def config(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    return write_config(folder / "tiny.yaml", dataset, folder / "runs")


def launch(config: Path, name: str, *overrides: str, ranks: int = 2) -> tuple[Launch, Path]:
    run = config.parent / "runs" / name
    return Launch(config, [f"run.name={name}", *LONG, *overrides], ranks, config.parent / f"{name}.out"), run


@pytest.mark.parametrize(
    ("phase", "min_step", "number", "status"),
    [
        ("building the engine", 0, signal.SIGTERM, 75),
        ("training", 3, signal.SIGUSR1, 75),
        ("waiting for data", 3, signal.SIGTERM, 75),
        ("evaluation", 5, signal.SIGTERM, 75),
        ("saving", 4, signal.SIGTERM, 75),
        ("training", 3, signal.SIGINT, 130),
    ],
)
def test_every_phase_sees_a_signal_that_one_rank_gets(
    config: Path, phase: str, min_step: int, number: signal.Signals, status: int
) -> None:
    name = f"{phase.split()[0]}_{number.name}"
    started, run = launch(config, name)
    started.until_phase(run, phase, min_step)
    # To the rank that is not asked by the console: the others must learn it from this one.
    started.send(number, [1])
    assert started.wait() == [status, status], started.output()
    output = started.output()
    stopped_at = end_record(run)["step"]
    assert f"stopped at step {stopped_at} for {number.name}" in output
    assert end_record(run)["reason"] == number.name
    assert stopped_at < STEPS
    assert saved_steps(run)[-1:] == ([stopped_at] if stopped_at else [])
    assert output.count(f"step {stopped_at}: checkpoint") == (1 if stopped_at else 0)
    assert "continue   python launch/pretrain.py" in output or "continue   " in output


def test_a_stopped_run_goes_on_as_if_nothing_was(config: Path) -> None:
    few = ["schedule.steps=30", "model.dropout=0.1"]
    undisturbed, whole = launch(config, "whole", *few)
    assert undisturbed.wait() == [0, 0], undisturbed.output()
    stopped, run = launch(config, "stopped", *few)
    stopped.until_phase(run, "training", 7)
    stopped.send(signal.SIGUSR1)
    assert stopped.wait() == [75, 75], stopped.output()
    resumed, run = launch(config, "stopped", *few)
    assert resumed.wait() == [0, 0], resumed.output()
    assert "replayed 0, skipped 0" in resumed.output()
    assert train_losses(run) == train_losses(whole)
    assert end_record(run)["window_hash"] == end_record(whole)["window_hash"]


def test_a_stop_file_and_a_time_limit(config: Path) -> None:
    started, run = launch(config, "file")
    started.until_phase(run, "training", 3)
    (run / "stop").touch()
    assert started.wait() == [75, 75], started.output()
    assert "for the stop file" in started.output()
    assert saved_steps(run)[-1] == end_record(run)["step"]
    # The file is of the last stop: the next start takes it away and goes on.
    again, run = launch(config, "file", "run.time_limit_minutes=0.15")
    began = time.monotonic()
    assert again.wait() == [75, 75], again.output()
    assert time.monotonic() - began < 20
    assert not (run / "stop").exists()
    assert "for the time limit" in again.output()
    assert saved_steps(run)[-1] == end_record(run)["step"]


def test_a_second_ctrl_c_quits_at_once_even_in_a_collective_that_never_ends(config: Path) -> None:
    started, run = launch(config, "twice")
    started.until_phase(run, "training", 2)
    # The peer stands still, so that rank 0 soon waits for it where Python runs no signal handler.
    started.send(signal.SIGSTOP, [1])
    time.sleep(1)
    for _ in range(2):
        assert started.processes[0].poll() is None, started.output()
        started.send(signal.SIGINT, [0])
        time.sleep(0.5)
    assert started.processes[0].wait(10) == 130, started.output()
    assert "second Ctrl-C: quitting at once" in started.output()
    started.kill()


def test_a_stop_while_the_ranks_look_for_each_other(config: Path) -> None:
    started, run = launch(config, "alone")
    started.send(signal.SIGSTOP, [1])
    # Rank 0 has read everything and waits, where Python runs no handler, for one that never comes.
    started.until(lambda: "plan" in started.output() or "optimizer" in started.output())
    time.sleep(1)
    started.send(signal.SIGTERM, [0])
    assert started.processes[0].wait(20) == 75, started.output()
    assert "nothing was begun" in started.output()
    assert not run.joinpath("log.jsonl").exists()
    started.kill()


def test_the_strongest_request_wins_and_the_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watch = SignalWatch(rank=1)
    watch.install()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert watch.reason == Reason.SIGTERM
        signal.raise_signal(signal.SIGUSR1)
        assert watch.reason == Reason.SIGTERM
    finally:
        watch.restore()
    assert signal.getsignal(signal.SIGUSR1) is before
    # Handlers belong to the main thread; elsewhere there is nothing to take over.
    thread = threading.Thread(target=lambda: SignalWatch(rank=0).install())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before
