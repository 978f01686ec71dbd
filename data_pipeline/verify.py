"""``verify``: every file of a data set against its manifest, and what its documents and sources say."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_pipeline.binformat import HEADER_BYTES, read_document_lengths, read_header
from data_pipeline.durable import file_sha256
from data_pipeline.engines import AUTO, Engine, ReferenceEngine, choose_engine
from data_pipeline.errors import DataError
from data_pipeline.manifest import RECEIPTS_FILE, Manifest, read_manifest
from data_pipeline.parts import PartRecord
from data_pipeline.receipt import QUARANTINE_FILE
from data_pipeline.sources import find_sources
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

_DEEP_BATCH_TOKENS = 1 << 20


def verify(
    path: str | Path, *, sources: Sequence[str] = (), deep: bool = False, tokenizer: str | None = None
) -> tuple[Manifest, list[str]]:
    """Hash all files again and hold headers, indices and page sums against the manifest; several files at a time.

    Args:
        path: directory of the data set.
        sources: the files that it was made from, to be hashed against the manifest too.
        deep: decode every document and encode its text again by an engine; the ids must be the same.
        tokenizer: for ``deep``, see `load_tokenizer`; by default the one that the manifest names.

    Returns:
        The manifest, and one line per problem, each naming a file; no lines when all is well.

    Raises:
        DataError: the manifest itself is missing or damaged, or the tokenizer is another one.
    """
    path = Path(path)
    manifest, _ = read_manifest(path)
    loaded = _tokenizer_of(manifest, tokenizer) if deep else None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda part: list(_check_part(path, part)), manifest.parts)
        problems = [problem for each in found for problem in each]
    if manifest.quarantine_sha256:
        problems += _check_hash(path / QUARANTINE_FILE, manifest.quarantine_sha256)
    if manifest.receipts_sha256:
        problems += _check_hash(path / RECEIPTS_FILE, manifest.receipts_sha256)
    known = {part.file for part in manifest.parts}
    for file in sorted([*path.glob("*_train_*.bin"), *path.glob("*_val_*.bin")]):
        if file.name not in known:
            problems.append(f"{file}: not in the manifest")
    if sources:
        problems += _check_sources(manifest, sources)
    if loaded and not problems:
        engine, _ = choose_engine(AUTO, loaded)
        problems += [problem for part in manifest.parts for problem in _check_ids(path, part, loaded, engine)]
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
    if part.sums_sha256:
        yield from _check_hash(path / part.sums_file, part.sums_sha256)
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


def _check_sources(manifest: Manifest, specs: Sequence[str]) -> Iterator[str]:
    """Every source of the manifest must be among the files that ``specs`` name, with its content."""
    found = find_sources(specs, manifest.options.text_column, manifest.options.text_documents, check=False)
    for record in manifest.sources:
        named = [file for file in found if file.name == record.name]
        if not named:
            yield f"{record.name}: a source of the data set, not among {' '.join(specs)}"
        elif record.sha256 not in (hashes := [file_sha256(file.path) for file in named]):
            yield f"{named[0].path}: SHA-256 is {hashes[0]}, the data set was made from {record.sha256}"


def _tokenizer_of(manifest: Manifest, spec: str | None) -> Tokenizer:
    loaded = load_tokenizer(spec or manifest.tokenizer.name)
    if loaded.vocabulary_sha256 != manifest.tokenizer.vocabulary_sha256:
        raise DataError(
            f"the data set was made with vocabulary {manifest.tokenizer.vocabulary_sha256}, {spec or loaded.name} has "
            f"{loaded.vocabulary_sha256}; name the right one with --tokenizer"
        )
    return loaded


def _check_ids(path: Path, part: PartRecord, tokenizer: Tokenizer, engine: Engine) -> Iterator[str]:
    """Decode and encode again, in batches of documents; the reference arbitrates."""
    lengths = read_document_lengths(path / part.idx_file).astype(np.int64)
    dtype = read_header(path / part.file).dtype
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        start = int(ends[first] - lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, start + _DEEP_BATCH_TOKENS, side="right")))
        stored = np.fromfile(
            path / part.file, dtype, int(ends[last - 1]) - start, offset=HEADER_BYTES + start * dtype.itemsize
        )
        documents = np.split(stored, (ends[first : last - 1] - start).tolist())
        texts = [tokenizer.decode(document[1:]) for document in documents]
        encoded = engine.encode([text.encode() for text in texts])
        for number, (document, text) in enumerate(zip(documents, texts, strict=True)):
            if document[0] != tokenizer.eot_id:
                yield f"{path / part.file}: document {first + number} does not start with end-of-text"
            elif not np.array_equal(encoded.document(number), document[1:]) and (
                isinstance(engine, ReferenceEngine) or not np.array_equal(tokenizer.encode(text), document[1:])
            ):
                yield f"{path / part.file}: document {first + number}: its text encodes to other ids"
        first = last
