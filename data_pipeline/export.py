"""``export``: the same tokens as one file per split, for programs that read no parts.

Every body is copied by the kernel where it can (no bytes pass through Python), into a file aside, read back
from there against the hashes of the manifest, and only then renamed. A file that is there already is kept
when it is what would be written, and refused otherwise.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.binformat import (
    HEADER_BYTES,
    MAX_FILE_BYTES,
    BinHeader,
    idx_bytes,
    read_document_lengths,
    read_header,
    token_dtype,
)
from data_pipeline.durable import canonical_json, sync_directory, write_atomic
from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.parts import PartRecord

EOT_PLACES = ("after", "before", "none")
META_FILE = "meta.json"
NANOGPT_FORMAT = "nanogpt"
MAX_HEADER_TOKENS = 2**31 - 1  # llm.c's header counts tokens in an int32
_BLOCK_BYTES = 1 << 24


@dataclass
class Export:
    """What an export wrote or found.

    Attributes:
        source_sha256: identity of the data set.
        tokens: tokens by file name.
        sha256: of each ``.bin``, by file name.
        notes: what a person should know.
    """

    source_sha256: str
    tokens: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For a person."""
        for name, tokens in self.tokens.items():
            yield f"{name}  {tokens:,} tokens, SHA-256 {self.sha256[name]}"
        yield from (f"note: {note}" for note in self.notes)
        yield f"source     {self.source_sha256}"


def export_nanogpt(dataset: str | Path, out_dir: str | Path, eot: str = "after") -> Export:
    """Write headerless ``train.bin`` and ``val.bin`` as nanoGPT reads them, and a ``meta.json`` that names the source.

    Parts hold end-of-text before each document and nanoGPT writes it after. Both are the same stream but for its
    ends: without the first token, and with one more at the end, it is nanoGPT's byte for byte.

    Args:
        dataset: directory of a finished data set.
        out_dir: made where it does not exist.
        eot: ``after`` each document (nanoGPT's own), ``before`` (as stored), or ``none``.

    Returns:
        The files; a split without documents has none.

    Raises:
        DataError: the data set is damaged, ``out_dir`` has too little space or other files of these names.
    """
    if eot not in EOT_PLACES:
        raise DataError(f"--eot {eot}: expected {', '.join(EOT_PLACES)}")
    source, target = Path(dataset), Path(out_dir)
    manifest, identity = read_manifest(source)
    _check_meta(target / META_FILE)
    export = Export(identity)
    planned = [_nanogpt_file(source, target, manifest, split, eot) for split in ("train", "val")]
    _write_all(target, [file for file in planned if file is not None], export)
    for split, file in zip(("train", "val"), planned, strict=True):
        if file is None:
            export.notes.append(f"the {split} split holds no documents, so there is no {split}.bin")
    tokenizer = manifest.tokenizer
    meta = {
        "format": NANOGPT_FORMAT,
        "source_manifest_sha256": identity,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "eot": eot,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokens": {name.removesuffix(".bin"): tokens for name, tokens in export.tokens.items()},
        "sha256": export.sha256,
    }
    write_atomic(target / META_FILE, canonical_json(meta))
    return export


def export_single(dataset: str | Path, out_dir: str | Path) -> Export:
    """Write each split as one part: ``NAME_SPLIT_000000.bin`` in llm.c's layout with its Megatron ``.idx``.

    Memory: 24 bytes per document, for the index.

    Args:
        dataset: directory of a finished data set.
        out_dir: made where it does not exist.

    Returns:
        The files; a split without documents has none.

    Raises:
        DataError: as `export_nanogpt`, or a split has more tokens than llm.c's header can count.
    """
    source, target = Path(dataset), Path(out_dir)
    manifest, identity = read_manifest(source)
    export = Export(identity)
    splits = {split: manifest.parts_of(split) for split in ("train", "val") if manifest.parts_of(split)}
    for split, parts in splits.items():
        tokens = sum(part.tokens for part in parts)
        if tokens > MAX_HEADER_TOKENS:
            raise DataError(
                f"{source}: the {split} split has {tokens:,} tokens; the int32 of llm.c's header counts to "
                f"{MAX_HEADER_TOKENS:,}. Export the nanogpt layout, which has no header, or read the parts as they are"
            )
    files = []
    indices = {}
    for split, parts in splits.items():
        path = target / f"{manifest.options.name}_{split}_000000.bin"
        files.append(_single_file(source, path, parts, manifest))
        lengths = np.concatenate([read_document_lengths(source / part.idx_file) for part in parts])
        index = idx_bytes(lengths, token_dtype(manifest.tokenizer.vocab_size).itemsize)
        indices[path.with_suffix(".idx")] = index
        if path.with_suffix(".idx").exists() and path.with_suffix(".idx").read_bytes() != index:
            raise _in_the_way(path.with_suffix(".idx"))
        if files[-1].num_bytes > MAX_FILE_BYTES:
            export.notes.append(
                f"{path.name} is larger than 2 GiB: llm.c's C loader seeks with an int and reads only files below; "
                "Megatron and Python readers are not concerned"
            )
    _write_all(target, files, export)
    for path, index in indices.items():
        if not path.exists():
            write_atomic(path, index)
    return export


