"""The doctor names what is wrong and what to do, and is quiet about what is right."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mars_ds.config import load_config
from mars_ds.doctor import local, together
from mars_ds.doctor.finding import Finding
from tests.ranks import run_on_ranks

REPOSITORY = Path(__file__).parents[2]


def test_this_environment_is_the_tested_one() -> None:
    findings = {finding.subject: finding for finding in local.versions()}
    assert {findings[name].status for name in ("torch", "deepspeed", "tiktoken", "gigatoken")} == {"ok"}


def test_another_version_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = local.importlib.metadata.version
    monkeypatch.setattr(
        local.importlib.metadata, "version", lambda name: "0.1.0" if name == "deepspeed" else real(name)
    )
    finding = next(finding for finding in local.versions() if finding.subject == "deepspeed")
    assert finding == Finding("note", "deepspeed", "0.1.0; tested with 0.19.8", "pip install deepspeed==0.19.8")
    assert finding.line().splitlines()[1] == "      -> pip install deepspeed==0.19.8"


def test_a_lock_of_a_killed_build_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    assert [finding.status for finding in local.stale_locks(tmp_path)] == ["ok"]
    lock.parent.mkdir(parents=True)
    lock.touch()
    (finding,) = local.stale_locks(tmp_path)
    assert (finding.status, finding.remedy) == ("mend", f"rm {lock}")
    assert "waits for it" in finding.seen
    # While a compiler is at work the lock is its own, unless it is very old.
    compiler = type("Compiler", (), {"info": {"name": "ninja"}})()
    monkeypatch.setattr(psutil, "process_iter", lambda fields: [compiler])
    assert [finding.status for finding in local.stale_locks(tmp_path)] == ["note"]
    old = time.time() - 3_600
    os.utime(lock, (old, old))
    assert [finding.status for finding in local.stale_locks(tmp_path)] == ["mend"]


def test_folders_and_disks(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.status for finding in local.paths(load_config(config_file))} == {"ok"}
    usage = type("Usage", (), {"free": 1_000})()
    monkeypatch.setattr(local.shutil, "disk_usage", lambda path: usage)
    finding = list(local.paths(load_config(config_file)))[-1]
    assert (finding.status, finding.subject) == ("mend", "run folder")
    assert "checkpoint.keep_last" in finding.remedy


def test_a_damaged_data_set_is_named(config_file: Path, dataset: Path, tmp_path: Path) -> None:
    assert [finding.status for finding in local.data(load_config(config_file), full=True)] == ["ok"]
    shutil.copytree(dataset, tmp_path / "copy")
    part = sorted((tmp_path / "copy").glob("*_train_*.bin"))[0]
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    config = load_config(config_file, [f"data.path={tmp_path / 'copy'}"])
    (finding,) = local.data(config, full=True)
    assert finding.status == "mend"
    assert part.name in finding.seen
    missing = load_config(config_file, [f"data.path={tmp_path / 'absent'}"])
    assert next(iter(local.data(missing, full=False))).seen.startswith(f"{tmp_path / 'absent'}: no such data set")


def ask_together(rank: int, world_size: int) -> list[Finding]:
    healthy = [together.ranks(), together.versions_agree(), together.clocks()]
    healthy += together.bandwidth(torch.device("cpu"), 999 * world_size)
    real = time.time
    if rank == 1:
        together.time.time = lambda: real() + 100.0
    skewed = together.clocks()
    together.time.time = real
    if rank == 1:
        together.torch.__version__ = "0.0"
    return [*healthy, skewed, together.versions_agree()]


def test_ranks_together() -> None:
    *healthy, skewed, versions = run_on_ranks(3, ask_together)[0]
    assert [finding.status for finding in healthy[:3]] == ["ok"] * 3
    assert {finding.subject for finding in healthy} == {
        "ranks",
        "versions",
        "clocks",
        "all-reduce",
        "all-gather",
        "all-to-all",
    }
    # A slow rank is a note on a busy machine; wrong sums would be "mend".
    assert "mend" not in {finding.status for finding in healthy}
    assert all("right; " in finding.seen for finding in healthy[3:])
    assert skewed.status == "mend"
    assert "rank 1 most" in skewed.seen
    assert versions.status == "mend"


def wrong_sums(rank: int, world_size: int) -> list[Finding]:
    import torch.distributed as dist

    real = dist.all_reduce

    def corrupting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = real(tensor, *arguments, **keywords)
        if rank == 1:
            tensor[-1] += 1
        return result

    together.dist.all_reduce = corrupting
    return list(together.bandwidth(torch.device("cpu"), 100 * world_size))


def test_wrong_sums_are_found() -> None:
    findings = run_on_ranks(2, wrong_sums)[0]
    assert findings[0] == Finding(
        "mend", "all-reduce", "gives wrong sums on ranks [1]", "this hardware or network corrupts data"
    )


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert local.computes(device, 64) == Finding("ok", "cpu", "a product of 64 x 64 is exact")
    product = torch.Tensor.__matmul__

    def one_bit_off(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = product(left, right)
        result[3, 5] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", one_bit_off)
    assert local.computes(device, 64).seen == "1 of 4,096 entries are wrong"


def test_devices_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    first = next(local.accelerator(expected=8))
    assert (first.status, first.seen) == ("mend", "0 devices, expected 8")
    # A build of torch for the CPU has none to miss.
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [finding.status for finding in local.accelerator(expected=8)] == ["ok"]


def test_the_command(config_file: Path) -> None:
    command = [sys.executable, "launch/doctor.py", "--config", str(config_file), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"torch", "accelerator", "build locks", "run folder", "data set", "tokenizer"} <= {
        f["subject"] for f in findings
    }
    command[-1] = "data.path=/nowhere"
    broken = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert broken.returncode == 1
    assert "MEND  data set               /nowhere: no such data set" in broken.stdout
