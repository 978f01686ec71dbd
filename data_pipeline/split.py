"""The validation split: by default a property of a document's text.

``content``: a document is validation when the XXH3-64 hash of its UTF-8 text, read as a fraction of 2^64, lies below
``val_fraction``. Equal texts fall on the same side, so duplicates cannot leak; the answer does not depend
on order, files or workers; and a larger fraction only adds documents.

For comparison with published losses there are two more, which see a document's place and not its text:
``llmc``, the whole documents of the first ``val_tokens`` tokens, as llm.c's first shard; and ``nanogpt``, rows
chosen and shuffled by NumPy's permutation of seed 2357, as nanoGPT's ``train_test_split`` does. nanoGPT cuts a
single text otherwise, and so does ``nanogpt`` where the only source is one .txt file: its last tenth is validation.
"""

import heapq
import math
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_pipeline.errors import DataError

HASH_RANGE = 1 << 64
DEFAULT_VAL_FRACTION = 0.0005
DEFAULT_VAL_TOKENS = 100_000_000
# A suggested fraction should give at least one GPT-2 window of 1,024 inputs and their targets.
USEFUL_VAL_TOKENS = 1_025
KEPT_CANDIDATES = 64


def text_hash(utf8: bytes) -> int:
    """XXH3-64 of a document's text, 0 to 2^64 - 1."""
    return xxhash.xxh3_64_intdigest(utf8)


def is_validation(document_hash: int, val_fraction: float) -> bool:
    """Whether the document with this `text_hash` belongs to the validation split."""
    return document_hash < val_fraction * HASH_RANGE


NANOGPT_SEED = 2357


def nanogpt_rows(num_rows: int, val_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """nanoGPT's split of ``num_rows`` rows.

    Returns:
        Row numbers of training and of validation in the order in which nanoGPT writes them, int64.
    """
    order = np.random.default_rng(NANOGPT_SEED).permutation(num_rows)
    num_val = math.ceil(val_fraction * num_rows)
    return order[num_val:], order[:num_val]


class SmallestHashes:
    """The documents nearest to entering the validation split, in bounded memory."""

    def __init__(self, items: Iterable[tuple[int, int]] = ()) -> None:
        """Start from ``(text_hash, tokens)`` pairs."""
        self._heap: list[tuple[int, int]] = []  # of (-hash, tokens): the largest hash kept is on top
        for document_hash, tokens in items:
            self.add(document_hash, tokens)

    def add(self, document_hash: int, tokens: int) -> None:
        """Note one document of ``tokens`` tokens."""
        if len(self._heap) < KEPT_CANDIDATES:
            heapq.heappush(self._heap, (-document_hash, tokens))
        elif -document_hash > self._heap[0][0]:
            heapq.heapreplace(self._heap, (-document_hash, tokens))

    def sorted(self) -> list[tuple[int, int]]:
        """``(text_hash, tokens)``, smallest hash first."""
        return sorted((-negative, tokens) for negative, tokens in self._heap)


def suggest_fraction(candidates: list[tuple[int, int]], num_documents: int) -> float | None:
    """The smallest round fraction with a useful validation split and something left to train on.

    Args:
        candidates: `SmallestHashes.sorted` of the whole corpus.
        num_documents: documents in the corpus.

    Returns:
        A fraction of two significant digits that gives at least `USEFUL_VAL_TOKENS` tokens, or as many as
        the candidates reach; None where every fraction would leave one split empty.
    """
    tokens = 0
    best: float | None = None
    distinct = sorted({document_hash for document_hash, _ in candidates})
    complete = len(candidates) == num_documents
    for position, document_hash in enumerate(distinct):
        if complete and position == len(distinct) - 1:
            break  # taking the last text as well would leave nothing to train on
        tokens += sum(count for other, count in candidates if other == document_hash)
        fraction = _round_up((document_hash + 1) / HASH_RANGE)
        if complete and is_validation(distinct[-1], fraction):
            fraction = (document_hash + 1) / HASH_RANGE
        if not is_validation(document_hash, fraction) or fraction >= 1.0:
            break
        best = fraction
        if tokens >= USEFUL_VAL_TOKENS:
            break
    return best


def _round_up(fraction: float) -> float:
    """The next number of two significant digits."""
    scale = 10.0 ** (1 - math.floor(math.log10(fraction)))
    return math.ceil(fraction * scale) / scale


def check_splits(documents: dict[str, int], val_fraction: float, candidates: list[tuple[int, int]]) -> None:
    """Refuse an empty split.

    Args:
        documents: documents per split, keys ``train`` and ``val``.
        val_fraction: the fraction asked for; 0 asks for no validation split and is accepted.
        candidates: `SmallestHashes.sorted` of the whole corpus.

    Raises:
        DataError: a split is empty; the message names the fraction that would do.
    """
    total = documents["train"] + documents["val"]
    if total == 0:
        raise DataError("the sources hold no documents: every row was null, empty or quarantined")
    if documents["train"] and (documents["val"] or val_fraction == 0):
        return
    empty = "validation" if documents["train"] else "training"
    suggestion = suggest_fraction(candidates, total)
    remedy = (
        f"--val-fraction {suggestion!r} would do"
        if suggestion is not None
        else "no fraction can split them (a .txt file is one document): --text-documents paragraph makes one of each "
        "paragraph, or add documents"
    )
    raise DataError(
        f"the {empty} split is empty: none of {total:,} documents fell into it at "
        f"--val-fraction {val_fraction!r}; {remedy}, or --val-fraction 0 makes no validation split"
    )
