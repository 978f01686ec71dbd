"""``inspect``: what is in a data set, for a person to read."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipeline.binformat import read_document_lengths
from data_pipeline.errors import DataError
from data_pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest
from data_pipeline.reader import TokenWindows, open_dataset
from data_pipeline.receipt import QUARANTINE_FILE
from data_pipeline.tokenizer import Tokenizer, load_tokenizer

_BAR_CHARACTERS = 40


def inspect_dataset(
    path: str | Path, split: str, window: int, sequence_length: int, tokenizer: str | None = None
) -> Iterator[str]:
    """Lines about a data set: counts, quarantined rows by reason, document lengths, and one decoded window.

    Args:
        path: directory of the data set.
        split: split of the lengths and the window.
        window: number of the window.
        sequence_length: its length in tokens, less one.
        tokenizer: see `load_tokenizer`; by default the one that the manifest names.

    Raises:
        DataError: the data set is damaged, the split or window does not exist, or the tokenizer is another.
    """
    path = Path(path)
    manifest, identity = read_manifest(path)
    windows = open_dataset(path, split, sequence_length)
    if not 0 <= window < windows.num_windows:
        raise DataError(f"--window {window}: the {split} split has windows 0 to {windows.num_windows - 1:,}")
    yield f"identity   {identity}"
    yield from summary(manifest)
    yield from _quarantined(manifest, path)
    yield ""
    yield f"document lengths in tokens, {split}:"
    yield from _histogram(manifest, path, split)
    yield ""
    yield f"window {window:,} of {windows.num_windows:,} in {split}, {sequence_length + 1} tokens:"
    yield tokenizer_of(windows, tokenizer).decode(windows.read([window])[0])


def tokenizer_of(windows: TokenWindows, spec: str | None = None) -> Tokenizer:
    """The tokenizer that a data set was made with.

    Args:
        windows: of the data set.
        spec: see `load_tokenizer`; by default the one that the data set names.

    Raises:
        DataError: it cannot be loaded, or its vocabulary is another one.
    """
    tokenizer = load_tokenizer(spec or windows.tokenizer_name)
    if (windows.path / MANIFEST_FILE).exists():
        expected = read_manifest(windows.path)[0].tokenizer.vocabulary_sha256
        if tokenizer.vocabulary_sha256 != expected:
            raise DataError(f"{windows.path}: was made with vocabulary {expected}; name it with --tokenizer")
    return tokenizer


def summary(manifest: Manifest) -> Iterator[str]:
    """Lines about sources, rows and splits."""
    identity = manifest.tokenizer
    yield f"tokenizer  {identity.name}, {identity.vocab_size:,} ids, end-of-text {identity.eot_id}"
    rows = manifest.accounting
    yield (
        f"rows       {rows.rows:,} of {len(manifest.sources)} files = {rows.documents:,} documents + "
        f"{rows.null:,} null + {rows.empty:,} empty + {rows.quarantined:,} quarantined"
    )
    for split in ("train", "val"):
        parts = manifest.parts_of(split)
        tokens = sum(part.tokens for part in parts)
        documents = sum(part.documents for part in parts)
        text = manifest.text_bytes[split]
        yield (
            f"{split:<10} {documents:,} documents, {tokens:,} tokens, {len(parts):,} parts, "
            f"{text / 1e6:,.1f} MB of text, {text / max(tokens - documents, 1):.2f} bytes per token"
        )


def _quarantined(manifest: Manifest, path: Path) -> Iterator[str]:
    """A line for each reason: how many rows, and the first of them."""
    if manifest.quarantine_sha256 is None:
        return
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    file = path / QUARANTINE_FILE
    try:
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                counts[entry["reason"]] += 1
                first.setdefault(entry["reason"], f"{entry['source']} row {entry['row']}")
    except FileNotFoundError:
        raise DataError(f"{file}: missing; copy the data set anew") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a list of quarantined rows ({error!r}); copy the data set anew") from error
    for reason, count in counts.most_common():
        yield f"{'':<10} {count:,} quarantined: {reason}, first {first[reason]}"


def _histogram(manifest: Manifest, path: Path, split: str) -> Iterator[str]:
    counts: Counter[int] = Counter()
    documents = tokens = shortest = longest = 0
    for part in manifest.parts_of(split):
        lengths = read_document_lengths(path / part.idx_file)
        if not lengths.size:
            continue
        counts.update((np.frexp(lengths)[1] - 1).tolist())
        shortest = min(shortest or int(lengths.min()), int(lengths.min()))
        longest = max(longest, int(lengths.max()))
        documents, tokens = documents + len(lengths), tokens + int(lengths.sum())
    yield f"shortest {shortest:,}, mean {tokens / max(documents, 1):,.1f}, longest {longest:,}, end-of-text included"
    most = max(counts.values(), default=1)
    for power in range(min(counts, default=0), max(counts, default=-1) + 1):
        bar = "#" * -(-_BAR_CHARACTERS * counts[power] // most)
        yield f"{2**power:>11,} to {2 ** (power + 1) - 1:>11,} {counts[power]:>12,} {bar}"