@dataclass(frozen=True)
class _OutputFile:
    """One file to write.

    Attributes:
        path: its final name.
        num_tokens: its tokens.
        num_bytes: its size.
        write: fills an open descriptor.
        check: reads an open descriptor and raises `DataError` where it is not the parts' tokens; returns the SHA-256.
    """

    path: Path
    num_tokens: int
    num_bytes: int
    write: Callable[[int], None]
    check: Callable[[int], str]


def _nanogpt_file(source: Path, target: Path, manifest: Manifest, split: str, eot: str) -> _OutputFile | None:
    parts = manifest.parts_of(split)
    if not parts:
        return None
    dtype = token_dtype(manifest.tokenizer.vocab_size)
    end = np.array([manifest.tokenizer.eot_id], dtype=dtype).tobytes()
    tokens, documents = sum(part.tokens for part in parts), sum(part.documents for part in parts)
    path = target / f"{split}.bin"

    def write_shifted(descriptor: int) -> None:
        skip = len(end) if eot == "after" else 0
        for part in parts:
            _copy_body(source / part.file, descriptor, skip)
            skip = 0
        if eot == "after":
            _write(descriptor, end)

    def write_without(descriptor: int) -> None:
        for part in parts:
            for block in _blocks_of_part(source, part):
                ids = np.frombuffer(block, dtype=dtype)
                _write(descriptor, ids[ids != manifest.tokenizer.eot_id].tobytes())

    def check_without(descriptor: int) -> str:
        # Filtered again: the parts are hashed as they are read, and the file is held against them.
        whole = hashlib.sha256()
        at = 0
        for part in parts:
            for block in _blocks_of_part(source, part):
                ids = np.frombuffer(block, dtype=dtype)
                wanted = ids[ids != manifest.tokenizer.eot_id].tobytes()
                if _read(descriptor, len(wanted), at) != wanted:
                    raise DataError(f"{path}: is not the tokens of {part.file} without end-of-text; export it again")
                whole.update(wanted)
                at += len(wanted)
        return whole.hexdigest()

    if eot == "none":
        num_tokens = tokens - documents
        return _OutputFile(path, num_tokens, num_tokens * dtype.itemsize, write_without, check_without)
    lead = end if eot == "after" else b""

    def check_shifted(descriptor: int) -> str:
        return _check_bodies(descriptor, path, source, parts, head=b"", lead=lead, tail=lead)

    return _OutputFile(path, tokens, tokens * dtype.itemsize, write_shifted, check_shifted)


def _single_file(source: Path, path: Path, parts: list[PartRecord], manifest: Manifest) -> _OutputFile:
    tokenizer = manifest.tokenizer
    header = BinHeader(
        sum(part.tokens for part in parts),
        token_dtype(tokenizer.vocab_size).itemsize,
        sum(part.documents for part in parts),
        tokenizer.eot_id,
        tokenizer.vocab_size,
    )

    def write(descriptor: int) -> None:
        _write(descriptor, header.to_bytes())
        for part in parts:
            _copy_body(source / part.file, descriptor, 0)

    def check(descriptor: int) -> str:
        return _check_bodies(descriptor, path, source, parts, head=header.to_bytes(), lead=b"", tail=b"")

    return _OutputFile(path, header.num_tokens, header.file_bytes, write, check)


def _write_all(target: Path, files: list[_OutputFile], export: Export) -> None:
    """Write what is not there yet, all or nothing as far as space and files in the way can be known before."""
    target.mkdir(parents=True, exist_ok=True)
    missing = []
    for file in files:
        if file.path.exists():
            export.sha256[file.path.name] = _checked_existing(file)
        else:
            missing.append(file)
    needed, free = sum(file.num_bytes for file in missing), shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"{target}: {free:,} bytes are free and the export needs {needed:,}; free some, or name another directory"
        )
    for file in missing:
        export.sha256[file.path.name] = _written(file)
    for file in files:
        export.tokens[file.path.name] = file.num_tokens


def _checked_existing(file: _OutputFile) -> str:
    if file.path.stat().st_size != file.num_bytes:
        raise _in_the_way(file.path)
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        return file.check(descriptor)
    except DataError as error:
        raise DataError(f"{_in_the_way(file.path)} ({error})") from error
    finally:
        os.close(descriptor)


