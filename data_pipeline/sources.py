"""Source files: found, ordered, identified, and checked before any work starts."""

import glob
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.blocks import FileHashes, VerifiedFile, hash_file
from data_pipeline.errors import DataError
from data_pipeline.hub.download import local_path
from data_pipeline.hub.listing import RemoteFile, is_hub_spec, list_files, read_footer

# Suffix to format and, for JSON lines, Arrow's name of the compression.
FORMATS = {
    ".parquet": ("parquet", None),
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".json.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
    ".arrow": ("arrow", None),
    ".txt": ("text", None),
}
# Bounds the memory of a worker: the text, its decoded form and its ids are held at once.
MAX_DOCUMENT_BYTES = 16 * 2**20
# Units of work are made of whole pieces: small, so that units come out even.
PIECE_BYTES = 4 << 20
# Compressed web text is roughly this much larger when unpacked.
_EXPANSION = 3


@dataclass(frozen=True)
class FoundFile:
    """One input file as it was named, before any of it is read.

    Attributes:
        path: where it is, or will be once it is fetched; not part of the data set's identity.
        name: path below the directory or pattern it was given by, else its base name.
        kind: ``parquet``, ``jsonl``, ``arrow``, ``text``, ``paragraphs`` or ``nanogpt-text``.
        compression: ``gzip``, ``zstd`` or None.
        size_bytes: size on disk.
        remote: where it is fetched from; None for a file that is here.
    """

    path: Path
    name: str
    kind: str
    compression: str | None
    size_bytes: int
    remote: RemoteFile | None = None


@dataclass(frozen=True)
class SourceFile(FoundFile):
    """One input file, hashed.

    Attributes:
        sha256: of the file.
        blocks: see `FileHashes`; empty until a remote file is fetched.
    """

    sha256: str = ""
    blocks: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, found: FoundFile, sha256: str, blocks: bytes) -> "SourceFile":
        """``found`` with its hashes."""
        return cls(**{each.name: getattr(found, each.name) for each in fields(FoundFile)}, sha256=sha256, blocks=blocks)

    def open(self) -> VerifiedFile:
        """The file for reading, each block held against its hash; raises `DataError` where it differs."""
        return VerifiedFile(self.path, FileHashes(self.size_bytes, self.sha256, self.blocks))


@dataclass(frozen=True)
class Piece:
    """The smallest stretch of a source that a unit of work may be cut from.

    Attributes:
        start: first row group of a parquet file, first byte of a JSON lines file, else 0.
        stop: one past the last; for other kinds 1.
        first_row: number of its first row in the file.
        text_bytes: its text, roughly, in bytes: what units are balanced by.
    """

    start: int
    stop: int
    first_row: int
    text_bytes: int


def find_sources(
    specs: Sequence[str],
    text_column: str = "text",
    text_documents: str = "file",
    download_dir: Path | None = None,
    check: bool = True,
) -> list[FoundFile]:
    """Find and check the files that ``specs`` name.

    Args:
        specs: files, directories (searched at any depth), glob patterns, and hub sources.
        text_column: the column that every parquet and Arrow file must have.
        text_documents: ``file`` or ``paragraph``, what a document of a .txt file is.
        download_dir: where files of hub sources are put.
        check: look into each file.

    Returns:
        Each file once, sorted by name: an order that does not depend on the machine.

    Raises:
        DataError: nothing was found, or a file is not what its suffix says.
    """
    remote = [file for spec in specs if is_hub_spec(spec) for file in list_files(spec)]
    found: dict[Path, tuple[str, Path]] = {}
    for named in (named for spec in specs if not is_hub_spec(spec) for named in _expand(spec)):
        # A file that two specs name in two ways gets the smaller name, whichever came first.
        key = named[1].resolve()
        found[key] = min(named, found.get(key, named))
    sources = []
    for file in remote:
        kind, compression = FORMATS.get(_suffix(Path(file.path)), ("", None))
        if kind not in ("parquet", "jsonl"):
            raise DataError(f"{file.repo_id}/{file.path}: only parquet and JSON lines are read from the hub")
        path = local_path(file, download_dir or Path())
        sources.append(FoundFile(path, file.path, kind, compression, file.size_bytes, file))
    for name, path in sorted(found.values()):
        kind, compression = FORMATS[_suffix(path)]
        if kind == "text" and text_documents == "paragraph":
            kind = "paragraphs"
        if check:
            _CHECKS[kind](path, text_column)
        sources.append(FoundFile(path, name, kind, compression, os.stat(path).st_size))
    return sorted(sources, key=lambda source: source.name)


def hash_sources(
    found: Sequence[FoundFile], text_column: str, threads: int
) -> tuple[list[SourceFile], list[list[Piece]]]:
    """Hash the files and find where they may be cut: one pass, several files at a time.

    A remote file is taken at the hub's word (its SHA-256 is checked when it is fetched); of a remote parquet file
    only the footer is read.

    Returns:
        The files sorted by name, then by content, and the pieces of each.
    """
    with ThreadPoolExecutor(max(1, threads)) as pool:
        hashed = list(pool.map(lambda file: _hash_source(file, text_column), found))
    hashed.sort(key=lambda item: (item[0].name, item[0].sha256))
    return [source for source, _ in hashed], [pieces for _, pieces in hashed]


