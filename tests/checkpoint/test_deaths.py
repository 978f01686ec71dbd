"""A writer that dies at every sync, rename, unlink and write: what is left is the old or the new checkpoint, whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_ds.checkpoint import CheckpointReader

REPOSITORY = Path(__file__).parents[2]

# Each death is a fork of one process that has the imports behind it. The arguments: folder, scenario.
KILLER = """
import builtins, json, os, shutil, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

from mars_ds.checkpoint import CheckpointReader, find_checkpoints
from mars_ds.checkpoint.saver import Retention, Saver
from mars_ds.errors import CheckpointError
import mars_ds.checkpoint.rank_file as rank_file

base, scenario = Path(sys.argv[1]), sys.argv[2]
rank_file._CHUNK_BYTES = 64
torch.set_num_threads(1)


def state(step, version):
    for name, start in (("a", 0), ("a", 20), ("b", 0)):
        yield "master", name, start, torch.arange(20.0) + 100 * step + 1000 * version + start
    yield "rng", "cpu", 0, torch.arange(9, dtype=torch.uint8)


def save(root, script):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver(root, Retention(2), asynchronous=True)
    for step, version in script:
        saver.begin(step, state(step, version), {"shapes": {}, "module_shapes": {}, "version_of_test": version})
        saved = saver.wait(60)
        assert saved.problem is None, saved.problem


def counted(function, countdown):
    def call(*arguments, **options):
        countdown[0] -= 1
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call


def in_a_child(action):
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(child, 0)[1]


def facts(root):
    committed = {}
    for path in find_checkpoints(root):
        reader = CheckpointReader(path, verify=True)
        version = reader.index["version_of_test"]
        for _, name, start, values in list(state(reader.step, version))[:3]:
            assert torch.equal(reader.read(name, "master", start, 20), values), path
        committed[reader.step] = version
    latest = root / "latest"
    return {
        "committed": committed,
        "latest": int(latest.read_text().strip().removeprefix("step_")) if latest.exists() else None,
    }


first, second = ([(1, 0), (2, 0)], [(3, 1)]) if scenario == "next" else ([(1, 0), (2, 0)], [(2, 1)])
assert in_a_child(lambda: save(base / "start", first)) == 0
deaths = []
for number in range(1, 200):
    root = base / str(number)
    shutil.copytree(base / "start", root)

    def dying():
        countdown = [number]
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, counted(getattr(os, name), countdown))
        write = rank_file.hashlib.sha256
        rank_file._bytes_of = counted(rank_file._bytes_of, countdown)
        save(root, second)

    status = in_a_child(dying)
    after = facts(root)
    again = in_a_child(lambda: save(root, [(4, 2)]))
    deaths.append({"status": status, "after": after, "again": again, "end": facts(root),
                   "left": sorted(path.name for path in root.iterdir())})
    if status == 0:
        break
print(json.dumps(deaths))
"""


def deaths(folder: Path, scenario: str) -> list[dict[str, Any]]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), scenario], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scenario", ["next", "again"])
def test_every_death_leaves_the_old_or_the_new_one_whole(tmp_path: Path, scenario: str) -> None:
    found = deaths(tmp_path / "deaths", scenario)
    assert found[-1]["status"] == 0
    assert len(found) > 15, len(found)
    states = []
    for number, death in enumerate(found):
        assert death["status"] == (0 if number == len(found) - 1 else 9), number
        committed = {int(step): version for step, version in death["after"]["committed"].items()}
        # Step 2 is there in one version or the other until something newer is.
        if scenario == "next":
            assert committed.get(2) == 0, (number, death)
            # `latest` never runs ahead of what is committed, and is behind for one moment at most.
            assert death["after"]["latest"] in ((2, 3) if 3 in committed else (2,)), (number, death)
        else:
            assert committed.get(2) in (0, 1), (number, death)
            assert death["after"]["latest"] == 2
            assert 1 in committed
        states.append(tuple(sorted(committed.items())))
        # The next life cleans up and goes on.
        assert death["again"] == 0
        assert set(death["end"]["committed"]) >= {"4"}
        assert len(death["end"]["committed"]) == 2
        assert death["end"]["latest"] == 4
        assert [name for name in death["left"] if name.startswith(".") and not name.endswith(".tmp")] == [], death
    assert len(set(states)) >= (3 if scenario == "next" else 2)


RANK_KILLER = """
import os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

import mars_ds.checkpoint.writer as writer
from mars_ds.checkpoint import find_checkpoints
from mars_ds.checkpoint.saver import Retention, Saver

root = Path(sys.argv[1])
rank = int(os.fork() == 0)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
saver = Saver(root, Retention(2))
for step in (1, 2):
    if (rank, step) == (1, 2):
        writer.write_rank_file = lambda path, pieces: os.kill(os.getpid(), signal.SIGKILL)
    values = torch.full((1000,), float(step))
    saver.begin(step, [("master", "w", 1000 * rank, values)], {"shapes": {}, "module_shapes": {}})
    values.fill_(-1.0)  # training goes on: the copy is what counts
    started = time.monotonic()
    saved = saver.wait(60)
    if step == 1:
        dist.barrier()
print(f"{time.monotonic() - started:.1f}", bool(saved.problem), [p.name for p in find_checkpoints(root)], flush=True)
os._exit(0)
"""


def test_a_rank_that_dies_in_a_save_frees_the_others_and_commits_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK_KILLER, str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )
    seconds, rest = done.stdout.strip().split(" ", 1)
    assert rest == "True ['step_00000001']", done.stderr
    assert float(seconds) < 20
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    reader = CheckpointReader(tmp_path / "step_00000001", verify=True)
    assert torch.equal(reader.read("w", "master", 0, 2000), torch.ones(2000))