def _check_meta(path: Path) -> None:
    """Refuse somebody else's ``meta.json``; one of an earlier export is written anew."""
    if path.exists():
        try:
            ours = json.loads(path.read_bytes())["format"] == NANOGPT_FORMAT
        except (ValueError, KeyError, TypeError):
            ours = False
        if not ours:
            raise _in_the_way(path)


def _in_the_way(path: Path) -> DataError:
    return DataError(f"{path}: is there and is another file; move it away, or name another directory")


def _written(file: _OutputFile) -> str:
    aside = file.path.with_name(f"{file.path.name}.tmp")
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{aside}: another export is writing it; wait for its end") from error
        os.ftruncate(descriptor, 0)
        file.write(descriptor)
        os.fsync(descriptor)
        # What is read back should come from the disk and not from the pages just written.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.fstat(descriptor).st_size != file.num_bytes:
            raise DataError(f"{aside}: has {os.fstat(descriptor).st_size:,} bytes instead of {file.num_bytes:,}")
        sha256 = file.check(descriptor)
        if file.path.exists():
            raise _in_the_way(file.path)
        os.replace(aside, file.path)
    finally:
        os.close(descriptor)
    sync_directory(file.path.parent)
    return sha256


def _check_bodies(
    descriptor: int, path: Path, source: Path, parts: list[PartRecord], head: bytes, lead: bytes, tail: bytes
) -> str:
    """Hold ``head`` + the parts' bodies without ``lead`` at their start + ``tail`` against the manifest's hashes.

    A part's hash covers its header and body, so it is that of the header followed by the part's share of the file.

    Returns:
        SHA-256 of the whole file.
    """
    whole = hashlib.sha256()
    found = _read(descriptor, len(head), 0)
    whole.update(found)
    at = len(head)
    wrong = found != head
    for part in parts:
        header = read_header(source / part.file)
        digest = hashlib.sha256(_first_bytes(source / part.file) + lead)
        left = header.file_bytes - HEADER_BYTES - len(lead)
        lead = b""
        while left:
            block = _read(descriptor, min(left, _BLOCK_BYTES), at)
            digest.update(block)
            whole.update(block)
            at, left = at + len(block), left - len(block)
        if digest.hexdigest() != part.sha256:
            raise DataError(
                f"{path}: its copy of {source / part.file} has not the SHA-256 of the manifest; "
                f"`python -m data_pipeline verify {source}` says whether the part is damaged"
            )
    found = _read(descriptor, len(tail), at)
    whole.update(found)
    if wrong or found != tail:
        raise DataError(f"{path}: its {'header' if wrong else 'last token'} is not what it should be; export it again")
    return whole.hexdigest()


def _blocks_of_part(source: Path, part: PartRecord) -> Iterator[bytes]:
    """The body of a part, and at its end the proof that it was what the manifest says."""
    digest = hashlib.sha256()
    with open(source / part.file, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            yield block
    if digest.hexdigest() != part.sha256:
        raise DataError(
            f"{source / part.file}: SHA-256 is {digest.hexdigest()}, the manifest says {part.sha256}; copy it anew"
        )


def _copy_body(part: Path, descriptor: int, skip_bytes: int) -> None:
    """Append the body of a part, less its first bytes, to an open file."""
    with open(part, "rb", buffering=0) as file:
        file.seek(HEADER_BYTES + skip_bytes)
        left = os.fstat(file.fileno()).st_size - HEADER_BYTES - skip_bytes
        copy: Callable[[int, int, int], int] = os.copy_file_range
        while left:
            try:
                count = copy(file.fileno(), descriptor, min(left, 1 << 30))
            except OSError as error:
                # Another file system, or one that cannot; both descriptors stand where the last copy ended.
                if copy is _copy_block or error.errno not in _CANNOT_COPY:
                    raise
                copy = _copy_block
                continue
            if count == 0:
                if copy is not os.copy_file_range:
                    raise DataError(f"{part}: truncated while it was copied; copy the data set anew")
                copy = _copy_block  # some file systems report nothing copied instead of an error
            left -= count


_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


def _copy_block(source: int, target: int, count: int) -> int:
    block = os.read(source, min(count, _BLOCK_BYTES))
    _write(target, block)
    return len(block)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, count: int, offset: int) -> bytes:
    """Exactly ``count`` bytes from ``offset``.

    Raises:
        DataError: the file ends before.
    """
    pieces: list[Any] = []
    while count:
        piece = os.pread(descriptor, count, offset)
        if not piece:
            raise DataError("the file ends too soon; export it again")
        pieces.append(piece)
        count, offset = count - len(piece), offset + len(piece)
    return b"".join(pieces)


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(HEADER_BYTES)
