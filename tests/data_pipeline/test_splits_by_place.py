"""``llmc`` and ``nanogpt``: the splits of published runs, against readings of their rules written here."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.build import BuildResult, prepare
from data_pipeline.errors import DataError
from data_pipeline.export import export_nanogpt
from data_pipeline.plan import BuildOptions
from data_pipeline.split import nanogpt_rows
from data_pipeline.tokenizer import BytesTokenizer, load_tokenizer
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.test_binformat import megatron_documents
from tests.data_pipeline.test_build import WriteJsonl, content

PART_TOKENS = 2_000


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    """Five files with rows that are no documents in between."""
    for number in range(5):
        rows: list[Any] = list(make_documents(30, seed=number))
        rows[7:7] = [{"text": None}, "", " \n"]
        write_jsonl(f"corpus/{number}.jsonl", rows)
    return tmp_path / "corpus"


def build(source: Path, output: Path, workers: int = 1, tokenizer: str = "bytes", **options: Any) -> BuildResult:
    chosen = BuildOptions(part_tokens=PART_TOKENS, **options)
    return prepare([str(source)], output, tokenizer=tokenizer, options=chosen, workers=workers, log=io.StringIO())


def documents(result: BuildResult, output: Path, split: str) -> list[str]:
    tokenizer = BytesTokenizer()
    parts = result.manifest.parts_of(split)
    return [tokenizer.decode(d[1:]) for part in parts for d in megatron_documents(output / part.file)]


def all_rows() -> list[str | None]:
    """The text of every row, None where a row is no document."""
    rows: list[str | None] = []
    for number in range(5):
        texts: list[str | None] = list(make_documents(30, seed=number))
        texts[7:7] = [None, None, None]
        rows += texts
    return rows


@pytest.mark.parametrize("val_tokens", [100_000 // 50, 5_000, 12_345, 30_000])
def test_llmc_takes_the_documents_of_the_first_tokens(corpus: Path, tmp_path: Path, val_tokens: int) -> None:
    result = build(corpus, tmp_path / "out", val_split="llmc", val_tokens=val_tokens)
    texts = [text for text in all_rows() if text is not None]
    ends = np.cumsum([len(text.encode()) + 1 for text in texts])
    num_val = int((ends <= val_tokens).sum())
    assert 0 < num_val < len(texts)
    assert documents(result, tmp_path / "out", "val") == texts[:num_val]
    assert documents(result, tmp_path / "out", "train") == texts[num_val:]
    assert result.manifest.text_bytes["val"] == sum(len(text.encode()) for text in texts[:num_val])
    again = build(corpus, tmp_path / "again", workers=2, val_split="llmc", val_tokens=val_tokens)
    assert again.manifest_sha256 == result.manifest_sha256
    assert content(tmp_path / "again") == content(tmp_path / "out")


def test_llmc_refuses_an_empty_split_with_a_number_that_does(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"training split is empty: all [\d,]+ tokens lie in the first") as error:
        build(corpus, tmp_path / "out", val_split="llmc")
    suggested = int(str(error.value).split("--val-tokens ")[2].split()[0].replace(",", ""))
    with pytest.raises(DataError, match=r"validation split is empty: the first document alone has") as error:
        build(corpus, tmp_path / "out", val_split="llmc", val_tokens=3)
    assert build(corpus, tmp_path / "out", val_split="llmc", val_tokens=suggested).manifest.parts_of("val")


@pytest.mark.parametrize("fraction", [0.0005, 0.1, 0.5])
def test_nanogpt_permutes_rows_as_numpy_does(corpus: Path, tmp_path: Path, fraction: float) -> None:
    result = build(corpus, tmp_path / "out", val_split="nanogpt", val_fraction=fraction)
    rows = all_rows()
    order = np.random.default_rng(2357).permutation(len(rows)).tolist()
    num_val = math.ceil(fraction * len(rows))
    expected = {"val": order[:num_val], "train": order[num_val:]}
    for split, numbers in expected.items():
        texts = [text for text in (rows[number] for number in numbers) if text is not None]
        assert documents(result, tmp_path / "out", split) == texts
        assert result.manifest.text_bytes[split] == sum(len(text.encode()) for text in texts)
    assert build(corpus, tmp_path / "again", workers=2, val_split="nanogpt", val_fraction=fraction) == result


def test_nanogpt_takes_the_4007_rows_of_openwebtext() -> None:
    train, val = nanogpt_rows(8_013_769, 0.0005)
    assert (len(train), len(val)) == (8_009_762, 4_007)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(8_013_769))


def test_nanogpt_is_the_split_of_datasets(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"row": list(range(4_321))})
    theirs = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    train, val = nanogpt_rows(4_321, 0.0005)
    assert theirs["test"]["row"] == val.tolist()
    assert theirs["train"]["row"] == train.tolist()


def test_a_single_text_is_cut_as_nanogpts_shakespeare(tmp_path: Path) -> None:
    text = "First Citizen:\nBefore we proceed any further, hear me speak — naïve.\n\n" * 700
    (tmp_path / "input.txt").write_text(text)
    output = tmp_path / "out"
    result = build(tmp_path / "input.txt", output, tokenizer="gpt2", val_split="nanogpt")
    export_nanogpt(output, tmp_path / "export", eot="none")
    tokenizer = load_tokenizer("gpt2")
    cut = int(len(text) * 0.9)
    for name, piece in (("train", text[:cut]), ("val", text[cut:])):
        written = np.fromfile(tmp_path / "export" / f"{name}.bin", dtype=np.uint16)
        assert written.tolist() == tokenizer.encode(piece).tolist()
    assert result.manifest.accounting.documents == 2


def test_empty_splits_are_refused(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    source = write_jsonl("one.jsonl", ["only"])
    with pytest.raises(DataError, match="train split is empty: --val-split nanogpt took 1 of 1 rows"):
        build(source, tmp_path / "out", val_split="nanogpt")
    assert build(source, tmp_path / "out", val_split="nanogpt", val_fraction=0.0).manifest.parts_of("val") == []
