import copy
import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.binformat import BinHeader
from data_pipeline.errors import DataError
from data_pipeline.order import SampleOrder
from data_pipeline.reader import open_dataset


def write_part(folder: Path, name: str, tokens: list[int]) -> None:
    """A part as llm.c's own scripts write it: no tag, no index."""
    folder.mkdir(exist_ok=True)
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    (folder / name).write_bytes(header.tobytes() + np.array(tokens, dtype="<u2").tobytes())


T = 8


@pytest.mark.parametrize(("tokens", "windows"), [(T + 1, 1), (2 * T, 1), (2 * T + 1, 2), (3 * T, 2), (3 * T + 1, 3)])
def test_windows_at_the_edges(tmp_path: Path, tokens: int, windows: int) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(tokens)))
    data = open_dataset(tmp_path / "d", "train", T)
    assert (data.num_windows, data.num_tokens) == (windows, tokens)
    expected = [list(range(start, start + T + 1)) for start in range(0, windows * T, T)]
    assert data.read(range(windows)).tolist() == expected


@pytest.mark.parametrize("tokens", [0, 1, T - 1, T])
def test_a_split_shorter_than_a_window_is_refused(tmp_path: Path, tokens: int) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(tokens)))
    with pytest.raises(DataError, match=f"has no window of {T + 1} tokens: its longest part has {tokens}"):
        open_dataset(tmp_path / "d", "train", T)


