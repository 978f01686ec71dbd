"""The checkpoint folder as a format: ranges, damage, other models; no engine."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mars_ds.checkpoint import CheckpointReader, newest_checkpoint
from mars_ds.checkpoint.layout import MARKER, Slice, sha256_of
from mars_ds.checkpoint.retention import prune
from mars_ds.errors import CheckpointError

VALUES = torch.arange(15.0)


def write(folder: Path, cuts: tuple[int, ...] = (4, 11)) -> Path:
    """A (3, 5) parameter in pieces, one file each, committed by hand."""
    folder.mkdir(parents=True)
    slices, files = [], {}
    bounds = (0, *cuts, 15)
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        entry = Slice("w", "master", start, stop - start, "float32", f"rank_{rank:05d}.safetensors")
        save_file({entry.key: VALUES[start:stop].clone()}, folder / entry.file)
        files[entry.file] = {
            "sha256": sha256_of(folder / entry.file),
            "bytes": (folder / entry.file).stat().st_size,
        }
        slices.append(entry.to_json())
    index = {
        "version": 1,
        "step": 7,
        "shapes": {"w": [3, 5]},
        "module_shapes": {},
        "files": files,
        "slices": slices,
    }
    (folder / "index.json").write_text(json.dumps(index))
    (folder / MARKER).write_text(sha256_of(folder / "index.json") + "\n")
    return folder


@pytest.mark.parametrize("cuts", [(), (4, 11), (1, 2, 3), (14,)])
def test_any_range_is_read_from_any_cut(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    reader = CheckpointReader(write(tmp_path / "c", cuts))
    for start in range(15):
        for stop in range(start + 1, 16):
            assert torch.equal(reader.read("w", "master", start, stop - start), VALUES[start:stop])
    assert torch.equal(reader.model_state()["w"], VALUES.view(3, 5))


def test_what_is_not_stored_is_named(tmp_path: Path) -> None:
    reader = CheckpointReader(write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"last_grad of w lacks elements 0\.\.3"):
        reader.read("w", "last_grad", 0, 3)


def test_damage_is_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    data = bytearray((folder / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "rank_00001.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors: damaged"):
        CheckpointReader(folder, verify=True)
    (folder / "rank_00001.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="missing or not"):
        CheckpointReader(folder)


def test_an_uncommitted_or_edited_folder_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000003" / MARKER).unlink()
    index = tmp_path / "step_00000002" / "index.json"
    index.write_text(index.read_text().replace('"step": 7', '"step": 8'))
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    with pytest.raises(CheckpointError, match="no COMPLETE marker"):
        CheckpointReader(tmp_path / "step_00000003")


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000004" / MARKER).unlink()
    removed = prune(tmp_path, keep_last=2, newest=tmp_path / "step_00000003")
    assert [p.name for p in removed] == ["step_00000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]
