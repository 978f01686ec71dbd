"""Real multi-process runs of launch/pretrain.py: started, watched by their heartbeats, signalled, killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mars_ds.telemetry.jsonl import read_jsonl
from mars_ds.training.heartbeat import FOLDER, read_heartbeats

REPOSITORY = Path(__file__).parents[2]
# Written often, so that a test sees every phase; a phase shorter than this may be missed.
BEAT = "health.heartbeat_seconds=0.02"


class Launch:
    """The ranks of one launch.

    Args:
        config: YAML file.
        overrides: Laid over it.
        ranks: How many.
        folder: Where their output goes.
    """

    def __init__(self, config: Path, overrides: Sequence[str], ranks: int, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "launch/pretrain.py", "--config", str(config), *overrides]
            with open(folder / f"rank_{rank}.log", "ab") as log:
                process = subprocess.Popen(
                    command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            self.processes.append(process)

    def send(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        """Signals some ranks, by default all."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def kill(self) -> None:
        """Ends all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Exit codes of all ranks; ends them with an error when they take longer."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}") from error

    def output(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        return (self.folder / f"rank_{rank}.log").read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits for something; fails when the run ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.002)

    def until_phase(self, run: Path, phase: str, min_step: int = 0) -> None:
        """Waits until rank 0 is in a phase that starts with `phase`, at step `min_step` or later."""

        def reached() -> bool:
            beat = read_heartbeats(run / FOLDER).get(0)
            fresh = beat is not None and beat["pid"] == self.processes[0].pid
            return fresh and beat["phase"].startswith(phase) and beat["step"] >= min_step

        self.until(reached)


def train_losses(run: Path) -> dict[int, float]:
    """Loss by step, the last one where a step was done twice."""
    return {r["step"]: r["loss"] for r in read_jsonl(run / "log.jsonl") if r["kind"] == "train"}


def end_record(run: Path) -> dict[str, Any]:
    """The last end line."""
    return [r for r in read_jsonl(run / "log.jsonl") if r["kind"] == "end"][-1]


def saved_steps(run: Path) -> list[int]:
    """Steps of the committed checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/COMPLETE"))


def index_of(run: Path, step: int) -> dict[str, Any]:
    """A checkpoint's index."""
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "index.json").read_text())  # type: ignore[no-any-return]
