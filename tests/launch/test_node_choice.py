"""Which nodes of an allocation a job uses: launch/slurm/job.sh asked directly, with a Slurm that only names nodes."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def choose(tmp_path: Path, nodes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `choose_nodes` in an allocation of n1 to nN; prints the chosen ones, or `too few`."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nseq -f n%g {nodes}\n")
    scontrol.chmod(0o755)
    script = 'source launch/slurm/job.sh; choose_nodes && echo "${NODES[*]}" || echo "too few"'
    slurm = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "any"}
    variables = {**os.environ, **slurm, **environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-uc", script], cwd=REPOSITORY, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("nodes", "environment", "chosen"),
    [
        (3, {}, "n1 n2 n3"),
        (3, {"SPARE_NODES": "1"}, "n1 n2"),
        (3, {"NODE_COUNTS": "1 2 4"}, "n1 n2"),
        (4, {"NODE_COUNTS": "4 2 1"}, "n1 n2 n3 n4"),
        (5, {"NODE_COUNTS": "1 2 4", "SPARE_NODES": "2"}, "n1 n2"),
        (3, {"NODE_COUNTS": "4 8"}, "too few"),
    ],
)
def test_which_nodes(tmp_path: Path, nodes: int, environment: dict[str, str], chosen: str) -> None:
    assert choose(tmp_path, nodes, **environment).stdout.strip() == chosen


def test_spares_that_leave_nothing(tmp_path: Path) -> None:
    refused = choose(tmp_path, 2, SPARE_NODES="2")
    assert refused.returncode == 2
    assert "SPARE_NODES: 2 of 2 nodes leaves none" in refused.stderr


@pytest.mark.parametrize(
    ("folder", "refused"), [("data", False), ("configs/reproduction", False), (".", True), ("database", True)]
)
def test_relative_folders_that_a_container_does_not_have(tmp_path: Path, folder: str, refused: bool) -> None:
    slurm = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_ID": "7", "IMAGE": "any.sqsh"}
    command = ["bash", "-uc", f"source launch/slurm/job.sh; see_in_container {folder}"]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **slurm}, capture_output=True, text=True)
    assert (done.returncode == 2) == refused, done.stderr
