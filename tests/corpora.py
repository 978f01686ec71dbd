"""Small data sets that tests make for themselves: generated English-like text, byte-level tokens."""

import json
import random
from pathlib import Path

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "gradient",
    "variance",
    "matrix",
    "update",
    "moment",
    "shard",
    "rank",
    "weight",
    "token",
    "loss",
    "step",
    "model",
    "learns",
    "reduces",
    "holds",
    "moves",
    "keeps",
    "clips",
    "scales",
    "owner",
    "partition",
    "buffer",
]


def write_jsonl(path: Path, documents: int = 300, seed: int = 0) -> Path:
    """Sentences of random words: enough structure for a loss to fall."""
    generator = random.Random(seed)
    lines = []
    for _ in range(documents):
        sentences = [" ".join(generator.choices(WORDS, k=generator.randint(4, 12))) + "." for _ in range(6)]
        lines.append(json.dumps({"text": " ".join(sentences)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def byte_dataset(folder: Path, documents: int = 300) -> Path:
    """A prepared byte-level data set (257 ids) with a validation split."""
    from data_pipeline.build import prepare
    from data_pipeline.plan import BuildOptions

    source = write_jsonl(folder / "text.jsonl", documents)
    output = folder / "bytes"
    prepare([str(source)], output, tokenizer="bytes", options=BuildOptions(val_fraction=0.1), workers=1)
    return output
