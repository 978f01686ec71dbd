"""A run folder read back: its configuration and its log as columns of numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mars_ds.telemetry.jsonl import read_jsonl

LOG_NAME = "log.jsonl"
CONFIG_NAME = "config.yaml"

_TRAIN_FIELDS = ("step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "memory_bytes")
_OPTIMIZER = "optimizer/"
_EVALUATION_FIELDS = ("step", "tokens", "loss", "bits_per_byte")


@dataclass(frozen=True)
class RunLog:
    """One run.

    Args:
        directory: The run folder.
        config: `config.yaml` as nested dictionaries; empty when the folder has none.
        train: Columns of the training lines, fp64, all of one length; NaN where a line lacks the field.
        evaluation: Columns of the evaluation lines, likewise; possibly of length 0.
        optimizer: Columns of `optimizer/...` fields that any training line has, by the rest of their names.
        start: The first `start` line; empty when there is none.
        end: The last `end` line; empty while a run goes on or after it was killed.
    """

    directory: Path
    config: Mapping[str, Any]
    train: Mapping[str, np.ndarray]
    evaluation: Mapping[str, np.ndarray]
    start: Mapping[str, Any]
    end: Mapping[str, Any]
    optimizer: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`run.name` of the configuration, or else the folder's name."""
        return str(self.setting("run.name") or self.directory.resolve().name)

    def setting(self, key: str) -> Any:
        """Value of a dotted key of the configuration, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the model, when the start line tells."""
        count = self.start.get("num_parameters", self.start.get("parameters"))
        return int(count) if isinstance(count, (int, float)) else None

    @property
    def training_seconds(self) -> float | None:
        """Time in training steps over all restarts, from tokens and throughput; None without throughput."""
        hours = self.hours(self.train["tokens"])
        return float(hours[-1]) * 3600.0 if hours is not None else None

    def hours(self, tokens: np.ndarray) -> np.ndarray | None:
        """Hours in training steps until so many tokens were consumed, over all restarts; None without throughput."""
        seen, rates = self.train["tokens"], self.train["tokens_per_second"]
        known = np.isfinite(rates) & (rates > 0) & np.isfinite(seen)
        if not known.any():
            return None
        since_last = np.diff(seen, prepend=0.0)
        seconds = np.where(known, since_last / np.where(known, rates, 1.0), 0.0).cumsum()
        return np.asarray(np.interp(tokens, np.concatenate([[0.0], seen]), np.concatenate([[0.0], seconds])) / 3600.0)


def load_run(run_dir: str | os.PathLike[str]) -> RunLog:
    """Reads `log.jsonl` and, when it is there, `config.yaml`.

    Raises:
        ValueError: No log, a log without training lines, or files that do not parse.
    """
    directory = Path(run_dir)
    path = directory / LOG_NAME
    if not path.is_file():
        raise ValueError(f"{directory} is not a run folder: it has no {LOG_NAME}")
    records = read_jsonl(path)
    train = [record for record in records if record.get("kind") == "train"]
    if not train:
        raise ValueError(f'{path} has no training step yet: none of its {len(records)} lines is of kind "train"')
    columns = _columns(train, _TRAIN_FIELDS, path)
    for name in ("step", "tokens"):
        if not np.isfinite(columns[name]).all():
            raise ValueError(f"{path}: a training line has no {name!r}, which places it on the axis")
    starts_and_ends = [record for record in records if record.get("kind") in ("start", "end")]
    starts = [record for record in starts_and_ends if record["kind"] == "start"]
    # An end that a later start follows is that of an earlier leg of the run.
    last = starts_and_ends[-1] if starts_and_ends else {}
    return RunLog(
        directory=directory,
        config=_read_config(directory / CONFIG_NAME),
        train=columns,
        evaluation=_columns([each for each in records if each.get("kind") == "eval"], _EVALUATION_FIELDS, path),
        start=starts[0] if starts else {},
        end=last if last.get("kind") == "end" else {},
        optimizer={
            name.removeprefix(_OPTIMIZER): column
            for name, column in _columns(train, sorted(_optimizer_fields(train)), path).items()
        },
    )


def _optimizer_fields(train: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for record in train for name in record if name.startswith(_OPTIMIZER)}


def _columns(records: Sequence[Mapping[str, Any]], fields: Sequence[str], path: Path) -> dict[str, np.ndarray]:
    columns = {}
    for name in fields:
        try:
            values = [float("nan") if each.get(name) is None else float(each[name]) for each in records]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: field {name!r} is not a number in every line: {error}") from error
        columns[name] = np.array(values, dtype=np.float64)
    return columns


def _read_config(path: Path) -> Mapping[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return content if isinstance(content, Mapping) else {}
