"""The plan of a build: fixed before it starts, a function of the sources and the options alone."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from data_pipeline.binformat import HEADER_BYTES, MAX_FILE_BYTES, token_dtype
from data_pipeline.durable import canonical_json
from data_pipeline.errors import DataError
from data_pipeline.parts import PartFormat
from data_pipeline.sources import SourceFile
from data_pipeline.split import DEFAULT_VAL_FRACTION
from data_pipeline.tokenizer import Tokenizer

FORMAT_VERSION = 1
DEFAULT_PART_TOKENS = 100_000_000
MIN_PART_TOKENS = 1_000
# English text has 4 to 5 bytes per GPT-2 token: files of this many bytes per part token give about one part.
_BYTES_PER_TOKEN = 4


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
        val_fraction: share of documents for validation, at least 0 and below 1.
        part_tokens: tokens per part; a part stays below 2 GiB.
        text_column: parquet column or JSON key that holds the text.
        text_documents: what a document of a .txt file is: the ``file``, or each ``paragraph``.
    """

    name: str = "data"
    val_fraction: float = DEFAULT_VAL_FRACTION
    part_tokens: int = DEFAULT_PART_TOKENS
    text_column: str = "text"
    text_documents: Literal["file", "paragraph"] = "file"


@dataclass(frozen=True)
class Plan:
    """Everything that decides the output bytes.

    Attributes:
        tokenizer: identity of the tokenizer.
        options: the options.
        sources: the files, in order.
        units: the units of work, each the positions of consecutive files in ``sources``.
    """

    tokenizer: TokenizerIdentity
    options: BuildOptions
    sources: tuple[SourceFile, ...]
    units: tuple[tuple[int, ...], ...]

    @property
    def part_format(self) -> PartFormat:
        """What all parts share."""
        identity = self.tokenizer
        dtype = token_dtype(identity.vocab_size)
        return PartFormat(dtype, identity.eot_id, identity.vocab_size, self.options.part_tokens)

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

    @property
    def sha256(self) -> str:
        """SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical()).hexdigest()


def make_plan(sources: Sequence[SourceFile], tokenizer: TokenizerIdentity, options: BuildOptions) -> Plan:
    """Check the options and cut the sources into units.

    A unit is one file, or as many consecutive files as make about one part: a thousand small files give
    a few whole parts and not a thousand crumbs.

    Raises:
        DataError: an option is out of its range.
    """
    itemsize = token_dtype(tokenizer.vocab_size).itemsize
    max_part_tokens = (MAX_FILE_BYTES - HEADER_BYTES) // itemsize
    if not MIN_PART_TOKENS <= options.part_tokens <= max_part_tokens:
        raise DataError(
            f"--part-tokens {options.part_tokens:,} is out of range; expected {MIN_PART_TOKENS:,} to "
            f"{max_part_tokens:,}, so that a part stays below 2 GiB"
        )
    if not 0 <= options.val_fraction < 1:
        raise DataError(
            f"--val-fraction {options.val_fraction} is out of range; expected 0 (no validation split) to "
            f"below 1, for instance {DEFAULT_VAL_FRACTION}"
        )
    if not options.name or not all(char.isalnum() or char in "._-" for char in options.name):
        raise DataError(f"--name {options.name!r} must be letters, digits, '.', '_' and '-', for instance owt")
    units: list[tuple[int, ...]] = []
    open_unit: list[int] = []
    open_bytes = 0
    for position, source in enumerate(sources):
        open_unit.append(position)
        open_bytes += source.size_bytes
        if open_bytes >= options.part_tokens * _BYTES_PER_TOKEN:
            units.append(tuple(open_unit))
            open_unit, open_bytes = [], 0
    if open_unit:
        units.append(tuple(open_unit))
    return Plan(tokenizer, options, tuple(sources), tuple(units))
