"""``order``: which tokens any step of a run reads, past or future, without running anything."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from data_pipeline.binformat import read_document_lengths
from data_pipeline.errors import DataError
from data_pipeline.inspection import tokenizer_of
from data_pipeline.manifest import read_manifest
from data_pipeline.reader import TokenWindows, open_dataset
from data_pipeline.sampling import Place, make_sampling
from data_pipeline.tokenizer import Tokenizer

RUN_CONFIG_FILE = "config.yaml"
CHECKPOINT_INDICES = "checkpoints/step_*/index.json"
_SHOWN_CHARACTERS = 60
_DECODED_TOKENS = 64


@dataclass(frozen=True)
class RunOrder:
    """What determines the order of a run's samples.

    Attributes:
        path: directory of the data set.
        sequence_length: inputs per window.
        seed: seed of the run.
        global_batch: samples of one step.
        sampling: one of `data_pipeline.sampling.SAMPLINGS`.
        epoch_offset: whether each epoch is shifted.
        micro_batch: samples that share a part with sampling ``random_part``.
        split: ``train`` or ``val``.
    """

    path: Path
    sequence_length: int
    seed: int
    global_batch: int
    sampling: str = "permutation"
    epoch_offset: bool = False
    micro_batch: int | None = None
    split: str = "train"


def order_of_run(run_folder: str | Path) -> RunOrder:
    """Read the order from the ``config.yaml`` that a run leaves in its folder.

    A run that went on with another micro-batch keeps the group of sampling ``random_part`` that its checkpoints name.

    Raises:
        DataError: there is no such file, or it lacks a key.
    """
    file = Path(run_folder) / RUN_CONFIG_FILE
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file}: missing; --run expects the folder of a run, e.g. runs/NAME") from None
    except yaml.YAMLError as error:
        raise DataError(f"{file}: not YAML ({error})") from error
    try:
        data, batch = config["data"], config["batch"]
        sequence_length = int(config["model"]["sequence_length"])
        global_batch = batch.get("global_batch_sequences") or batch["global_batch_tokens"] // sequence_length
        return RunOrder(
            path=Path(data["path"]),
            sequence_length=sequence_length,
            seed=int(config["run"]["seed"]),
            global_batch=int(global_batch),
            sampling=data.get("sampling", "permutation"),
            epoch_offset=data.get("epoch_offset", False),
            micro_batch=_sampling_group(Path(run_folder)) or batch.get("micro_batch"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: not the config of a run: {error!r}; expected run, model, data and batch") from error


def _sampling_group(run_folder: Path) -> int | None:
    """The group that the newest checkpoint names."""
    for file in sorted(run_folder.glob(CHECKPOINT_INDICES), reverse=True):
        try:
            group = json.loads(file.read_bytes())["data"]["sampling group"]
        except (OSError, ValueError, KeyError):
            continue
        return int(group) if group is not None else None
    return None


def run_order(options: dict[str, Any], run_folder: str | Path | None = None) -> RunOrder:
    """The order that options of the command line mean, laid over that of a run folder where one is given.

    Args:
        options: fields of `RunOrder`; None where the command line does not say.
        run_folder: see `order_of_run`.

    Raises:
        DataError: a field is neither given nor known from a run.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if "path" in given:
        given["path"] = Path(given["path"])
    if run_folder is not None:
        return replace(order_of_run(run_folder), **given)
    missing = [key for key in ("path", "sequence_length", "seed", "global_batch") if key not in given]
    if missing:
        names = ", ".join("DIR" if key == "path" else "--" + key.replace("_", "-") for key in missing)
        raise DataError(f"missing: {names}; give them, or --run FOLDER of a run")
    return RunOrder(**given)


def order_lines(
    order: RunOrder, step: int, samples: int | None = 8, decode: bool = False, tokenizer: str | None = None
) -> Iterator[str]:
    """A line per sample of one step: its index, epoch, window, part, token offset and document.

    Args:
        order: what determines it.
        step: counts from 1 as in a run's log: step 1 reads samples 0 to ``global_batch - 1``.
        samples: the first so many; None for all.
        decode: add the first characters of each sample.
        tokenizer: see `load_tokenizer`; by default the one that the data set names.

    Raises:
        DataError: a number is out of range, or the data set cannot be read.
    """
    if step < 1:
        raise DataError(f"--step {step}: steps count from 1, as in a run's log")
    if order.global_batch < 1:
        raise DataError(f"--global-batch {order.global_batch}: expected 1 or more")
    if samples is not None and samples < 1:
        raise DataError(f"--samples {samples}: expected 1 or more")
    windows = open_dataset(order.path, order.split, order.sequence_length)
    sampling = make_sampling(
        order.sampling,
        windows.part_tokens,
        order.sequence_length,
        order.seed,
        epoch_offset=order.epoch_offset,
        group_size=order.micro_batch,
    )
    loaded = tokenizer_of(windows, tokenizer) if decode else None
    documents = _Documents(windows)
    first = (step - 1) * order.global_batch
    count = order.global_batch if samples is None else min(samples, order.global_batch)
    yield (
        f"step {step:,}: samples {first:,} to {first + order.global_batch - 1:,}, {order.sampling} of "
        f"{sampling.epoch_samples:,} samples an epoch, data set {windows.manifest_sha256}"
    )
    yield f"{'sample':>12} {'epoch':>5} {'window':>12} {'token offset':>13}  {'part':<28} {'document':>12}"
    for index in range(first, first + count):
        yield _line(index, sampling.locate(index), windows, documents, loaded)


def _line(index: int, place: Place, windows: TokenWindows, documents: "_Documents", tokenizer: Tokenizer | None) -> str:
    part = int(windows.layout.parts_at(np.array([place.position]))[0])
    offset = place.position - int(windows.layout.starts[part])
    window = "-" if place.window is None else f"{place.window:,}"
    line = (
        f"{index:>12,} {place.epoch:>5} {window:>12} {offset:>13,}  {windows.part_files[part]:<28} "
        f"{documents.at(part, offset):>12}"
    )
    if tokenizer is not None:
        tokens = windows.read_at([place.position])[0, :_DECODED_TOKENS]
        line += f"  {tokenizer.decode(tokens)[:_SHOWN_CHARACTERS]!r}"
    return line


class _Documents:
    """The number, in the split, of the document that holds a token; from the ``.idx`` files, one held at a time."""

    def __init__(self, windows: TokenWindows) -> None:
        self._windows = windows
        self._counts: list[int] | None = None
        if windows.num_documents is not None:
            manifest, _ = read_manifest(windows.path)
            self._counts = [part.documents for part in manifest.parts_of(windows.split)]
        self._loaded = -1
        self._ends: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, part: int, offset: int) -> str:
        """``-`` for a data set without an index."""
        if self._counts is None:
            return "-"
        if part != self._loaded:
            file = self._windows.path / self._windows.part_files[part]
            self._ends = np.cumsum(read_document_lengths(file.with_suffix(".idx")), dtype=np.int64)
            self._loaded = part
        return f"{sum(self._counts[:part]) + int(np.searchsorted(self._ends, offset, side='right')):,}"
