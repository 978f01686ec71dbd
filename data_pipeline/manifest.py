"""``manifest.json``: the description of a finished data set; its SHA-256 is the data set's identity."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.durable import canonical_json, write_atomic
from data_pipeline.errors import DataError
from data_pipeline.parts import PartRecord
from data_pipeline.plan import FORMAT_VERSION, BuildOptions, TokenizerIdentity
from data_pipeline.receipt import RowCounts

MANIFEST_FILE = "manifest.json"
MANIFEST_HASH_FILE = "manifest.sha256"
# One line per unit of work: what it read and what it made.
RECEIPTS_FILE = "receipts.jsonl"
FORMAT_NAME = "data_pipeline"
READABLE_VERSIONS = (1, FORMAT_VERSION)


@dataclass(frozen=True)
class SourceRecord:
    """One source file: its identity and where its rows went."""

    name: str
    size_bytes: int
    sha256: str
    counts: RowCounts


@dataclass(frozen=True)
class Manifest:
    """A finished data set. Holds no time, no path and nothing else that differs between two builds.

    Attributes:
        plan_sha256: hash of the plan that made it.
        tokenizer: identity of the tokenizer.
        options: the options of the build.
        sources: the source files in order.
        parts: the parts in order, training first.
        text_bytes: UTF-8 bytes of the documents' text per split, keys ``train`` and ``val``.
        quarantine_sha256: of ``quarantine.jsonl``; None where no row was quarantined.
        receipts_sha256: of ``receipts.jsonl``; None in data sets of version 1.
        version: of the format.
    """

    plan_sha256: str
    tokenizer: TokenizerIdentity
    options: BuildOptions
    sources: list[SourceRecord]
    parts: list[PartRecord]
    text_bytes: dict[str, int]
    quarantine_sha256: str | None
    receipts_sha256: str | None = None
    version: int = FORMAT_VERSION

    @property
    def accounting(self) -> RowCounts:
        """Where the rows of all sources went."""
        return sum((source.counts for source in self.sources), RowCounts())

    def parts_of(self, split: str) -> list[PartRecord]:
        """The parts of one split, in order."""
        return [part for part in self.parts if part.split == split]

    def to_bytes(self) -> bytes:
        """The file: canonical JSON."""
        return canonical_json(
            {
                "format": FORMAT_NAME,
                "accounting": asdict(self.accounting),
                "tokens": {split: sum(p.tokens for p in self.parts_of(split)) for split in ("train", "val")},
                **asdict(self),
            }
        )

    def write(self, directory: Path) -> str:
        """Write both files, the manifest last: it marks the data set as finished. Returns the identity."""
        data = self.to_bytes()
        identity = hashlib.sha256(data).hexdigest()
        write_atomic(directory / MANIFEST_HASH_FILE, _hash_line(identity))
        write_atomic(directory / MANIFEST_FILE, data)
        return identity


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """Read and check a manifest.

    Returns:
        The manifest and the data set's identity, the SHA-256 of the file.

    Raises:
        DataError: it is missing, is not of this format and version, or differs from ``manifest.sha256``.
    """
    path = directory / MANIFEST_FILE
    hash_path = directory / MANIFEST_HASH_FILE
    try:
        data = path.read_bytes()
        promised = hash_path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: missing; the data set is unfinished or was copied in part") from None
    identity = hashlib.sha256(data).hexdigest()
    if promised != _hash_line(identity):
        raise DataError(f"{path}: its SHA-256 is {identity}, not what {hash_path.name} says; copy both anew")
    try:
        return _parse(json.loads(data)), identity
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a manifest of {FORMAT_NAME} version {FORMAT_VERSION} ({error!r}); run prepare again"
        ) from error


def _hash_line(identity: str) -> bytes:
    """The content of ``manifest.sha256``: what ``sha256sum`` writes and checks."""
    return f"{identity}  {MANIFEST_FILE}\n".encode()


def _parse(value: dict[str, Any]) -> Manifest:
    if value["format"] != FORMAT_NAME or value["version"] not in READABLE_VERSIONS:
        raise ValueError(f"format {value['format']} version {value['version']}")
    return Manifest(
        plan_sha256=value["plan_sha256"],
        tokenizer=TokenizerIdentity(**value["tokenizer"]),
        options=BuildOptions(**value["options"]),
        sources=[SourceRecord(**{**source, "counts": RowCounts(**source["counts"])}) for source in value["sources"]],
        parts=[PartRecord(**part) for part in value["parts"]],
        text_bytes=value["text_bytes"],
        quarantine_sha256=value["quarantine_sha256"],
        receipts_sha256=value.get("receipts_sha256"),
        version=value["version"],
    )
