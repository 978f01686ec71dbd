"""``verify``: every file of a data set against its manifest."""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.binformat import read_document_lengths, read_header
from data_pipeline.durable import file_sha256
from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.parts import PartRecord
from data_pipeline.receipt import QUARANTINE_FILE


def verify(path: str | Path) -> tuple[Manifest, list[str]]:
    """Hash all files again and hold headers and indices against the manifest.

    Returns:
        The manifest, and one line per problem, each naming a file; no lines when all is well.

    Raises:
        DataError: the manifest itself is missing or damaged.
    """
    path = Path(path)
    manifest, _ = read_manifest(path)
    problems = [problem for part in manifest.parts for problem in _check_part(path, part)]
    if manifest.quarantine_sha256:
        problems += _check_hash(path / QUARANTINE_FILE, manifest.quarantine_sha256)
    known = {part.file for part in manifest.parts}
    for file in sorted([*path.glob("*_train_*.bin"), *path.glob("*_val_*.bin")]):
        if file.name not in known:
            problems.append(f"{file}: not in the manifest")
    return manifest, problems


def _check_part(path: Path, part: PartRecord) -> Iterator[str]:
    try:
        header = read_header(path / part.file)
        if (header.num_tokens, header.num_documents) != (part.tokens, part.documents):
            yield f"{path / part.file}: {header.num_tokens:,} tokens, the manifest says {part.tokens:,}"
    except DataError as error:
        yield str(error)
    else:
        yield from _check_hash(path / part.file, part.sha256)
    try:
        lengths = read_document_lengths(path / part.idx_file)
        if (len(lengths), int(lengths.sum())) != (part.documents, part.tokens):
            yield f"{path / part.idx_file}: does not index the documents of {part.file}"
    except DataError as error:
        yield str(error)
    else:
        yield from _check_hash(path / part.idx_file, part.idx_sha256)


def _check_hash(file: Path, expected: str) -> Iterator[str]:
    if not file.exists():
        yield f"{file}: missing"
    elif (actual := file_sha256(file)) != expected:
        yield f"{file}: SHA-256 is {actual}, the manifest says {expected}"
