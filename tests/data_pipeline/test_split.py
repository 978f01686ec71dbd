import pytest

from data_pipeline.errors import DataError
from data_pipeline.split import (
    KEPT_CANDIDATES,
    SmallestHashes,
    check_splits,
    is_validation,
    suggest_fraction,
    text_hash,
)


def test_hash_is_xxh3() -> None:
    # XXH3-64 of the empty input, from the reference implementation.
    assert text_hash(b"") == 0x2D06800538D394C2


def test_split_is_a_threshold_on_the_hash() -> None:
    hashes = [text_hash(str(number).encode()) for number in range(20_000)]
    small = {value for value in hashes if is_validation(value, 0.01)}
    large = {value for value in hashes if is_validation(value, 0.02)}
    assert small < large
    assert 150 < len(small) < 250
    assert not any(is_validation(value, 0.0) for value in hashes)


def test_smallest_hashes_do_not_depend_on_order() -> None:
    pairs = [(text_hash(str(number).encode()), number) for number in range(1_000)]
    expected = sorted(pairs)[:KEPT_CANDIDATES]
    assert SmallestHashes(pairs).sorted() == expected
    assert SmallestHashes(reversed(pairs)).sorted() == expected


@pytest.mark.parametrize(("documents", "tokens"), [(2, 10), (3, 2_000), (20, 100), (5_000, 400)])
def test_suggested_fraction_fills_both_splits(documents: int, tokens: int) -> None:
    hashes = [text_hash(str(number).encode()) for number in range(documents)]
    candidates = SmallestHashes((value, tokens) for value in hashes).sorted()
    fraction = suggest_fraction(candidates, documents)
    assert fraction is not None
    inside = sum(is_validation(value, fraction) for value in hashes)
    assert 1 <= inside < documents
    assert inside * tokens >= 1_025 or inside == documents - 1
    with pytest.raises(DataError, match=f"--val-fraction {fraction!r} would do"):
        check_splits({"train": documents, "val": 0}, 1e-9, candidates)


def test_one_document_cannot_be_split() -> None:
    candidates = [(5, 10_000)]
    assert suggest_fraction(candidates, 1) is None
    with pytest.raises(DataError, match=r"a \.txt file is one document"):
        check_splits({"train": 1, "val": 0}, 0.5, candidates)
    check_splits({"train": 1, "val": 0}, 0.0, candidates)


def test_empty_corpus_and_empty_training_split_are_refused() -> None:
    with pytest.raises(DataError, match="no documents"):
        check_splits({"train": 0, "val": 0}, 0.5, [])
    with pytest.raises(DataError, match="training split is empty"):
        check_splits({"train": 0, "val": 2}, 0.9, [(5, 10), (2**60, 10)])
