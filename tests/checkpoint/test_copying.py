"""Copies through fsspec: to memory and back, resumed, refused, and told; no network."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mars_ds.checkpoint import CheckpointReader
from mars_ds.checkpoint.command import main
from mars_ds.checkpoint.layout import MARKER
from mars_ds.checkpoint.uploads import Uploads
from mars_ds.errors import CheckpointError, ConfigError
from tests.checkpoint.test_format import write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 7 and, with the same content under another name, 3 (uncommitted 9)."""
    write(tmp_path / "run" / "checkpoints" / "step_00000007")
    shutil.copytree(
        tmp_path / "run" / "checkpoints" / "step_00000007", tmp_path / "run" / "checkpoints" / "step_00000009"
    )
    (tmp_path / "run" / "checkpoints" / "step_00000009" / MARKER).unlink()
    return tmp_path / "run"


@pytest.fixture
def bucket(tmp_path: Path) -> Any:
    """A folder in fsspec's memory."""
    files = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    if files.exists(f"/{tmp_path.name}"):
        files.rm(f"/{tmp_path.name}", recursive=True)


def test_there_and_back(run: Path, bucket: str, tmp_path: Path) -> None:
    lines: list[str] = []
    assert main(["copy", str(run), bucket, "--all"], lines.append) == 0
    assert sum("copied and read back" in line for line in lines) == 3
    assert lines[-1] == f"{bucket}/step_00000007: committed"
    assert main(["copy", bucket, str(tmp_path / "back")], lines.append) == 0
    for name in ("index.json", MARKER, "rank_00002.safetensors"):
        assert (tmp_path / "back" / "step_00000007" / name).read_bytes() == (
            run / "checkpoints" / "step_00000007" / name
        ).read_bytes()
    assert CheckpointReader(tmp_path / "back" / "step_00000007", verify=True).step == 7
    lines.clear()
    assert main(["copy", str(run / "checkpoints" / "step_00000007"), f"file://{tmp_path}/back"], lines.append) == 0
    assert sum("there already, equal" in line for line in lines) == 3


def test_an_interrupted_copy_goes_on(run: Path, bucket: str) -> None:
    files, lines = fsspec.filesystem("memory"), []
    main(["copy", str(run), bucket], lines.append)
    there = f"/{bucket.removeprefix('memory://')}/step_00000007"
    files.rm_file(f"{there}/{MARKER}")
    files.rm_file(f"{there}/rank_00002.safetensors")
    # Of the right length, with other content.
    files.pipe_file(f"{there}/rank_00001.safetensors", b"x" * files.info(f"{there}/rank_00001.safetensors")["size"])
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        main(["copy", bucket, "nowhere"])
    lines.clear()
    main(["copy", str(run), bucket], lines.append)
    assert [line.split("/")[-1].split(":")[0] for line in lines if "equal" in line] == ["rank_00000.safetensors"]
    assert sum("copied and read back" in line for line in lines) == 2


def test_damage_is_not_copied(run: Path, bucket: str) -> None:
    data = run / "checkpoints" / "step_00000007" / "rank_00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors: damaged .* no marker was set"):
        main(["copy", str(run), bucket])
    assert not fsspec.filesystem("memory").exists(f"{bucket}/step_00000007/{MARKER}")
    index = run / "checkpoints" / "step_00000007" / "index.json"
    index.write_text(index.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"index\.json does not fit COMPLETE"):
        main(["copy", str(run), bucket])


def test_another_checkpoint_of_the_step_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "other" / "step_00000007", cuts=(2,))
    with pytest.raises(CheckpointError, match="holds another checkpoint of this step"):
        main(["copy", str(run), str(tmp_path / "other")])
    assert main(["copy", str(run), str(tmp_path / "other"), "--replace"], lambda line: None) == 0
    assert len(CheckpointReader(tmp_path / "other" / "step_00000007", verify=True).index["files"]) == 3


def test_a_file_system_that_lies_is_found_out(run: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mars_ds.checkpoint import copying

    monkeypatch.setattr(copying.Place, "sha256", lambda self: "0" * 64)
    with pytest.raises(CheckpointError, match="read back is not what was written; no marker was set"):
        main(["copy", str(run), bucket])


def test_what_cannot_be_reached_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no file system for floppy://; expected a path, or a URL"):
        main(["copy", str(run), "floppy://a"])
    with pytest.raises(ConfigError, match=r"is a run; its checkpoints lie in .*/run/checkpoints"):
        main(["copy", str(run), str(run)])
    with pytest.raises(CheckpointError, match="expected a checkpoint, a folder of checkpoints"):
        main(["copy", str(run / "nothing"), "memory://a"])

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"s3:// needs a package that is missing: pip install s3fs"):
        main(["copy", "s3://bucket/run", str(run)])


def test_list_and_verify(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_00000007\n")
    lines: list[str] = []
    assert main(["list", str(run)], lines.append) == 0
    assert lines[0].startswith("step_00000007") and lines[0].endswith("healthy, latest")
    assert "no COMPLETE marker" in lines[1]
    lines.clear()
    assert main(["verify", str(run / "checkpoints" / "step_00000007")], lines.append) == 0
    assert lines == ["step_00000007  intact, 3 files hashed"]
    assert main(["verify", str(run)], lines.append) == 1
    data = run / "checkpoints" / "step_00000007" / "rank_00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    lines.clear()
    assert main(["verify", str(run)], lines.append) == 1
    assert "rank_00001.safetensors: damaged" in lines[0]


def test_background_copies_fail_without_a_word_too_many(
    run: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mars_ds.checkpoint import uploads as module

    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    good, bad = run / "checkpoints" / "step_00000007", run / "checkpoints" / "step_00000009"
    uploads = Uploads(bucket)
    uploads.add(bad)
    uploads.add(good)
    missing = uploads.wait(20.0)
    assert len(missing) == 1
    assert f"step_00000009 is not at {bucket}: CheckpointError" in missing[0]
    news = uploads.news()
    assert "could not be copied" in news[0] and news[1].startswith(f"copied step_00000007 to {bucket}")
    assert uploads.busy == set()
    # A destination that hangs: older ones in the queue give way, and nobody waits longer than said.
    monkeypatch.setattr(module, "copy_checkpoint", lambda *arguments, **options: time.sleep(3.0))
    for number in range(7):
        uploads.add(Path(f"step_{number:08d}"))
        time.sleep(0.02)
    started = time.monotonic()
    missing = uploads.wait(0.1)
    assert time.monotonic() - started < 2.0
    assert sum("slower than the saves" in line for line in missing) == 2
    assert sum("not done after" in line for line in missing) == 5
    uploads.close()


def test_the_command_line(run: Path) -> None:
    command = [sys.executable, "launch/checkpoints.py", "verify", str(run / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "no checkpoint; expected" in done.stderr
