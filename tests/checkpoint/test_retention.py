"""What is kept: the last ones, permanent ones, and the last healthy one whatever came after it."""

import json
import shutil
from pathlib import Path

import pytest

from mars_ds.checkpoint.layout import INDEX, MARKER, sha256_of
from mars_ds.checkpoint.retention import prune
from tests.checkpoint.test_format import write


def folder(root: Path, step: int, healthy: bool | None = True) -> Path:
    path = write(root / f"step_{step:08d}", cuts=())
    index = json.loads((path / INDEX).read_text())
    if healthy is not None:
        index["healthy"] = healthy
    (path / INDEX).write_text(json.dumps(index))
    (path / MARKER).write_text(sha256_of(path / INDEX) + "\n")
    return path


def left(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


def test_the_last_healthy_one_is_pinned(tmp_path: Path) -> None:
    for step in range(1, 9):
        newest = folder(tmp_path, step, healthy=step <= 3)
        prune(tmp_path, 2, newest)
    assert left(tmp_path) == [3, 7, 8]
    prune(tmp_path, 2, folder(tmp_path, 9))
    assert left(tmp_path) == [8, 9]


def test_a_damaged_one_is_no_healthy_one(tmp_path: Path) -> None:
    for step in (1, 2):
        folder(tmp_path, step)
    (tmp_path / "step_00000002" / "rank_00000.safetensors").unlink()
    prune(tmp_path, 1, folder(tmp_path, 3, healthy=False))
    assert left(tmp_path) == [1, 3]


def test_permanent_ones_and_those_without_a_word(tmp_path: Path) -> None:
    for step in range(2, 22, 2):
        newest = folder(tmp_path, step, healthy=None)
    assert len(prune(tmp_path, 2, newest, keep_every_steps=8)) == 6
    assert left(tmp_path) == [8, 16, 18, 20]


def test_what_is_copied_now_stays_and_what_was_half_deleted_goes(tmp_path: Path) -> None:
    for step in range(1, 6):
        newest = folder(tmp_path, step)
    (tmp_path / "step_00000002" / MARKER).unlink()
    prune(tmp_path, 1, newest, busy={tmp_path / "step_00000003"})
    assert left(tmp_path) == [3, 5]


def test_an_error_in_deleting_is_told_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 4):
        newest = folder(tmp_path, step)

    def refused(path: Path) -> None:
        raise PermissionError(f"not {path.name}")

    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        assert prune(tmp_path, 1, newest, tell=told.append) == []
    assert len(told) == 2
    assert "step_00000001: could not be deleted (not step_00000001)" in told[0]
    # The marker was gone first; the next time the rest goes.
    assert not (tmp_path / "step_00000001" / MARKER).exists()
    prune(tmp_path, 1, newest)
    assert left(tmp_path) == [3]
