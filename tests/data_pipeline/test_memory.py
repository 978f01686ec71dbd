"""The memory of a worker is bounded by the largest document, not by the files.

Measured as the peak of a worker process above that of the same worker with a small document, on x86-64 with pyarrow 26
and tiktoken 0.14. A worker with nothing to do holds about 60 MB (``bytes``) or 150 MB (GPT-2). Above that:

- documents of up to 1 MB, lines that are too long, empty documents: `SMALL_MB`;
- one document of 16 MiB, the limit, of words: `LARGEST_MB`;
- one document of 16 MiB that is a single word (no blank, no change between letters and digits): `ONE_WORD_MB`, held by
  tiktoken, whose merges need about 64 bytes per byte of the longest word;
- of a parquet file about 16 MB are decoded at once, but never less than a page and a value: 4 GB for a value of 1 GB.

``python benchmarks/data_faults.py memory`` runs the large forms.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.sources import MAX_DOCUMENT_BYTES
from tests.data_pipeline.faults import REPOSITORY

SMALL_MB = 300
LARGEST_MB = 400
ONE_WORD_MB = 1_200
RUNS = ("a", "0", " ", "\n", "\u3000", "\U0001f600", "^")
RUN_LENGTH = 1_000_000
DRIVER = """
import sys
import data_pipeline.workers as workers

run_unit = workers.run_unit

def measured(task, encoders, board):
    run_unit(task, encoders, board)
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("unit", task.number, peak.split()[1], flush=True)

