"""The end of a build: receipts to parts under their final names, and the manifest. Safe to repeat."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.binformat import HEADER_BYTES, read_document_lengths
from data_pipeline.durable import file_sha256, sync_directory, write_synced
from data_pipeline.errors import DataError
from data_pipeline.manifest import RECEIPTS_FILE, Manifest, SourceRecord
from data_pipeline.parts import PartRecord, PartSeries
from data_pipeline.plan import Plan
from data_pipeline.receipt import (
    PROVENANCE_FILE,
    QUARANTINE_FILE,
    RECEIPT_FILE,
    ROWS_FILE,
    Receipt,
    RowCounts,
)
from data_pipeline.split import SmallestHashes, check_splits, nanogpt_rows
from data_pipeline.unit import commit_directory

_GATHER_TOKENS = 4 << 20


def unit_directory(work: Path, number: int) -> Path:
    """Where unit ``number`` of the plan is committed."""
    return work / f"unit-{number:06d}"


def finish(plan: Plan, output: Path, work: Path, max_quarantined: float) -> str:
    """Turn committed units into a data set.

    Training parts keep their bytes and get their number in plan order. Validation documents, few per unit, are
    packed into common parts; the splits by place (``llmc``, ``nanogpt``) are made here.

    Args:
        plan: the plan; every unit of it is committed in ``work``.
        output: where the data set goes.
        work: the build's own directory inside ``output``.
        max_quarantined: share of rows that may be quarantined.

    Returns:
        The data set's identity.

    Raises:
        DataError: a split is empty, or too many rows were quarantined.
    """
    units = [unit_directory(work, number) for number in range(len(plan.units))]
    receipts = [Receipt.read(unit) for unit in units]
    counts = _count_rows(plan, receipts)
    _check_quarantine(sum(counts, RowCounts()), max_quarantined, units)
    grouping = _GROUPINGS[plan.options.val_split](plan, work, units, receipts)

    published = _publish(plan.options.name, output, grouping.parts)
    manifest = Manifest(
        plan_sha256=plan.sha256,
        tokenizer=plan.tokenizer,
        options=plan.options,
        sources=[
            SourceRecord(source.name, source.size_bytes, source.sha256, count)
            for source, count in zip(plan.sources, counts, strict=True)
        ],
        parts=published,
        text_bytes=grouping.text_bytes,
        quarantine_sha256=_join([unit / QUARANTINE_FILE for unit in units], output / QUARANTINE_FILE),
        receipts_sha256=_publish_receipts(plan, receipts, output),
    )
    _join([unit / PROVENANCE_FILE for unit in units], output / PROVENANCE_FILE)
    _assert_closed(manifest)
    return manifest.write(output)


def _count_rows(plan: Plan, receipts: list[Receipt]) -> list[RowCounts]:
    """Where the rows of each source went."""
    counts = [RowCounts() for _ in plan.sources]
    for unit, receipt in zip(plan.units, receipts, strict=True):
        for piece, count in zip(unit, receipt.counts, strict=True):
            counts[piece.source] += count
    return counts


def _check_quarantine(total: RowCounts, max_quarantined: float, units: list[Path]) -> None:
    if total.quarantined <= max_quarantined * total.rows:
        return
    lists = (unit / QUARANTINE_FILE for unit in units)
    first = next(path for path in lists if path.stat().st_size)
    with open(first, encoding="utf-8") as file:
        example = json.loads(file.readline())
    share = total.quarantined / total.rows
    raise DataError(
        f"{total.quarantined:,} of {total.rows:,} rows ({share:.2%}) are quarantined, more than --max-quarantined "
        f"{max_quarantined:g} allows; the first: {example['source']}, row {example['row']}: {example['reason']}; "
        f"lists: {first.parent.parent}/unit-*/{QUARANTINE_FILE}. Mend the source, or accept them: the same command "
        f"with --max-quarantined {-(-share * 100 // 1) / 100:g} ends at once, nothing is encoded again"
    )


def _assert_closed(manifest: Manifest) -> None:
    """Rows, bytes and documents in are those out; anything else is a defect of this package."""
    total = manifest.accounting
    total.assert_closed()
    assert total.documents == sum(part.documents for part in manifest.parts), total
    assert total.bytes_documents == sum(manifest.text_bytes.values()), total


@dataclass
class _Grouping:
    """The parts of a data set in their final order, with the directory of each, and the text of each split."""

    parts: list[tuple[Path, PartRecord]]
    text_bytes: dict[str, int]


@dataclass
class _Documents:
    """Where documents are stored: one array entry each.

    Attributes:
        files: the parts' files.
        file: position in ``files``.
        offset: bytes from the start of the file.
        length: tokens.
        row: row that it came from, counted over all sources.
        text_bytes: UTF-8 bytes of its text.
    """

    files: list[Path]
    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    row: NDArray[np.int64]
    text_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, units: list[Path], receipts: list[Receipt], itemsize: int) -> "_Documents":
        """The documents of these units, in plan order; their rows count from the first unit's."""
        files: list[Path] = []
        columns: list[list[NDArray[np.int64]]] = [[], [], [], [], []]
        rows_before = 0
        for unit, receipt in zip(units, receipts, strict=True):
            for part in receipt.parts:
                lengths = read_document_lengths(unit / part.idx_file).astype(np.int64)
                columns[0].append(np.full(len(lengths), len(files)))
                columns[1].append(HEADER_BYTES + (np.cumsum(lengths) - lengths) * itemsize)
                columns[2].append(lengths)
                files.append(unit / part.file)
            origin = np.fromfile(unit / ROWS_FILE, dtype="<i8").reshape(-1, 2)
            columns[3].append(origin[:, 0] + rows_before)
            columns[4].append(origin[:, 1])
            rows_before += sum(count.rows for count in receipt.counts)
        return cls(files, *(np.concatenate([np.empty(0, np.int64), *column]) for column in columns))

    def write(self, chosen: NDArray[np.int64], series: PartSeries, dtype: np.dtype[np.generic]) -> None:
        """Append the chosen documents, in that order, to ``series``."""
        descriptors: dict[int, int] = {}
        try:
            for batch in np.array_split(chosen, max(1, int(self.length[chosen].sum()) // _GATHER_TOKENS)):
                pieces = []
                for file, offset, length in zip(self.file[batch], self.offset[batch], self.length[batch], strict=True):
                    if file not in descriptors:
                        descriptors[file] = os.open(self.files[file], os.O_RDONLY)
                    size = int(length) * dtype.itemsize
                    pieces.append(os.pread(descriptors[file], size, int(offset)))
                    assert len(pieces[-1]) == size, self.files[file]
                series.add(np.frombuffer(b"".join(pieces), dtype=dtype), self.length[batch])
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def _by_content(plan: Plan, work: Path, units: list[Path], receipts: list[Receipt]) -> _Grouping:
    """The workers have split; the validation documents of all units go into common parts."""
    documents = {"train": 0, "val": 0}
    for part in (part for receipt in receipts for part in receipt.parts):
        documents[part.split] += part.documents
    nearest = SmallestHashes(pair for receipt in receipts for pair in receipt.smallest_hashes)
    _or_give_up(work, lambda: check_splits(documents, plan.options.val_fraction, nearest.sorted()))

    def pack(series: PartSeries) -> None:
        dtype = plan.part_format.dtype
        for unit, receipt in zip(units, receipts, strict=True):
            for part in (part for part in receipt.parts if part.split == "val"):
                lengths = read_document_lengths(unit / part.idx_file).astype(np.int64)
                series.add(np.fromfile(unit / part.file, dtype=dtype, offset=HEADER_BYTES), lengths)

    val = _regroup(plan, work, "val", pack)
    return _Grouping(
        _parts_of_units(units, receipts) + val,
        {split: sum(receipt.text_bytes[split] for receipt in receipts) for split in ("train", "val")},
    )


def _by_llmc(plan: Plan, work: Path, units: list[Path], receipts: list[Receipt]) -> _Grouping:
    """The whole documents within the first ``val_tokens`` tokens are validation."""
    ends = np.cumsum([sum(part.tokens for part in receipt.parts) for receipt in receipts])
    wanted = plan.options.val_tokens
    if ends[-1] <= wanted:
        _give_up(
            work,
            f"the training split is empty: all {ends[-1]:,} tokens lie in the first --val-tokens {wanted:,}; "
            f"--val-tokens {max(1, int(ends[-1]) // 10):,} would leave nine tenths to train on",
        )
    cut = int(np.searchsorted(ends, wanted, side="right"))  # the unit that holds the last token and more
    documents = _Documents.of(units[: cut + 1], receipts[: cut + 1], plan.part_format.dtype.itemsize)
    num_val = int(np.searchsorted(np.cumsum(documents.length), wanted, side="right"))
    if num_val == 0:
        _give_up(
            work,
            f"the validation split is empty: the first document alone has {documents.length[0]:,} tokens, more than "
            f"--val-tokens {wanted:,}; --val-tokens {documents.length[0]:,} would do",
        )
    if num_val == len(documents.length) and cut + 1 == len(units):
        _give_up(work, "the training split is empty; a smaller --val-tokens would do")
    places = np.arange(len(documents.length))
    dtype = plan.part_format.dtype
    val = _regroup(plan, work, "val", lambda series: documents.write(places[:num_val], series, dtype))
    rest = _regroup(plan, work, "train", lambda series: documents.write(places[num_val:], series, dtype))
    total = sum(sum(receipt.text_bytes.values()) for receipt in receipts)
    val_bytes = int(documents.text_bytes[:num_val].sum())
    return _Grouping(
        rest + _parts_of_units(units[cut + 1 :], receipts[cut + 1 :]) + val,
        {"train": total - val_bytes, "val": val_bytes},
    )


def _by_nanogpt(plan: Plan, work: Path, units: list[Path], receipts: list[Receipt]) -> _Grouping:
    """Rows chosen and ordered by a permutation; rows that are no documents leave no gap."""
    documents = _Documents.of(units, receipts, plan.part_format.dtype.itemsize)
    num_rows = sum(count.rows for receipt in receipts for count in receipt.counts)
    if plan.cuts_single_text:
        chosen = {"train": np.array([0]), "val": np.array([1])}
    else:
        chosen = dict(zip(("train", "val"), nanogpt_rows(num_rows, plan.options.val_fraction), strict=True))
    place_of_row = np.full(num_rows, -1)
    place_of_row[documents.row] = np.arange(len(documents.row))
    places = {split: place_of_row[rows][place_of_row[rows] >= 0] for split, rows in chosen.items()}
    for split, each in places.items():
        if not each.size and (split == "train" or plan.options.val_fraction > 0):
            _give_up(
                work,
                f"the {split} split is empty: --val-split nanogpt took {len(chosen['val']):,} of {num_rows:,} rows for "
                "validation; another --val-fraction or --val-split content would do",
            )
    dtype = plan.part_format.dtype
    parts = []
    for split in ("train", "val"):
        here = places[split]
        parts += _regroup(plan, work, split, lambda series, here=here: documents.write(here, series, dtype))  # type: ignore[misc]
    return _Grouping(parts, {split: int(documents.text_bytes[here].sum()) for split, here in places.items()})


_GROUPINGS: dict[str, Callable[[Plan, Path, list[Path], list[Receipt]], _Grouping]] = {
    "content": _by_content,
    "llmc": _by_llmc,
    "nanogpt": _by_nanogpt,
}


def _parts_of_units(units: list[Path], receipts: list[Receipt]) -> list[tuple[Path, PartRecord]]:
    """The training parts as the workers have written them."""
    pairs = zip(units, receipts, strict=True)
    return [(unit, part) for unit, receipt in pairs for part in receipt.parts if part.split == "train"]


def _regroup(plan: Plan, work: Path, split: str, write: Callable[[PartSeries], None]) -> list[tuple[Path, PartRecord]]:
    """Write documents into new parts, unless an earlier run has committed them."""
    final = work / split
    if not final.exists():
        aside = final.with_name(f"{final.name}.{os.getpid()}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        series = PartSeries(aside, split, plan.part_format)
        write(series)
        packed = Receipt(counts=[], parts=series.close(), text_bytes={}, smallest_hashes=[])
        write_synced(aside / RECEIPT_FILE, packed.to_bytes())
        commit_directory(aside, final)
    return [(final, part) for part in Receipt.read(final).parts]


def _or_give_up(work: Path, check: Callable[[], None]) -> None:
    try:
        check()
    except DataError as error:
        _give_up(work, str(error))


def _give_up(work: Path, why: str) -> None:
    """Refuse the build as a whole: one with other options may use the directory."""
    shutil.rmtree(work)
    raise DataError(why)


def _publish(name: str, output: Path, made: list[tuple[Path, PartRecord]]) -> list[PartRecord]:
    """Rename parts to their final names; those that a killed run already renamed are left as they are."""
    numbers = {"train": 0, "val": 0}
    published = []
    for directory, part in made:
        final = replace(part, file=f"{name}_{part.split}_{numbers[part.split]:06d}.bin")
        numbers[part.split] += 1
        names = (part.file, part.idx_file, part.sums_file), (final.file, final.idx_file, final.sums_file)
        for here, there in zip(*names, strict=True):
            if (directory / here).exists():
                os.rename(directory / here, output / there)
        published.append(final)
    sync_directory(output)
    return published


def _publish_receipts(plan: Plan, receipts: list[Receipt], output: Path) -> str:
    """One line per unit: what it read and what it made; returns the SHA-256."""

    def line(number: int, receipt: Receipt) -> bytes:
        value = {**asdict(receipt), "unit": number, "slices": plan.units[number]}
        del value["smallest_hashes"]
        return json.dumps(value, sort_keys=True).encode() + b"\n"

    return _write_lines(output / RECEIPTS_FILE, (line(number, receipt) for number, receipt in enumerate(receipts)))


def _join(lists: list[Path], target: Path) -> str | None:
    """Join files of lines; returns the SHA-256, None and no file where all are empty."""
    if not any(path.stat().st_size for path in lists):
        return None
    return _write_lines(target, (path.read_bytes() for path in lists))


def _write_lines(target: Path, pieces: Iterable[bytes]) -> str:
    aside = target.with_name(f"{target.name}.tmp")
    with open(aside, "wb") as joined:
        joined.writelines(pieces)
        joined.flush()
        os.fsync(joined.fileno())
    os.replace(aside, target)
    return file_sha256(target)
