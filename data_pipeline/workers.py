"""Worker processes: each does one unit at a time; one that dies is named, replaced, and its unit tried again."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnContext
from typing import Any, Protocol

from data_pipeline.engines import load_engine
from data_pipeline.errors import DataError, Stopped
from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.unit import Board, Encoders, UnitTask, run_unit

_MAX_DEATHS = 3
# Without a sign of progress for so long, a worker is taken for hung.
_STALL_SECONDS = 600.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class EncoderNames:
    """How a worker process loads its tokenizers; both engines have passed their self-test on this host.

    Attributes:
        tokenizer: see `load_tokenizer`.
        engine: see `load_engine`.
        second: encodes everything again; None for a sample by the reference.
    """

    tokenizer: str
    engine: str
    second: str | None

    def load(self) -> Encoders:
        """The tokenizers, in this process."""
        reference = load_tokenizer(self.tokenizer)
        second = load_engine(self.second, reference) if self.second else None
        return Encoders(reference, load_engine(self.engine, reference), second)


class Workers(Protocol):
    """What runs units: `InlineWorkers` in this process or `WorkerPool` in others.

    Attributes:
        size: how many units run at once.
    """

    size: int

    def submit(self, task: UnitTask) -> None:
        """Give a unit to an idle worker; at most ``size`` may be open."""
        ...

    def finished(self, timeout_seconds: float) -> list[int]:
        """Numbers of the units that have ended well since the last call; waits for one, up to the time-out.

        Raises:
            DataError: a unit failed, or killed its worker several times.
        """
        ...

    def close(self) -> None:
        """End all workers; open units are given up."""
        ...


class InlineWorkers:
    """One unit at a time, in this process."""

    size = 1

    def __init__(self, encoders: Encoders, board: Board) -> None:
        """Use ``encoders`` and report on ``board``."""
        self._encoders = encoders
        self._board = board
        self._finished: list[int] = []

    def submit(self, task: UnitTask) -> None:
        """See `Workers.submit`; returns when it is done."""
        run_unit(task, self._encoders, self._board)
        self._finished.append(task.number)

    def finished(self, timeout_seconds: float) -> list[int]:
        """See `Workers.finished`."""
        done, self._finished = self._finished, []
        if not done:
            time.sleep(min(timeout_seconds, 0.05))
        return done

    def close(self) -> None:
        """See `Workers.close`."""


class _Worker:
    """One process, the pipe to it, and the unit it has."""

    def __init__(self, context: SpawnContext, names: EncoderNames, board: Board) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, names, board), daemon=True)
        with _signals_blocked():
            self.process.start()
        theirs.close()
        self.task: UnitTask | None = None
        self.progress = (-1, 0.0)


class WorkerPool:
    """Processes started afresh: a fork would copy the locks of native threads and could hang on them."""

    def __init__(self, size: int, names: EncoderNames, board: Board) -> None:
        """Start a process with each of the first ``size`` units."""
        self.size = size
        self._context = get_context("spawn")
        self._names = names
        self._board = board
        self._deaths: dict[int, int] = {}
        self._workers: list[_Worker] = []

    def submit(self, task: UnitTask) -> None:
        """See `Workers.submit`."""
        worker = next((worker for worker in self._workers if worker.task is None), None)
        if worker is None:
            worker = _Worker(self._context, self._names, self._board)
            self._workers.append(worker)
        worker.task = task
        worker.progress = (-1, time.monotonic())
        with suppress(BrokenPipeError):  # it died while it was idle; `finished` sees that and replaces it
            worker.pipe.send(task)

    def finished(self, timeout_seconds: float) -> list[int]:
        """See `Workers.finished`."""
        done = []
        connection.wait([worker.pipe for worker in self._workers], timeout_seconds)
        for worker in list(self._workers):
            try:
                answers = [worker.pipe.recv()] if worker.pipe.poll() else []
            except (EOFError, OSError):
                self._replace(worker)
                continue
            for error in answers:
                if error is not None:
                    raise error
                assert worker.task is not None
                done.append(worker.task.number)
                worker.task = None
            self._kill_if_hung(worker)
        return done

    def close(self) -> None:
        """See `Workers.close`."""
        self._board.stop()
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _replace(self, dead: _Worker) -> None:
        """Start a process in the place of one that died, and give it the same unit."""
        self._workers.remove(dead)
        dead.pipe.close()
        dead.process.join()
        task = dead.task
        if task is None:
            return  # it was idle: `submit` starts another when there is work for it
        self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
        if self._deaths[task.number] >= _MAX_DEATHS:
            files = ", ".join(dict.fromkeys(source.name for source in task.sources))
            raise DataError(
                f"unit {task.number} ({files}) ended its worker process {_MAX_DEATHS} times (exit code "
                f"{dead.process.exitcode}; -9 means killed, usually for memory); finished units are kept: run the same "
                "command again, with fewer --workers if memory was short"
            )
        self.submit(task)

    def _kill_if_hung(self, worker: _Worker) -> None:
        if worker.task is None:
            return
        progress = self._board.text_bytes[worker.task.number]
        if progress != worker.progress[0]:
            worker.progress = (progress, time.monotonic())
        elif time.monotonic() - worker.progress[1] > _STALL_SECONDS:
            worker.process.kill()  # seen as a death by the next call


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a process that never sees Ctrl-C or a scheduler's TERM: the parent decides, and tells it by the board."""
    resource_tracker.ensure_running()  # when it starts it unblocks both, so it must be there before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Any, names: EncoderNames, board: Board) -> None:
    """The life of a worker process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    encoders = names.load()
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return  # the parent has closed the pipe: no more work
        answer: Exception | None = None
        try:
            run_unit(task, encoders, board)
        except Stopped:
            return
        except (DataError, OSError) as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        with suppress(BrokenPipeError):  # the parent gives up; the next receive ends this process
            pipe.send(answer)


def _die_with_parent() -> None:
    """A killed parent cannot tell its workers; without this they would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
