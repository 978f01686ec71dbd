"""Rows of source files: each is a text, nothing, or a problem with a reason. None is dropped unseen."""

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.blocks import VerifiedFile
from data_pipeline.errors import DataError
from data_pipeline.sources import MAX_DOCUMENT_BYTES, Piece, SourceFile, looks_like, open_arrow, open_stream
from data_pipeline.text import well_formed

# Rows that are decoded at once, and bytes that are read at once.
_BATCH_ROWS = 256
_BATCH_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20
# JSON escapes make a line longer than its text.
_MAX_LINE_BYTES = 2 * MAX_DOCUMENT_BYTES


class Row(NamedTuple):
    """One row of a source.

    Attributes:
        number: row of the table, or line of the file, from 0.
        utf8: the document, valid UTF-8; None where the row holds null or has a problem.
        problem: why the row is quarantined, else None. The wording is fixed: it is part of the output.
        size_bytes: size of what a problem row holds, where it is known.
        done: share of the slice consumed so far, 0 to 1, for progress.
    """

    number: int
    utf8: bytes | None
    problem: str | None
    size_bytes: int
    done: float


class Slice(NamedTuple):
    """Consecutive pieces of one source: what a unit of work reads of it.

    Attributes:
        source: the source's position in the plan.
        start: see `Piece`.
        stop: see `Piece`.
        first_row: number of the first row.
        text_bytes: its text, roughly.
    """

    source: int
    start: int
    stop: int
    first_row: int
    text_bytes: int


def read_rows(source: SourceFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    """Stream the rows of one slice in bounded memory; only ``text_column`` is read.

    Every byte is held against the hash that the plan was made with before it is used.

    Raises:
        DataError: the file breaks off, is damaged, was changed, or has no such column.
    """
    with source.open() as file:
        yield from _READERS[source.kind](source, file, piece, text_column)


def _parquet_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    def batches() -> Iterator[pa.RecordBatch]:
        # One read of a column chunk at a time; threads would only fight over the one file.
        table = pq.ParquetFile(pa.PythonFile(file, mode="r"), page_checksum_verification=True)
        groups = range(piece.start, piece.stop)
        num_rows = sum(table.metadata.row_group(number).num_rows for number in groups)
        # Few rows at a time where they are large.
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(piece.text_bytes, 1)))
        yield from table.iter_batches(rows, row_groups=groups, columns=[text_column], use_threads=False)

    return _table_rows(source, file, piece, text_column, batches())


def _arrow_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    return _table_rows(source, file, piece, text_column, open_arrow(pa.PythonFile(file, mode="r")))


def _table_rows(
    source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[Row]:
    index = piece.first_row
    seen = 0
    try:
        for batch in batches:
            texts = _as_binary(batch.column(text_column))
            check = _taken if _all_utf8(texts) else _checked
            for data in texts.to_pylist():
                if data is None:
                    yield Row(index, None, None, 0, 0.0)
                else:
                    seen += len(data)
                    yield check(index, data, min(1.0, seen / max(piece.text_bytes, 1)))
                index += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: cannot be read beyond row {index}; it looks like {looks_like(source.path)}. "
            f"Fetch it again ({error})"
        ) from error


def _as_binary(column: Any) -> Any:
    """The column as bytes, because one string of invalid UTF-8 must not lose its neighbours."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary())


def _all_utf8(texts: Any) -> bool:
    """Whether every text of a binary column is UTF-8: Arrow's check of a whole column costs a tenth of Python's."""
    try:
        texts.cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _taken(index: int, data: bytes, done: float) -> Row:
    return Row(index, data, None, 0, done)


def _checked(index: int, data: bytes, done: float) -> Row:
    try:
        data.decode()
    except UnicodeDecodeError:
        return Row(index, None, "invalid UTF-8", len(data), done)
    return Row(index, data, None, 0, done)


def _text_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    del source, piece, text_column  # the file is the text
    yield _checked(0, file.read(), 1.0)


def _nanogpt_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    """nanoGPT's split of a single text: the first nine tenths of its characters, and the rest."""
    del piece, text_column
    data = file.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{source.path}: invalid UTF-8 at byte {error.start}; convert it to UTF-8 first") from error
    cut = int(len(text) * 0.9)
    yield Row(0, text[:cut].encode(), None, 0, 0.9)
    yield Row(1, text[cut:].encode(), None, 0, 1.0)


