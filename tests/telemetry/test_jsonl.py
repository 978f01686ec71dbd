"""The log survives kills: torn lines, lost steps, numbers that JSON does not have."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mars_ds.telemetry.jsonl import JsonlLog, read_jsonl


def _log(path: Path, steps: range) -> None:
    with JsonlLog(path) as log:
        for step in steps:
            log.write({"kind": "train", "step": step, "loss": 10.0 - step})


def test_each_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    log = JsonlLog(path)
    log.write({"kind": "start", "name": "größer"})
    assert path.read_bytes() == '{"kind": "start", "name": "größer"}\n'.encode()
    log.write(
        {
            "step": 1,
            "loss": torch.tensor(0.5),
            "lr": np.float32(0.25),
            "path": Path("a"),
            "betas": (0.9, 0.95),
        }
    )
    assert read_jsonl(path)[1] == {"step": 1, "loss": 0.5, "lr": 0.25, "path": "a", "betas": [0.9, 0.95]}
    log.close()


def test_values_without_a_json_form_are_strings_that_float_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.write({"loss": math.nan, "norms": [math.inf, torch.tensor(-math.inf)]})
    assert path.read_text() == '{"loss": "nan", "norms": ["inf", "-inf"]}\n'
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(record["loss"])) and float(record["norms"][1]) == -math.inf


def test_what_is_not_json_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log, pytest.raises(TypeError, match="cannot write object"):
        log.write({"step": 1, "thing": object()})
    assert path.read_bytes() == b""


def test_resume_moves_later_steps_aside_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.write({"kind": "start"})
    _log(path, range(1, 6))
    before = path.read_bytes().splitlines(keepends=True)
    with JsonlLog(path) as log:
        assert log.resume(3) == 2
        log.write({"kind": "train", "step": 4, "loss": 0.0})
    assert path.read_bytes().splitlines(keepends=True)[:-1] == before[:4]
    assert [record.get("step") for record in read_jsonl(path)] == [None, 1, 2, 3, 4]
    assert (tmp_path / "log.discarded-1.jsonl").read_bytes() == b"".join(before[4:])
    with JsonlLog(path) as log:
        assert log.resume(2) == 2
        assert log.resume(2) == 0
    assert [record["step"] for record in read_jsonl(tmp_path / "log.discarded-2.jsonl")] == [3, 4]
    assert sorted(os.listdir(tmp_path)) == ["log.discarded-1.jsonl", "log.discarded-2.jsonl", "log.jsonl"]


def test_a_kill_during_resume_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    _log(path, range(1, 6))
    before = path.read_bytes()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    log = JsonlLog(path)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.resume(3)
    assert path.read_bytes() == before
    assert len(read_jsonl(tmp_path / "log.discarded-1.jsonl")) == 2


def test_a_torn_last_line_is_ignored_then_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _log(path, range(1, 3))
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st')
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    _log(path, range(3, 4))
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]
    assert (tmp_path / "log.discarded-1.jsonl").read_bytes() == b'{"kind": "train", "st\n'


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}')
    assert read_jsonl(path) == [{"step": 1}]
    _log(path, range(2, 3))
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2: not a JSON object"):
        read_jsonl(path)
