"""Rows of source files: each is a text, nothing, or a problem with a reason. None is dropped unseen."""

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.errors import DataError
from data_pipeline.sources import MAX_DOCUMENT_BYTES, SourceFile, looks_like, open_stream
from data_pipeline.text import well_formed

_PARQUET_BATCH_ROWS = 256
# A JSON escape such as \\u00e9 spends six bytes on two bytes of text.
_MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES


class Row(NamedTuple):
    """One row of a source.

    Attributes:
        number: row of the parquet table, or line of the file, from 0.
        text: the document; None where the row holds null or has a problem.
        problem: why the row is quarantined, else None. The wording is fixed: it is part of the output.
        position: bytes of the source file consumed so far, for progress.
    """

    number: int
    text: str | None
    problem: str | None
    position: int


def read_rows(source: SourceFile, text_column: str) -> Iterator[Row]:
    """Stream the rows of one source in bounded memory; only ``text_column`` is read.

    Raises:
        DataError: the file breaks off, is damaged, or has no such column.
    """
    return _READERS[source.kind](source, text_column)


def _parquet_rows(source: SourceFile, text_column: str) -> Iterator[Row]:
    index = 0
    try:
        file = pq.ParquetFile(source.path, page_checksum_verification=True)
        num_rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_column]):
            for data in _as_binary(batch.column(0)).to_pylist():
                position = source.size_bytes * (index + 1) // num_rows
                if data is None:
                    yield Row(index, None, None, position)
                else:
                    yield _decoded(index, data, position)
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


def _decoded(index: int, data: bytes, position: int) -> Row:
    try:
        return Row(index, data.decode(), None, position)
    except UnicodeDecodeError:
        return Row(index, None, "invalid UTF-8", position)


def _text_rows(source: SourceFile, text_column: str) -> Iterator[Row]:
    del text_column  # the file is the text
    yield _decoded(0, source.path.read_bytes(), source.size_bytes)


def _paragraph_rows(source: SourceFile, text_column: str) -> Iterator[Row]:
    """Documents between blank lines; line ends inside a paragraph stay, those around it go."""
    del text_column
    index, length = 0, 0
    lines: list[bytes] = []
    with open(source.path, "rb") as file:
        for line in itertools.chain(file, (b"",)):
            if line.strip():
                length += len(line)
                if length <= MAX_DOCUMENT_BYTES:
                    lines.append(line)
                continue
            if length > MAX_DOCUMENT_BYTES:
                yield Row(index, None, f"paragraph longer than {MAX_DOCUMENT_BYTES} bytes", file.tell())
            elif lines:
                yield _decoded(index, b"".join(lines).rstrip(b"\r\n"), file.tell())
            index += bool(length)
            lines, length = [], 0


def _jsonl_rows(source: SourceFile, text_column: str) -> Iterator[Row]:
    any_text = False
    index = 0
    raw, stream = open_stream(source.path, source.compression)
    try:
        for index, line in enumerate(_lines(io.BufferedReader(stream, 1 << 20))):
            if line is None:
                yield Row(index, None, f"line longer than {_MAX_LINE_BYTES} bytes", raw.tell())
                continue
            if not line.strip():
                continue
            row = _parsed(index, line, text_column, raw.tell())
            if isinstance(row, list):
                if not any_text:
                    raise DataError(
                        f"{source.path}: line {index + 1} has no key {text_column!r}; it has "
                        f"{', '.join(row) or 'none'}. Name one with --text-column"
                    )
                row = Row(index, None, f"no key {text_column!r}", raw.tell())
            any_text = any_text or row.problem is None
            yield row
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: cannot be read beyond line {index + 1}; it is truncated or damaged. "
            f"Fetch it again ({error})"
        ) from error
    finally:
        stream.close()
        raw.close()


def _lines(stream: io.BufferedReader) -> Iterator[bytes | None]:
    """Lines of a stream; None for one that is too long to hold."""
    first = True
    while line := stream.readline(_MAX_LINE_BYTES):
        if first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            first = False
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_MAX_LINE_BYTES)
            yield None
        else:
            yield line


def _parsed(index: int, line: bytes, text_column: str, position: int) -> Row | list[str]:
    """The row that a line holds, or the keys of an object without ``text_column``."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Row(index, None, "invalid UTF-8", position)
    except (ValueError, RecursionError):
        return Row(index, None, "invalid JSON", position)
    if not isinstance(value, dict):
        return Row(index, None, "not a JSON object", position)
    if text_column not in value:
        return [str(key) for key in value]
    text = value[text_column]
    if text is None:
        return Row(index, None, None, position)
    if not isinstance(text, str):
        return Row(index, None, "the text is not a string", position)
    return Row(index, well_formed(text), None, position)


_READERS = {
    "parquet": _parquet_rows,
    "jsonl": _jsonl_rows,
    "text": _text_rows,
    "paragraphs": _paragraph_rows,
}
