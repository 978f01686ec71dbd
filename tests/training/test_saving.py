"""Checkpoints of whole runs on two ranks: damage, failures in the background, a full disk, spikes, copies."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mars_ds.checkpoint import CheckpointReader
from mars_ds.training.callbacks import Callback
from tests.conftest import write_config
from tests.ranks import run_on_ranks
from tests.training.test_trainer import end, losses


class Doing(Callback):
    """Calls `action(step)` after every step."""

    def __init__(self, action: Any) -> None:
        self._action = action

    def after_step(self, trainer: Any, result: Any) -> None:
        self._action(trainer.step)


def train(config_file: str, overrides: list[str], before: Any = None) -> tuple[list[str], str]:
    """One run in this process group: what rank 0 printed, and the error that ended it."""
    import logging

    import torch.distributed as dist

    from mars_ds.config import load_config
    from mars_ds.errors import ConfigError
    from mars_ds.planning.batch import plan_batch
    from mars_ds.training.run_folder import open_run_folder
    from mars_ds.training.trainer import Trainer
    from mars_ds.zero.distributed import join

    logging.disable(logging.WARNING)
    join()
    printed: list[str] = []
    try:
        config = load_config(config_file, overrides)
        batch = plan_batch(config.global_batch, config.batch.micro_batch, dist.get_world_size())
        folder = open_run_folder(config)
        printed.extend(folder.passed_over)
        dist.barrier()
        trainer = Trainer(config, batch, folder, printed.append)
        if before:
            trainer.callbacks.insert(trainer.callbacks.index(trainer.checkpoints), Doing(before))
        trainer.train()
    except ConfigError as error:
        dist.barrier()
        return printed, str(error)
    dist.barrier()
    return printed, ""


def damage(run: Path, step: int, kind: str) -> None:
    folder = run / "checkpoints" / f"step_{step:08d}"
    file = folder / {"index": "index.json", "marker": "COMPLETE"}.get(kind, "rank_00001.safetensors")
    if kind == "missing":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if kind == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 4
    file.write_bytes(data)


KINDS = ["truncated", "flipped", "index", "marker", "missing"]
QUIET = ["evaluation.interval_steps=0"]


def damaged_runs(rank: int, world_size: int, config_file: str, root: str) -> dict[str, Any]:
    import torch.distributed as dist

    from mars_ds.checkpoint import uploads

    uploads._PAUSE_SECONDS = 0.01
    runs, found = Path(root), {}
    sync, spiky = ["checkpoint.asynchronous=false"], ["model.factory=tests.training.factories:spiky_llama"]
    found["whole"] = train(config_file, ["run.name=whole", *QUIET])
    for kind in KINDS:
        if rank == 0:
            shutil.copytree(runs / "whole", runs / kind)
            damage(runs / kind, 12, kind)
        dist.barrier()
        found[kind] = train(config_file, [f"run.name={kind}", *QUIET])
    if rank == 0:
        shutil.copytree(runs / "whole", runs / "two")
        damage(runs / "two", 12, "flipped")
        damage(runs / "two", 8, "truncated")
        shutil.copytree(runs / "whole", runs / "none")
        for step in (4, 8, 12):
            damage(runs / "none", step, "flipped")
    dist.barrier()
    found["two"] = train(config_file, ["run.name=two", *QUIET, *sync])
    found["none"] = train(config_file, ["run.name=none", *QUIET])
    found["sync"] = train(config_file, ["run.name=sync", *QUIET, *sync])
    copied = f"checkpoint.copy_to={root}/copies"
    found["copied"] = train(config_file, ["run.name=copied", "checkpoint.keep_last=1", copied, *QUIET])
    blocked = f"checkpoint.copy_to=file://{config_file}/impossible"
    found["uncopied"] = train(config_file, ["run.name=uncopied", blocked, *QUIET])
    found["no package"] = train(config_file, ["run.name=floppy", "checkpoint.copy_to=floppy://a", *QUIET])
    # Forward 40 * 3 is in step 40: told, applied, saved and marked.
    few = ["schedule.steps=44", "checkpoint.interval_steps=2", "checkpoint.keep_last=2", *QUIET]
    arguments = f"model.factory_arguments={{vocab_size: 320, forward: {40 * 3}}}"
    found["spiky"] = train(config_file, ["run.name=spiky", *few, *spiky, arguments])
    return found


@pytest.fixture(scope="module")
def damaged(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("damaged")
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    return folder / "runs", run_on_ranks(2, damaged_runs, str(config), str(folder / "runs"))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_passed_over_by_name(damaged: tuple[Path, dict[str, Any]], kind: str) -> None:
    runs, found = damaged
    printed, error = found[kind]
    assert error == ""
    name = {"index": "index.json", "marker": "index.json"}.get(kind, "rank_00001.safetensors")
    (problem,) = {
        line.removeprefix("passed over a damaged checkpoint: ") for line in printed if "step_00000012/" in line
    }
    assert problem.startswith(str(runs / kind / "checkpoints" / "step_00000012" / name)), problem
    assert any("position step 8" in line and "replayed 0, skipped 0" in line for line in printed)
    assert end(runs / kind)["window_hash"] == end(runs / "whole")["window_hash"]
    assert losses(runs / kind) == losses(runs / "whole")
    # The damaged one was replaced by what it should have been.
    again = CheckpointReader(runs / kind / "checkpoints" / "step_00000012", verify=True)
    whole = CheckpointReader(runs / "whole" / "checkpoints" / "step_00000012", verify=True)
    assert {n: f["sha256"] for n, f in again.index["files"].items()} == {
        n: f["sha256"] for n, f in whole.index["files"].items()
    }
    assert not [path for path in (runs / kind / "checkpoints").iterdir() if path.name.startswith(".")]


def test_two_damaged_ones_and_none_intact(damaged: tuple[Path, dict[str, Any]]) -> None:
    runs, found = damaged
    printed, error = found["two"]
    assert error == ""
    assert any("position step 4" in line for line in printed)
    assert end(runs / "two")["window_hash"] == end(runs / "whole")["window_hash"]
    assert "no checkpoint is intact" in found["none"][1]


def test_synchronous_saves_are_the_same_bytes(damaged: tuple[Path, dict[str, Any]]) -> None:
    runs, found = damaged
    for step in (4, 8, 12):
        one, other = (runs / name / "checkpoints" / f"step_{step:08d}" for name in ("sync", "whole"))
        for rank in (0, 1):
            name = f"rank_{rank:05d}.safetensors"
            assert (one / name).read_bytes() == (other / name).read_bytes()
    for name in ("sync", "whole"):
        assert (runs / name / "checkpoints" / "latest").read_text() == "step_00000012\n"
        lines = [line for line in found[name][0] if ": checkpoint " in line]
        assert [line.split(":")[0] for line in lines] == ["step 4", "step 8", "step 12"]
        index = json.loads((runs / name / "checkpoints" / "step_00000012" / "index.json").read_text())
        assert index["healthy"] is True


def test_each_commit_is_copied_and_a_failed_copy_is_told(damaged: tuple[Path, dict[str, Any]]) -> None:
    runs, found = damaged
    printed, error = found["copied"]
    assert error == ""
    assert sum(line.startswith("copied step_") for line in printed) == 3
    for step in (4, 8, 12):
        assert CheckpointReader(runs / "copies" / f"step_{step:08d}", verify=True).step == step
    printed, error = found["uncopied"]
    assert error == ""
    assert sum("is not at file://" in line for line in printed) == 3
    assert "launch/checkpoints.py copy" in printed[-1] and printed[-1].endswith("--all")
    assert "no file system for floppy://" in found["no package"][1]


def test_a_spike_is_saved_marked_and_never_the_only_one(damaged: tuple[Path, dict[str, Any]]) -> None:
    runs, found = damaged
    printed, error = found["spiky"]
    assert error == ""
    seen = losses(runs / "spiky")
    assert seen[40] > seen[39] + 0.5
    assert "step 40: its loss is a spike; the checkpoint is marked as not healthy" in printed
    healthy = {
        CheckpointReader(path.parent).step: CheckpointReader(path.parent).index["healthy"]
        for path in (runs / "spiky" / "checkpoints").glob("step_*/COMPLETE")
    }
    assert set(healthy) == {42, 44}


def failing_runs(rank: int, world_size: int, config_file: str, root: str) -> dict[str, Any]:
    """Writes that fail on rank 1 with EIO, at one save, at the last one, and for good; and slow ones."""
    from mars_ds.checkpoint import writer

    found: dict[str, Any] = {}
    real, state = writer.write_rank_file, {"fail": 0, "calls": 0, "slow": 0.0, "threads": set()}

    def write(path: Path, pieces: Any) -> Any:
        state["calls"] += 1
        state["threads"].add(threading.current_thread().name)
        time.sleep(state["slow"])
        if rank == 1 and state["fail"] > 0:
            state["fail"] -= 1
            path.write_bytes(b"half")
            raise OSError(5, "Input/output error")
        return real(path, pieces)

    writer.write_rank_file = write

    def fail_at(step: int, times: int) -> Any:
        def action(now: int) -> None:
            state["fail"] = times if now == step else state["fail"]

        return action

    for mode in ("true", "false"):
        always = [f"checkpoint.asynchronous={mode}", *QUIET]
        found[mode, "once"] = train(config_file, [f"run.name=once_{mode}", *always], fail_at(8, 1))
        state["fail"] = 0
        if mode == "true":
            found[mode, "last"] = train(config_file, [f"run.name=last_{mode}", *always], fail_at(12, 1))
            state["fail"] = 0
        found[mode, "ever"] = train(config_file, [f"run.name=ever_{mode}", *always], fail_at(8, 9))
        state["fail"] = 0
        found[mode, "threads"] = set(state["threads"])
        state["threads"].clear()
    state["slow"] = 0.6
    found["slow"] = train(config_file, ["run.name=slow", "checkpoint.interval_steps=1", "schedule.steps=3", *QUIET])
    return found


def test_a_failed_save_is_tried_again_and_at_the_end_is_an_error(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("failing")
    config, runs = write_config(folder / "tiny.yaml", dataset, folder / "runs"), folder / "runs"
    found = run_on_ranks(2, failing_runs, str(config), str(runs))
    for mode in ("true", "false"):
        printed, error = found[0][mode, "once"]
        assert error == ""
        (warning,) = [line for line in printed if line.startswith("warning")]
        assert "warning: step 8: no checkpoint" in warning
        assert "rank 1: [Errno 5] Input/output error" in warning and "earlier checkpoints are untouched" in warning
        assert steps(runs / f"once_{mode}") == [4, 12]
        if mode == "true":
            printed, error = found[0][mode, "last"]
            assert error == ""
            assert steps(runs / f"last_{mode}") == [4, 8, 12]
        for rank in (0, 1):
            assert "step 12: " in found[rank][mode, "ever"][1] and "Input/output error" in found[rank][mode, "ever"][1]
        assert steps(runs / f"ever_{mode}") == [4]
        assert (runs / f"ever_{mode}" / "checkpoints" / "latest").read_text() == "step_00000004\n"
        assert [path.name for path in (runs / f"ever_{mode}" / "checkpoints").glob(".*")] == []
    assert any("2 times in a row" in line for line in found[0]["true", "ever"][0])
    assert found[0]["true", "threads"] == {"checkpoint"}
    assert found[0]["false", "threads"] == {"MainThread"}
    printed, error = found[0]["slow"]
    assert sum("for the checkpoint before this one" in line for line in printed) == 2
    assert steps(runs / "slow") == [1, 2, 3]


def steps(run: Path) -> list[int]:
    return sorted(CheckpointReader(path.parent, verify=True).step for path in run.glob("checkpoints/step_*/COMPLETE"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def full_disk(rank: int, world_size: int, config_file: str, disk: str) -> dict[str, Any]:
    """The disk is full at step 8 and has room again at step 12; seen before the save, and found while writing."""
    from mars_ds.checkpoint import writer

    filler, found = Path(disk) / "filler", {}

    def fill(step: int) -> None:
        if rank == 0 and step == 8:
            with filler.open("wb") as file:
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                file.write(b"x" * max(0, free - 100_000))
        # The saves of step 8 are over when step 12 comes; the one of step 4 is waited for there.
        if rank == 0 and step == 11:
            filler.unlink(missing_ok=True)

    for name in ("told", "found"):
        if name == "found":
            writer._prepare = lambda root, temporary, num_bytes: temporary.mkdir(parents=True)
        found[name] = train(config_file, [f"run.name={name}", "checkpoint.keep_last=2", *QUIET], fill)
        if rank == 0:
            found[name, "steps"] = steps(Path(disk) / "runs" / name)
            shutil.rmtree(Path(disk) / "runs" / name)
    return found


def test_a_full_disk_never_loses_the_previous_one(dataset: Path, tmp_path: Path, small_disk: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", dataset, small_disk / "runs")
    found = run_on_ranks(2, full_disk, str(config), str(small_disk))[0]
    for name, words in (("told", " MB are free; make room"), ("found", "No space left on device")):
        printed, error = found[name]
        assert error == ""
        (warning,) = [line for line in printed if line.startswith("warning")]
        assert "step 8: no checkpoint" in warning and words in warning, warning
        assert found[name, "steps"] == [4, 12]


def test_permanent_checkpoints_must_be_saved_at_all(config_file: Path) -> None:
    from mars_ds.config import load_config
    from mars_ds.errors import ConfigError

    with pytest.raises(ConfigError, match=r"keep_every_steps 10 is not a multiple of interval_steps 4.*nearest: 8"):
        load_config(config_file, ["checkpoint.keep_every_steps=10"])
    assert load_config(config_file, ["checkpoint.keep_every_steps=12"]).checkpoint.keep_every_steps == 12
