"""The audit: documents that a second tokenizer encodes during the build, and what happens when it disagrees."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.engines import Encoded, Engine
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import Tokenizer

MISMATCH_FILE = "mismatch.txt"
# One document in this many, chosen by the hash of its text.
_SAMPLE = 512
_LARGE_BYTES = 1 << 20
_SPECIAL = re.compile(rb"<\|[a-z_]+\|>")
# A run of twice as many repeated characters always fills one aligned stretch of this many bytes.
_STRETCH = 128
_PERIOD = 12  # a whole number of characters of 1, 2, 3 or 4 bytes each


class EngineMismatch(DataError):
    """Two tokenizers gave other ids for one document; the build stops."""


@dataclass(frozen=True)
class Audited:
    """A batch in the hands of the audit.

    Attributes:
        documents: their text, UTF-8.
        places: ``source, row`` of each, for messages.
        hashes: `text_hash` of each.
        encoded: what the engine gave.
    """

    documents: Sequence[bytes]
    places: Sequence[tuple[str, int]]
    hashes: Sequence[int]
    encoded: Encoded


class Auditor:
    """Encodes documents again, a sample of them or all.

    The sample is the first document of every batch, so of every part, one in 512 by content, and all that are
    unusual: text of special tokens, runs of 256 repeated characters or more, 1 MiB or more.

    Attributes:
        documents: encoded again so far.
    """

    def __init__(self, engine: Engine, second: Engine | None, reference: Tokenizer, directory: Path) -> None:
        """Audit ``engine``.

        Args:
            engine: the engine of the build.
            second: encodes every document again; None for a sample by the reference.
            reference: decides which of two engines is right.
            directory: where a document that they disagree on is kept.
        """
        self.documents = 0
        self._engine = engine
        self._second = second
        self._reference = reference
        self._directory = directory

    def check(self, batch: Audited) -> None:
        """Encode documents of a batch again.

        Raises:
            EngineMismatch: the ids differ.
        """
        if self._second is None:
            for index in sample_of(batch.documents, batch.hashes):
                self.documents += 1
                if not np.array_equal(
                    self._reference.encode(batch.documents[index].decode()), batch.encoded.document(index)
                ):
                    raise self.mismatch(batch.documents[index], batch.places[index], self._engine.name)
            return
        self.documents += len(batch.documents)
        again = self._second.encode(batch.documents)
        if np.array_equal(again.ids, batch.encoded.ids) and np.array_equal(again.offsets, batch.encoded.offsets):
            return
        for index, utf8 in enumerate(batch.documents):
            if not np.array_equal(again.document(index), batch.encoded.document(index)):
                right = self._reference.encode(utf8.decode())
                wrong = [
                    name
                    for name, encoded in ((self._engine.name, batch.encoded), (self._second.name, again))
                    if not np.array_equal(encoded.document(index), right)
                ]
                raise self.mismatch(utf8, batch.places[index], " and ".join(wrong))
        raise AssertionError("equal documents, but other arrays")

    def mismatch(self, utf8: bytes, place: tuple[str, int], engine: str) -> EngineMismatch:
        """Keep the document and say which engine is wrong about it."""
        kept = self._directory / MISMATCH_FILE
        kept.write_bytes(utf8)
        source, row = place
        return EngineMismatch(
            f"{source}, row {row}: {engine} gives other ids than the reference tokenizer; nothing of it was published. "
            f"The document is kept as {kept}. Report it to {engine}, and run again with --engine tiktoken"
        )


def sample_of(documents: Sequence[bytes], hashes: Sequence[int]) -> list[int]:
    """Positions of the documents of a batch that a sample audit encodes again, ascending."""
    chosen = {0} if documents else set()
    chosen.update(index for index, document_hash in enumerate(hashes) if document_hash % _SAMPLE == 0)
    chosen.update(index for index, utf8 in enumerate(documents) if len(utf8) >= _LARGE_BYTES)
    joined = b"\n".join(documents)
    ends = np.cumsum([len(utf8) + 1 for utf8 in documents])
    odd = [match.start() for match in _SPECIAL.finditer(joined)] + repeated_stretches(joined).tolist()
    chosen.update(np.searchsorted(ends, odd, side="right").tolist())
    return sorted(chosen)


def repeated_stretches(data: bytes) -> NDArray[np.int64]:
    """Positions of aligned stretches of 128 bytes that repeat what stands 12 bytes before."""
    values = np.frombuffer(data, np.uint8)
    usable = max(0, (len(values) - _PERIOD) // _STRETCH) * _STRETCH
    stretches = values[_PERIOD : usable + _PERIOD].reshape(-1, _STRETCH)
    before = values[:usable].reshape(-1, _STRETCH)
    likely = np.flatnonzero(stretches[:, 0] == before[:, 0])  # the first byte settles nearly all
    repeated = np.flatnonzero((stretches[likely] == before[likely]).all(axis=1))
    return likely[repeated] * _STRETCH + _PERIOD
