"""Page sums: no flipped bit of a part or of its sums reaches a reader."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_pipeline.build import prepare
from data_pipeline.errors import DataError
from data_pipeline.pages import PAGE_BYTES, hash_pages
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import ACCESSES, open_dataset
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.test_build import WriteJsonl

LENGTH = 64


@pytest.fixture
def dataset(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    """Two training parts of several pages."""
    source = write_jsonl("corpus.jsonl", make_documents(800, words=60))
    options = BuildOptions(val_fraction=0.01, part_tokens=50_000)
    prepare([str(source)], tmp_path / "data", tokenizer="bytes", options=options, workers=1, log=io.StringIO())
    return tmp_path / "data"


@pytest.mark.parametrize("size", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 256 * PAGE_BYTES + 5])
def test_one_sum_a_page(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    _, sums = hash_pages(tmp_path / "file")
    pages = [data[at : at + PAGE_BYTES] for at in range(0, size, PAGE_BYTES)]
    assert np.frombuffer(sums, "<u8").tolist() == [xxhash.xxh3_64_intdigest(page) for page in pages]


@pytest.mark.parametrize("access", ACCESSES)
def test_checked_reads_are_the_unchecked_ones(dataset: Path, access: str) -> None:
    checked = open_dataset(dataset, "train", LENGTH, access)
    plain = open_dataset(dataset, "train", LENGTH, access, verify_reads=False)
    assert len(checked.part_files) >= 2
    np.testing.assert_array_equal(checked.read(range(checked.num_windows)), plain.read(range(plain.num_windows)))
    positions = np.arange(0, checked.num_tokens - LENGTH, 37)  # across parts too
    np.testing.assert_array_equal(checked.read_at(positions), plain.read_at(positions))


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("suffix", [".bin", ".sums"])
def test_a_flipped_bit_is_refused_where_it_is_read_and_nowhere_else(dataset: Path, access: str, suffix: str) -> None:
    whole = open_dataset(dataset, "train", LENGTH).read(range(100))
    path = (dataset / "data_train_000000.bin").with_suffix(suffix)
    data = path.read_bytes()
    for _ in range(20):
        page = random.randrange(1, 20)
        at = page * PAGE_BYTES + random.randrange(PAGE_BYTES) if suffix == ".bin" else page * 8 + random.randrange(8)
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        windows = open_dataset(dataset, "train", LENGTH, access)
        refused = []
        for window in range(windows.num_windows):
            try:
                windows.read([window])
            except DataError as error:
                assert "data_train_000000.bin: bytes" in str(error)
                refused.append(window)
        tokens = np.array([1024 + 2 * LENGTH * window for window in refused])
        assert refused
        assert all(start < (page + 1) * PAGE_BYTES and start + 2 * (LENGTH + 1) > page * PAGE_BYTES for start in tokens)
    path.write_bytes(data)
    np.testing.assert_array_equal(open_dataset(dataset, "train", LENGTH, access).read(range(100)), whole)


def test_missing_sums_are_refused_and_can_be_done_without(dataset: Path) -> None:
    (dataset / "data_train_000001.sums").unlink()
    windows = open_dataset(dataset, "train", LENGTH)
    of_second = [int(windows.layout.windows_per_part[0])]
    with pytest.raises(DataError, match=r"data_train_000001.sums: missing.*data.verify_reads: false"):
        windows.read(of_second)
    open_dataset(dataset, "train", LENGTH, verify_reads=False).read(of_second)
    (dataset / "data_train_000000.sums").write_bytes(b"")
    with pytest.raises(DataError, match="has not one sum for each page"):
        open_dataset(dataset, "train", LENGTH).read([0])
