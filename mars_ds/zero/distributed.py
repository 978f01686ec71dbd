"""Joins the process group, whichever launcher started this process."""

import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mars_ds.errors import LaunchError

# A NCCL or gloo wait longer than this is a dead rank, not a slow one.
TIMEOUT = timedelta(minutes=30)
SHUT_DOWN_SECONDS = 10.0
# PyTorch's flight recorder keeps the last collectives of each rank and writes them out when one times out.
FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
# Where it writes; the rank is appended.
FLIGHT_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def launch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for any launcher.

    `deepspeed` and `torchrun` set them. `srun` sets SLURM_PROCID and friends; the master is then the
    first node of the step. Without a launcher this is one process.

    Args:
        environ: Usually `os.environ`.

    Raises:
        LaunchError: Only some of the variables are set.
    """
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = {key: environ[key] for key in keys if key in environ}
    if len(present) == len(keys):
        return present
    tasks = int(environ.get("SLURM_NTASKS", "1"))
    # An interactive shell inside an allocation has SLURM_NTASKS but is no step of srun.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and "RANK" not in environ:
        return {
            "RANK": environ["SLURM_PROCID"],
            "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
            "WORLD_SIZE": str(tasks),
            "MASTER_ADDR": environ.get("MASTER_ADDR", _first_slurm_node(environ)),
            "MASTER_PORT": environ.get("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000)),
        }
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(key for key in keys if key not in environ)
        raise LaunchError(f"launch environment: {missing} not set; use deepspeed, torchrun, srun or plain python")
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _first_slurm_node(environ: Mapping[str, str]) -> str:
    """First host of SLURM_STEP_NODELIST, e.g. `node[003-007,9]` -> `node003`."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[([0-9]+))?", nodes)
    return (match.group(1) + (match.group(2) or "")) if match else "127.0.0.1"


def join(flight_folder: Path | None = None, deepspeed_log: bool = False) -> None:
    """Initializes torch's and DeepSpeed's process group from the launch environment; idempotent.

    Args:
        flight_folder: Where NCCL's flight recorder dumps the last collectives of each rank when one times out; None
            leaves torch's own choice. Variables that the user has set are left as they are.
        deepspeed_log: Show DeepSpeed's own log lines.

    Raises:
        LaunchError: An accelerator is present that torch cannot use, or the environment is incomplete.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Its progress messages would drown ours; warnings about what we do on purpose (a client optimizer) too.
    deepspeed.utils.logger.setLevel(logging.INFO if deepspeed_log else logging.ERROR)
    # Building this optional CPU op needs a compiler, and a build that is killed leaves a lock on which every later
    # start waits for ever. gloo alone gives the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if dist.is_initialized():
        deepspeed.init_distributed(verbose=False)
        return
    environment = launch_environment(os.environ)
    os.environ.update(environment)
    accelerator = get_accelerator()
    on_gpu = accelerator.device_name() != "cpu"
    _switch_on_flight_recorder(flight_folder)
    if on_gpu:
        accelerator.set_device(int(environment["LOCAL_RANK"]))
    else:
        refuse_unusable_gpu()
        share_cores(environment)
    backend = accelerator.communication_backend_name() if on_gpu else "gloo"
    if environment["WORLD_SIZE"] == "1" and environment["MASTER_PORT"] == "0":
        # Nobody to agree with on a port: a store in memory cannot collide with another run.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    deepspeed.init_distributed(verbose=False)


def share_cores(environment: Mapping[str, str]) -> None:
    """Divides this machine's cores between its ranks; more threads than cores wait on each other.

    OMP_NUM_THREADS wins, but for torchrun's: it sets 1 where the user has said nothing.
    """
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or environment["WORLD_SIZE"]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(local_ranks)))


def refuse_unusable_gpu() -> None:
    """Raises `LaunchError` where an NVIDIA device exists that torch cannot use."""
    if torch.cuda.is_available() or not os.path.exists("/proc/driver/nvidia/version"):
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES", None) == "":
        return
    raise LaunchError(
        f"an NVIDIA driver is loaded but torch {torch.__version__} cannot use it; install a CUDA build "
        "(pip install torch==2.13.0), or set CUDA_VISIBLE_DEVICES= to train on the CPU on purpose"
    )


def _switch_on_flight_recorder(folder: Path | None) -> None:
    """Must happen before the process group is made."""
    for variable, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(variable, value)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for variable in FLIGHT_FILE_VARIABLES:
            os.environ.setdefault(variable, str(folder / "flight_rank_"))


def leave(code: int) -> NoReturn:
    """Ends this process once everything is written: threads of the communication libraries can abort the
    interpreter's own shutdown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def shut_down() -> None:
    """Leaves the process group, if there is one, in bounded time: with a dead rank the leaving itself may hang."""
    if not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(SHUT_DOWN_SECONDS)
