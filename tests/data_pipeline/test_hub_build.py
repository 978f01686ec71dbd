"""``prepare`` from a hub that has bad moments: the same data set as from the files themselves."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.build import Execution, prepare
from data_pipeline.errors import DataError
from data_pipeline.plan import BuildOptions
from data_pipeline.verify import verify
from tests.data_pipeline import hub_standin
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.hub_standin import StandIn
from tests.data_pipeline.test_build import content

REPOSITORY = Path(__file__).parents[2]
REPO_ID = "HuggingFaceFW/fineweb-edu"
OPTIONS = BuildOptions(name="fineweb", val_fraction=0.1, part_tokens=5_000)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Three parquet files of four row groups, as the hub has them and in a folder."""
    made = {}
    for number in range(3):
        path = tmp_path / "here" / f"sample/10BT/{number:03d}_00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        documents = make_documents(100, seed=number)
        pq.write_table(pa.table({"text": documents, "id": [str(n) for n in range(100)]}), path, row_group_size=25)
        made[f"sample/10BT/{path.name}"] = path.read_bytes()
    return made


def good(handler: hub_standin.Handler, rest: bytes) -> bool:
    """No fault."""
    return False


def command(hub: StandIn, output: Path, *more: str) -> "subprocess.Popen[str]":
    arguments = ["prepare", "--source", "fineweb-edu-10b", "--output", str(output), "--tokenizer", "bytes"]
    arguments += ["--val-fraction", "0.1", "--part-tokens", "5000", *more]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token"}
    return subprocess.Popen(
        [sys.executable, "-m", "data_pipeline", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("delete", [False, True])
def test_the_hub_gives_the_same_data_set_as_the_files(tmp_path: Path, files: dict[str, bytes], delete: bool) -> None:
    expected = prepare(
        [str(tmp_path / "here")],
        tmp_path / "expected",
        tokenizer="bytes",
        options=OPTIONS,
        workers=1,
        log=io.StringIO(),
    )
    with hub_standin.running() as hub:
        hub.add(REPO_ID, files)
        hub.api_faults = [hub_standin.status(500), hub_standin.status(429, Retry_After="0")]
        # Three footers first, then the files.
        hub.faults = [hub_standin.status(503), hub_standin.cut_after(1_000), good, good, good]
        hub.faults += [hub_standin.status(500), hub_standin.cut_after(1_000), hub_standin.wrong_bytes, good]
        process = command(hub, tmp_path / "out", "--workers", "2", *(["--delete-downloads"] if delete else []))
        output, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "3 files" in stderr
    assert hub.faults == []
    assert f"identity   {expected.manifest_sha256}" in output
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert (tmp_path / "out" / "fineweb_train_000000.bin").exists()
    assert (tmp_path / "out" / "fineweb_val_000000.bin").exists()
    assert verify(tmp_path / "out")[1] == []
    kept = [path.name for path in (tmp_path / "out-downloads").rglob("*.parquet")]
    assert sorted(kept) == ([] if delete else [Path(name).name for name in files])


def test_a_hub_that_gives_other_bytes_stops_the_build(tmp_path: Path, files: dict[str, bytes]) -> None:
    with hub_standin.running() as hub:
        hub.add(REPO_ID, files)
        hub.faults = [hub_standin.wrong_bytes] * 100  # the footer is at the other end
        process = command(hub, tmp_path / "out", "--workers", "1")
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "never right" in stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_footer_that_was_a_lie_is_found(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from data_pipeline import sources
    from data_pipeline.hub import fetch

    other = io.BytesIO()
    pq.write_table(pa.table({"text": make_documents(75)}), other, row_group_size=25)  # three groups instead of four
    metadata = pq.read_metadata(pa.BufferReader(other.getvalue()))
    found = sources.find_sources([str(tmp_path / "here")], "text")
    remote = [
        sources.RemoteFile(REPO_ID, "0" * 40, file.name, file.size_bytes, sources.hash_file(file.path).sha256)
        for file in found
    ]
    monkeypatch.setattr(sources, "is_hub_spec", lambda spec: True)
    monkeypatch.setattr(sources, "list_files", lambda spec: remote)
    monkeypatch.setattr(sources, "read_footer", lambda file: metadata)
    here = {file.name: file.path for file in found}
    monkeypatch.setattr(fetch, "download", lambda file, *_, **__: (here[file.path], sources.hash_file(here[file.path])))
    with pytest.raises(DataError, match="has 4 row groups, the plan was made for 3"):
        prepare(
            ["fineweb-edu-10b"],
            tmp_path / "out",
            tokenizer="bytes",
            options=OPTIONS,
            workers=1,
            execution=Execution(download_dir=tmp_path / "raw"),
            log=io.StringIO(),
        )
