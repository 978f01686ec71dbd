"""Speed of a build beside the peers', its scaling, and the identity of its output.

    python benchmarks/data_build.py [--megabytes 80] [--repeats 3] [--datatrove PYTHON] [--directory DIR]

Makes a parquet file like FineWeb's (see `data_peers.fineweb_like`) and tokenises it with every builder, each in its own
process with two workers, in turns, ``--repeats`` times. CPU is user and system time of the process and all of its
children; medians are printed. What a builder costs on two documents is its start-up (imports, vocabularies, self-tests,
processes) and is subtracted for rates and ratios; "CPU s" and "wall s" are of whole commands. Memory is the largest
proportional set size (PSS) of the process and its children, temporary disk the largest size of everything written less
the output; both are sampled. Ours divides a file of this size among two workers only with parts far smaller than the
usual 100 million tokens: `PART_TOKENS`. Scaling is measured on four times as much text.

``--datatrove`` names a Python that has it (python -m venv V; V/bin/pip install datatrove pyarrow tokenizers orjson
xxhash); without it, datatrove is left out. Prints the tables of docs/data.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data_peers.builders import jsonl_lines
from benchmarks.data_peers.fineweb_like import write_fineweb_like

BUILDERS = Path(__file__).with_name("data_peers") / "builders.py"
ENGINES = ("gigatoken", "fastokens", "tiktoken")
PART_TOKENS = 2_000_000
EMPTY_PART_TOKENS = 1_000
SCALING_TEXT = 4  # times as much text, so that the start-up does not hide the rest
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Contender:
    """One row of the first table."""

    label: str
    builder: str
    engine: str = "auto"
    python: str = sys.executable


@dataclass(frozen=True)
class Cost:
    """What one build has cost.

    Attributes:
        cpu_seconds: user and system time, children included.
        wall_seconds: from start to end.
        peak_bytes: largest sampled PSS of all of its processes.
        temporary_bytes: largest sampled size of its files less its output.
        answer: what the builder printed.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    temporary_bytes: int
    answer: dict[str, Any]


