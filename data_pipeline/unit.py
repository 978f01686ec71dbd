"""One unit of work: slices of sources to parts in a directory of its own, committed by one rename."""

import ctypes
import json
import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.audit import Audited, Auditor
from data_pipeline.binformat import stored_documents
from data_pipeline.durable import sync_directory, write_synced
from data_pipeline.engines import Encoded, Engine, ReferenceEngine
from data_pipeline.errors import Stopped
from data_pipeline.parts import PartFormat, PartSeries
from data_pipeline.receipt import PROVENANCE_FILE, QUARANTINE_FILE, RECEIPT_FILE, ROWS_FILE, Receipt, RowCounts
from data_pipeline.rows import Row, Slice, read_rows
from data_pipeline.sources import MAX_DOCUMENT_BYTES, SourceFile
from data_pipeline.split import SmallestHashes, is_validation, text_hash
from data_pipeline.tokenizer import Tokenizer

STAGES = ("decode", "encode", "audit", "write")
_BATCH_BYTES = 4 << 20
_BATCH_DOCUMENTS = 4_096


class Board:
    """Numbers that workers write and the parent reads, without a lock: each unit has its own slot.

    Attributes:
        text_bytes: text of the sources consumed, per unit, roughly.
        tokens: tokens written, per unit.
        seconds: spent in each of `STAGES`, per unit, flat: unit ``u``'s stage ``s`` is at ``len(STAGES) * u + s``.
    """

    def __init__(self, context: BaseContext, num_units: int) -> None:
        """Make shared arrays for ``num_units`` units."""
        self.text_bytes: Any = context.RawArray(ctypes.c_int64, max(num_units, 1))
        self.tokens: Any = context.RawArray(ctypes.c_int64, max(num_units, 1))
        self.seconds: Any = context.RawArray(ctypes.c_double, max(num_units, 1) * len(STAGES))
        self._stop: Any = context.RawValue(ctypes.c_bool, False)

    def stop(self) -> None:
        """Ask all workers to give up their open unit."""
        self._stop.value = True

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return bool(self._stop.value)

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of all units per stage."""
        return {stage: sum(self.seconds[at :: len(STAGES)]) for at, stage in enumerate(STAGES)}


@dataclass(frozen=True)
class UnitTask:
    """What a worker needs to know of a unit.

    Attributes:
        number: position in the plan.
        slices: what it reads.
        sources: the source of each slice.
        directory: where the finished unit appears.
        part_format: what all parts share.
        text_column: column or key of the text.
        val_fraction: see `data_pipeline.split`; 0 where `finish` decides.
        keep_rows: whether to note which row each document came from, for `finish`.
    """

    number: int
    slices: tuple[Slice, ...]
    sources: tuple[SourceFile, ...]
    directory: Path
    part_format: PartFormat
    text_column: str
    val_fraction: float
    keep_rows: bool

    @property
    def text_bytes(self) -> int:
        """Its text, roughly, in bytes."""
        return sum(piece.text_bytes for piece in self.slices)


@dataclass(frozen=True)
class Encoders:
    """The tokenizers of a process.

    Attributes:
        reference: decides.
        engine: encodes everything.
        second: encodes everything again; None for an audit of a sample.
    """

    reference: Tokenizer
    engine: Engine
    second: Engine | None


def run_unit(task: UnitTask, encoders: Encoders, board: Board) -> None:
    """Do the unit and commit it; its directory appears whole, receipt included, or not at all.

    It returns without the unit where another node has taken that over; whoever needs it looks whether it is there.

    Raises:
        DataError: a source is damaged or changed, or two tokenizers disagree.
        Stopped: `Board.stop` was called.
    """
    # Two builders of one unit must never share a name; the slower one's rename fails and it steps back.
    unique = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    aside = task.directory.with_name(f"{task.directory.name}.{unique}.tmp")
    aside.mkdir()
    try:
        receipt, provenance = _UnitWriter(task, encoders, board, aside).run()
        write_synced(aside / PROVENANCE_FILE, json.dumps(provenance, sort_keys=True).encode() + b"\n")
        write_synced(aside / RECEIPT_FILE, receipt.to_bytes())
        commit_directory(aside, task.directory)
    except FileNotFoundError:
        if aside.exists():
            raise
        return  # stopped for long, this node lost the unit to another, which has cleared the directory away
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    board.text_bytes[task.number] = task.text_bytes


def commit_directory(aside: Path, final: Path) -> None:
    """Rename a finished directory into place, unless an equal one is already there."""
    sync_directory(aside)
    try:
        os.rename(aside, final)
    except OSError:
        if not final.exists():  # a rename never replaces a directory that holds files
            raise
    sync_directory(final.parent)


class _UnitWriter:
    """The state of one running unit."""

    def __init__(self, task: UnitTask, encoders: Encoders, board: Board, directory: Path) -> None:
        self._task = task
        self._encoders = encoders
        self._board = board
        self._directory = directory
        self._series = {split: PartSeries(directory, split, task.part_format) for split in ("train", "val")}
        self._auditor = Auditor(encoders.engine, encoders.second, encoders.reference, task.directory.parent)
        self._text_bytes = {"train": 0, "val": 0}
        self._smallest = SmallestHashes()
        self._quarantine: list[dict[str, Any]] = []
        self._fallbacks = 0
        self._rows = 0
        self._row_of_document: list[NDArray[np.int64]] = []
        self._done_before = 0
        board.tokens[task.number] = board.text_bytes[task.number] = 0
        for stage in range(len(STAGES)):
            board.seconds[task.number * len(STAGES) + stage] = 0.0

    def run(self) -> tuple[Receipt, dict[str, Any]]:
        counts = []
        for piece, source in zip(self._task.slices, self._task.sources, strict=True):
            counts.append(self._consume(piece, source))
            self._done_before += piece.text_bytes
        with self._timed("write"):
            parts = [record for series in self._series.values() for record in series.close()]
            lines = "".join(json.dumps(entry, ensure_ascii=True) + "\n" for entry in self._quarantine)
            write_synced(self._directory / QUARANTINE_FILE, lines.encode())
            if self._task.keep_rows:
                rows = np.concatenate([np.empty((0, 2), np.int64), *self._row_of_document])
                write_synced(self._directory / ROWS_FILE, rows.astype("<i8").tobytes())
        return Receipt(counts, parts, self._text_bytes, self._smallest.sorted()), self._provenance()

    def _provenance(self) -> dict[str, Any]:
        engine, second = self._encoders.engine, self._encoders.second
        start = self._task.number * len(STAGES)
        return {
            "unit": self._task.number,
            "host": socket.gethostname(),
            "machine": platform.machine(),
            "engine": f"{engine.name} {engine.version}",
            "second_engine": f"{second.name} {second.version}" if second else None,
            "documents_audited": self._auditor.documents,
            "documents_by_reference_after_an_engine_failure": self._fallbacks,
            "seconds": {stage: round(self._board.seconds[start + at], 4) for at, stage in enumerate(STAGES)},
        }

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._board.seconds[self._task.number * len(STAGES) + STAGES.index(stage)] += time.perf_counter() - started

    def _consume(self, piece: Slice, source: SourceFile) -> RowCounts:
        """Read one slice, a batch at a time."""
        counts = RowCounts()
        problems: list[tuple[int, str]] = []
        rows = read_rows(source, piece, self._task.text_column)
        while True:
            if self._board.stopped:
                raise Stopped
            with self._timed("decode"):
                batch, done = self._next_batch(rows, counts, problems)
            if not batch:
                break
            self._add(batch, source, counts, problems)
            self._board.text_bytes[self._task.number] = self._done_before + int(done * piece.text_bytes)
        counts.assert_closed()
        for row, problem in sorted(problems):
            self._quarantine.append({"source": source.name, "row": row, "reason": problem})
        return counts

    def _next_batch(
        self, rows: Iterator[Row], counts: RowCounts, problems: list[tuple[int, str]]
    ) -> tuple[list[tuple[int, int, bytes]], float]:
        """The next documents, ``(row number, ordinal in the unit, text)``, and the share of the slice that is read."""
        batch: list[tuple[int, int, bytes]] = []
        size = 0
        done = 1.0
        for row in rows:
            ordinal = self._rows
            self._rows += 1
            counts.rows += 1
            if row.problem is not None:
                _quarantine(counts, problems, row.number, row.problem, row.size_bytes)
            elif row.utf8 is None:
                counts.null += 1
            elif len(row.utf8) > MAX_DOCUMENT_BYTES:
                _quarantine(counts, problems, row.number, f"longer than {MAX_DOCUMENT_BYTES} bytes", len(row.utf8))
            elif is_blank(row.utf8):
                counts.empty += 1
                counts.bytes_read += len(row.utf8)
                counts.bytes_empty += len(row.utf8)
            else:
                batch.append((row.number, ordinal, row.utf8))
                size += len(row.utf8)
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                    done = row.done
                    break
        return batch, done

    def _add(
        self,
        batch: list[tuple[int, int, bytes]],
        source: SourceFile,
        counts: RowCounts,
        problems: list[tuple[int, str]],
    ) -> None:
        """Encode a batch and append it to the parts."""
        with self._timed("encode"):
            batch, encoded, stored = self._encode(batch, source, counts, problems)
        if not batch:
            return
        documents = [utf8 for _, _, utf8 in batch]
        hashes = [text_hash(utf8) for utf8 in documents]
        if self._encoders.second or not isinstance(self._encoders.engine, ReferenceEngine):
            with self._timed("audit"):
                places = [(source.name, row) for row, _, _ in batch]
                self._auditor.check(Audited(documents, places, hashes, encoded))
        with self._timed("write"):
            self._write(batch, hashes, np.diff(encoded.offsets) + 1, stored)
        size = sum(map(len, documents))
        counts.documents += len(batch)
        counts.bytes_read += size
        counts.bytes_documents += size
        self._board.tokens[self._task.number] += len(stored)

    def _encode(
        self,
        batch: list[tuple[int, int, bytes]],
        source: SourceFile,
        counts: RowCounts,
        problems: list[tuple[int, str]],
    ) -> tuple[list[tuple[int, int, bytes]], Encoded, NDArray[Any]]:
        """Ids of a batch and the documents as stored, without those that no tokenizer can encode."""
        encoded = None
        try:
            encoded = self._encoders.engine.encode([utf8 for _, _, utf8 in batch])
            return batch, encoded, self._stored(encoded)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # a panic in native code is no Exception
            pass
        # One document at a time by the reference: what it can encode is kept, whatever the engine makes of it.
        self._fallbacks += len(batch)
        kept, ids = [], []
        for index, (row, ordinal, utf8) in enumerate(batch):
            try:
                right = self._encoders.reference.encode(utf8.decode())
                self._stored(Encoded(right, np.array([0, len(right)])))
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:
                _quarantine(counts, problems, row, f"tokenizer failed: {type(error).__name__}", len(utf8))
                continue
            if encoded is not None and not np.array_equal(encoded.document(index), right):
                raise self._auditor.mismatch(utf8, (source.name, row), self._encoders.engine.name)
            kept.append((row, ordinal, utf8))
            ids.append(right)
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids], dtype=np.int64)])
        encoded = Encoded(np.concatenate([np.empty(0, np.uint32), *ids]), offsets)
        return kept, encoded, self._stored(encoded)

    def _stored(self, encoded: Encoded) -> NDArray[Any]:
        part_format = self._task.part_format
        return stored_documents(
            encoded.ids, encoded.offsets, part_format.eot_id, part_format.vocab_size, part_format.dtype
        )

    def _write(
        self, batch: list[tuple[int, int, bytes]], hashes: list[int], lengths: NDArray[np.int64], stored: NDArray[Any]
    ) -> None:
        """Append stored documents to the parts of their split."""
        fraction = self._task.val_fraction
        is_val = np.array([is_validation(document_hash, fraction) for document_hash in hashes])
        for document_hash, tokens in zip(hashes, lengths.tolist(), strict=True):
            self._smallest.add(document_hash, tokens)
        sizes = np.array([len(utf8) for _, _, utf8 in batch])
        of_val = np.repeat(is_val, lengths) if is_val.any() else None
        for split, chosen in (("train", ~is_val), ("val", is_val)):
            if chosen.any():
                tokens = stored if of_val is None else stored[of_val == (split == "val")]
                self._series[split].add(tokens, lengths[chosen])
                self._text_bytes[split] += int(sizes[chosen].sum())
        if self._task.keep_rows:
            rows = np.array([ordinal for _, ordinal, _ in batch], dtype=np.int64)
            self._row_of_document.append(np.stack([rows, sizes], axis=1))


def _quarantine(counts: RowCounts, problems: list[tuple[int, str]], row: int, problem: str, size: int) -> None:
    counts.quarantined += 1
    counts.bytes_read += size
    counts.bytes_quarantined += size
    problems.append((row, problem))


def is_blank(utf8: bytes) -> bool:
    """Whether a text is empty or blank, in Unicode's sense, without decoding one that plainly is not."""
    rest = utf8.strip()
    return not rest or ((rest[0] >= 0x80 or rest[0] < 0x20) and not utf8.decode().strip())