def _paragraph_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    """Documents between blank lines; line ends inside a paragraph stay, those around it go."""
    del piece, text_column
    index, length, size = 0, 0, max(source.size_bytes, 1)
    lines: list[bytes] = []
    whole = True  # the next bytes start a line
    stream = io.BufferedReader(file, _BUFFER_BYTES)
    for line in itertools.chain(iter(lambda: stream.readline(MAX_DOCUMENT_BYTES), b""), (b"",)):
        if line.strip() or (line and not whole):
            length += len(line)
            if length <= MAX_DOCUMENT_BYTES:
                lines.append(line)
            else:
                lines.clear()
            whole = line.endswith(b"\n")
            continue
        if length > MAX_DOCUMENT_BYTES:
            yield Row(index, None, f"paragraph longer than {MAX_DOCUMENT_BYTES} bytes", length, file.tell() / size)
        elif lines:
            yield _checked(index, b"".join(lines).rstrip(b"\r\n"), file.tell() / size)
        index += bool(length)
        lines, length, whole = [], 0, True


def _jsonl_rows(source: SourceFile, file: VerifiedFile, piece: Slice | Piece, text_column: str) -> Iterator[Row]:
    any_text = False
    index = piece.first_row
    start, stop = (0, source.size_bytes) if source.compression else (piece.start, piece.stop)
    size = max(stop - start, 1)
    try:
        if source.compression:
            stream, limit = io.BufferedReader(open_stream(file, source.compression), _BUFFER_BYTES), None
        else:
            file.seek(start)
            stream, limit = io.BufferedReader(file, _BUFFER_BYTES), size
        for index, line in enumerate(_lines(stream, limit, at_start=start == 0), start=piece.first_row):
            done = min(1.0, (file.tell() - start) / size)
            if isinstance(line, int):
                yield Row(index, None, f"line longer than {_MAX_LINE_BYTES} bytes", line, done)
                continue
            if not line.strip():
                continue
            row = _parsed(index, line, text_column, done)
            if isinstance(row, list):
                if not any_text and start == 0:
                    raise DataError(
                        f"{source.path}: line {index + 1} has no key {text_column!r}; it has "
                        f"{', '.join(row) or 'none'}. Name one with --text-column"
                    )
                row = Row(index, None, f"no key {text_column!r}", len(line), done)
            any_text = any_text or row.problem is None
            yield row
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: cannot be read beyond line {index + 1}; it is truncated or damaged. "
            f"Fetch it again ({error})"
        ) from error


def _lines(stream: io.BufferedReader, limit: int | None, at_start: bool) -> Iterator[bytes | int]:
    """The lines of the next ``limit`` bytes; of one that is too long to hold, its length."""
    taken = 0
    while (limit is None or taken < limit) and (line := stream.readline(_MAX_LINE_BYTES)):
        length = len(line)
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_BUFFER_BYTES)
                length += len(line)
            yield length
        else:
            yield line.removeprefix(b"\xef\xbb\xbf") if at_start and taken == 0 else line
        taken += length


def _parsed(index: int, line: bytes, text_column: str, done: float) -> Row | list[str]:
    """The row that a line holds, or the keys of an object without ``text_column``."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Row(index, None, "invalid UTF-8", len(line), done)
    except (ValueError, RecursionError):
        return Row(index, None, "invalid JSON", len(line), done)
    if not isinstance(value, dict):
        return Row(index, None, "not a JSON object", len(line), done)
    if text_column not in value:
        return [str(key) for key in value]
    text = value[text_column]
    if text is None:
        return Row(index, None, None, 0, done)
    if not isinstance(text, str):
        return Row(index, None, "the text is not a string", len(line), done)
    return Row(index, well_formed(text).encode(), None, 0, done)


_READERS: dict[str, Callable[[SourceFile, VerifiedFile, Slice | Piece, str], Iterator[Row]]] = {
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "jsonl": _jsonl_rows,
    "text": _text_rows,
    "paragraphs": _paragraph_rows,
    "nanogpt-text": _nanogpt_rows,
}
