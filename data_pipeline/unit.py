"""One unit of work: source files to parts in a directory of its own, committed by one rename."""

import ctypes
import json
import os
import shutil
import socket
import uuid
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from data_pipeline.binformat import document_tokens
from data_pipeline.durable import sync_directory, write_synced
from data_pipeline.parts import PartFormat, PartSeries
from data_pipeline.receipt import QUARANTINE_FILE, RECEIPT_FILE, Receipt, RowCounts
from data_pipeline.rows import Row, read_rows
from data_pipeline.sources import MAX_DOCUMENT_BYTES, SourceFile
from data_pipeline.split import SmallestHashes, is_validation, text_hash
from data_pipeline.tokenizer import Tokenizer


class Stopped(Exception):
    """The build was told to stop; the unit left nothing behind."""


class Board:
    """Numbers that workers write and the parent reads, without a lock: each unit has its own slot.

    Attributes:
        source_bytes: bytes of source files consumed, per unit.
        tokens: tokens written, per unit.
    """

    def __init__(self, context: BaseContext, num_units: int) -> None:
        """Make shared arrays for ``num_units`` units."""
        self.source_bytes: Any = context.RawArray(ctypes.c_int64, max(num_units, 1))
        self.tokens: Any = context.RawArray(ctypes.c_int64, max(num_units, 1))
        self._stop: Any = context.RawValue(ctypes.c_bool, False)

    def stop(self) -> None:
        """Ask all workers to give up their open unit."""
        self._stop.value = True

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return bool(self._stop.value)


@dataclass(frozen=True)
class UnitTask:
    """What a worker needs to know of a unit.

    Attributes:
        number: position in the plan.
        sources: the unit's files.
        directory: where the finished unit appears.
        part_format: what all parts share.
        text_column: column or key of the text.
        val_fraction: see `data_pipeline.split`.
    """

    number: int
    sources: tuple[SourceFile, ...]
    directory: Path
    part_format: PartFormat
    text_column: str
    val_fraction: float


def run_unit(task: UnitTask, tokenizer: Tokenizer, board: Board) -> None:
    """Do the unit and commit it; its directory appears whole, receipt included, or not at all.

    Raises:
        DataError: a source is damaged or changed.
        Stopped: `Board.stop` was called.
    """
    # Two builders of one unit must never share a name; the slower one's rename fails and it steps back.
    unique = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    aside = task.directory.with_name(f"{task.directory.name}.{unique}.tmp")
    aside.mkdir()
    try:
        receipt = _UnitWriter(task, tokenizer, board, aside).run()
        write_synced(aside / RECEIPT_FILE, receipt.to_bytes())
        commit_directory(aside, task.directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def commit_directory(aside: Path, final: Path) -> None:
    """Rename a finished directory into place, unless an equal one is already there."""
    sync_directory(aside)
    if not final.exists():
        os.rename(aside, final)
        sync_directory(final.parent)


class _UnitWriter:
    """The state of one running unit."""

    def __init__(self, task: UnitTask, tokenizer: Tokenizer, board: Board, directory: Path) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._board = board
        self._series = {split: PartSeries(directory, split, task.part_format) for split in ("train", "val")}
        self._text_bytes = {"train": 0, "val": 0}
        self._smallest = SmallestHashes()
        self._quarantine = open(directory / QUARANTINE_FILE, "w", encoding="utf-8")  # noqa: SIM115

    def run(self) -> Receipt:
        with self._quarantine:
            counts = [self._consume(source) for source in self._task.sources]
            parts = [record for series in self._series.values() for record in series.close()]
            self._quarantine.flush()
            os.fsync(self._quarantine.fileno())
        return Receipt(counts, parts, self._text_bytes, self._smallest.sorted())

    def _consume(self, source: SourceFile) -> RowCounts:
        counts = RowCounts()
        board, unit = self._board, self._task.number
        done_before = board.source_bytes[unit]
        for row in read_rows(source, self._task.text_column):
            if board.stopped:
                raise Stopped
            counts.rows += 1
            problem = row.problem
            if problem is None and row.text is None:
                counts.null += 1
            elif row.text is not None and not row.text.strip():
                counts.empty += 1
            elif row.text is not None:
                problem = self._add(row.text)
                counts.documents += problem is None
            if problem is not None:
                counts.quarantined += 1
                self._set_aside(source, row, problem)
            board.source_bytes[unit] = done_before + row.position
        source.assert_unchanged()
        board.source_bytes[unit] = done_before + source.size_bytes
        counts.assert_closed()
        return counts

    def _add(self, text: str) -> str | None:
        """Append one document; returns the reason where it must be quarantined instead."""
        utf8 = text.encode()
        if len(utf8) > MAX_DOCUMENT_BYTES:
            return f"longer than {MAX_DOCUMENT_BYTES} bytes"
        part_format = self._task.part_format
        try:
            ids = self._tokenizer.encode(text)
            document = document_tokens(ids, part_format.eot_id, part_format.vocab_size, part_format.dtype)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic inside tiktoken is no Exception
            return f"tokenizer failed: {type(error).__name__}"
        document_hash = text_hash(utf8)
        split = "val" if is_validation(document_hash, self._task.val_fraction) else "train"
        self._series[split].add(document)
        self._text_bytes[split] += len(utf8)
        self._smallest.add(document_hash, len(document))
        self._board.tokens[self._task.number] += len(document)
        return None

    def _set_aside(self, source: SourceFile, row: Row, problem: str) -> None:
        entry = {"source": source.name, "row": row.number, "reason": problem}
        self._quarantine.write(json.dumps(entry, ensure_ascii=True) + "\n")
