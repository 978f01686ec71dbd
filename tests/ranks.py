"""Runs a function on several gloo ranks and returns what each rank returned."""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Spawns `world_size` processes that call `function(rank, world_size, *arguments)` in one gloo group.

    `function` must be importable (module level). A rank that raises fails the caller with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (world_size, folder, function, arguments), nprocs=world_size, join=True)
        results = [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]
    for rank, (ok, value) in enumerate(results):
        assert ok, f"rank {rank}:\n{value}"
    return [value for _, value in results]


def _enter(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        result = (True, function(rank, world_size, *arguments))
    except Exception:
        result = (False, traceback.format_exc())
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if not result[0]:
        # The others may wait for this rank in a collective; only its end frees them.
        raise SystemExit(result[1])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # The outcome is on disk. As in launch/pretrain.py: threads of the communication libraries sometimes abort the
    # interpreter's own shutdown, which would fail a test that has passed.
    os._exit(0)
