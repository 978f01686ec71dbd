"""The builders that the benchmark compares write the same tokens, so that their speeds may be compared."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.data_loader import drop_pages, make_data, measured, nanogpt_way, our_way
from benchmarks.data_peers.builders import jsonl_lines
from benchmarks.data_peers.fineweb_like import write_fineweb_like

BUILDERS = Path(__file__).parents[2] / "benchmarks" / "data_peers" / "builders.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of a megabyte like FineWeb's, from a corpus of half that size."""
    path: Path = tmp_path_factory.mktemp("text") / "text.parquet"
    words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)} and others" for i in range(200)]
    pieces = [" ".join(words[at:] + words[:at]) for at in range(0, 200, 10)]
    lines = [json.dumps({"text": piece}) for piece in pieces]
    path.with_suffix(".corpus.jsonl").write_text("\n".join(lines))
    report = write_fineweb_like(path, 0.1)
    assert report.text_bytes >= 100_000 and 0.1 < report.rewritten_share < 0.9
    assert pq.ParquetFile(path).metadata.num_rows == report.documents
    path.with_suffix(".jsonl").write_text("".join(jsonl_lines(path)))
    return path


def run(builder: str, source: Path, directory: Path) -> dict[str, object]:
    for name in ("output", "scratch"):
        (directory / name).mkdir()
    command = [sys.executable, str(BUILDERS), builder, "--source", str(source), "--workers", "1"]
    command += ["--output", str(directory / "output"), "--scratch", str(directory / "scratch")]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer.splitlines()[-1]))


@pytest.mark.parametrize(("peer", "package"), [("llmc", "datasets"), ("nanogpt", "datasets"), ("megatron", "megatron")])
def test_peers_write_as_many_tokens_as_we_do(source: Path, tmp_path: Path, peer: str, package: str) -> None:
    pytest.importorskip(package)
    (tmp_path / "ours").mkdir()
    (tmp_path / "peer").mkdir()
    ours = run("ours", source, tmp_path / "ours")
    assert run(peer, source, tmp_path / "peer")["tokens"] == ours["tokens"]
    if peer == "llmc":  # one shard, end-of-text first, in source order: ours byte for byte but for the header
        (theirs,), (mine,) = ((tmp_path / who / "output").glob("*.bin") for who in ("peer", "ours"))
        assert theirs.read_bytes()[1_024:] == mine.read_bytes()[1_024:]


def test_both_ways_of_loading_run_warm_and_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.data_loader._TEXT_BYTES", 100_000)
    dataset, export = make_data(tmp_path, 0.2)
    for way in (nanogpt_way(export), our_way(dataset, "pread", checked=True, ahead=1)):
        assert drop_pages([export / "train.bin"]) < 1
        assert measured(way, 0, 2).wall_rate > 0
