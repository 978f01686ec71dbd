import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from data_pipeline.prefetch import Fill, Prefetcher


def recording(log: list[int], fail_at: set[int] | None = None) -> Fill:
    def fill(position: int, out: np.ndarray) -> None:
        log.append(position)
        if fail_at and position in fail_at:
            raise OSError(f"cannot read {position}")
        out[...] = position

    return fill


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for ten seconds"
        time.sleep(0.005)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_come_in_order_whatever_is_read_ahead(ahead: int) -> None:
    log: list[int] = []
    reader = Prefetcher(recording(log), (2, 3), 10, ahead)
    for position in range(0, 200, 10):
        assert reader.get(position).tolist() == [[position] * 3] * 2
        reader.release_before(position + 10)
    reader.close()
    assert log[:20] == list(range(0, 200, 10))
    assert len(log) <= 20 + ahead


def test_the_thread_reads_ahead_and_no_further() -> None:
    log: list[int] = []
    reader = Prefetcher(recording(log), (1,), 5, 2)
    reader.get(0)
    wait_for(lambda: log == [0, 5, 10])
    time.sleep(0.02)
    assert log == [0, 5, 10]
    reader.release_before(5)
    assert reader.get(5)[0] == 5
    wait_for(lambda: log == [0, 5, 10, 15])
    reader.close()


def test_a_batch_that_was_looked_at_is_not_read_again() -> None:
    log: list[int] = []
    reader = Prefetcher(recording(log), (1,), 1, 2)
    for position in range(6):  # as exact mode: the next one first
        assert reader.get(position + 1)[0] == position + 1
        assert reader.get(position)[0] == position
        reader.release_before(position + 1)
    reader.close()
    assert len(log) == len(set(log))


@pytest.mark.parametrize("ahead", [0, 2])
def test_buffers_are_bounded_and_not_overwritten_before_their_release(ahead: int) -> None:
    reader = Prefetcher(recording([]), (64,), 1, ahead)
    for position in range(50):
        peeked = reader.get(position + 1)
        batch = reader.get(position)
        time.sleep(0.0005)
        assert (set(batch), set(peeked)) == ({position}, {position + 1})
        assert reader.num_buffers <= ahead + 3
        reader.release_before(position + 1)
    reader.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_surfaces_where_its_batch_is_asked_for_and_not_before(ahead: int) -> None:
    failing = {3}
    reader = Prefetcher(recording([], failing), (1,), 1, ahead)
    for position in range(3):
        assert reader.get(position)[0] == position
        reader.release_before(position + 1)
    with pytest.raises(OSError, match="cannot read 3"):
        reader.get(3)
    failing.clear()
    assert reader.get(3)[0] == 3  # the next call tries again
    assert reader.get(4)[0] == 4
    reader.close()


def test_the_thread_ends_with_close_and_with_its_owner() -> None:
    reader = Prefetcher(recording([]), (1,), 1, 2)
    reader.get(0)
    assert len(threads()) == 1
    reader.close()
    assert not threads()
    assert reader.get(7)[0] == 7  # starts anew
    assert len(threads()) == 1
    del reader
    gc.collect()
    wait_for(lambda: not threads())


def test_without_reading_ahead_there_is_no_thread() -> None:
    reader = Prefetcher(recording([]), (1,), 1, 0)
    reader.get(0)
    assert not threads()


def test_close_does_not_wait_for_what_has_not_begun() -> None:
    gate, log = threading.Event(), []

    def fill(position: int, out: np.ndarray) -> None:
        log.append(position)
        if position:
            gate.wait(10)
        out[...] = position

    reader = Prefetcher(fill, (1,), 1, 5)
    reader.get(0)
    wait_for(lambda: log == [0, 1])
    gate.set()
    reader.close()
    assert len(log) <= 6
    assert not threads()