def _hash_source(found: FoundFile, text_column: str) -> tuple[SourceFile, list[Piece]]:
    if found.remote:
        source = SourceFile.of(found, found.remote.sha256, b"")
        if found.kind == "parquet":
            return source, _row_groups(read_footer(found.remote), text_column, found)
        return source, [_whole(found)]
    lines = LinePieces() if found.kind == "jsonl" and not found.compression else None
    hashes = hash_file(found.path, lines.watch if lines else None)
    if hashes.size_bytes != found.size_bytes:
        raise DataError(f"{found.path}: changed while it was hashed; run prepare again once it is complete")
    source = SourceFile.of(found, hashes.sha256, hashes.blocks)
    if lines:
        return source, lines.finish()
    if found.kind == "parquet":
        with source.open() as file:
            return source, _row_groups(pq.read_metadata(pa.PythonFile(file, mode="r")), text_column, found)
    return source, [_whole(found)]


def _whole(found: FoundFile) -> Piece:
    expansion = _EXPANSION if found.compression else 1
    return Piece(0, 1, 0, found.size_bytes * expansion)


def _row_groups(metadata: pq.FileMetaData, text_column: str, found: FoundFile) -> list[Piece]:
    _require_text_column(metadata.schema.to_arrow_schema(), text_column, str(found.path))
    pieces = []
    rows = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(index) for index in range(group.num_columns))
        text = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_column)
        pieces.append(Piece(number, number + 1, rows, text))
        rows += group.num_rows
    return pieces


class LinePieces:
    """Cuts a file of lines into pieces of about `PIECE_BYTES` while its blocks pass by."""

    def __init__(self) -> None:
        """Start before the first block."""
        self._pieces: list[Piece] = []
        self._position = self._start = 0
        self._rows = self._first_row = 0

    def watch(self, block: memoryview) -> None:
        """Note the next block of the file."""
        data = block.tobytes()
        at = 0
        while (threshold := self._start + PIECE_BYTES - self._position) < len(data):
            end = data.find(b"\n", max(at, threshold)) + 1
            if end == 0:
                break
            self._rows += data.count(b"\n", at, end)
            self._cut(self._position + end)
            at = end
        self._rows += data.count(b"\n", at)
        self._position += len(data)

    def finish(self) -> list[Piece]:
        """The pieces, once all blocks have passed."""
        if self._position > self._start or not self._pieces:
            self._cut(self._position)
        return self._pieces

    def _cut(self, stop: int) -> None:
        self._pieces.append(Piece(self._start, stop, self._first_row, stop - self._start))
        self._start, self._first_row = stop, self._rows


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


def open_stream(file: Any, compression: str | None) -> pa.NativeFile:
    """The decompressed bytes of an open file."""
    stream = pa.PythonFile(file, mode="r")
    return pa.CompressedInputStream(stream, compression) if compression else stream


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
    _require_text_column(schema, text_column, str(path))


def _check_arrow(path: Path, text_column: str) -> None:
    """An Arrow file as `datasets.Dataset.save_to_disk` writes them."""
    try:
        with open(path, "rb") as file:
            schema = open_arrow(pa.PythonFile(file, mode="r")).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected an Arrow file, but it looks like {looks_like(path)}") from error
    _require_text_column(schema, text_column, str(path))


def open_arrow(file: pa.NativeFile) -> Any:
    """The record batches of an Arrow stream (what `datasets` writes) or Arrow file."""
    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        return pa.ipc.open_stream(file)
    reader = pa.ipc.open_file(file)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    return pa.RecordBatchReader.from_batches(reader.schema, batches)


def _require_text_column(schema: pa.Schema, text_column: str, where: str) -> None:
    if text_column not in schema.names:
        raise DataError(
            f"{where}: no column {text_column!r}; it has {', '.join(schema.names)}. Name one with --text-column"
        )
    kind = schema.field(text_column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        strings = [each.name for each in schema if pa.types.is_string(each.type)]
        raise DataError(
            f"{where}: column {text_column!r} holds {kind}, not text; text columns are: "
            f"{', '.join(strings) or 'none'}. Name one with --text-column"
        )


def _check_jsonl(path: Path, text_column: str) -> None:
    _, compression = FORMATS[_suffix(path)]
    del text_column  # rows are judged one by one: see rows.py
    try:
        with open(path, "rb") as file:
            start = bytes(open_stream(file, compression).read(512)).lstrip(b"\xef\xbb\xbf \t\r\n")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected {compression} data, but it looks like {looks_like(path)}") from error
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
    "arrow": _check_arrow,
    "text": _check_text,
    "paragraphs": lambda path, text_column: None,  # a paragraph is judged when it is read
}
