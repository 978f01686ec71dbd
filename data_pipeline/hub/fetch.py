"""Files of hub sources during a build: fetched ahead of the workers, checked, and deleted after use when asked."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.errors import DataError
from data_pipeline.hub.download import download
from data_pipeline.plan import Plan
from data_pipeline.rows import Slice
from data_pipeline.sources import SourceFile

FETCH_THREADS = 4


class Fetcher:
    """Sources of a plan, made local when they are needed.

    Attributes:
        fetched_bytes: bytes that have arrived so far.
    """

    def __init__(
        self, plan: Plan, download_dir: Path, keep: bool, ahead: int, is_committed: Callable[[int], bool]
    ) -> None:
        """Fetch into ``download_dir``.

        Args:
            plan: the plan.
            download_dir: where files go.
            keep: whether they stay after use.
            ahead: how many may lie there at once if they do not stay.
            is_committed: tells of a unit whether anyone has finished it.
        """
        self.fetched_bytes = 0
        self._plan = plan
        self._directory = download_dir
        self._keep = keep
        self._ahead = ahead
        self._held: set[int] = set()
        self._is_committed = is_committed
        self._units_of: dict[int, list[int]] = {}
        for number, unit in enumerate(plan.units):
            for piece in unit:
                self._units_of.setdefault(piece.source, []).append(number)
        self._pool = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        self._fetches: dict[int, Future[SourceFile]] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def want(self, unit: Iterable[Slice]) -> bool:
        """Start to fetch what a unit needs; False where enough files are on their way already."""
        for position in {piece.source for piece in unit}:
            if self._plan.sources[position].remote is None or position in self._fetches:
                continue
            under_way = sum(not fetch.done() for fetch in self._fetches.values())
            if under_way >= FETCH_THREADS or (not self._keep and len(self._held) >= self._ahead):
                return False
            self._held.add(position)
            self._fetches[position] = self._pool.submit(self._fetch, position)
        return True

    def ready(self, unit: Iterable[Slice]) -> tuple[SourceFile, ...] | None:
        """The sources of a unit's slices once all of them are here; None before.

        Raises:
            DataError: a file cannot be had.
        """
        sources = []
        for piece in unit:
            source = self._plan.sources[piece.source]
            if source.remote is not None:
                fetch = self._fetches.get(piece.source)
                if fetch is None or not fetch.done():
                    return None
                source = fetch.result()
            sources.append(source)
        return tuple(sources)

    def release(self, unit: Iterable[Slice]) -> None:
        """After a unit was committed: delete its files that no unit needs any more, unless they are to be kept."""
        for position in {piece.source for piece in unit}:
            source = self._plan.sources[position]
            if source.remote and not self._keep and all(map(self._is_committed, self._units_of[position])):
                self._held.discard(position)
                source.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop all transfers; what has arrived stays and is gone on from."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, position: int) -> SourceFile:
        source = self._plan.sources[position]
        assert source.remote is not None
        path, hashes = download(source.remote, self._directory, on_bytes=self._count, stopped=self._stopped.is_set)
        fetched = replace(source, path=path, blocks=hashes.blocks)
        self._check_footer(fetched, position)
        return fetched

    def _count(self, count: int) -> None:
        with self._lock:
            self.fetched_bytes += count

    def _check_footer(self, source: SourceFile, position: int) -> None:
        """The plan was made from a footer that no hash vouched for: hold it against the file that one does."""
        if source.kind != "parquet":
            return
        with source.open() as file:
            metadata = pq.read_metadata(pa.PythonFile(file, mode="r"))
        planned = max(piece.stop for unit in self._plan.units for piece in unit if piece.source == position)
        if metadata.num_row_groups != planned:
            raise DataError(
                f"{source.path}: has {metadata.num_row_groups:,} row groups, the plan was made for {planned:,}: the "
                "hub gave another footer then. Delete the output directory and run the same command"
            )
