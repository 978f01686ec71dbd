import hashlib

import numpy as np

from data_pipeline.window_hash import WindowHash

WINDOWS = np.random.default_rng(0).integers(0, 50_257, size=(20, 65))


def hash_of(indices: list[int]) -> WindowHash:
    result = WindowHash()
    for index in indices:
        result.add(index, WINDOWS[index])
    return result


def test_value_is_the_sum_of_keyed_hashes() -> None:
    expected = 0
    for index in (3, 1):
        data = index.to_bytes(8, "little") + b"".join(int(t).to_bytes(4, "little") for t in WINDOWS[index])
        digest = hashlib.blake2b(data, digest_size=16, key=b"data_pipeline window").digest()
        expected += int.from_bytes(digest, "little")
    assert hash_of([3, 1]).value == expected % 2**128


def test_order_and_division_among_ranks_do_not_matter() -> None:
    everything = hash_of(list(range(20)))
    assert hash_of(list(reversed(range(20)))) == everything
    for ranks in (2, 3, 7):
        total = WindowHash()
        for rank in range(ranks):
            total += hash_of(list(range(rank, 20, ranks)))
        assert total == everything


def test_a_lost_repeated_or_moved_window_is_seen() -> None:
    everything = hash_of(list(range(20)))
    moved = hash_of(list(range(19)))
    moved.add(18, WINDOWS[19])
    for other in (hash_of(list(range(19))), hash_of([*range(20), 5]), moved):
        assert other != everything


def test_dtype_of_the_tokens_does_not_matter() -> None:
    hashes = []
    for dtype in (np.uint16, np.int32, np.int64):
        result = WindowHash()
        result.add(5, WINDOWS[0].astype(dtype))
        hashes.append(result.value)
    assert len(set(hashes)) == 1


def test_value_survives_its_hexadecimal_form() -> None:
    before = hash_of([0, 1])
    assert len(before.hexdigest()) == 32
    assert WindowHash(int(before.hexdigest(), 16)) == before
    assert WindowHash().hexdigest() == "0" * 32
