"""``prepare``: sources to a finished data set, by any number of processes and nodes, resumable after any death."""

import errno
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, TextIO

from data_pipeline.binformat import read_header, token_dtype
from data_pipeline.claims import Claims, wait_briefly
from data_pipeline.engines import AUTO, REFERENCE, choose_engine, installed_engines, self_test
from data_pipeline.errors import DataError
from data_pipeline.finish import finish, unit_directory
from data_pipeline.hub.fetch import FETCH_THREADS, Fetcher
from data_pipeline.hub.listing import describe, is_hub_spec
from data_pipeline.hub.space import check_space
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.plan import BYTES_PER_TOKEN, BuildOptions, Plan, TokenizerIdentity, make_plan
from data_pipeline.progress import Progress, Reading
from data_pipeline.sources import FoundFile, SourceFile, find_sources, hash_sources
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.unit import Board, UnitTask
from data_pipeline.workers import EncoderNames, InlineWorkers, WorkerPool, Workers
from data_pipeline.workspace import WORK_DIRECTORY, Workspace

DEFAULT_MAX_QUARANTINED = 0.01
DOWNLOAD_DIRECTORY = "downloads"
_FINISH_CLAIM = "finish"
_POLL_SECONDS = 0.5

__all__ = ["WORK_DIRECTORY", "BuildResult", "Execution", "prepare"]


@dataclass(frozen=True)
class Execution:
    """How to do the work; nothing of it has an effect on a single byte of the output.

    Attributes:
        engine: ``auto`` or a name; see `choose_engine`.
        verify: ``sample`` encodes a part of the documents again by the reference, ``full`` all of them by a second
            engine.
        max_quarantined: share of rows that may be quarantined, beyond which the build fails.
        rank: this process among ``world`` on all nodes: where it starts in the list of units.
        world: how many there are; any number may join or leave.
        download_dir: where files of hub sources go; by default ``downloads`` beside the output.
        delete_downloads: delete them once all of their units are done.
    """

    engine: str = AUTO
    verify: Literal["sample", "full"] = "sample"
    max_quarantined: float = DEFAULT_MAX_QUARANTINED
    rank: int = 0
    world: int = 1
    download_dir: Path | None = None
    delete_downloads: bool = False


@dataclass(frozen=True)
class BuildResult:
    """A finished data set.

    Attributes:
        manifest: its manifest.
        manifest_sha256: its identity.
        up_to_date: whether it was there already and nothing was done.
    """

    manifest: Manifest
    manifest_sha256: str
    up_to_date: bool


def prepare(
    specs: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str = "gpt2",
    options: BuildOptions | None = None,
    workers: int | None = None,
    execution: Execution | None = None,
    log: TextIO | None = None,
) -> BuildResult:
    """Tokenise sources into parts. The output bytes depend on the sources and options alone.

    Run again after any interruption, it goes on from the units that were committed. Run at the same time by several
    processes or nodes that share ``output``, they divide the units among them.

    Args:
        specs: files, directories, glob patterns and hub sources.
        output: directory of the data set; may hold an unfinished build of the same plan.
        tokenizer: see `load_tokenizer`.
        options: what decides the output, beside the sources and the tokenizer.
        workers: processes; by default one per processor core that this process may use.
        execution: how to do it.
        log: where the plan and the progress are reported, by default stderr.

    Raises:
        DataError: a source, an option or the output directory is not usable; nothing is overwritten.
    """
    options = options or BuildOptions()
    execution = execution or Execution()
    output = Path(output)
    cores = len(os.sched_getaffinity(0))
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers} is out of range; expected 1 or more")
    if not 0 <= execution.rank < execution.world:
        raise DataError(
            f"--rank {execution.rank} is out of range; expected 0 to {execution.world - 1} (--world less 1)"
        )
    build = _Build(
        loaded=load_tokenizer(tokenizer),
        spec=tokenizer,
        output=output,
        options=options,
        execution=execution,
        workers=workers or cores,
        log=log or sys.stderr,
    )
    options.check(build.loaded.vocab_size)
    try:
        return build.run(specs)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = error.strerror if error.errno == errno.EFBIG else "the disk is full"
        raise DataError(
            f"{error.filename or output}: {what}; finished units are kept: free space and run the same command again"
        ) from error


