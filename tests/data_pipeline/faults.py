"""What the tests and ``benchmarks/data_faults.py`` share: a corpus, builds that are killed, and flipped bits."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data_pipeline.build import prepare
from data_pipeline.cli import main
from data_pipeline.errors import DataError
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import open_dataset
from tests.data_pipeline.conftest import make_documents

REPOSITORY = Path(__file__).resolve().parents[2]
# The command line, with each start and end of a unit noted in a file, and claims that go stale sooner.
DRIVER = """
import os, sys
import data_pipeline.claims as claims
import data_pipeline.workers as workers

claims.STALE_SECONDS = float(os.environ["STALE_SECONDS"])
claims.TOUCH_SECONDS = claims.STALE_SECONDS / 8
run_unit = workers.run_unit

def note(what, number):
    line = os.open(os.environ["UNIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, f"{what} {number} {os.getpid()}\\n".encode())
    os.close(line)

def noted(task, encoders, board):
    note("start", task.number)
    run_unit(task, encoders, board)
    note("end", task.number)

workers.run_unit = noted
if __name__ == "__main__":
    from data_pipeline.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def json_lines(rows: Sequence[Any]) -> bytes:
    """A string becomes {"text": string}, bytes a raw line, others JSON."""
    texts = ({"text": row} if isinstance(row, str) else row for row in rows)
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in texts)


def write_corpus(folder: Path, documents: int = 40, words: int = 120) -> list[Path]:
    """Parquet and JSON lines, plain and compressed, some rows with problems: 44 units at 1,000 tokens a part.

    Args:
        folder: where the files go.
        documents: per unit.
        words: of the longest document.
    """
    folder.mkdir(parents=True)
    seeds = iter(range(1_000))

    def some() -> list[str]:
        return make_documents(documents, seed=next(seeds), words=words)

    for name in ("a", "b"):
        with pq.ParquetWriter(folder / f"{name}.parquet", pa.schema([("id", pa.int64()), ("text", pa.string())])) as to:
            for _ in range(12):
                to.write_table(pa.table({"id": range(documents), "text": some()}))
    for number in range(14):
        lines = json_lines([*some(), {"text": None}, "", b"{broken"] if number == 3 else some())
        (folder / f"c{number:02d}.jsonl").write_bytes(lines)
    for number in range(3):
        (folder / f"d{number}.jsonl.gz").write_bytes(gzip.compress(json_lines(some()), mtime=0))
        (folder / f"e{number}.jsonl.zst").write_bytes(zstandard.compress(json_lines(some())))
    return sorted(folder.iterdir())


def content(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder that must be equal between builds; leftovers count too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "provenance.jsonl")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass
class Node:
    """One running ``prepare`` with its workers, in a process group of its own."""

    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    worker_kills: int = 0

    def start(self) -> None:
        """Start it, or start it again."""
        self.worker_kills = 0
        self.log = Path(f"{self.environment['UNIT_LOG']}.{Path(self.command[-1]).name}.err")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stderr=log, stdout=log, process_group=0)

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = []
        with suppress(OSError):
            for child in children.read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self, whole_group: bool) -> None:
        """SIGKILL, of all of it or of the parent alone, whose workers must then end by themselves."""
        if whole_group:
            self.send(signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@dataclass
class KillReport:
    """What `kill_at_random` did.

    Attributes:
        kills: by kind.
        builds: builds that ended, all in the expected bytes.
        units: units of all builds.
        starts: units started, the repeated ones included.
        allowed: most repetitions that the kills and stops can explain: one per worker that they hit.
        seconds: wall clock.
    """

    kills: Counter[str] = field(default_factory=Counter)
    builds: int = 0
    units: int = 0
    starts: int = 0
    allowed: int = 0
    seconds: float = 0.0

    @property
    def repeated(self) -> int:
        """Units started more than once."""
        return self.starts - self.units

    def line(self) -> str:
        """For a person."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{kinds}; {self.builds} builds of {self.units} units, all equal to the undisturbed one; "
            f"{self.repeated} units repeated, at most {self.allowed} allowed; {self.seconds:.0f} s"
        )


class KilledBuilds:
    """Builds of one corpus by several nodes that are killed and stopped at random moments until they end."""

    stale_seconds = 1.5

    def __init__(self, folder: Path, nodes: int = 2, workers: int = 2, seed: int = 0, documents: int = 700) -> None:
        """Write the corpus and make the undisturbed build."""
        self._folder = folder
        self._workers = workers
        self._nodes = nodes
        self._random = random.Random(seed)
        self.report = KillReport()
        write_corpus(folder / "corpus", documents)
        (folder / "driver.py").write_text(DRIVER)
        expected = subprocess.run(
            self._command(folder / "expected", 0, 1), env=self._environment("expected"), stderr=subprocess.PIPE
        )
        assert expected.returncode == 0, expected.stderr
        self._expected = content(folder / "expected")
        self.units_per_build = len((folder / "expected.units").read_text().split("start")) - 1

    def run(self, kills: int) -> KillReport:
        """Build until ``kills`` processes or groups were killed and the last build has ended."""
        started = time.monotonic()
        while self._num_kills < kills:
            self._build(f"out{self.report.builds}", kills)
        self.report.seconds = time.monotonic() - started
        return self.report

    @property
    def _num_kills(self) -> int:
        return sum(count for kind, count in self.report.kills.items() if not kind.startswith("stop"))

    def _command(self, output: Path, rank: int, world: int) -> list[str]:
        command = [sys.executable, str(self._folder / "driver.py"), "prepare", "--source", str(self._folder / "corpus")]
        command += ["--output", str(output), "--tokenizer", "bytes", "--workers", str(self._workers)]
        command += ["--part-tokens", "50000", "--val-fraction", "0.01"]
        return [*command, "--world", str(world), "--rank", str(rank)]

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "UNIT_LOG": str(self._folder / f"{name}.units"),
            "STALE_SECONDS": str(self.stale_seconds),
        }

    def _build(self, name: str, kills: int) -> None:
        output, log = self._folder / name, self._folder / f"{name}.units"
        nodes = [Node(self._command(output, rank, self._nodes), self._environment(name)) for rank in range(self._nodes)]
        for node in nodes:
            node.start()
        try:
            while running := [node for node in nodes if node.process.poll() is None]:
                if self._num_kills >= kills:
                    running[0].process.wait()
                    continue
                self._wait_for_a_moment(log, running)
                self._disturb(self._random.choice(running))
            for node in nodes:
                assert node.process.returncode == 0, f"{node.log.read_text()}\n{self.report}"
        finally:
            for node in nodes:
                node.kill(whole_group=True)
        assert content(output) == self._expected, f"{name}: other files or bytes"
        self.report.builds += 1
        self.report.units += self.units_per_build
        self.report.starts += log.read_text().count("start")
        shutil.rmtree(output)

    def _wait_for_a_moment(self, log: Path, running: list[Node]) -> None:
        """A moment anywhere in a run, or, two times in three, while units are open."""
        if self._random.random() < 1 / 3:
            time.sleep(self._random.uniform(0, 1.5))
            return
        before = log.stat().st_size if log.exists() else 0
        while (log.stat().st_size if log.exists() else 0) == before:
            if any(node.process.poll() is not None for node in running):
                return
            time.sleep(0.002)
        time.sleep(self._random.uniform(0, 0.3))

    def _disturb(self, node: Node) -> None:
        kind = self._random.choices(["node", "group", "worker", "stop"], [3, 3, 3, 2])[0]
        if kind == "worker":
            # A unit whose worker dies three times is given up, so no more than two in one run.
            workers = node.workers()
            if not workers or node.worker_kills == 2:
                return
            node.worker_kills += 1
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(workers), signal.SIGKILL)
            self.report.allowed += 1
        elif kind == "stop":
            # Stopped for longer than a claim lives, its units are taken over, and it finds that out later.
            long = self._random.random() < 0.5
            kind = f"stop {'beyond' if long else 'within'} the life of a claim"
            node.send(signal.SIGSTOP)
            time.sleep(self.stale_seconds * (1.6 if long else 0.3))
            node.send(signal.SIGCONT)
            self.report.allowed += self._workers
        else:
            if node.process.poll() is not None:
                return
            node.kill(whole_group=kind == "group")
            self.report.allowed += self._workers
            time.sleep(self._random.choice([0, self._random.uniform(0, 0.5)]))
            node.start()
        self.report.kills[kind] += 1


OUTPUT_KINDS = (
    "header of a part",
    "body of a part",
    "index",
    "page sums",
    "receipts.jsonl",
    "quarantine.jsonl",
    "manifest.json",
    "manifest.sha256",
)


@dataclass
class FlipReport:
    """What `BitFlips` saw, counted by kind of file.

    Attributes:
        flips: flips made.
        found: sources: the build refused by name; the output: `verify` named the file.
        refused: opening or reading the data set for training raised `DataError`.
        same: training read exactly the original windows.
        unused: sources: the flipped bytes are none that the build reads, and its output is the same.
        silent: training read something else without an error, or nobody noticed; must be empty.
    """

    flips: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """A table for a person."""
        columns = ("flips", "found", "refused", "same", "unused")
        table = [f"{'':20}" + "".join(f"{name:>10}" for name in columns)]
        for kind in [*self.flips, "all"]:
            counters: list[Counter[str]] = [getattr(self, name) for name in columns]
            numbers = (counter.total() if kind == "all" else counter[kind] for counter in counters)
            table.append(f"{kind:20}" + "".join(f"{number:>10}" for number in numbers))
        return [*table, *(f"SILENT: {line}" for line in self.silent)]


@contextmanager
def one_flipped_bit(path: Path, position: int) -> Iterator[None]:
    """Bit ``position`` of a file is the other one; size and times stay. Put back afterwards."""
    before = os.stat(path)
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[position // 8] ^= 1 << position % 8
    for data in (damaged, original):
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if data is damaged:
            try:
                yield
            except BaseException:
                path.write_bytes(original)
                raise


class BitFlips:
    """A small finished data set, and a build that has its plan and no unit; both are damaged a bit at a time."""

    options = BuildOptions(val_fraction=0.1, part_tokens=20_000)
    sequence_length = 64

    def __init__(self, folder: Path, seed: int = 0) -> None:
        """Make both."""
        self._random = random.Random(seed)
        self._folder = folder
        self.report = FlipReport()
        self.sources = write_corpus(folder / "corpus", documents=30, words=60)
        # More than one block, most of it a column that no build reads.
        rows = {"id": np.random.default_rng(0).bytes(3 << 20), "text": "one document"}
        pq.write_table(pa.table({name: [value] for name, value in rows.items()}), folder / "corpus" / "wide.parquet")
        self.sources.append(folder / "corpus" / "wide.parquet")
        self._prepare(folder / "data")
        self._expected = content(folder / "data")
        self._windows = self._read()
        with (
            mock.patch("data_pipeline.build._Build._do_units", side_effect=KeyboardInterrupt),
            suppress(KeyboardInterrupt),
        ):
            self._prepare(folder / "planned")

    def flip_source(self, path: Path) -> None:
        """Damage a source after the plan was made, and build."""
        kind = f"source {''.join(path.suffixes)}"
        position = self._random.randrange(8 * path.stat().st_size)
        output = self._folder / "out"
        shutil.copytree(self._folder / "planned", output)
        self.report.flips[kind] += 1
        with one_flipped_bit(path, position):
            try:
                self._prepare(output)
            except DataError as error:
                complete = path.name in str(error) and not (output / "manifest.json").exists()
                complete &= not list(output.glob("*.bin"))
            else:
                # Never read, so never hashed: what came of the rest must be right, and a new plan sees the change.
                complete = content(output) == self._expected and self._is_refused_later(output)
                self.report.unused[kind] += complete
        self.report.found[kind] += complete
        if not complete:
            self.report.silent.append(f"{path.name}, bit {position}")
        shutil.rmtree(output)

    def flip_output(self, kind: str) -> None:
        """Damage a file of the data set; verify it, and read all of it as training does."""
        path, first, stop = self._place(kind)
        position = self._random.randrange(8 * first, 8 * stop)
        place = f"{path.name}, bit {position}"
        self.report.flips[kind] += 1
        with one_flipped_bit(path, position):
            said = io.StringIO()
            with redirect_stderr(said), redirect_stdout(said):
                status = main(["verify", str(self._folder / "data")])
            if status and path.name in said.getvalue():
                self.report.found[kind] += 1
            else:
                self.report.silent.append(f"{place}: verify ended with {status}: {said.getvalue()}")
            try:
                same = all(np.array_equal(*pair) for pair in zip(self._read(), self._windows, strict=True))
            except DataError:
                self.report.refused[kind] += 1
            else:
                self.report.same[kind] += same
                if not same:
                    self.report.silent.append(f"{place}: other windows reach training")

    def _place(self, kind: str) -> tuple[Path, int, int]:
        """A file of that kind, and the bytes of it to damage."""
        data = self._folder / "data"
        if kind in ("header of a part", "body of a part"):
            path = self._random.choice(sorted(data.glob("*.bin")))
            # The first seven numbers of the header mean something; the zeros behind them are damaged too.
            first, stop = (0, self._random.choice([28, 1_024])) if kind[0] == "h" else (1_024, path.stat().st_size)
            return path, first, stop
        pattern = {"index": "*.idx", "page sums": "*.sums"}.get(kind, kind)
        path = self._random.choice(sorted(data.glob(pattern)))
        return path, 0, path.stat().st_size

    def _prepare(self, output: Path) -> None:
        prepare(
            [str(self._folder / "corpus")],
            output,
            tokenizer="bytes",
            options=self.options,
            workers=1,
            log=io.StringIO(),
        )

    def _is_refused_later(self, output: Path) -> bool:
        try:
            self._prepare(output)
        except DataError as error:
            return "other sources" in str(error)
        return False

    def _read(self) -> list[np.ndarray[Any, Any]]:
        """All windows of both splits."""
        read = []
        for split in ("train", "val"):
            windows = open_dataset(self._folder / "data", split, self.sequence_length)
            read.append(windows.read(range(windows.num_windows)))
            windows.close()
        return read
