"""Source files: found, ordered, identified, and checked before any work starts."""

import glob
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.durable import file_sha256
from data_pipeline.errors import DataError

# Suffix to format and, for JSON lines, Arrow's name of the compression.
FORMATS = {
    ".parquet": ("parquet", None),
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".json.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
    ".txt": ("text", None),
}
# With any tokenizer a document of this size fits one part of less than 2 GiB.
MAX_DOCUMENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class SourceFile:
    """One input file.

    Attributes:
        path: where it is; not part of the data set's identity.
        name: path below the directory or pattern it was given by, else its base name.
        kind: ``parquet``, ``jsonl`` or ``text``.
        compression: ``gzip``, ``zstd`` or None.
        size_bytes: size on disk.
        modified_ns: modification time when it was hashed, to notice a change during the build.
        sha256: of the file.
    """

    path: Path
    name: str
    kind: str
    compression: str | None
    size_bytes: int
    modified_ns: int
    sha256: str

    def assert_unchanged(self) -> None:
        """Raise `DataError` if the file was written to since it was hashed."""
        status = os.stat(self.path)
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.modified_ns):
            raise DataError(f"{self.path}: changed while it was read; run prepare again once it is complete")


def find_sources(specs: Sequence[str], text_column: str, text_documents: str = "file") -> list[SourceFile]:
    """Find, check and hash the files that ``specs`` name.

    Args:
        specs: files, directories (searched at any depth) and glob patterns.
        text_column: the column that every parquet file must have.
        text_documents: ``file`` or ``paragraph``, what a document of a .txt file is.

    Returns:
        Each file once, sorted by name, then by content: an order that does not depend on the machine.

    Raises:
        DataError: nothing was found, or a file is not what its suffix says.
    """
    found: dict[Path, tuple[str, Path]] = {}
    for named in (named for spec in specs for named in _expand(spec)):
        # A file that two specs name in two ways gets the smaller name, whichever came first.
        key = named[1].resolve()
        found[key] = min(named, found.get(key, named))
    sources = []
    for name, path in sorted(found.values()):
        kind, compression = FORMATS[_suffix(path)]
        if kind == "text" and text_documents == "paragraph":
            kind = "paragraphs"
        _CHECKS[kind](path, text_column)
        status = os.stat(path)
        sources.append(
            SourceFile(
                path=path,
                name=name,
                kind=kind,
                compression=compression,
                size_bytes=status.st_size,
                modified_ns=status.st_mtime_ns,
                sha256=file_sha256(path),
            )
        )
    return sorted(sources, key=lambda source: (source.name, source.sha256))


def looks_like(path: Path) -> str:
    """What a file looks like, in words, for messages about files that are not what they should be."""
    with open(path, "rb") as file:
        start = file.read(512)
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        end = file.read()
    lowered = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "an empty file"
    if lowered.startswith((b"<!doctype html", b"<html")):
        return "an HTML page (a download that failed?)"
    if lowered.startswith(b"<"):
        return "an XML or HTML page"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (run `git lfs pull`)"
    if start.startswith(b"PAR1"):
        return "a damaged parquet file" if end == b"PAR1" else "a truncated parquet file"
    if start.startswith(b"\x1f\x8b"):
        return "a gzip file"
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        return "a zstd file"
    if lowered.startswith((b"{", b"[")):
        return "JSON"
    return "binary data" if b"\x00" in start else "text"


def open_stream(path: Path, compression: str | None) -> tuple[Any, pa.NativeFile]:
    """Open a file for reading through a decompressor.

    Returns:
        The raw file, whose position tells the progress, and the stream of decompressed bytes.
    """
    raw = open(path, "rb")  # noqa: SIM115 - closed with the stream
    stream = pa.PythonFile(raw, mode="r")
    return raw, pa.CompressedInputStream(stream, compression) if compression else stream


def _suffix(path: Path) -> str:
    """The suffix among `FORMATS`, empty where there is none."""
    return next((suffix for suffix in FORMATS if path.name.endswith(suffix)), "")


def _expand(spec: str) -> Iterator[tuple[str, Path]]:
    """Name and path of the files of one ``--source``."""
    path = Path(spec)
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and _suffix(file)]
        visible = [file for file in found if not any(part[0] == "." for part in file.relative_to(path).parts)]
        if not visible:
            raise DataError(f"{spec}: the directory holds none of {', '.join(FORMATS)}")
        for file in visible:
            yield file.relative_to(path).as_posix(), file
    elif path.is_file():
        if not _suffix(path):
            raise DataError(f"{spec}: unknown kind of file; expected one of {', '.join(FORMATS)}")
        yield path.name, path
    elif glob.has_magic(spec):
        matches = [Path(match) for match in glob.glob(spec, recursive=True)]
        matches = [match for match in matches if match.is_file() and _suffix(match)]
        if not matches:
            raise DataError(f"{spec}: the pattern matches none of {', '.join(FORMATS)}")
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        for match in matches:
            yield match.relative_to(base).as_posix(), match
    else:
        raise DataError(f"{spec}: no such file or directory")


def _check_parquet(path: Path, text_column: str) -> None:
    try:
        schema = pq.ParquetFile(path).schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected a parquet file, but it looks like {looks_like(path)}") from error
    if text_column not in schema.names:
        raise DataError(
            f"{path}: no column {text_column!r}; it has {', '.join(schema.names)}. Name one with --text-column"
        )
    kind = schema.field(text_column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        strings = [field.name for field in schema if pa.types.is_string(field.type)]
        raise DataError(
            f"{path}: column {text_column!r} holds {kind}, not text; text columns are: "
            f"{', '.join(strings) or 'none'}. Name one with --text-column"
        )


def _check_jsonl(path: Path, text_column: str) -> None:
    _, compression = FORMATS[_suffix(path)]
    del text_column  # rows are judged one by one: see rows.py
    raw, stream = open_stream(path, compression)
    try:
        start = bytes(stream.read(512)).lstrip(b"\xef\xbb\xbf \t\r\n")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected {compression} data, but it looks like {looks_like(path)}") from error
    finally:
        stream.close()
        raw.close()
    if not start.startswith(b"{"):
        what = looks_like(path) if not compression else "something else inside"
        raise DataError(f"{path}: expected one JSON object a line, but it looks like {what}")


def _check_text(path: Path, text_column: str) -> None:
    del text_column
    size = os.stat(path).st_size
    if size > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{path}: a .txt file is one document, and this one has {size:,} bytes; the limit is "
            f"{MAX_DOCUMENT_BYTES:,}. --text-documents paragraph makes a document of each paragraph; or write one "
            'JSON object a line: {"text": "..."} in a .jsonl file'
        )


_CHECKS: dict[str, Callable[[Path, str], None]] = {
    "parquet": _check_parquet,
    "jsonl": _check_jsonl,
    "text": _check_text,
    "paragraphs": lambda path, text_column: None,  # a paragraph is judged when it is read
}
