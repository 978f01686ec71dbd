"""Inputs for the tests of the data pipeline: generated, never read from elsewhere."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = Sequence[Any]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[str, Rows], Path]:
    """Write rows under ``tmp_path``: a string becomes {"text": string}, bytes a raw line, others JSON."""

    def write(name: str, rows: Rows) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_line(row) + b"\n" for row in rows))
        return path

    return write


def _line(row: Any) -> bytes:
    if isinstance(row, bytes):
        return row
    return json.dumps({"text": row} if isinstance(row, str) else row).encode()


def make_documents(count: int, seed: int = 0, words: int = 200) -> list[str]:
    """Different documents of common words, the same for the same arguments."""
    rng = random.Random(seed)
    vocabulary = [
        "the",
        "window",
        "of",
        "tokens",
        "is",
        "read",
        "once",
        "and",
        "naïve",
        "café",
        "\n",
        "  ",
        "42",
    ]
    return [
        f"{seed}/{number} " + " ".join(rng.choice(vocabulary) for _ in range(rng.randint(5, words)))
        for number in range(count)
    ]
