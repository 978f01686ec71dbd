"""A rank that hangs: the others' wait is noticed, and the one to blame is named."""

import json
import signal
from pathlib import Path

from tests.conftest import write_config
from tests.training.launching import Launch


def test_a_stopped_rank_is_named_before_any_time_out(dataset: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", dataset, tmp_path / "runs")
    overrides = ["schedule.steps=100000", "evaluation.interval_steps=0", "checkpoint.interval_steps=0"]
    overrides += ["health.heartbeat_seconds=0.5", "health.silence_seconds=3"]
    launch = Launch(config, overrides, 3, tmp_path / "out")
    run = tmp_path / "runs" / "tiny"
    try:
        launch.until_phase(run, "", 3)
        launch.send(signal.SIGSTOP, [1])
        launch.until(lambda: "no progress for" in launch.output(), seconds=30)
        launch.until(lambda: "is silent since" in launch.output(), seconds=60)
        silent = next(line for line in launch.output().splitlines() if "is silent since" in line)
        assert silent.strip().startswith("rank 1 (")
        assert f"process {launch.processes[1].pid})" in silent
        stacks = (run / "heartbeats" / "stacks_rank_00000.txt").read_text()
        assert "trainer.py" in stacks
        recorded = json.loads((run / "heartbeats" / "collectives_gloo_rank_00000.json").read_text())
        assert recorded["entries"]
        # Woken again, the run goes on.
        launch.send(signal.SIGCONT, [1])
        launch.send(signal.SIGTERM)
        assert launch.wait(60) == [75, 75, 75], launch.output()
    finally:
        launch.kill()
