"""Reads batches ahead in one background thread, into buffers that are used again."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Fill = Callable[[int, NDArray[np.int64]], None]


class Prefetcher:
    """The batches at positions p, p + stride, p + 2 stride and so on, up to ``ahead`` of them beyond the last asked.

    What is handed out, and in which order, does not depend on ``ahead``: a batch is a function of its position. With
    ``ahead`` 0 there is no thread, and a batch is read when it is asked for. The thread starts with the first batch
    and ends with `close`, with the garbage collection of this object, or with the process.
    """

    def __init__(self, fill: Fill, shape: tuple[int, ...], stride: int, ahead: int) -> None:
        """Define the batches; nothing is read yet.

        Args:
            fill: writes the batch of a position into an array; called by one thread at a time. It must not refer to
                whoever owns this object, which would then not be collected at once.
            shape: of a batch, int64.
            stride: from the position of one batch to that of the next.
            ahead: batches that are read ahead.
        """
        self._fill, self._shape, self._stride, self._ahead = fill, shape, stride, ahead
        self._batches: dict[int, Future[NDArray[np.int64]]] = {}
        self._free: list[NDArray[np.int64]] = []
        self._thread: ThreadPoolExecutor | None = None

    def get(self, position: int) -> NDArray[np.int64]:
        """The batch at ``position``; the array stays as it is until `release_before` a later position.

        Raises:
            Exception: whatever ``fill`` raised for this batch, and never what it raised for a later one. The next
                call tries again.
        """
        for step in range(self._ahead + 1):
            self._start(position + step * self._stride)
        try:
            return self._batches[position].result()
        except Exception:
            del self._batches[position]
            raise

    def release_before(self, position: int) -> None:
        """Give back the buffers of all batches before ``position``."""
        for done in [at for at in self._batches if at < position]:
            batch = self._batches.pop(done)
            # One that waits or failed has no buffer to give back: it took none, or dropped it.
            if not batch.cancel() and batch.exception() is None:
                self._free.append(batch.result())

    def close(self) -> None:
        """Wait for the read in progress, drop the others, end the thread; a later `get` starts anew."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._batches.clear()

    @property
    def num_buffers(self) -> int:
        """Buffers in existence, those being filled included."""
        return len(self._batches) + len(self._free)

    def _start(self, position: int) -> None:
        if position in self._batches:
            return
        buffer = self._free.pop() if self._free else np.empty(self._shape, dtype=np.int64)
        if self._ahead == 0:
            batch: Future[NDArray[np.int64]] = Future()
            self._batches[position] = batch
            try:
                self._fill(position, buffer)
            except Exception as error:
                batch.set_exception(error)
            else:
                batch.set_result(buffer)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._batches[position] = self._thread.submit(_filled, self._fill, position, buffer)


def _filled(fill: Fill, position: int, buffer: NDArray[np.int64]) -> NDArray[np.int64]:
    fill(position, buffer)
    return buffer
