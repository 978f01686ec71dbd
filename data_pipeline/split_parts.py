"""What a split consists of: its parts and what is known of them, by a manifest, or as others have made them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_pipeline.binformat import HEADER_BYTES, BinHeader, read_header
from data_pipeline.errors import DataError
from data_pipeline.manifest import MANIFEST_FILE, read_manifest

# What parts of llm.c's format without a manifest hold by convention.
_FOREIGN_TOKENIZER = "gpt2"
_FOREIGN_VOCAB_SIZE = 50_257


@dataclass(frozen=True)
class SplitInfo:
    """What is known of one split before any window is read.

    Attributes:
        manifest_sha256: identity of the data set.
        tokenizer_name: the tokenizer's name.
        vocab_size: number of ids; every id that is read lies below it.
        max_token_id: the largest id of the split; for a directory without a manifest ``vocab_size - 1``.
        num_documents: documents; None for a directory without a manifest.
        bytes_of_text: UTF-8 bytes of the documents' text; None for a directory without a manifest.
    """

    manifest_sha256: str
    tokenizer_name: str
    vocab_size: int
    max_token_id: int
    num_documents: int | None
    bytes_of_text: int | None


class SplitPart(NamedTuple):
    """One part: the names of its files, the sums' being None where it has none, and its header."""

    file: str
    sums_file: str | None
    header: BinHeader


def split_of_manifest(path: Path, split: str) -> tuple[SplitInfo, list[SplitPart]]:
    """A split of a data set that `prepare` made; `DataError` where a part is missing, damaged or of another one."""
    manifest, identity = read_manifest(path)
    records = manifest.parts_of(split)
    parts = []
    for record in records:
        header = read_header(path / record.file)
        if (header.num_tokens, header.num_documents) != (record.tokens, record.documents):
            raise DataError(
                f"{path / record.file}: its header says {header.num_tokens:,} tokens, the manifest "
                f"{record.tokens:,}; the part is of another data set: copy it anew"
            )
        parts.append(SplitPart(record.file, record.sums_file if record.sums_sha256 else None, header))
    info = SplitInfo(
        manifest_sha256=identity,
        tokenizer_name=manifest.tokenizer.name,
        vocab_size=manifest.tokenizer.vocab_size,
        max_token_id=max((record.max_token_id for record in records), default=0),
        num_documents=sum(record.documents for record in records),
        bytes_of_text=manifest.text_bytes[split],
    )
    return info, parts


def split_of_foreign_parts(path: Path, split: str) -> tuple[SplitInfo, list[SplitPart]]:
    """A split of parts without a manifest, taken as GPT-2 tokens in uint16; `DataError` for others."""
    identity = hashlib.sha256()
    parts = []
    for file in sorted([*path.glob("*_train_*.bin"), *path.glob("*_val_*.bin")]):
        header = read_header(file)
        if header.itemsize != 2:
            raise DataError(
                f"{file}: parts without a {MANIFEST_FILE} are taken as GPT-2 tokens in uint16 (magic "
                "20240520); prepare other vocabularies from their text"
            )
        with open(file, "rb") as opened:
            start = opened.read(HEADER_BYTES)
        identity.update(f"{file.name}\n{header.file_bytes}\n".encode() + start)
        if f"_{split}_" in file.name:
            parts.append(SplitPart(file.name, None, header))
    info = SplitInfo(
        manifest_sha256=identity.hexdigest(),
        tokenizer_name=_FOREIGN_TOKENIZER,
        vocab_size=_FOREIGN_VOCAB_SIZE,
        max_token_id=_FOREIGN_VOCAB_SIZE - 1,
        num_documents=None,
        bytes_of_text=None,
    )
    return info, parts