workers.run_unit = measured
if __name__ == "__main__":
    from data_pipeline.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def worker_peak(source: Path, engine: str | None) -> tuple[float, str]:
    """Peak of the worker process that reads ``source``, in MB, and the line of the summary that counts the rows.

    Args:
        source: its first bytes make the first unit.
        engine: of GPT-2; None for the tokenizer ``bytes``.
    """
    folder = source.parent
    # A second unit, so that the work is done by processes that do nothing else.
    (folder / "zz.jsonl").write_bytes(b'{"text": "a few words"}\n' * 400)
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(folder / "driver.py"), "prepare", "--source", str(source), str(folder / "zz.jsonl")]
    command += ["--output", str(folder / f"{source.name}.{engine}"), "--workers", "2", "--val-fraction", "0"]
    command += ["--part-tokens", "1000", "--max-quarantined", "1"]
    command += ["--engine", engine] if engine else ["--tokenizer", "bytes"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    peaks = [int(line.split()[2]) / 1_024 for line in lines if line.startswith("unit 0 ")]
    return peaks[0], next(line for line in lines if line.startswith("rows"))


def write_lines(path: Path, documents: Iterable[str]) -> Path:
    """JSON lines, without escapes."""
    with open(path, "w", encoding="utf-8") as file:
        # A first document that makes the file long enough for a unit.
        file.writelines(
            json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ["words " * 1_000, *documents]
        )
    return path


def write_one_line(path: Path, size: int) -> Path:
    """A gzip file with one line of about ``size`` bytes; small on the disk."""
    block = b"one line and no end of it, " * 40_000
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "words"}\n{"text": "')
        for _ in range(size // len(block)):
            file.write(block)
        file.write(b'"}\n')
    return path


def largest_words(path: Path) -> Path:
    """One document of words just below the limit."""
    words = "some words, 12 and a naïve café\n"
    return write_lines(path, [words * ((MAX_DOCUMENT_BYTES - 1) // len(words.encode()))])


def largest_wide_words(path: Path) -> Path:
    """The same with characters beyond the 16-bit range, of which Python holds each in four bytes."""
    words = "some words, 12 and an \U0001f600\n"
    return write_lines(path, [words * ((MAX_DOCUMENT_BYTES - 1) // len(words.encode()))])


def largest_word(path: Path) -> Path:
    """One word just below the limit."""
    return write_lines(path, ["\U0001f600" * ((MAX_DOCUMENT_BYTES - 1) // 4)])


def row_group(path: Path, values: int, value_bytes: int) -> Path:
    """A parquet file with one row group of ``values`` different large values."""
    texts = [f"{number} words " + "a café " * (value_bytes // 8) for number in range(values)]
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path, row_group_size=values)
    return path


def empty_documents(path: Path) -> Path:
    """100,000 empty documents."""
    return write_lines(path, [""] * 100_000)


def long_runs(path: Path) -> Path:
    """Documents that are a million equal characters between two others, and one of nothing else."""
    return write_lines(
        path, [*(f"x{character * RUN_LENGTH}x" for character in RUNS), "a" * RUN_LENGTH, " " * RUN_LENGTH]
    )


CASES: dict[str, tuple[Callable[[Path], Path], str | None, int, str]] = {
    "a line of 2 GB": (
        lambda folder: write_one_line(folder / "line.jsonl.gz", 2_000_000_000),
        None,
        SMALL_MB,
        "402 of 2 files = 401 documents + 0 null + 0 empty + 1 quarantined",
    ),
    "100,000 empty documents": (
        lambda folder: empty_documents(folder / "empty.jsonl"),
        None,
        SMALL_MB,
        "100,401 of 2 files = 401 documents + 0 null + 100,000 empty + 0 quarantined",
    ),
    "a document of 16 MiB, bytes": (
        lambda folder: largest_wide_words(folder / "largest.jsonl"),
        None,
        LARGEST_MB,
        "402 of 2 files = 402 documents + 0 null + 0 empty + 0 quarantined",
    ),
    "runs of 1,000,000 characters, gigatoken": (
        lambda folder: long_runs(folder / "runs.jsonl"),
        "gigatoken",
        SMALL_MB,
        "410 of 2 files = 409 documents + 0 null + 1 empty + 0 quarantined",
    ),
}
# Minutes together: for the command.
LARGE_CASES: dict[str, tuple[Callable[[Path], Path], str | None, int, str]] = {
    "runs of 1,000,000 characters, tiktoken": (
        lambda folder: long_runs(folder / "runs.jsonl"),
        "tiktoken",
        SMALL_MB,
        "410 of 2 files = 409 documents + 0 null + 1 empty + 0 quarantined",
    ),
    "runs of 1,000,000 characters, fastokens": (
        lambda folder: long_runs(folder / "runs.jsonl"),
        "fastokens",
        SMALL_MB,
        "410 of 2 files = 409 documents + 0 null + 1 empty + 0 quarantined",
    ),
    **{
        f"a document of 16 MiB, {engine}": (
            lambda folder: largest_words(folder / "largest.jsonl"),
            engine,
            LARGEST_MB,
            "402 of 2 files = 402 documents + 0 null + 0 empty + 0 quarantined",
        )
        for engine in ("gigatoken", "fastokens", "tiktoken")
    },
    "a document of 16 MiB that is one word, gigatoken": (
        lambda folder: largest_word(folder / "word.jsonl"),
        "gigatoken",
        ONE_WORD_MB,
        "402 of 2 files = 402 documents + 0 null + 0 empty + 0 quarantined",
    ),
    "a parquet row group with one value of 16 MB": (
        lambda folder: row_group(folder / "group.parquet", 1, 16_000_000),
        "gigatoken",
        LARGEST_MB,
        "401 of 2 files = 401 documents + 0 null + 0 empty + 0 quarantined",
    ),
    "a parquet row group with one value of 1 GB": (
        lambda folder: row_group(folder / "group.parquet", 1, 1_000_000_000),
        None,
        5_000,
        "401 of 2 files = 400 documents + 0 null + 0 empty + 1 quarantined",
    ),
    "a parquet row group of 256 values of 4 MB": (
        lambda folder: row_group(folder / "group.parquet", 256, 4_000_000),
        None,
        3_000,
        "656 of 2 files = 656 documents + 0 null + 0 empty + 0 quarantined",
    ),
}


def baseline(folder: Path, engine: str | None) -> float:
    """Peak of a worker with small documents, in MB; measured once."""
    if engine not in _baselines:
        _baselines[engine] = worker_peak(write_lines(folder / "small.jsonl", []), engine)[0]
    return _baselines[engine]


_baselines: dict[str | None, float] = {}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_stays_within_its_bound(case: str, tmp_path: Path) -> None:
    write, engine, bound_mb, rows = CASES[case]
    if engine:
        pytest.importorskip(engine)
    peak, counted = worker_peak(write(tmp_path), engine)
    idle = baseline(tmp_path, engine)
    assert counted.split(maxsplit=1)[1] == rows
    assert peak - idle <= bound_mb, f"{peak:.0f} MB, {idle:.0f} MB with small documents"
