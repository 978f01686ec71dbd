"""The literal commands: deepspeed, torchrun, srun's variables, plain python; a failure ends all ranks."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = f"{BIN}{os.pathsep}{clean['PATH']}"
    return subprocess.run(
        command, cwd=ROOT, env={**clean, "PATH": path, **environment}, capture_output=True, text=True, timeout=180
    )


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "29611"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "29612"],
    "python": ["python"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_under_each_launcher(launcher: str, config_file: Path) -> None:
    done = launch([*LAUNCHERS[launcher], "launch/pretrain.py", "--config", str(config_file), "schedule.steps=2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 steps" in done.stdout
    ranks = 1 if launcher == "python" else 2
    assert f"over {ranks} rank" in done.stdout
    assert done.stdout.count("done: 2 steps") == 1
    run = config_file.parent / "runs" / "tiny"
    assert (run / "report.md").is_file()
    assert (run / "loss.png").is_file()
    assert len(list((run / "checkpoints" / "step_00000002").glob("rank_*.safetensors"))) == ranks
    # The printed command is the one that continues this run under this launcher.
    assert f"{launcher} " in done.stdout.split("continue   ")[1]


def test_two_tasks_of_srun(config_file: Path) -> None:
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "9613",
        "SLURM_STEP_NODELIST": "localhost",
    }
    command = ["python", "launch/pretrain.py", "--config", str(config_file), "schedule.steps=2"]
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(launch, command, **slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
        first, second = (task.result() for task in tasks)
    assert first.returncode == 0, first.stdout + first.stderr
    assert second.returncode == 0, second.stdout + second.stderr
    assert "done: 2 steps" in first.stdout
    assert "over 2 ranks" in first.stdout
    assert "srun python launch/pretrain.py" in first.stdout
    assert "done" not in second.stdout


def test_a_mistake_ends_the_whole_launch_within_seconds(config_file: Path) -> None:
    started = time.monotonic()
    done = launch([*LAUNCHERS["deepspeed"], "launch/pretrain.py", "--config", str(config_file), "data.path=nowhere"])
    assert done.returncode != 0
    assert done.stderr.count("error: nowhere") == 1
    assert time.monotonic() - started < 60


def test_the_literal_command_plans_and_names_the_missing_data() -> None:
    done = launch(["deepspeed", "launch/pretrain.py", "--config", "configs/xl_mars_m.yaml"])
    if (ROOT / "data" / "fineweb_edu_100b").exists():
        pytest.skip("this checkout has the data set, so the command would train XL here")
    assert done.returncode != 0
    assert "python -m data_pipeline prepare" in done.stderr
    done = launch(
        ["python", "launch/pretrain.py", "--config", "configs/xl_mars_m.yaml", "--plan", "--world-size", "64"]
    )
    assert done.returncode == 0
    assert "1,556,840,000 parameters" in done.stdout
    assert "512 sequences = 8 micro-batch x 1 accumulation x 64 ranks" in done.stdout


def test_environment_of_each_launcher() -> None:
    from mars_ds.errors import LaunchError
    from mars_ds.zero.distributed import launch_environment

    assert launch_environment({})["WORLD_SIZE"] == "1"
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "20123",
        "SLURM_STEP_NODELIST": "node[007-008,12]",
    }
    assert launch_environment(slurm) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node007",
        "MASTER_PORT": "20123",
    }
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        launch_environment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


def test_a_gpu_that_torch_cannot_use_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mars_ds.errors import LaunchError
    from mars_ds.zero.distributed import refuse_unusable_gpu

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.path.exists", lambda path: path == "/proc/driver/nvidia/version")
    with pytest.raises(LaunchError, match=r"an NVIDIA driver is loaded but torch .* cannot use it"):
        refuse_unusable_gpu()
    # On the CPU on purpose.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_unusable_gpu()
