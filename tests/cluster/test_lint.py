"""Linters over every shell script and the Dockerfile."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shell_scripts() -> list[str]:
    """Scripts of the checkout, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(
        name for name in listed if (name.endswith((".sh", ".sbatch")) or name == ".ci/run") and (ROOT / name).is_file()
    )


def linter(name: str) -> str:
    """Path of a linter; the test skips where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_shell_scripts() -> None:
    """shellcheck, with sourced files followed; a sourced file without a first line is bash."""
    scripts = shell_scripts()
    assert {".ci/run", "docker/entry.sh", "launch/quickstart.sh"} <= set(scripts)
    # SC2015: in `A && B || fail` the last is meant for a failure of either.
    command = [linter("shellcheck"), "--shell=bash", "--external-sources", "--exclude=SC2015", *scripts]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_dockerfile() -> None:
    """hadolint; the rules that are ignored are named in the Dockerfile, where they apply."""
    result = subprocess.run([linter("hadolint"), "docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