@dataclass
class _Build:
    """One call of `prepare`."""

    loaded: Tokenizer
    spec: str
    output: Path
    options: BuildOptions
    execution: Execution
    workers: int
    log: TextIO

    def run(self, specs: Sequence[str]) -> BuildResult:
        self._say("finding the sources")
        found = find_sources(specs, self.options.text_column, self.options.text_documents, self._download_dir)
        if remote := [file.remote for file in found if file.remote]:
            self._say(describe(" ".join(filter(is_hub_spec, specs)), remote))
        if self.options.val_split == "nanogpt" and [file.kind for file in found] == ["text"]:
            found = [replace(found[0], kind="nanogpt-text")]
        workspace = Workspace(self.output)
        if not workspace.is_finished:
            workspace.open()
        if workspace.is_finished:  # looked at after the directory was made: nobody starts anew what has just ended
            self._check_finished(self._make_plan(found))
            workspace.remove()
            return self._result(up_to_date=True)
        try:
            with Claims(workspace.path) as claims:
                identity = TokenizerIdentity.of(self.loaded)
                plan = workspace.settle_plan(found, identity, self.options, claims, lambda: self._make_plan(found))
                self._say(plan.describe())
                self._do_units(plan, workspace, claims)
                self._finish(plan, workspace, claims)
        except OSError:
            # Another node has finished, and removed the directory under this one.
            if not workspace.is_finished:
                raise
        return self._result(up_to_date=False)

    @property
    def _download_dir(self) -> Path:
        return self.execution.download_dir or self.output.with_name(f"{self.output.name}-{DOWNLOAD_DIRECTORY}")

    @property
    def _files_ahead(self) -> int:
        """Files of the hub that lie on the disk at once if they are deleted after use; each has several units."""
        return FETCH_THREADS + self.workers // 4

    def _say(self, line: str) -> None:
        self.log.write(f"{line}\n")
        self.log.flush()

    def _result(self, up_to_date: bool) -> BuildResult:
        manifest, identity = read_manifest(self.output)
        return BuildResult(manifest, identity, up_to_date)

    def _make_plan(self, found: Sequence[FoundFile]) -> Plan:
        size = sum(file.size_bytes for file in found if file.remote is None)
        self._say(f"hashing {size / 1e6:,.1f} MB in {len(found):,} files")
        sources, pieces = hash_sources(found, self.options.text_column, self.workers)
        return make_plan(sources, pieces, TokenizerIdentity.of(self.loaded), self.options)

    def _check_finished(self, plan: Plan) -> None:
        """Refuse another data set, and one with a part that is missing or has another size."""
        manifest, _ = read_manifest(self.output)
        if manifest.plan_sha256 != plan.sha256:
            here = [(source.name, source.sha256) for source in manifest.sources]
            asked = [(source.name, source.sha256) for source in plan.sources]
            differences = {
                "tokenizer": manifest.tokenizer != plan.tokenizer,
                "options": manifest.options != plan.options,
                "sources": here != asked,
            }
            what = " and ".join(name for name, differs in differences.items() if differs)
            raise DataError(
                f"{self.output}: holds another data set (other {what or 'version of this program'}); nothing was "
                "changed. Name a new directory with --output, or delete this one first"
            )
        for part in manifest.parts:
            read_header(self.output / part.file)

    def _do_units(self, plan: Plan, workspace: Workspace, claims: Claims) -> None:
        pending = self._in_order([n for n in range(len(plan.units)) if not workspace.is_committed(n)], len(plan.units))
        if not pending:
            return
        self._check_space(plan, workspace)
        context = get_context("spawn")
        board = Board(context, len(plan.units))
        for number in set(range(len(plan.units))).difference(pending):
            board.text_bytes[number] = sum(piece.text_bytes for piece in plan.units[number])
        size = min(self.workers, len(pending))
        names = self._choose_engines()
        before = (
            f", {len(plan.units) - len(pending):,} of the units done before" if len(pending) < len(plan.units) else ""
        )
        self._say(f"{size} processes, tokenizer {plan.tokenizer.name} by {names.engine}{before}")
        keep = not self.execution.delete_downloads
        fetcher = Fetcher(plan, self._download_dir, keep, self._files_ahead, workspace.is_committed)
        workers: Workers | None = None
        try:
            workers = InlineWorkers(names.load(), board) if size == 1 else WorkerPool(size, names, board)
            schedule = _Schedule(plan, workspace, claims, fetcher, workers, pending)

            def read() -> Reading:
                seconds = {"download": schedule.waited_seconds * size, **board.stage_seconds()}
                return Reading(
                    sum(board.text_bytes), plan.text_bytes, sum(board.tokens), seconds, fetcher.fetched_bytes
                )

            with Progress(read, self.log):
                schedule.run()
        finally:
            fetcher.close()
            if workers:
                workers.close()

    def _in_order(self, pending: list[int], num_units: int) -> list[int]:
        """Start at this rank's stretch of the units, so that nodes seldom meet and share few source files."""
        first = num_units * self.execution.rank // self.execution.world
        return [n for n in pending if n >= first] + [n for n in pending if n < first]

    def _choose_engines(self) -> EncoderNames:
        """The engines that pass their self-test on this host."""
        engine, refused = choose_engine(self.execution.engine, self.loaded)
        for line in refused:
            self._say(f"warning: {line}")
        second = None
        if self.execution.verify == "full":
            others = [each for each in installed_engines(self.loaded) if each.name != engine.name]
            second = next((each.name for each in others if self_test(each) is None), REFERENCE)
            if second == REFERENCE and engine.name not in {each.name for each in installed_engines(self.loaded)}:
                raise DataError(
                    f"--verify full compares two engines, and {engine.name} is the only one here for "
                    f"{self.loaded.name}; pip install gigatoken fastokens, or leave it out"
                )
        return EncoderNames(self.spec, engine.name, second)

    def _check_space(self, plan: Plan, workspace: Workspace) -> None:
        remote = [source.remote for source in plan.sources if source.remote]
        if remote:
            keep = not self.execution.delete_downloads
            check_space(remote, self._download_dir, self.output, keep=keep, ahead=self._files_ahead)
            return
        left = sum(
            piece.text_bytes
            for number, unit in enumerate(plan.units)
            if not workspace.is_committed(number)
            for piece in unit
        )
        tokens = left if plan.tokenizer.name == "bytes" else left // BYTES_PER_TOKEN
        needed = tokens * token_dtype(plan.tokenizer.vocab_size).itemsize
        free = shutil.disk_usage(self.output).free
        if free < needed:
            raise DataError(
                f"{self.output}: about {needed / 1e9:,.2f} GB are needed and {free / 1e9:,.2f} GB are free; free some, "
                "or name a directory on another disk with --output"
            )

    def _finish(self, plan: Plan, workspace: Workspace, claims: Claims) -> None:
        """Write the manifest, or wait for the one who does."""
        while not workspace.is_finished:
            if not claims.take(_FINISH_CLAIM):
                wait_briefly()
                continue
            try:
                if not workspace.is_finished:
                    finish(plan, self.output, workspace.path, self.execution.max_quarantined)
            finally:
                claims.give_back(_FINISH_CLAIM)
        workspace.remove()


