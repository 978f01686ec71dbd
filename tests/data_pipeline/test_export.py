import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_pipeline import export as module
from data_pipeline.binformat import read_document_lengths, read_header
from data_pipeline.build import prepare
from data_pipeline.errors import DataError
from data_pipeline.export import export_nanogpt, export_single
from data_pipeline.manifest import read_manifest
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import open_dataset
from tests.corpora import write_jsonl

EOT = 256


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes in several parts, with a validation split."""
    folder = tmp_path_factory.mktemp("export")
    source = write_jsonl(folder / "text.jsonl", 120)
    options = BuildOptions(val_fraction=0.2, part_tokens=9_000)
    prepare([str(source)], folder / "data", tokenizer="bytes", options=options, workers=1)
    assert len(read_manifest(folder / "data")[0].parts_of("train")) > 2
    return folder / "data"


def documents(dataset: Path, split: str) -> list[list[int]]:
    """The documents' tokens without end-of-text, read with nothing of the export."""
    result: list[list[int]] = []
    for file in sorted(dataset.glob(f"*_{split}_*.bin")):
        for token in np.fromfile(file, dtype="<u2", offset=1024).tolist():
            if token == EOT:
                result.append([])
            else:
                result[-1].append(token)
    return result


# nanoGPT's own script: each document, then end-of-text.
STREAMS: dict[str, Any] = {
    "after": lambda document: [*document, EOT],
    "before": lambda document: [EOT, *document],
    "none": lambda document: document,
}


