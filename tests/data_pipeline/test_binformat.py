import struct
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.binformat import (
    BinHeader,
    idx_bytes,
    read_document_lengths,
    read_header,
    stored_documents,
    token_dtype,
)
from data_pipeline.errors import DataError
from data_pipeline.parts import PartFormat, PartSeries


def megatron_documents(bin_path: Path) -> list[list[int]]:
    """Documents by way of the ``.idx`` alone, as Megatron-LM's IndexedDataset defines the file."""
    data = bin_path.with_suffix(".idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack_from("<Q", data, 9)
    (code,) = struct.unpack_from("<B", data, 17)
    sequences, boundaries = struct.unpack_from("<QQ", data, 18)
    assert version == 1
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[code]
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    pointers = np.frombuffer(data, "<i8", sequences, 34 + lengths.nbytes)
    documents = np.frombuffer(data, "<i8", boundaries, 34 + lengths.nbytes + pointers.nbytes)
    assert 34 + lengths.nbytes + pointers.nbytes + documents.nbytes == len(data)
    assert documents.tolist() == list(range(sequences + 1))
    body = bin_path.read_bytes()
    return [
        np.frombuffer(body, dtype, length, pointer).tolist() for length, pointer in zip(lengths, pointers, strict=True)
    ]


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "dtype"),
    [(50_257, 20240520, 1, "<u2"), (65_535, 20240520, 1, "<u2"), (65_536, 20240801, 7, "<u4")],
)
def test_llmc_layout(tmp_path: Path, vocab_size: int, magic: int, version: int, dtype: str) -> None:
    part_format = PartFormat(token_dtype(vocab_size), vocab_size - 1, vocab_size, part_tokens=1_000)
    series = PartSeries(tmp_path, "train", part_format)
    documents = [[vocab_size - 1, 5, 6], [vocab_size - 1, 7]]
    for document in documents:
        series.add(np.array(document, dtype=dtype), np.array([len(document)]))
    (record,) = series.close()

    data = (tmp_path / "train-000000.bin").read_bytes()
    header = np.frombuffer(data, "<i4", 256)
    assert header[:3].tolist() == [magic, version, 5]
    assert np.frombuffer(data, dtype, offset=1024).tolist() == documents[0] + documents[1]
    assert len(data) == 1024 + 5 * np.dtype(dtype).itemsize
    assert megatron_documents(tmp_path / record.file) == documents
    assert read_header(tmp_path / record.file) == BinHeader(5, np.dtype(dtype).itemsize, 2, vocab_size - 1, vocab_size)
    assert (record.tokens, record.documents, record.max_token_id) == (5, 2, vocab_size - 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_documents_never_cross_parts(tmp_path: Path, batch: int) -> None:
    series = PartSeries(tmp_path, "train", PartFormat(np.dtype("<u2"), 256, 257, part_tokens=10))
    lengths = [4, 6, 1, 9, 25, 3, 8, 2]
    for at in range(0, len(lengths), batch):
        some = lengths[at : at + batch]
        joined = [token for length in some for token in [256] + [length] * (length - 1)]
        series.add(np.array(joined, dtype="<u2"), np.array(some))
    records = series.close()
    # A document longer than a part has a part for itself.
    assert [record.tokens for record in records] == [10, 10, 25, 3, 10]
    assert [record.documents for record in records] == [2, 2, 1, 1, 2]
    read = [document for record in records for document in megatron_documents(tmp_path / record.file)]
    assert [len(document) for document in read] == lengths
    assert all(document[0] == 256 and 256 not in document[1:] for document in read)


def test_pointers_are_64_bit() -> None:
    data = idx_bytes(np.full(3, 2**30, dtype=np.int32), itemsize=4)
    pointers = np.frombuffer(data, "<i8", 3, 34 + 12)
    assert pointers.tolist() == [1024, 1024 + 2**32, 1024 + 2**33]


def test_end_of_text_stands_before_every_document() -> None:
    ids, offsets = np.array([1, 2, 3], dtype=np.uint32), np.array([0, 0, 2, 3, 3])
    stored = stored_documents(ids, offsets, 256, 257, np.dtype("<u2"))
    assert stored.dtype == np.dtype("<u2")
    assert stored.tolist() == [256, 256, 1, 2, 256, 3, 256]


def test_ids_outside_the_vocabulary_never_wrap() -> None:
    def store(*ids: int) -> list[int]:
        joined = np.array(ids, dtype=np.uint32)
        return stored_documents(joined, np.array([0, len(ids)]), 256, 257, np.dtype("<u2")).tolist()  # type: ignore[no-any-return]

    assert store(1, 2) == [256, 1, 2]
    assert store() == [256]
    for bad in (257, 65_536 + 1, 2**31):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 257"):
            store(1, bad)
    with pytest.raises(ValueError, match="end-of-text"):
        store(256)


def test_damaged_headers_are_named(tmp_path: Path) -> None:
    whole = BinHeader(3, 2).to_bytes() + bytes(6)
    path = tmp_path / "x_train_000000.bin"
    for data, expected in [
        (whole[:-2], "1,028 bytes, but its header promises 3 tokens = 1,030 bytes"),
        (whole + b"xx", "promises 3 tokens"),
        (bytes(2000), "magic 0 version 0 is not that of a part"),
        (whole[:100], "too few for the 1,024-byte header"),
    ]:
        path.write_bytes(data)
        with pytest.raises(DataError, match=expected):
            read_header(path)
    with pytest.raises(DataError, match="the part is missing"):
        read_header(tmp_path / "absent.bin")


def test_damaged_indices_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.idx"
    whole = idx_bytes(np.array([3, 4], dtype=np.int32), 2)
    path.write_bytes(whole)
    assert read_document_lengths(path).tolist() == [3, 4]
    for data in (whole[:-1], whole[:20], b"", b"X" + whole[1:]):
        path.write_bytes(data)
        with pytest.raises(DataError, match="not a whole Megatron"):
            read_document_lengths(path)
