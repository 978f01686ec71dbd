from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.cli import main
from data_pipeline.progress import Reading, duration, progress_line
from tests.data_pipeline.conftest import make_documents

WriteJsonl = Callable[[str, Sequence[Any]], Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def prepared(write_jsonl: WriteJsonl, tmp_path: Path, capsys: Capture) -> list[str]:
    """The arguments of a ``prepare`` that has run, its output directory last."""
    source = write_jsonl("corpus.jsonl", make_documents(100))
    arguments = ["prepare", "--source", str(source), "--tokenizer", "gpt2", "--workers", "1"]
    arguments += ["--val-fraction", "0.05", "--name", "owt", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    return arguments


def test_prepare_reports_and_is_up_to_date_the_second_time(prepared: list[str], capsys: Capture) -> None:
    first = capsys.readouterr()
    identity = Path(prepared[-1], "manifest.sha256").read_text().split()[0]
    assert f"{prepared[-1]}: finished" in first.out
    assert "100 of 1 files = 100 documents + 0 null + 0 empty + 0 quarantined" in first.out
    assert f"identity   {identity}" in first.out
    assert "1 files of 0.1 MB" in first.err
    assert "ETA 0:00:00" in first.err
    assert "\r" not in first.err
    assert main(prepared) == 0
    assert f"{prepared[-1]}: up to date" in capsys.readouterr().out


def test_verify_says_what_is_wrong(prepared: list[str], capsys: Capture) -> None:
    assert main(["verify", prepared[-1]]) == 0
    assert "all 2 parts are what the manifest says" in capsys.readouterr().out
    part = Path(prepared[-1], "owt_train_000000.bin")
    data = bytearray(part.read_bytes())
    data[5000] ^= 1
    part.write_bytes(data)
    assert main(["verify", prepared[-1]]) == 1
    assert f"error: {part}: SHA-256 is " in capsys.readouterr().err


def test_inspect_shows_lengths_and_text(prepared: list[str], capsys: Capture) -> None:
    assert main(["inspect", prepared[-1], "--split", "train", "--window", "0"]) == 0
    out = capsys.readouterr().out
    assert "window 0 of" in out
    assert "<|endoftext|>0/" in out
    assert main(["inspect", prepared[-1], "--window", "100000"]) == 2
    assert "error: --window 100000: the train split has windows 0 to" in capsys.readouterr().err
    assert main(["inspect", prepared[-1], "--tokenizer", "bytes"]) == 2
    assert "was made with vocabulary 306cd27f" in capsys.readouterr().err


def test_errors_are_one_message(tmp_path: Path, capsys: Capture) -> None:
    assert main(["prepare", "--source", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]) == 2
    expected = ["finding the sources", f"error: {tmp_path / 'absent'}: no such file or directory"]
    assert capsys.readouterr().err.splitlines() == expected
    assert main(["verify", str(tmp_path)]) == 2
    assert "manifest.json: missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "verify", "inspect", "corpus"])
def test_help_shows_an_example(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"example:\n  python -m data_pipeline {command}" in capsys.readouterr().out


def test_progress_line() -> None:
    line = progress_line(Reading(100_000_000, 500_000_000, 0), Reading(200_000_000, 500_000_000, 20_000_000), 10.0)
    assert line == " 40.0 % of 500.0 MB | 10.0 MB/s | 2.00 Mtok/s | ETA 0:00:30"
    assert progress_line(Reading(0, 10, 0), Reading(0, 10, 0), 0.0).endswith("ETA unknown")
    assert duration(3_725.4) == "1:02:05"


def test_order_export_and_vocabulary(prepared: list[str], tmp_path: Path, capsys: Capture) -> None:
    data = prepared[-1]
    capsys.readouterr()
    command = ["order", data, "--sequence-length", "64", "--seed", "1", "--global-batch", "4", "--step", "2"]
    assert main([*command, "--samples", "2", "--decode"]) == 0
    shown = capsys.readouterr().out
    assert "owt_train_000000.bin" in shown
    assert main(["order", "--run", str(tmp_path / "nowhere"), "--step", "1"]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
    assert main(["export", data, "--output", str(tmp_path / "nanogpt")]) == 0
    assert "train.bin" in capsys.readouterr().out
    assert (tmp_path / "nanogpt" / "val.bin").stat().st_size % 2 == 0
    assert main(["export", data, "--output", str(tmp_path / "single"), "--layout", "single", "--eot", "after"]) == 2
    assert "--eot is for --layout nanogpt" in capsys.readouterr().err
    assert main(["vocab", "export", str(tmp_path / "cache")]) == 0
    assert f"TIKTOKEN_CACHE_DIR={tmp_path / 'cache'}" in capsys.readouterr().out
    assert main(["verify", data, "--deep"]) == 0
    assert "the text of all 100 documents encodes to the stored ids" in capsys.readouterr().out