def test_windows_never_cross_parts(tmp_path: Path) -> None:
    sizes = [2 * T + 1, T, 3 * T + 5, 1, T + 1]
    start = 0
    expected = []
    for number, size in enumerate(sizes):
        write_part(tmp_path / "d", f"x_train_{number:06d}.bin", list(range(start, start + size)))
        for window in range(max(0, (size - 1) // T)):
            first = start + window * T
            expected.append(list(range(first, first + T + 1)))
        start += size
    data = open_dataset(tmp_path / "d", "train", T)
    assert data.num_windows == len(expected) == 6
    order = [5, 0, 3, 3, 1, 4, 2]
    assert data.read(np.array(order)).tolist() == [expected[number] for number in order]


def test_read_into_a_given_array(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_val_000000.bin", list(range(50)))
    data = open_dataset(str(tmp_path / "d"), "val", T)
    out = np.empty((2, T + 1), dtype=np.int64)
    assert data.read([1, 0], out) is out
    assert out[:, 0].tolist() == [8, 0]
    assert data.read([]).shape == (0, T + 1)
    # A returned array is the caller's: the next read leaves it alone.
    kept = data.read([0])
    data.read([3])
    assert kept[0, 0] == 0
    with pytest.raises(ValueError, match="expected int64"):
        data.read([0], np.empty((1, T + 1), dtype=np.int32))
    for bad in (-1, data.num_windows):
        with pytest.raises(IndexError, match="the split has 6"):
            data.read([0, bad])


def test_parts_of_others_have_an_identity(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_part(tmp_path / folder, "fineweb_train_000001.bin", list(range(50)))
        write_part(tmp_path / folder, "fineweb_val_000000.bin", list(range(20)))
    one, other = (open_dataset(tmp_path / folder, "train", T) for folder in ("a", "b"))
    assert len(one.manifest_sha256) == 64
    assert one.manifest_sha256 == other.manifest_sha256
    assert open_dataset(tmp_path / "a", "val", T).manifest_sha256 == one.manifest_sha256
    assert (one.tokenizer_name, one.vocab_size, one.max_token_id) == ("gpt2", 50_257, 50_256)
    assert (one.num_documents, one.bytes_of_text) == (None, None)
    write_part(tmp_path / "b", "fineweb_val_000000.bin", list(range(21)))
    assert open_dataset(tmp_path / "b", "train", T).manifest_sha256 != one.manifest_sha256


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", [0] * 20 + [50_257] + [0] * 20)
    data = open_dataset(tmp_path / "d", "train", T)
    assert data.read([0, 1, 3]).sum() == 0
    with pytest.raises(DataError, match="window 2 holds id 50257, outside the vocabulary of 50,257"):
        data.read([0, 2])


def test_a_part_truncated_while_open_is_noticed(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(50)))
    data = open_dataset(tmp_path / "d", "train", T)
    with open(tmp_path / "d" / "x_train_000000.bin", "r+b") as file:
        file.truncate(1024 + 60)
    with pytest.raises(DataError, match=r"x_train_000000.bin: truncated since it was opened"):
        data.read([5])


def test_mistakes_are_told(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(DataError) as caught:
        open_dataset(absent, "train", T)
    assert str(caught.value).endswith(f"python -m data_pipeline prepare --source YOUR_TEXT_FILES --output {absent}")
    absent.mkdir()
    with pytest.raises(DataError, match=r"neither a manifest.json nor parts"):
        open_dataset(absent, "train", T)
    write_part(absent, "x_train_000000.bin", list(range(50)))
    with pytest.raises(DataError, match="the val split is empty"):
        open_dataset(absent, "val", T)
    with pytest.raises(DataError, match="expected train or val"):
        open_dataset(absent, "test", T)
    with pytest.raises(DataError, match="sequence_length is 0"):
        open_dataset(absent, "train", 0)
    (absent / "x_train_000001.bin").write_bytes(BinHeader(9, 4).to_bytes() + bytes(36))
    with pytest.raises(DataError, match="uint16"):
        open_dataset(absent, "train", T)


def test_a_pickled_reader_reads_the_same(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(50)))
    data = open_dataset(tmp_path / "d", "train", T)
    data.read([0])
    copy = pickle.loads(pickle.dumps(data))
    assert np.array_equal(copy.read([2, 4]), data.read([2, 4]))
    assert copy.manifest_sha256 == data.manifest_sha256


def test_more_parts_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.reader._MAX_OPEN_PARTS", 4)
    for number in range(20):
        write_part(tmp_path / "d", f"x_train_{number:06d}.bin", [number] * (T + 1))
    data = open_dataset(tmp_path / "d", "train", T)
    assert data.read(range(20))[:, 0].tolist() == list(range(20))
    assert data.read([0, 19, 0])[:, 0].tolist() == [0, 19, 0]
    assert len(data._open_parts) == 4
    data.close()
    assert data.read([7])[0, 0] == 7


def test_offsets_beyond_two_gib(tmp_path: Path) -> None:
    # Two sparse parts of a little less than 2 GiB: window numbers and offsets are 64-bit throughout.
    folder = tmp_path / "d"
    folder.mkdir()
    num_tokens = 1_073_741_000
    for number in range(3):
        with open(folder / f"x_train_{number:06d}.bin", "wb") as file:
            file.write(BinHeader(num_tokens, 2).to_bytes())
            file.truncate(1024 + 2 * num_tokens)
            file.seek(1024 + 2 * (num_tokens - 1000))
            file.write(np.full(1000, 100 + number, dtype="<u2").tobytes())
    data = open_dataset(folder, "train", 100)
    assert data.num_tokens == 3 * num_tokens > 2**31
    per_part = (num_tokens - 1) // 100
    assert data.read([per_part - 1, 2 * per_part - 1, 3 * per_part - 1])[:, 50].tolist() == [100, 101, 102]
    shutil.rmtree(folder)


def sparse_part(path: Path, num_tokens: int) -> None:
    """A part of zeros that takes no space on disk."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(BinHeader(num_tokens, 2).to_bytes())
        file.truncate(1024 + 2 * num_tokens)


def test_memory_does_not_grow_over_ten_gigabytes_of_reads(tmp_path: Path) -> None:
    length, batch = 65_536, 16
    sparse_part(tmp_path / "d" / "x_train_000000.bin", 150_000_000)
    sparse_part(tmp_path / "d" / "x_train_000001.bin", 150_000_000)
    data = open_dataset(tmp_path / "d", "train", length)
    order = SampleOrder(data.num_windows, seed=1)
    out = np.empty((batch, length + 1), dtype=np.int64)
    data.read(order.windows(0, batch), out)
    before = resident_bytes()
    done = position = 0
    while done < 10_000_000_000:
        data.read(order.windows(position, batch), out)
        position += batch
        done += 2 * out.size
        assert resident_bytes() - before < 4_000_000


def test_memory_does_not_grow_over_many_small_reads(tmp_path: Path) -> None:
    sparse_part(tmp_path / "d" / "x_train_000000.bin", 20_000_000)
    data = open_dataset(tmp_path / "d", "train", 1_024)
    out = np.empty((8, 1_025), dtype=np.int64)
    data.read(range(8), out)
    before = resident_bytes()
    for start in range(0, data.num_windows - 8, 8):
        data.read(range(start, start + 8), out)
    assert resident_bytes() - before < 4_000_000  # of a file of 40 MB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_lost_manifest_does_not_turn_a_data_set_into_somebody_elses(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(4 * T)))
    (tmp_path / "d" / "manifest.sha256").write_text("0" * 64 + "  manifest.json\n")
    with pytest.raises(DataError, match=r"manifest\.json is gone"):
        open_dataset(tmp_path / "d", "train", T)


@pytest.mark.parametrize("access", ["pread", "mmap"])
def test_positions_are_read_across_parts_as_in_one_file(tmp_path: Path, access: str) -> None:
    sizes = [2 * T + 1, 3, 0, 1, T + 2, 2]
    tokens = [7 * number % 1000 for number in range(sum(sizes))]
    start = 0
    for number, size in enumerate(sizes):
        write_part(tmp_path / "d", f"x_train_{number:06d}.bin", tokens[start : start + size])
        start += size
    data = open_dataset(tmp_path / "d", "train", T, access)
    last = len(tokens) - T - 1
    everywhere = list(range(last + 1))
    assert data.read_at(everywhere).tolist() == [tokens[at : at + T + 1] for at in everywhere]
    out = np.empty((2, T + 1), dtype=np.int64)
    assert data.read_at([last, 0], out) is out
    assert out[0].tolist() == tokens[last:]
    for bad in (-1, last + 1):
        with pytest.raises(IndexError, match=f"the last window starts at {last}"):
            data.read_at([0, bad])


def test_mapped_and_copied_reads_are_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(6):
        write_part(tmp_path / "d", f"x_train_{number:06d}.bin", rng.integers(0, 50_000, 9_000 + number).tolist())
    copied = open_dataset(tmp_path / "d", "train", 100)
    mapped = open_dataset(tmp_path / "d", "train", 100, access="mmap")
    order = rng.permutation(copied.num_windows)
    assert np.array_equal(mapped.read(order), copied.read(order))
    assert np.array_equal(copy.copy(mapped).read(order[:5]), copied.read(order[:5]))
    assert copy.copy(mapped).access == "mmap"
    mapped.close()
    assert np.array_equal(mapped.read([3]), copied.read([3]))


def test_more_mapped_parts_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.reader._MAX_OPEN_PARTS", 4)
    for number in range(20):
        write_part(tmp_path / "d", f"x_train_{number:06d}.bin", [number] * (T + 1))
    data = open_dataset(tmp_path / "d", "train", T, access="mmap")
    assert data.read(range(20))[:, 0].tolist() == list(range(20))
    assert len(data._open_maps) == 4


def test_a_mapped_part_truncated_while_open_is_noticed_before_the_kernel_does(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(5_000)))
    data = open_dataset(tmp_path / "d", "train", T, access="mmap")
    data.read([500])
    with open(tmp_path / "d" / "x_train_000000.bin", "r+b") as file:
        file.truncate(1024 + 60)
    with pytest.raises(DataError, match=r"x_train_000000.bin: truncated since it was opened"):
        data.read([500])


def test_an_unknown_access_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(50)))
    with pytest.raises(DataError, match="unknown access 'direct'; expected pread or mmap"):
        open_dataset(tmp_path / "d", "train", T, access="direct")


def test_a_position_with_an_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", [0] * 12)
    write_part(tmp_path / "d", "x_train_000001.bin", [0] * 3 + [50_257] + [0] * 20)
    data = open_dataset(tmp_path / "d", "train", T)
    with pytest.raises(DataError, match="the window at token 9 holds id 50257"):
        data.read_at([0, 9])


@pytest.mark.parametrize("answer", ["not cached", "half cached", "not supported"])
def test_what_the_page_cache_does_not_hold_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    write_part(tmp_path / "d", "x_train_000000.bin", list(range(300)))
    waits: list[int] = []
    preadv = os.preadv

    def preadv_of_a_cold_cache(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        waits.append(flags == 0)
        if flags == 0:
            return preadv(descriptor, buffers, offset)
        if answer == "half cached":
            return len(buffers[0]) // 2
        raise OSError(errno.EAGAIN if answer == "not cached" else errno.EOPNOTSUPP, answer)

    monkeypatch.setattr(os, "preadv", preadv_of_a_cold_cache)
    data = open_dataset(tmp_path / "d", "train", T)
    assert data.read([3, 0, 7]).tolist() == [list(range(at, at + T + 1)) for at in (3 * T, 0, 7 * T)]
    assert waits == [False] * 3 + [True] * 3  # all are asked for before the first wait
