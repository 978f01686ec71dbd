"""``prepare``: sources to a finished data set, by any number of processes, resumable after any death."""

import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import TextIO

from data_pipeline.binformat import read_header
from data_pipeline.durable import write_atomic
from data_pipeline.errors import DataError
from data_pipeline.finish import finish, unit_directory
from data_pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest
from data_pipeline.plan import BuildOptions, Plan, TokenizerIdentity, make_plan
from data_pipeline.progress import Progress, Reading
from data_pipeline.sources import find_sources
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.unit import Board, UnitTask, run_unit

WORK_DIRECTORY = ".build"
PLAN_FILE = "plan.json"


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
    log: TextIO | None = None,
) -> BuildResult:
    """Tokenise sources into parts. The output bytes depend on the sources and options alone.

    Run again after any interruption, it goes on from the units that were committed.

    Args:
        specs: files, directories and glob patterns.
        output: directory of the data set; may hold an unfinished build of the same plan.
        tokenizer: see `load_tokenizer`.
        options: what decides the output, beside the sources and the tokenizer.
        workers: processes; by default one per processor core that this process may use.
        log: where the plan and the progress are reported, by default stderr.

    Raises:
        DataError: a source, an option or the output directory is not usable; nothing is overwritten.
    """
    output = Path(output)
    log = log or sys.stderr
    options = options or BuildOptions()
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers} is out of range; expected 1 or more")
    loaded = load_tokenizer(tokenizer)
    log.write("finding and hashing the sources\n")
    sources = find_sources(specs, options.text_column, options.text_documents)
    plan = make_plan(sources, TokenizerIdentity.of(loaded), options)
    with _locked(output):
        work = output / WORK_DIRECTORY
        up_to_date = _is_finished(plan, output)
        if not up_to_date:
            _open_work(plan, output, work)
            _run_units(plan, work, tokenizer, loaded, workers or len(os.sched_getaffinity(0)), log)
            finish(plan, output, work)
        shutil.rmtree(work, ignore_errors=True)
        manifest, identity = read_manifest(output)
    return BuildResult(manifest, identity, up_to_date)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Make the directory and hold it against a second build on this machine; a death releases it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{output}: not a directory; name a new one with --output") from error
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{output}: another prepare is at work there; wait for it") from error
        yield
    finally:
        os.close(descriptor)


def _is_finished(plan: Plan, output: Path) -> bool:
    """Whether ``output`` already holds this data set, whole.

    Raises:
        DataError: it holds another one, or a part of it is missing or has another size.
    """
    if not (output / MANIFEST_FILE).exists():
        return False
    manifest, _ = read_manifest(output)
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
            f"{output}: holds another data set (other {what}); nothing was changed. Name a new "
            "directory with --output, or delete this one first"
        )
    for part in manifest.parts:
        read_header(output / part.file)
    return True


def _open_work(plan: Plan, output: Path, work: Path) -> None:
    """Make or adopt the build's own directory, and clear what a killed run left half-done in it."""
    plan_file = work / PLAN_FILE
    if plan_file.exists() and plan_file.read_bytes() != plan.canonical():
        raise DataError(
            f"{output}: holds an unfinished build of other sources or options; nothing was changed. Name a "
            f"new directory with --output, or delete {output} first"
        )
    if not plan_file.exists():
        foreign = next((path for split in ("train", "val") for path in output.glob(f"*_{split}_*.bin")), None)
        if foreign:
            raise DataError(
                f"{foreign}: the directory holds parts of another data set; nothing was changed. Name a new "
                "directory with --output"
            )
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_atomic(plan_file, plan.canonical())
    for stale in work.glob("*.tmp"):
        shutil.rmtree(stale)


def _run_units(plan: Plan, work: Path, spec: str, tokenizer: Tokenizer, workers: int, log: TextIO) -> None:
    """Do every unit that is not committed yet."""
    context = get_context("spawn")
    board = Board(context, len(plan.units))
    tasks = []
    for number, positions in enumerate(plan.units):
        members = tuple(plan.sources[position] for position in positions)
        directory = unit_directory(work, number)
        if directory.exists():
            board.source_bytes[number] = sum(source.size_bytes for source in members)
            continue
        options = plan.options
        tasks.append(UnitTask(number, members, directory, plan.part_format, options.text_column, options.val_fraction))
    workers = min(workers, max(len(tasks), 1))
    total_bytes = sum(source.size_bytes for source in plan.sources)
    resumed = f", {len(plan.units) - len(tasks)} done before" if len(tasks) < len(plan.units) else ""
    log.write(
        f"{len(plan.sources)} source files, {total_bytes / 1e6:,.1f} MB, {len(plan.units)} units{resumed}; "
        f"{workers} processes, tokenizer {plan.tokenizer.name}\n"
    )
    with Progress(lambda: Reading(sum(board.source_bytes), total_bytes, sum(board.tokens)), log):
        if workers == 1:
            for task in tasks:
                run_unit(task, tokenizer, board)
        else:
            _run_pool(tasks, spec, workers, board)


def _run_pool(tasks: list[UnitTask], spec: str, workers: int, board: Board) -> None:
    # spawn: a fork would copy the locks of Arrow's and tiktoken's threads and could hang on them.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (spec, board))
    try:
        with _interrupt_blocked():
            futures = [pool.submit(_run_in_worker, task) for task in tasks]
        for future in as_completed(futures):
            future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died (killed, or out of memory); finished units are kept: run the same command "
            "again, with fewer --workers if memory was short"
        ) from error
    finally:
        board.stop()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Start processes that never see Ctrl-C: the parent alone decides, and tells them by the board."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Tokenizer, Board] | None = None


def _start_worker(spec: str, board: Board) -> None:
    global _worker
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = load_tokenizer(spec), board


def _die_with_parent() -> None:
    """A killed parent cannot tell its workers; without this they would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _run_in_worker(task: UnitTask) -> None:
    assert _worker is not None
    tokenizer, board = _worker
    run_unit(task, tokenizer, board)
