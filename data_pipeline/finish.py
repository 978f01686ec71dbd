"""The end of a build: receipts to parts under their final names, and the manifest. Safe to repeat."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipeline.binformat import HEADER_BYTES, read_document_lengths
from data_pipeline.durable import file_sha256, sync_directory, write_synced
from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, SourceRecord
from data_pipeline.parts import PartRecord, PartSeries
from data_pipeline.plan import Plan
from data_pipeline.receipt import QUARANTINE_FILE, RECEIPT_FILE, Receipt
from data_pipeline.split import SmallestHashes, check_splits
from data_pipeline.unit import commit_directory

VAL_DIRECTORY = "val"


def unit_directory(work: Path, number: int) -> Path:
    """Where unit ``number`` of the plan is committed."""
    return work / f"unit-{number:06d}"


def finish(plan: Plan, output: Path, work: Path) -> str:
    """Turn committed units into a data set.

    Training parts keep their bytes and get their number in plan order. Validation documents, few per
    unit, are packed into common parts.

    Args:
        plan: the plan; every unit of it is committed in ``work``.
        output: where the data set goes.
        work: the build's own directory inside ``output``.

    Returns:
        The data set's identity.

    Raises:
        DataError: a split is empty.
    """
    units = [unit_directory(work, number) for number in range(len(plan.units))]
    receipts = [Receipt.read(unit) for unit in units]
    try:
        _check_splits(plan, receipts)
    except DataError:
        shutil.rmtree(work)  # refused as a whole: a build with other options may use the directory
        raise
    val_parts = _pack_validation(plan, units, receipts, work / VAL_DIRECTORY)

    made: list[tuple[Path, PartRecord]] = []
    for unit, receipt in zip(units, receipts, strict=True):
        made += [(unit, part) for part in receipt.parts if part.split == "train"]
    made += [(work / VAL_DIRECTORY, part) for part in val_parts]
    published = _publish(plan.options.name, output, made)

    counts = [counts for receipt in receipts for counts in receipt.counts]
    manifest = Manifest(
        plan_sha256=plan.sha256,
        tokenizer=plan.tokenizer,
        options=plan.options,
        sources=[
            SourceRecord(source.name, source.size_bytes, source.sha256, count)
            for source, count in zip(plan.sources, counts, strict=True)
        ],
        parts=published,
        text_bytes={split: sum(receipt.text_bytes[split] for receipt in receipts) for split in ("train", "val")},
        quarantine_sha256=_publish_quarantine(output, units),
    )
    manifest.accounting.assert_closed()
    return manifest.write(output)


def _check_splits(plan: Plan, receipts: list[Receipt]) -> None:
    documents = {"train": 0, "val": 0}
    for part in (part for receipt in receipts for part in receipt.parts):
        documents[part.split] += part.documents
    nearest = SmallestHashes(pair for receipt in receipts for pair in receipt.smallest_hashes)
    check_splits(documents, plan.options.val_fraction, nearest.sorted())


def _pack_validation(plan: Plan, units: list[Path], receipts: list[Receipt], final: Path) -> list[PartRecord]:
    """Copy the units' validation documents, in plan order, into parts in ``final``."""
    if not final.exists():
        aside = final.with_name(f"{final.name}.{os.getpid()}.tmp")
        aside.mkdir()
        series = PartSeries(aside, "val", plan.part_format)
        for unit, receipt in zip(units, receipts, strict=True):
            for part in receipt.parts:
                if part.split == "val":
                    _copy_documents(unit, part, plan, series)
        packed = Receipt(counts=[], parts=series.close(), text_bytes={}, smallest_hashes=[])
        write_synced(aside / RECEIPT_FILE, packed.to_bytes())
        commit_directory(aside, final)
    return Receipt.read(final).parts


def _copy_documents(unit: Path, part: PartRecord, plan: Plan, series: PartSeries) -> None:
    dtype = plan.part_format.dtype
    with open(unit / part.file, "rb") as file:
        file.seek(HEADER_BYTES)
        for length in read_document_lengths(unit / part.idx_file):
            series.add(np.frombuffer(file.read(int(length) * dtype.itemsize), dtype=dtype))


def _publish(name: str, output: Path, made: list[tuple[Path, PartRecord]]) -> list[PartRecord]:
    """Rename parts to their final names; those that a killed run already renamed are left as they are."""
    numbers = {"train": 0, "val": 0}
    published = []
    for directory, part in made:
        final = replace(part, file=f"{name}_{part.split}_{numbers[part.split]:06d}.bin")
        numbers[part.split] += 1
        for here, there in ((part.file, final.file), (part.idx_file, final.idx_file)):
            if (directory / here).exists():
                os.rename(directory / here, output / there)
        published.append(final)
    sync_directory(output)
    return published


def _publish_quarantine(output: Path, units: list[Path]) -> str | None:
    """Join the units' lists of quarantined rows; returns the SHA-256, None where there are none."""
    lists = [unit / QUARANTINE_FILE for unit in units]
    if not any(path.stat().st_size for path in lists):
        return None
    aside = output / f"{QUARANTINE_FILE}.tmp"
    with open(aside, "wb") as joined:
        for path in lists:
            with open(path, "rb") as file:
                shutil.copyfileobj(file, joined)
        joined.flush()
        os.fsync(joined.fileno())
    os.replace(aside, output / QUARANTINE_FILE)
    return file_sha256(output / QUARANTINE_FILE)