@pytest.mark.parametrize("eot", ["after", "before", "none"])
def test_nanogpt_files_are_the_documents_one_after_the_other(dataset: Path, tmp_path: Path, eot: str) -> None:
    export = export_nanogpt(dataset, tmp_path / "out", eot)
    for split in ("train", "val"):
        expected = np.array([t for document in documents(dataset, split) for t in STREAMS[eot](document)], dtype="<u2")
        data = (tmp_path / "out" / f"{split}.bin").read_bytes()
        assert data == expected.tobytes()
        assert export.tokens[f"{split}.bin"] == len(expected)
        assert export.sha256[f"{split}.bin"] == hashlib.sha256(data).hexdigest()
    meta = json.loads((tmp_path / "out" / "meta.json").read_bytes())
    assert meta == {
        "format": "nanogpt",
        "source_manifest_sha256": read_manifest(dataset)[1],
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot_id": EOT,
        "eot": eot,
        "dtype": "uint16",
        "tokens": {split: export.tokens[f"{split}.bin"] for split in ("train", "val")},
        "sha256": export.sha256,
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_a_single_file_holds_all_parts_and_their_index(dataset: Path, tmp_path: Path) -> None:
    export = export_single(dataset, tmp_path / "out")
    assert export.notes == []
    for split in ("train", "val"):
        file = tmp_path / "out" / f"data_{split}_000000.bin"
        parts = sorted(dataset.glob(f"*_{split}_*.bin"))
        header = read_header(file)
        assert header.num_documents == len(documents(dataset, split))
        assert (header.eot_id, header.vocab_size, header.itemsize) == (EOT, 257, 2)
        assert file.read_bytes()[1024:] == b"".join(part.read_bytes()[1024:] for part in parts)
        lengths = np.concatenate([read_document_lengths(part.with_suffix(".idx")) for part in parts])
        assert np.array_equal(read_document_lengths(file.with_suffix(".idx")), lengths)
        assert export.sha256[file.name] == hashlib.sha256(file.read_bytes()).hexdigest()
    # The directory is a data set for whoever reads llm.c's parts, this package included.
    data = open_dataset(tmp_path / "out", "val", 64)
    assert data.num_tokens == export.tokens["data_val_000000.bin"]


def test_a_second_export_writes_nothing_and_says_the_same(dataset: Path, tmp_path: Path) -> None:
    for run in (lambda: export_nanogpt(dataset, tmp_path / "a"), lambda: export_single(dataset, tmp_path / "b")):
        first = run()
        bins = sorted(tmp_path.glob("*/*.bin"))
        before = [file.stat().st_mtime_ns for file in bins]
        assert run() == first
        assert [file.stat().st_mtime_ns for file in bins] == before
        assert [line.split()[0] for line in first.lines()] == [*first.tokens, "source"]


def test_another_file_is_never_overwritten(dataset: Path, tmp_path: Path) -> None:
    export_nanogpt(dataset, tmp_path, "after")
    before = (tmp_path / "train.bin").read_bytes()
    # As long as the file that would be written, and other tokens.
    with pytest.raises(DataError, match=r"train.bin: is there and is another file; move it away"):
        export_nanogpt(dataset, tmp_path, "before")
    (tmp_path / "val.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"val.bin: is there and is another file"):
        export_nanogpt(dataset, tmp_path, "after")
    assert ((tmp_path / "train.bin").read_bytes(), (tmp_path / "val.bin").read_bytes()) == (before, b"mine")
    export_single(dataset, tmp_path / "single")
    index = tmp_path / "single" / "data_train_000000.idx"
    index.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"data_train_000000.idx: is there and is another file"):
        export_single(dataset, tmp_path / "single")
    assert index.read_bytes() == b"mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "meta.json").write_text("{}")
    with pytest.raises(DataError, match=r"meta.json: is there and is another file"):
        export_nanogpt(dataset, tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["meta.json"]


@pytest.mark.parametrize("eot", ["after", "before", "none"])
def test_a_damaged_part_is_noticed_and_leaves_no_export(dataset: Path, tmp_path: Path, eot: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in dataset.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    part = sorted(copy.glob("*_train_*.bin"))[1]
    data = bytearray(part.read_bytes())
    data[5_000] ^= 1
    part.write_bytes(data)
    with pytest.raises(DataError, match=part.name):
        export_nanogpt(copy, tmp_path / "out", eot)
    assert not (tmp_path / "out" / "train.bin").exists()
    with pytest.raises(DataError, match=f"{part.name} has not the SHA-256 of the manifest"):
        export_single(copy, tmp_path / "single")
    assert not (tmp_path / "single" / "data_train_000000.bin").exists()


def test_a_bit_flipped_on_the_way_is_noticed(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipping(source: int, target: int, count: int) -> int:
        block = bytearray(os.read(source, min(count, 777)))
        block[0] ^= 1
        return os.write(target, block)

    monkeypatch.setattr(os, "copy_file_range", flipping)
    with pytest.raises(DataError, match="has not the SHA-256 of the manifest"):
        export_nanogpt(dataset, tmp_path)
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("way", ["error", "nothing", "pieces"])
def test_file_systems_that_cannot_copy_by_themselves(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    expected = export_nanogpt(dataset, tmp_path / "expected").sha256

    def refusing(source: int, target: int, count: int) -> int:
        if way == "error":
            raise OSError(18, "Invalid cross-device link")
        return 0 if way == "nothing" else os.write(target, os.read(source, min(count, 1_001)))

    monkeypatch.setattr(os, "copy_file_range", refusing)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3_000)
    assert export_nanogpt(dataset, tmp_path / "out").sha256 == expected


def test_too_little_space_is_told_before_anything_is_written(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(DataError, match=r"1,000 bytes are free and the export needs [0-9,]{5,}"):
        export_nanogpt(dataset, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_export_leaves_a_file_that_the_next_one_replaces(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "train.bin.tmp").write_bytes(b"x" * 1_000_000)
    export_nanogpt(dataset, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_two_exports_do_not_write_one_file(dataset: Path, tmp_path: Path) -> None:
    import fcntl

    with open(tmp_path / "train.bin.tmp", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another export is writing it"):
            export_nanogpt(dataset, tmp_path)


def test_limits_of_llm_c_are_told(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 20_000)
    export = export_single(dataset, tmp_path / "large")
    assert [note.split()[0] for note in export.notes] == ["data_train_000000.bin"]
    assert "seeks with an int" in export.notes[0]
    monkeypatch.setattr(module, "MAX_HEADER_TOKENS", 20_000)
    with pytest.raises(DataError, match=r"int32 of llm.c's header counts to 20,000. Export the nanogpt layout"):
        export_single(dataset, tmp_path / "larger")
    assert not (tmp_path / "larger").exists()


def test_a_split_without_documents_has_no_file(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "text.jsonl", 5)
    prepare([str(source)], tmp_path / "d", tokenizer="bytes", options=BuildOptions(val_fraction=0.0), workers=1)
    export = export_nanogpt(tmp_path / "d", tmp_path / "out")
    assert list(export.tokens) == ["train.bin"]
    assert export.notes == ["the val split holds no documents, so there is no val.bin"]
    assert list(export_single(tmp_path / "d", tmp_path / "single").tokens) == ["data_train_000000.bin"]


def test_mistakes_are_told(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--eot middle: expected after, before, none"):
        export_nanogpt(dataset, tmp_path, "middle")
    with pytest.raises(DataError, match=r"manifest.json: missing"):
        export_nanogpt(tmp_path / "absent", tmp_path)


def test_the_ends_of_a_file_that_is_there_are_checked_too(dataset: Path, tmp_path: Path) -> None:
    """What no part's hash covers: the end-of-text that was appended, and the new header."""
    export_nanogpt(dataset, tmp_path)
    export_single(dataset, tmp_path)
    for name, at, again, what in [
        ("train.bin", -1, export_nanogpt, "last token"),
        ("data_train_000000.bin", 600, export_single, "header"),
    ]:
        data = bytearray((tmp_path / name).read_bytes())
        data[at] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: is there and is another file; .* its {what} is not what"):
            again(dataset, tmp_path)
