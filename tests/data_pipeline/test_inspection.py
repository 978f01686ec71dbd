from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.build import Execution, prepare
from data_pipeline.errors import DataError
from data_pipeline.inspection import inspect_dataset
from data_pipeline.plan import BuildOptions
from tests.corpora import byte_dataset


@pytest.fixture
def with_problems(tmp_path: Path, write_jsonl: Callable[..., Path]) -> Path:
    rows = ["a" * 30, b"not json", "b" * 70, {"text": 5}, b"{", {"other": 1}, {"text": None}, "  ", "c" * 100]
    source = write_jsonl("a.jsonl", rows)
    options, execution = BuildOptions(val_fraction=0.0), Execution(max_quarantined=1.0)
    prepare([str(source)], tmp_path / "out", tokenizer="bytes", options=options, workers=1, execution=execution)
    return tmp_path / "out"


def test_quarantined_rows_are_counted_by_reason_with_the_first_of_each(with_problems: Path) -> None:
    lines = list(inspect_dataset(with_problems, "train", 0, 16))
    quarantined = [line.split(maxsplit=2) for line in lines if "quarantined:" in line]
    assert [(count, rest) for count, _, rest in quarantined] == [
        ("2", "invalid JSON, first a.jsonl row 1"),
        ("1", "the text is not a string, first a.jsonl row 3"),
        ("1", "no key 'text', first a.jsonl row 5"),
    ]


def test_lengths_are_a_histogram_with_their_extremes(with_problems: Path) -> None:
    lines = list(inspect_dataset(with_problems, "train", 0, 16))
    at = lines.index("document lengths in tokens, train:")
    assert lines[at + 1] == "shortest 31, mean 67.7, longest 101, end-of-text included"
    assert [line.split()[:4] for line in lines[at + 2 : at + 5]] == [
        ["16", "to", "31", "1"],
        ["32", "to", "63", "0"],
        ["64", "to", "127", "2"],
    ]


def test_a_window_is_decoded(with_problems: Path) -> None:
    lines = list(inspect_dataset(with_problems, "train", 1, 16))
    assert lines[-2] == "window 1 of 12 in train, 17 tokens:"
    assert lines[-1] == "a" * 15 + "<|endoftext|>b"
    with pytest.raises(DataError, match=r"--window 12: the train split has windows 0 to 11"):
        list(inspect_dataset(with_problems, "train", 12, 16))


def test_a_data_set_without_problems_says_nothing_of_them(tmp_path: Path) -> None:
    lines = list(inspect_dataset(byte_dataset(tmp_path, 40), "train", 0, 16))
    assert not [line for line in lines if "quarantined:" in line]
    assert [line.split()[0] for line in lines[:5]] == ["identity", "tokenizer", "rows", "train", "val"]


def test_a_lost_or_damaged_quarantine_list_is_named(with_problems: Path) -> None:
    file = with_problems / "quarantine.jsonl"
    file.write_text("{}\n")
    with pytest.raises(DataError, match=r"quarantine.jsonl: not a list of quarantined rows \(KeyError"):
        list(inspect_dataset(with_problems, "train", 0, 16))
    file.unlink()
    with pytest.raises(DataError, match=r"quarantine.jsonl: missing"):
        list(inspect_dataset(with_problems, "train", 0, 16))
