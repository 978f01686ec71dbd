"""A parquet file with FineWeb's layout and as much fresh text as this machine has.

Fast engines live on a cache of words, so text that repeats would flatter them. The corpus "installed-documentation"
is taken once as it is. Beyond its size it is taken again in another order, and each word that occurs in it once is
replaced by a new one of the same letters. Of a corpus of N words V occur once, and V / N is the share of new words
to expect of the next text of its kind (Good and Turing): the file goes on meeting new words at the rate at which the
corpus did at its end.
"""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.corpus import write_corpus

DOCUMENT_BYTES = 4_600  # FineWeb's mean
ROW_GROUP = 1_000
_WORD = re.compile(r"[A-Za-z]{5,}")


@dataclass(frozen=True)
class TextReport:
    """What is in the file.

    Attributes:
        documents: rows.
        text_bytes: UTF-8 bytes of their text.
        file_bytes: size of the file.
        rewritten_share: share of the text that stands in the file a second time, but for its rare words.
        new_words_share: share of words that the rewriting replaces by new ones.
    """

    documents: int
    text_bytes: int
    file_bytes: int
    rewritten_share: float
    new_words_share: float


def write_fineweb_like(path: Path, megabytes: float) -> TextReport:
    """Write ``path``: columns text and id, snappy, row groups of 1,000."""
    corpus = path.with_suffix(".corpus.jsonl")
    if not corpus.exists():
        write_corpus(corpus)
    with open(corpus, encoding="utf-8") as file:
        pieces = [json.loads(line)["text"] for line in file]
    counts = Counter(word for piece in pieces for word in _WORD.findall(piece))
    generator = random.Random(2_357)
    wanted = int(megabytes * 1e6)
    documents: list[str] = []
    size = fresh = 0
    while size < wanted:
        generator.shuffle(pieces)
        for document in _documents(pieces):
            if size >= wanted:
                break
            if fresh:
                document = _WORD.sub(lambda match: _renewed(match[0], counts, generator), document)
            documents.append(document)
            size += len(document.encode())
        fresh = fresh or size
    names = [f"<urn:uuid:{generator.getrandbits(128):032x}>" for _ in documents]
    pq.write_table(pa.table({"text": documents, "id": names}), path, row_group_size=ROW_GROUP, compression="snappy")
    once = sum(count == 1 for count in counts.values())
    return TextReport(
        len(documents), size, path.stat().st_size, (size - fresh) / size, once / max(1, sum(counts.values()))
    )


def _documents(pieces: list[str]) -> list[str]:
    """Pieces joined to documents of FineWeb's mean size."""
    documents: list[str] = []
    held: list[str] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= DOCUMENT_BYTES - 1_000:
            documents.append("\n\n".join(held))
            held = []
    return documents


def _renewed(word: str, counts: Counter[str], generator: random.Random) -> str:
    """A word that is new, where the corpus has this one once."""
    if counts[word] > 1:
        return word
    return "".join(generator.sample(word, len(word)))
