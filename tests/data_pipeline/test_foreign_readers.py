"""Programs of others on our files: nanoGPT's and llm.c's ways of reading, and Megatron's own class."""

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.build import prepare
from data_pipeline.export import export_nanogpt, export_single
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import open_dataset
from data_pipeline.tokenizer import load_tokenizer
from tests.corpora import write_jsonl

EOT = 256
T = 64


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    import json

    source = write_jsonl(tmp_path_factory.mktemp("texts") / "text.jsonl", 80, seed=4)
    return [json.loads(line)["text"] for line in source.read_text().splitlines()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    source = write_jsonl(folder / "text.jsonl", 80, seed=4)
    options = BuildOptions(val_fraction=0.2, part_tokens=9_000)
    prepare([str(source)], folder / "data", tokenizer="bytes", options=options, workers=1)
    return folder / "data"


@pytest.fixture(scope="module")
def single(dataset: Path) -> Path:
    export_single(dataset, dataset.parent / "single")
    return dataset.parent / "single"


def text_of(tokens: Any) -> str:
    return load_tokenizer("bytes").decode(tokens)


def split_texts(dataset: Path, texts: list[str]) -> dict[str, list[str]]:
    """Which texts went where, by the text itself."""
    val = text_of(np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in sorted(dataset.glob("*_val_*.bin"))]))
    return {
        "train": [text for text in texts if text not in val],
        "val": [text for text in texts if text in val],
    }


def test_a_reader_like_nanogpt_s_sees_every_document_and_then_end_of_text(dataset: Path, texts: list[str]) -> None:
    """A headerless file of uint16, mapped, from which windows are taken at any offset."""
    folder = dataset.parent / "nanogpt"
    export_nanogpt(dataset, folder)
    for split, expected in split_texts(dataset, texts).items():
        data = np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="r")
        assert text_of(data) == "".join(text + "<|endoftext|>" for text in expected)
        # Our window at position p is nanoGPT's at p - 1: its stream lacks our first token and ends with one more.
        windows = open_dataset(dataset, split, T)
        for position in (1, 2, 500, windows.num_tokens - T - 1):
            window = data[position - 1 : position + T].astype(np.int64)
            assert np.array_equal(windows.read_at([position])[0], window)


def llm_c_tokens(path: Path) -> list[int]:
    """A file of llm.c by its description alone: 256 int32, magic, version, count; then the tokens."""
    data = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", data)
    assert (magic, version) == (20240520, 1)
    assert len(data) == 256 * 4 + 2 * count
    return [token for (token,) in struct.iter_unpack("<H", data[256 * 4 :])]


@pytest.mark.parametrize("layout", ["parts", "single"])
def test_a_reader_like_llm_c_s_sees_end_of_text_and_then_each_document(
    dataset: Path, single: Path, texts: list[str], layout: str
) -> None:
    folder = dataset if layout == "parts" else single
    for split, expected in split_texts(dataset, texts).items():
        files = sorted(folder.glob(f"*_{split}_*.bin"))
        assert (len(files) == 1) == (layout == "single" or split == "val")
        tokens = [token for file in files for token in llm_c_tokens(file)]
        assert text_of(tokens) == "".join("<|endoftext|>" + text for text in expected)


@pytest.mark.parametrize("layout", ["parts", "single"])
def test_megatron_s_own_class_reads_each_document(dataset: Path, single: Path, texts: list[str], layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the accelerator libraries that it would like to have
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    folder = dataset if layout == "parts" else single
    for split, expected in split_texts(dataset, texts).items():
        read: list[str] = []
        for file in sorted(folder.glob(f"*_{split}_*.bin")):
            for mapped in (True, False):
                megatron = IndexedDataset(str(file.with_suffix("")), mmap=mapped)
                documents = [megatron[number] for number in range(len(megatron))]
                assert all(document.dtype == np.uint16 and document[0] == EOT for document in documents)
                assert np.array_equal(megatron.document_indices, np.arange(len(documents) + 1))
                # A piece of a document, as its training samples are cut.
                assert np.array_equal(megatron.get(0, offset=3, length=10), documents[0][3:13])
            read += [text_of(document[1:]) for document in documents]
        assert read == expected
