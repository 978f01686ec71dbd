"""The log of a run: one JSON object a line, appended, flushed, rewritten only to take back lost steps.

Strict JSON has no NaN or infinity. They are written as the strings "nan", "inf" and "-inf": valid in every
parser, and `float(value)` reads numbers and these strings alike.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO


class JsonlLog:
    """An append-only log file.

    Opening an existing log keeps its lines. A last line that a kill tore apart is moved to the discarded
    file, so that the next record starts on a line of its own.

    Args:
        path: The file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._repair()
        self._file: BinaryIO = self.path.open("ab")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record and hands it to the operating system before returning.

        Args:
            record: JSON values; 0-dim tensors and numpy scalars are taken as numbers.

        Raises:
            TypeError: A value that is none of these.
            ValueError: The log is closed.
        """
        # One write call for the whole line: a kill between two would leave half a record.
        self._file.write(_line(record))
        self._file.flush()

    def resume(self, step: int) -> int:
        """Takes back what was logged after a checkpoint, because it will be logged again.

        Lines whose `step` is greater than `step` leave the log for `<name>.discarded-N.jsonl` beside it, N
        counting from 1; every other line stays, byte for byte. The discarded file is complete before the log
        is replaced, and the replacement is atomic: a kill at any moment loses nothing.

        Args:
            step: The step of the checkpoint that the run resumes from.

        Returns:
            Number of lines taken back.
        """
        kept: list[bytes] = []
        dropped: list[bytes] = []
        self._file.close()
        for line in self.path.read_bytes().splitlines(keepends=True):
            logged = _parse(line, self.path, len(kept) + len(dropped) + 1).get("step")
            (dropped if isinstance(logged, int) and logged > step else kept).append(line)
        if dropped:
            _write_synced(self._next_discarded_path(), b"".join(dropped))
            self._replace(b"".join(kept))
        self._file = self.path.open("ab")
        return len(dropped)

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _repair(self) -> None:
        """Makes the file end with a whole line."""
        content = self.path.read_bytes()
        if not content or content.endswith(b"\n"):
            return
        whole, tail = content[: content.rfind(b"\n") + 1], content[content.rfind(b"\n") + 1 :]
        if _is_record(tail):
            self._replace(content + b"\n")
        else:
            _write_synced(self._next_discarded_path(), tail + b"\n")
            self._replace(whole)

    def _replace(self, content: bytes) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        _write_synced(temporary, content)
        os.replace(temporary, self.path)

    def _next_discarded_path(self) -> Path:
        number = 1
        while (path := self.path.with_name(f"{self.path.stem}.discarded-{number}.jsonl")).exists():
            number += 1
        return path


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a log, oldest first.

    A last line without its newline that does not parse is a record that was being written when the run was
    killed, and is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Any other line is not a JSON object; the message names file and line.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n") and not _is_record(lines[-1]):
        lines.pop()
    return [_parse(line, Path(path), number) for number, line in enumerate(lines, start=1)]


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """The value in strict JSON types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        return _plain(value.item())
    raise TypeError(f"cannot write {type(value).__name__} to a JSON log: {value!r}")


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    if not _is_record(line):
        raise ValueError(f"{path}, line {number}: not a JSON object: {line[:80]!r}")
    record: dict[str, Any] = json.loads(line)
    return record


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
