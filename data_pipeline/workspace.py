"""The build's own directory inside the output: the plan, block hashes, claims, and committed units."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.blocks import hash_file
from data_pipeline.claims import Claims, wait_briefly
from data_pipeline.durable import write_synced
from data_pipeline.errors import DataError
from data_pipeline.finish import unit_directory
from data_pipeline.manifest import MANIFEST_FILE
from data_pipeline.plan import BuildOptions, Plan, TokenizerIdentity, read_plan
from data_pipeline.sources import FoundFile, SourceFile

WORK_DIRECTORY = ".build"
PLAN_FILE = "plan.json"
_BLOCKS_DIRECTORY = "blocks"
_PLAN_CLAIM = "plan"


class Workspace:
    """``OUTPUT/.build``.

    Attributes:
        output: the data set's directory.
        path: the build's directory.
    """

    def __init__(self, output: Path) -> None:
        """Make the directories.

        Raises:
            DataError: ``output`` is a file, or holds parts of a data set that is not described.
        """
        self.output = output
        self.path = output / WORK_DIRECTORY
        try:
            output.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(f"{output}: not a directory; name a new one with --output") from error
        if not self._plan_file.exists() and not self.is_finished:
            foreign = next((path for split in ("train", "val") for path in output.glob(f"*_{split}_*.bin")), None)
            if foreign and not self._plan_file.exists() and not self.is_finished:
                raise DataError(
                    f"{foreign}: the directory holds parts of another data set; nothing was changed. Name a new "
                    "directory with --output"
                )

    def open(self) -> None:
        """Make the build's directory."""
        self.path.mkdir(exist_ok=True)

    @property
    def _plan_file(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def is_finished(self) -> bool:
        """Whether the output has a manifest."""
        return (self.output / MANIFEST_FILE).exists()

    def is_committed(self, number: int) -> bool:
        """Whether a unit of the plan is done."""
        return unit_directory(self.path, number).exists()

    def settle_plan(
        self,
        found: Sequence[FoundFile],
        tokenizer: TokenizerIdentity,
        options: BuildOptions,
        claims: Claims,
        make: Callable[[], Plan],
    ) -> Plan:
        """The one plan of this directory: the one that is there, or what ``make`` makes; nodes agree on it.

        Raises:
            DataError: the plan that is there is of other sources or options.
        """
        while True:
            if self._plan_file.exists():
                return self._adopt(found, tokenizer, options)
            if claims.take(_PLAN_CLAIM):
                break
            wait_briefly()
        try:
            if self._plan_file.exists():
                return self._adopt(found, tokenizer, options)
            plan = make()
            (self.path / _BLOCKS_DIRECTORY).mkdir(exist_ok=True)
            for source in plan.sources:
                if source.remote is None:
                    write_synced(self._blocks_file(source.sha256), source.blocks)
            self._commit_plan(plan)
        finally:
            claims.give_back(_PLAN_CLAIM)
        # Whoever was first: everybody goes on with what is on the disk.
        return self._adopt(found, tokenizer, options)

    def clear_stale(self, number: int) -> None:
        """Remove what a killed worker left half-done of a unit that is claimed by the caller."""
        for stale in self.path.glob(f"{unit_directory(self.path, number).name}.*.tmp"):
            _remove_at_once(stale)

    def remove(self) -> None:
        """Remove the directory, and what a killed process left of it here."""
        _remove_at_once(self.path)
        for left in self.output.glob(f"{self.path.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def _blocks_file(self, sha256: str) -> Path:
        return self.path / _BLOCKS_DIRECTORY / sha256

    def _commit_plan(self, plan: Plan) -> None:
        aside = self.path / f"{PLAN_FILE}.{uuid.uuid4().hex}"
        write_synced(aside, plan.canonical)
        try:
            os.link(aside, self._plan_file)
        except FileExistsError:
            pass
        finally:
            aside.unlink()

    def _adopt(self, found: Sequence[FoundFile], tokenizer: TokenizerIdentity, options: BuildOptions) -> Plan:
        data = self._plan_file.read_bytes()
        value = json.loads(data)
        recorded = value["sources"]
        differences = {
            "tokenizer": value["tokenizer"] != asdict(tokenizer),
            "options": value["options"] != asdict(options),
            "sources": sorted((file.name, file.size_bytes) for file in found)
            != sorted((record["name"], record["size_bytes"]) for record in recorded),
        }
        if any(differences.values()):
            what = " and ".join(name for name, differs in differences.items() if differs)
            raise DataError(
                f"{self.output}: holds an unfinished build of other {what}; nothing was changed. Name a new "
                f"directory with --output, or delete {self.output} first"
            )
        return read_plan(data, [self._identified(record, found) for record in recorded])

    def _identified(self, record: dict[str, Any], found: Sequence[FoundFile]) -> SourceFile:
        """The file that a plan's record speaks of, by name and size; block hashes prove it when it is read."""
        named = [file for file in found if (file.name, file.size_bytes) == (record["name"], record["size_bytes"])]
        if len(named) > 1:
            named = [file for file in named if not file.remote and hash_file(file.path).sha256 == record["sha256"]]
        if not named or (named[0].remote and named[0].remote.sha256 != record["sha256"]):
            raise DataError(
                f"{record['name']}: changed since the plan in {self.output} was made; nothing was changed. Restore it, "
                f"name a new directory with --output, or delete {self.output} first"
            )
        blocks = b"" if named[0].remote else self._blocks_file(record["sha256"]).read_bytes()
        return SourceFile.of(named[0], record["sha256"], blocks)


def _remove_at_once(directory: Path) -> None:
    """Remove a directory that others may be working in: for them it is gone whole, never in part."""
    aside = directory.with_name(f"{directory.name.removesuffix('.tmp')}.{uuid.uuid4().hex[:8]}.tmp")
    with suppress(FileNotFoundError):
        os.rename(directory, aside)
        shutil.rmtree(aside, ignore_errors=True)