def build(contender: Contender, source: Path, directory: Path, *, workers: int = 2, **options: Any) -> Cost:
    """Run one builder in a process of its own and in empty directories, which are gone afterwards."""
    output, scratch = directory / "output", directory / "scratch"
    for each in (output, scratch):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    command = [contender.python, str(BUILDERS), contender.builder, "--source", str(source), "--output", str(output)]
    command += ["--scratch", str(scratch), "--workers", str(workers), "--engine", contender.engine]
    command += [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    environment = {**os.environ, "TMPDIR": str(scratch), "HF_HOME": str(scratch), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    with open(directory / "stderr.txt", "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=scratch)
        peak = largest = 0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, _memory(process.pid))
            largest = max(largest, _size(output) + _size(scratch))
            time.sleep(_POLL_SECONDS)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        raise SystemExit(f"{contender.label}: {(directory / 'stderr.txt').read_text()}")
    assert process.stdout is not None
    answer = json.loads(process.stdout.read().splitlines()[-1])
    process.stdout.close()
    usage = ended[2]
    temporary = max(0, max(largest, _size(output) + _size(scratch)) - _size(output))
    for each in (output, scratch):
        shutil.rmtree(each)
    return Cost(usage.ru_utime + usage.ru_stime, wall, max(peak, usage.ru_maxrss * 1_024), temporary, answer)


def _memory(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_full_info().pss
    except (psutil.Error, FileNotFoundError):
        pass  # one of them has ended
    return total


def _size(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(folder, file)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@dataclass(frozen=True)
class Measured:
    """Medians of a contender's builds.

    Attributes:
        cpu_seconds: without the start-up.
        wall_seconds: with the start-up.
        startup_cpu_seconds: of the build of two documents.
        startup_wall_seconds: of the build of two documents.
        peak_bytes: the largest, see `Cost`.
        temporary_bytes: the largest, see `Cost`.
        answers: what each build printed.
        startup_answers: what each build of two documents printed.
    """

    cpu_seconds: float
    wall_seconds: float
    startup_cpu_seconds: float
    startup_wall_seconds: float
    peak_bytes: int
    temporary_bytes: int
    answers: list[dict[str, Any]]
    startup_answers: list[dict[str, Any]]

    @classmethod
    def of(cls, whole: list[Cost], empty: list[Cost]) -> "Measured":
        """The medians of these builds, two documents in ``empty``."""
        startup = statistics.median(cost.cpu_seconds for cost in empty)
        return cls(
            cpu_seconds=statistics.median(cost.cpu_seconds for cost in whole) - startup,
            wall_seconds=statistics.median(cost.wall_seconds for cost in whole),
            startup_cpu_seconds=startup,
            startup_wall_seconds=statistics.median(cost.wall_seconds for cost in empty),
            peak_bytes=max(cost.peak_bytes for cost in whole),
            temporary_bytes=max(cost.temporary_bytes for cost in whole),
            answers=[cost.answer for cost in whole],
            startup_answers=[cost.answer for cost in empty],
        )


def measure(
    contenders: list[tuple[str, Contender, dict[str, Any]]], inputs: "Inputs", repeats: int
) -> dict[str, Measured]:
    """Build everything in turns, ``repeats`` times; each contender comes with a key and options."""
    whole: dict[str, list[Cost]] = {key: [] for key, _, _ in contenders}
    empty: dict[str, list[Cost]] = {key: [] for key, _, _ in contenders}
    for repeat in range(repeats):
        for key, contender, options in contenders:
            print(f"  round {repeat + 1} of {repeats}: {key}", file=sys.stderr, flush=True)
            small = {**options, "part_tokens": EMPTY_PART_TOKENS}
            empty[key].append(build(contender, inputs.empty, inputs.directory / "build", **small))
            whole[key].append(build(contender, inputs.source, inputs.directory / "build", **options))
    return {key: Measured.of(whole[key], empty[key]) for key, _, _ in contenders}


@dataclass(frozen=True)
class Inputs:
    """The files that all builders read.

    Attributes:
        directory: where everything is.
        source: the text.
        empty: two documents in two row groups, which make two units of work.
        text_bytes: text in ``source``.
    """

    directory: Path
    source: Path
    empty: Path
    text_bytes: int


def make_inputs(directory: Path, megabytes: float) -> Inputs:
    """Write the parquet files, the JSON lines for Megatron and the tokenizer.json for datatrove."""
    source, empty = directory / "text" / "text.parquet", directory / "empty" / "empty.parquet"
    for path in (source, empty):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = write_fineweb_like(source, megabytes)
    print(
        f"text: {report.text_bytes / 1e6:,.1f} MB in {report.documents:,} documents, "
        f"{report.file_bytes / 1e6:,.1f} MB of parquet; {1 - report.rewritten_share:.0%} of it fresh, the rest again "
        f"with its rare words made new ({report.new_words_share:.2%} of the words)\n"
    )
    documents = pq.ParquetFile(source).read_row_group(0).slice(0, 2)
    with pq.ParquetWriter(empty, documents.schema, compression="snappy") as writer:
        for row in range(2):
            writer.write_table(documents.slice(row, 1))
    for path in (source, empty):
        with open(path.with_suffix(".jsonl"), "w", encoding="utf-8") as file:
            file.writelines(jsonl_lines(path))
        _write_tokenizer(path.with_name("tokenizer.json"))
    assert pa.types.is_string(documents.schema.field("text").type)
    return Inputs(directory, source, empty, report.text_bytes)


def _write_tokenizer(path: Path) -> None:
    """GPT-2 with its special token, which Hugging Face's tokenizers read."""
    from tokenizers import Tokenizer

    from data_pipeline.tokenizer_json import tokenizer_json
    from data_pipeline.vocabulary import load_gpt2_vocabulary

    tokenizer = Tokenizer.from_str(tokenizer_json(load_gpt2_vocabulary(None)))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def print_speed(inputs: Inputs, repeats: int, datatrove: str | None) -> None:
    """The first table: ours, per engine, and the peers."""
    contenders = [Contender(f"ours, {engine}", "ours", engine) for engine in ENGINES]
    contenders += [Contender("llm.c-style", "llmc"), Contender("nanoGPT-style", "nanogpt")]
    contenders += [Contender("Megatron-style", "megatron")]
    if datatrove:
        contenders.append(Contender("datatrove", "datatrove", python=datatrove))
    rows = [(each.label, each, {"part_tokens": PART_TOKENS}) for each in contenders]
    nets = measure(rows, inputs, repeats)
    best = nets[contenders[0].label]
    columns = ["builder", "MB/s per core", "CPU, times ours", "CPU s", "wall s"]
    columns += ["start-up, CPU s (wall s)", "peak MB", "temporary MB"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for label, net in nets.items():
        cells = [label, f"{inputs.text_bytes / 1e6 / net.cpu_seconds:,.1f}"]
        cells += [f"{net.cpu_seconds / best.cpu_seconds:.1f}"]
        cells += [f"{net.cpu_seconds + net.startup_cpu_seconds:.1f}", f"{net.wall_seconds:.1f}"]
        cells += [f"{net.startup_cpu_seconds:.1f} ({net.startup_wall_seconds:.1f})"]
        cells += [f"{net.peak_bytes / 1e6:,.0f}", f"{net.temporary_bytes / 1e6:,.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    tokens = best.answers[0]["tokens"]
    others = [f"{label} {n - tokens:+,}" for label, net in nets.items() if (n := net.answers[0]["tokens"]) != tokens]
    print(f"\nTokens, end-of-text included: {tokens:,}; all the same but for: {', '.join(others) or 'none'}.\n")


def print_scaling(inputs: Inputs, repeats: int) -> None:
    """The second table: one worker and two, and the stages that only one process does."""
    ours = Contender("ours", "ours", ENGINES[0])
    rows = [(f"{n}", ours, {"part_tokens": PART_TOKENS, "workers": n}) for n in (1, 2)]
    nets = measure(rows, inputs, repeats)
    print("| workers | CPU ms per MB | times 1 worker | wall s, start-up included |\n|---|---|---|---|")
    for workers, net in nets.items():
        cost = net.cpu_seconds * 1e9 / inputs.text_bytes
        print(f"| {workers} | {cost:.2f} | {net.cpu_seconds / nets['1'].cpu_seconds:.2f} | {net.wall_seconds:.1f} |")
    one, two = nets["1"], nets["2"]
    hashing, finish = (
        statistics.median(each["serial_seconds"][stage] for each in two.answers) / one.cpu_seconds
        for stage in ("hash_sources", "finish")
    )
    parent = [
        statistics.median(each["parent_seconds"] for each in answers) for answers in (two.answers, two.startup_answers)
    ]
    print(
        f"\nOf the CPU time of a build: hashing the sources for the plan {hashing:.1%} (one thread a file), finish "
        f"{finish:.1%}; everything that the parent does, these two and the handing out of units, "
        f"{(parent[0] - parent[1]) / one.cpu_seconds:.1%} beyond its start-up.\n"
    )


def print_identity(inputs: Inputs) -> None:
    """The third table: the same data set from every engine, number of workers and two nodes."""
    print("| build | identity |\n|---|---|")
    identities = []
    builds = [(engine, workers) for engine in ENGINES for workers in ((1, 2, 4) if engine == ENGINES[0] else (2,))]
    for engine, workers in builds:
        cost = build(
            Contender("ours", "ours", engine),
            inputs.source,
            inputs.directory / "build",
            workers=workers,
            part_tokens=PART_TOKENS,
            val_fraction=0.0005,
        )
        identities.append(cost.answer["identity"])
        print(f"| {engine}, {workers} workers | {identities[-1]} |", flush=True)
    identities.extend(_two_nodes(inputs))
    print(f"| two nodes, {ENGINES[0]} and {ENGINES[1]} | {identities[-1]} |")
    assert len(set(identities)) == 1, identities


def _two_nodes(inputs: Inputs) -> Iterator[str]:
    """Two processes, one worker and another engine each, that share an output directory and nothing else."""
    output = inputs.directory / "nodes" / "output"
    shutil.rmtree(output.parent, ignore_errors=True)
    output.mkdir(parents=True)

    def node(rank: int) -> str:
        scratch = output.parent / f"scratch-{rank}"
        scratch.mkdir()
        command = [sys.executable, str(BUILDERS), "ours", "--source", str(inputs.source), "--output", str(output)]
        command += ["--scratch", str(scratch), "--workers", "1", "--engine", ENGINES[rank], "--val-fraction", "0.0005"]
        command += ["--part-tokens", str(PART_TOKENS), "--rank", str(rank), "--world", "2"]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return str(json.loads(answer.splitlines()[-1])["identity"])

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(node, range(2))
    shutil.rmtree(output.parent)


def main() -> None:
    """Prints the three tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=80, help="text in the file")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--datatrove", metavar="PYTHON", help="interpreter of an environment that has datatrove")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary one")
    parser.add_argument(
        "--tables", nargs="+", choices=("speed", "scaling", "identity"), default=["speed", "scaling", "identity"]
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.directory or Path(temporary)).resolve()
        inputs = make_inputs(directory, arguments.megabytes)
        if "speed" in arguments.tables:
            print_speed(inputs, arguments.repeats, arguments.datatrove)
        if "scaling" in arguments.tables:
            larger = make_inputs(directory / "larger", SCALING_TEXT * arguments.megabytes)
            print_scaling(larger, arguments.repeats)
        if "identity" in arguments.tables:
            print_identity(inputs)


if __name__ == "__main__":
    main()