class _Schedule:
    """Hands units to workers until all are committed, by whomever.

    Attributes:
        waited_seconds: time in which a worker was idle because files were still on their way.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        claims: Claims,
        fetcher: Fetcher,
        workers: Workers,
        pending: list[int],
    ) -> None:
        self.waited_seconds = 0.0
        self._plan = plan
        self._workspace = workspace
        self._claims = claims
        self._fetcher = fetcher
        self._workers = workers
        self._pending = pending
        self._open: set[int] = set()

    def run(self) -> None:
        while self._pending or self._open:
            started = time.monotonic()
            waits_for_files = self._hand_out()
            for number in self._workers.finished(_POLL_SECONDS if self._open else 0.2):
                self._open.discard(number)
                self._claims.give_back(_claim(number))
                if self._workspace.is_committed(number):
                    self._fetcher.release(self._plan.units[number])
                else:  # taken over by another node while this one was stopped: wait for it, or do it after all
                    self._pending.append(number)
            if waits_for_files:
                idle = self._workers.size - len(self._open)
                self.waited_seconds += (time.monotonic() - started) * idle / self._workers.size

    def _hand_out(self) -> bool:
        """Give units to idle workers; returns whether one stays idle for want of files."""
        waits_for_files = False
        for number in list(self._pending):
            if len(self._open) == self._workers.size:
                return False
            if self._workspace.is_committed(number):
                self._pending.remove(number)
                continue
            unit = self._plan.units[number]
            if not self._fetcher.want(unit):
                return True
            sources = self._fetcher.ready(unit)
            if sources is None:
                waits_for_files = True
            elif self._claims.take(_claim(number)):
                self._pending.remove(number)
                if self._workspace.is_committed(number):  # in the moment before the claim
                    self._claims.give_back(_claim(number))
                    continue
                self._workspace.clear_stale(number)
                self._open.add(number)
                self._workers.submit(self._task(number, sources))
        return waits_for_files

    def _task(self, number: int, sources: tuple[SourceFile, ...]) -> UnitTask:
        options = self._plan.options
        by_content = options.val_split == "content"
        return UnitTask(
            number=number,
            slices=self._plan.units[number],
            sources=sources,
            directory=unit_directory(self._workspace.path, number),
            part_format=self._plan.part_format,
            text_column=options.text_column,
            val_fraction=options.val_fraction if by_content else 0.0,
            keep_rows=not by_content,
        )


def _claim(number: int) -> str:
    return f"unit-{number:06d}"
