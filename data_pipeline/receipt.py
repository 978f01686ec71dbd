"""The receipt of a unit of work: what the manifest is made from, and nothing else is."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.durable import canonical_json
from data_pipeline.parts import PartRecord

RECEIPT_FILE = "receipt.json"
QUARANTINE_FILE = "quarantine.jsonl"
# How a unit was made: engine, host, seconds. Differs between builds, so it is no part of the identity.
PROVENANCE_FILE = "provenance.jsonl"
# Of each document of a unit its row, counted over the unit, and its text's bytes; int64, shape (documents, 2).
ROWS_FILE = "rows.i64"


@dataclass
class RowCounts:
    """Where the rows of one source went, and the bytes they hold. Every row is in exactly one of the last four.

    Attributes:
        rows: rows read.
        documents: rows that became documents.
        null: rows without a text.
        empty: rows whose text is empty or blank.
        quarantined: rows with a problem, listed in ``quarantine.jsonl``.
        bytes_read: UTF-8 bytes of all texts, and of whole lines where no text could be taken from them.
        bytes_documents: those that became documents.
        bytes_empty: those of blank texts.
        bytes_quarantined: those with a problem.
    """

    rows: int = 0
    documents: int = 0
    null: int = 0
    empty: int = 0
    quarantined: int = 0
    bytes_read: int = 0
    bytes_documents: int = 0
    bytes_empty: int = 0
    bytes_quarantined: int = 0

    def __add__(self, other: "RowCounts") -> "RowCounts":
        """The counts of both."""
        return RowCounts(**{key: value + getattr(other, key) for key, value in asdict(self).items()})

    def assert_closed(self) -> None:
        """Every row and byte is accounted for once; anything else is a defect of this package."""
        assert self.rows == self.documents + self.null + self.empty + self.quarantined, self
        assert self.bytes_read == self.bytes_documents + self.bytes_empty + self.bytes_quarantined, self


@dataclass(frozen=True)
class Receipt:
    """What one unit produced.

    Attributes:
        counts: per slice of the unit, in order.
        parts: the unit's parts, named within its directory; training parts first.
        text_bytes: UTF-8 bytes of the documents' text per split, keys ``train`` and ``val``.
        smallest_hashes: ``(text_hash, tokens)`` of the documents nearest to the validation split.
    """

    counts: list[RowCounts]
    parts: list[PartRecord]
    text_bytes: dict[str, int]
    smallest_hashes: list[tuple[int, int]]

    def to_bytes(self) -> bytes:
        """The receipt file."""
        return canonical_json(asdict(self))

    @classmethod
    def read(cls, directory: Path) -> "Receipt":
        """The receipt of a committed unit directory."""
        value = json.loads((directory / RECEIPT_FILE).read_bytes())
        return cls(
            counts=[RowCounts(**counts) for counts in value["counts"]],
            parts=[PartRecord(**part) for part in value["parts"]],
            text_bytes=value["text_bytes"],
            smallest_hashes=[(document_hash, tokens) for document_hash, tokens in value["smallest_hashes"]],
        )
