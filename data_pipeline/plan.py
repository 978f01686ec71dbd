"""The plan of a build: fixed before it starts, a function of the sources and the options alone."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from data_pipeline.binformat import HEADER_BYTES, MAX_FILE_BYTES, token_dtype
from data_pipeline.durable import canonical_json
from data_pipeline.errors import DataError
from data_pipeline.parts import PartFormat
from data_pipeline.rows import Slice
from data_pipeline.sources import Piece, SourceFile
from data_pipeline.split import DEFAULT_VAL_FRACTION, DEFAULT_VAL_TOKENS
from data_pipeline.tokenizer import Tokenizer

FORMAT_VERSION = 2
DEFAULT_PART_TOKENS = 100_000_000
MIN_PART_TOKENS = 1_000
# English text has 4 to 5 bytes per GPT-2 token: units of this many bytes per part token give one part each.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class TokenizerIdentity:
    """What the manifest says of the tokenizer; the fields are those of `Tokenizer`."""

    name: str
    vocabulary_sha256: str
    vocab_size: int
    eot_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerIdentity":
        """The identity of a loaded tokenizer."""
        return cls(tokenizer.name, tokenizer.vocabulary_sha256, tokenizer.vocab_size, tokenizer.eot_id)


@dataclass(frozen=True)
class BuildOptions:
    """The options that decide the output.

    Attributes:
        name: parts are called ``NAME_train_NNNNNN.bin`` and ``NAME_val_NNNNNN.bin``.
        val_split: how validation documents are chosen; see `data_pipeline.split`.
        val_fraction: share of documents for validation, at least 0 and below 1; not for ``llmc``.
        val_tokens: tokens of the validation split, for ``llmc`` alone.
        part_tokens: tokens per part; a part stays below 2 GiB.
        text_column: parquet column or JSON key that holds the text.
        text_documents: what a document of a .txt file is: the ``file``, or each ``paragraph``.
    """

    name: str = "data"
    val_split: Literal["content", "llmc", "nanogpt"] = "content"
    val_fraction: float = DEFAULT_VAL_FRACTION
    val_tokens: int = DEFAULT_VAL_TOKENS
    part_tokens: int = DEFAULT_PART_TOKENS
    text_column: str = "text"
    text_documents: Literal["file", "paragraph"] = "file"

    def check(self, vocab_size: int) -> None:
        """Raise `DataError` where an option is out of its range."""
        max_part_tokens = (MAX_FILE_BYTES - HEADER_BYTES) // token_dtype(vocab_size).itemsize
        if not MIN_PART_TOKENS <= self.part_tokens <= max_part_tokens:
            raise DataError(
                f"--part-tokens {self.part_tokens:,} is out of range; expected {MIN_PART_TOKENS:,} to "
                f"{max_part_tokens:,}, so that a part stays below 2 GiB"
            )
        if not 0 <= self.val_fraction < 1:
            raise DataError(
                f"--val-fraction {self.val_fraction} is out of range; expected 0 (no validation split) to "
                f"below 1, for instance {DEFAULT_VAL_FRACTION}"
            )
        if self.val_tokens < 1:
            raise DataError(f"--val-tokens {self.val_tokens} is out of range; expected 1 or more")
        if not self.name or not all(char.isalnum() or char in "._-" for char in self.name):
            raise DataError(f"--name {self.name!r} must be letters, digits, '.', '_' and '-', for instance owt")


@dataclass(frozen=True)
class Plan:
    """Everything that decides the output bytes.

    Attributes:
        tokenizer: identity of the tokenizer.
        options: the options.
        sources: the files, in order.
        units: the units of work: slices of consecutive sources.
    """

    tokenizer: TokenizerIdentity
    options: BuildOptions
    sources: tuple[SourceFile, ...]
    units: tuple[tuple[Slice, ...], ...]

    @property
    def part_format(self) -> PartFormat:
        """What all parts share."""
        identity = self.tokenizer
        dtype = token_dtype(identity.vocab_size)
        return PartFormat(dtype, identity.eot_id, identity.vocab_size, self.options.part_tokens)

    @property
    def text_bytes(self) -> int:
        """Text of all sources, roughly, in bytes."""
        return sum(piece.text_bytes for unit in self.units for piece in unit)

    @property
    def cuts_single_text(self) -> bool:
        """Whether the only source is one text that nanoGPT's rule cuts into its splits."""
        return self.options.val_split == "nanogpt" and [source.kind for source in self.sources] == ["nanogpt-text"]

    @cached_property
    def canonical(self) -> bytes:
        """The plan as canonical JSON, without paths or times."""
        sources: list[dict[str, Any]] = [
            {"name": source.name, "size_bytes": source.size_bytes, "sha256": source.sha256} for source in self.sources
        ]
        return canonical_json(
            {
                "version": FORMAT_VERSION,
                "tokenizer": asdict(self.tokenizer),
                "options": asdict(self.options),
                "sources": sources,
                "units": self.units,
            }
        )

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical).hexdigest()

    def describe(self) -> str:
        """One line for a person."""
        size = sum(source.size_bytes for source in self.sources)
        return (
            f"plan {self.sha256[:16]}: {len(self.sources):,} files of {size / 1e6:,.1f} MB, about "
            f"{self.text_bytes / 1e6:,.1f} MB of text, {len(self.units):,} units of work"
        )


def make_plan(
    sources: Sequence[SourceFile],
    pieces: Sequence[Sequence[Piece]],
    tokenizer: TokenizerIdentity,
    options: BuildOptions,
) -> Plan:
    """Check the options and cut the sources into units of about one part.

    A unit is a run of row groups or lines; it may cross files, so that a thousand small files give a few whole
    parts and not a thousand crumbs.

    Raises:
        DataError: an option is out of its range.
    """
    options.check(tokenizer.vocab_size)
    units: list[tuple[Slice, ...]] = []
    unit: list[Slice] = []
    unit_bytes = 0
    for position, piece in ((position, piece) for position, each in enumerate(pieces) for piece in each):
        last = unit[-1] if unit else None
        if last and last.source == position:
            unit[-1] = last._replace(stop=piece.stop, text_bytes=last.text_bytes + piece.text_bytes)
        else:
            unit.append(Slice(position, piece.start, piece.stop, piece.first_row, piece.text_bytes))
        unit_bytes += piece.text_bytes
        if unit_bytes >= options.part_tokens * BYTES_PER_TOKEN:
            units.append(tuple(unit))
            unit, unit_bytes = [], 0
    if unit:
        units.append(tuple(unit))
    return Plan(tokenizer, options, tuple(sources), tuple(units))


def read_plan(data: bytes, sources: Sequence[SourceFile]) -> Plan:
    """The plan that `Plan.canonical` wrote, for these sources, which are in its order."""
    value = json.loads(data)
    units = tuple(tuple(Slice(*piece) for piece in unit) for unit in value["units"])
    return Plan(TokenizerIdentity(**value["tokenizer"]), BuildOptions(**value["options"]), tuple(sources), units)
