"""Builds that are killed, fill the disk, or read damaged files; ``benchmarks/data_faults.py`` has the large counts."""

import errno
import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.build import WORK_DIRECTORY, BuildResult, Execution, prepare
from data_pipeline.claims import STALE_SECONDS
from data_pipeline.errors import DataError
from data_pipeline.plan import BuildOptions
from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.verify import verify
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.faults import (
    DRIVER,
    OUTPUT_KINDS,
    REPOSITORY,
    BitFlips,
    KilledBuilds,
    Node,
    content,
    json_lines,
    write_corpus,
)
from tests.data_pipeline.test_binformat import megatron_documents

OPTIONS = BuildOptions(val_fraction=0.0, part_tokens=1_000)
PREPARE = [sys.executable, "-m", "data_pipeline", "prepare", "--tokenizer", "bytes", "--val-fraction", "0"]


def build(source: Path, output: Path, **changes: Any) -> BuildResult:
    arguments: dict[str, Any] = {"tokenizer": "bytes", "options": OPTIONS, "workers": 1, "log": io.StringIO()}
    return prepare([str(source)], output, **{**arguments, **changes})


def test_random_kills_and_stops_leave_the_same_bytes(tmp_path: Path) -> None:
    report = KilledBuilds(tmp_path / "kills", seed=1).run(kills=12)
    assert sum(count for kind, count in report.kills.items() if not kind.startswith("stop")) == 12
    assert report.repeated <= report.allowed, report.line()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    flips = BitFlips(tmp_path / "flips", seed=1)
    for number in range(20):
        flips.flip_source(flips.sources[number * 5 % len(flips.sources)])
    for number in range(40):
        flips.flip_output(OUTPUT_KINDS[number % len(OUTPUT_KINDS)])
    assert flips.report.silent == [], "\n".join(flips.report.lines())
    assert flips.report.found.total() == 60
    # What holds tokens is held against its sums when it is read, and the rest is not read.
    for kind in ("body of a part", "manifest.json", "manifest.sha256"):
        assert flips.report.refused[kind] == flips.report.flips[kind]


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of the given size, or changes its size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(size: str) -> Path:
        options = f"remount,size={size}" if folder.is_mount() else f"size={size}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.decode().strip()}")
        return folder

    yield resize
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_prepare(source: Path, output: Path, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [*PREPARE, "--source", str(source), "--output", str(output), *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, **settings)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_stops_the_build_and_space_lets_it_go_on(
    tmp_path: Path, small_disk: Callable[[str], Path], workers: str
) -> None:
    write_corpus(tmp_path / "corpus", documents=200)
    options = ["--workers", workers, "--part-tokens", "20000"]
    assert run_prepare(tmp_path / "corpus", tmp_path / "expected", *options).returncode == 0
    expected = content(tmp_path / "expected")
    size = sum(path.stat().st_size for path in (tmp_path / "expected").iterdir())
    disk = small_disk("1M")
    refused = run_prepare(tmp_path / "corpus", disk / "out", *options)
    assert refused.returncode == 2
    assert "MB are needed" in refused.stderr or "GB are needed" in refused.stderr
    # Enough at the start, and then somebody else fills it.
    small_disk(str(2 * size))
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(size // 8))
    slow = subprocess.Popen(
        [*PREPARE, "--source", str(tmp_path / "corpus"), "--output", str(disk / "out"), *options],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list((disk / "out" / WORK_DIRECTORY).glob("unit-*[0-9]"))) < 3:
        assert slow.poll() is None
        time.sleep(0.001)
    fill(ballast)
    _, stderr = slow.communicate()
    assert slow.returncode == 2, stderr
    assert "the disk is full; finished units are kept: free space and run the same command again" in stderr
    assert "Traceback" not in stderr
    published = [path.name for path in (disk / "out").iterdir() if path.name != WORK_DIRECTORY]
    assert published == []
    small_disk(str(5 * size))
    resumed = run_prepare(tmp_path / "corpus", disk / "out", *options)
    assert resumed.returncode == 0, resumed.stderr
    assert "of the units done before" in resumed.stderr
    assert content(disk / "out") == expected


def fill(path: Path) -> None:
    """Append until the disk is full."""
    with open(path, "ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines(make_documents(400)))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    refused = run_prepare(source, tmp_path / "out", "--workers", "1", preexec_fn=limit)
    assert refused.returncode == 2
    assert "File too large" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK_DIRECTORY]
    assert run_prepare(source, tmp_path / "out").returncode == 0
    assert run_prepare(source, tmp_path / "expected").returncode == 0
    assert content(tmp_path / "out") == content(tmp_path / "expected")


# Several nodes


def test_one_of_three_nodes_is_killed_and_the_others_finish(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", documents=400)
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), *PREPARE[3:], "--part-tokens", "30000", "--workers", "1"]
    command += ["--source", str(tmp_path / "corpus"), "--world", "3"]
    log = tmp_path / "units"
    settings = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "UNIT_LOG": str(log),
        "STALE_SECONDS": str(STALE_SECONDS),
    }
    alone = subprocess.run([*command, "--output", str(tmp_path / "alone")], env=settings, capture_output=True)
    assert alone.returncode == 0, alone.stderr
    units = log.read_text().count("start")
    log.unlink()
    nodes = [Node([*command, "--output", str(tmp_path / "out"), "--rank", str(rank)], settings) for rank in range(3)]
    for node in nodes:
        node.start()
    victim = nodes[1]
    while not log.exists() or f" {victim.process.pid}\n" not in log.read_text():
        time.sleep(0.002)
    victim.kill(whole_group=True)
    started = time.monotonic()
    for node in (nodes[0], nodes[2]):
        assert node.process.wait(timeout=50) == 0, node.log.read_text()
    assert time.monotonic() - started < STALE_SECONDS / 2  # a dead process of this host is seen at once
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert log.read_text().count("start") <= units + 1


@pytest.mark.parametrize(("age_seconds", "taken_over"), [(STALE_SECONDS - 20, False), (STALE_SECONDS + 5, True)])
def test_a_claim_of_another_host_is_taken_over_when_it_is_old(
    tmp_path: Path, age_seconds: float, taken_over: bool
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines(make_documents(20)))
    claims = tmp_path / "out" / WORK_DIRECTORY / "claims"
    claims.mkdir(parents=True)
    claim = claims / "unit-000000"
    claim.write_text(json.dumps({"host": "another host", "pid": os.getpid(), "id": "0"}))
    past = time.time() - age_seconds
    os.utime(claim, (past, past))
    process = subprocess.Popen([*PREPARE, "--source", str(source), "--output", str(tmp_path / "out")], cwd=REPOSITORY)
    try:
        assert process.wait(timeout=30 if taken_over else 4) == 0
    except subprocess.TimeoutExpired:
        assert not taken_over
        assert json.loads(claim.read_text())["host"] == "another host"
        os.utime(claim, (past - 60, past - 60))  # its owner has died
        assert process.wait(timeout=30) == 0
    else:
        assert taken_over
    assert verify(tmp_path / "out")[1] == []


def test_a_worker_that_dies_while_it_is_idle_is_no_failure(tmp_path: Path) -> None:
    # One large unit and one small: the worker of the small one has nothing to do when it is killed.
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(json_lines(make_documents(30_000, words=30)))
    (tmp_path / "in" / "b.txt").write_bytes(b"a text " * 1_000)
    (tmp_path / "driver.py").write_text(DRIVER)
    log = tmp_path / "units"
    settings = {**os.environ, "PYTHONPATH": str(REPOSITORY), "UNIT_LOG": str(log), "STALE_SECONDS": "60"}
    command = [sys.executable, str(tmp_path / "driver.py"), *PREPARE[3:], "--workers", "2", "--part-tokens", "1000"]
    node = Node([*command, "--source", str(tmp_path / "in"), "--output", str(tmp_path / "out")], settings)
    node.start()
    while not log.exists() or "end" not in log.read_text():
        assert node.process.poll() is None
        time.sleep(0.002)
    ended = next(line.split() for line in log.read_text().splitlines() if line.startswith("end"))
    assert ended[1] == "1", "the large unit was the first to end"
    os.kill(int(ended[2]), signal.SIGKILL)
    assert node.process.wait(timeout=60) == 0, node.log.read_text()
    assert log.read_text().count("start") == 2


def test_a_unit_that_is_taken_from_a_living_node_is_waited_for(tmp_path: Path) -> None:
    """As after a node was stopped for more than a minute: its directory is cleared away while it works."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines(make_documents(20_000, words=30)))
    process = subprocess.Popen(
        [*PREPARE, "--source", str(source), "--output", str(tmp_path / "out"), "--workers", "2"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    work = tmp_path / "out" / WORK_DIRECTORY
    while not (found := list(work.glob("unit-000000.*.tmp/*.bin"))):
        assert process.poll() is None
        time.sleep(0.001)
    found[0].parent.rename(work / "cleared away")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert verify(tmp_path / "out")[1] == []


# Hard cases: what each gives is fixed.

BLANKS = " \t\r\n\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2028\u2029\u202f\u205f\u3000"
GOOD = [f"document {number}" for number in range(9)]


def parquet(path: Path, texts: Sequence[Any], column: str = "text", kind: Any = None, **options: Any) -> None:
    """A parquet file; invalid UTF-8 comes in as bytes under the type of text."""
    array = pa.array(texts, kind or pa.binary() if any(isinstance(text, bytes) for text in texts) else kind)
    if pa.types.is_binary(array.type):
        array = pa.Array.from_buffers(pa.string(), len(array), array.buffers())
    pq.write_table(pa.table({column: array}), path, **options)


def write(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def good_and(*rows: Any) -> Callable[[Path], None]:
    return write(json_lines([*GOOD, *rows]))


def long_parquet(path: Path) -> None:
    parquet(path, make_documents(500))


def cut(make: Callable[[Path], None], share: float = 0.6) -> Callable[[Path], None]:
    """What ``make`` writes, broken off."""

    def write_cut(path: Path) -> None:
        make(path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return write_cut


LINES = json_lines(make_documents(2_000))
# Name of the file, what writes it, and documents, null, empty, quarantined, and the reason; or part of the error.
Outcome = tuple[int, int, int, int, str | None] | str
HARD_CASES: dict[str, tuple[str, Callable[[Path], None], Outcome]] = {
    "null": ("a.jsonl", good_and({"text": None}), (9, 1, 0, 0, None)),
    "null in parquet": ("a.parquet", lambda path: parquet(path, [*GOOD, None]), (9, 1, 0, 0, None)),
    "empty": ("a.jsonl", good_and(""), (9, 0, 1, 0, None)),
    "blanks of Unicode": ("a.jsonl", good_and(BLANKS, *BLANKS), (9, 0, 1 + len(BLANKS), 0, None)),
    "a blank of no width is text": ("a.jsonl", good_and("\u200b", "\ufeff"), (11, 0, 0, 0, None)),
    "NUL is text": ("a.jsonl", good_and("\0", "a\0b"), (11, 0, 0, 0, None)),
    "lone surrogates become U+FFFD": ("a.jsonl", good_and(b'{"text": "\\ud800 \\udc00"}\n'), (10, 0, 0, 0, None)),
    "text of special tokens": ("a.jsonl", good_and("<|endoftext|>", "a<|endoftext|>b"), (11, 0, 0, 0, None)),
    "invalid UTF-8": ("a.jsonl", good_and(b'{"text": "\xff"}\n'), (9, 0, 0, 1, "invalid UTF-8")),
    "invalid UTF-8 in parquet": (
        "a.parquet",
        lambda path: parquet(path, [b"one", b"\xff\xfe", b"two"]),
        (2, 0, 0, 1, "invalid UTF-8"),
    ),
    "invalid JSON": ("a.jsonl", good_and(b'{"text": "a"\n'), (9, 0, 0, 1, "invalid JSON")),
    "nested too deeply": ("a.jsonl", good_and(b"[" * 100_000 + b"\n"), (9, 0, 0, 1, "invalid JSON")),
    "not an object": ("a.jsonl", good_and(b"[1]\n"), (9, 0, 0, 1, "not a JSON object")),
    "not a string": ("a.jsonl", good_and({"text": 7}), (9, 0, 0, 1, "the text is not a string")),
    "no key": ("a.jsonl", good_and({"body": "x"}), (9, 0, 0, 1, "no key 'text'")),
    "no key anywhere": ("a.jsonl", write(json_lines([{"body": "x"}] * 3)), "a.jsonl: line 1 has no key 'text'"),
    "no column": ("a.parquet", lambda path: parquet(path, GOOD, "body"), "no column 'text'; it has body"),
    "wrong type": ("a.parquet", lambda path: parquet(path, [1, 2]), "column 'text' holds int64, not text"),
    "a list of texts": ("a.parquet", lambda path: parquet(path, [["a"]]), "column 'text' holds list<"),
    "HTML for parquet": ("a.parquet", write(b"<!DOCTYPE html><html>"), "a.parquet: .*an HTML page"),
    "HTML for JSON lines": ("a.jsonl", write(b"<html>502</html>"), "a.jsonl: .*an HTML page"),
    "parquet broken off": ("a.parquet", cut(long_parquet), "a.parquet: .*a truncated parquet file"),
    "gzip broken off": ("a.jsonl.gz", cut(write(gzip.compress(LINES))), "a.jsonl.gz: cannot be read beyond line"),
    "zstd broken off": (
        "a.jsonl.zst",
        cut(write(zstandard.compress(LINES))),
        "a.jsonl.zst: cannot be read beyond line",
    ),
    "gzip with something behind it": (
        "a.jsonl.gz",
        write(gzip.compress(LINES) + b"garbage"),
        "a.jsonl.gz: cannot be read beyond line",
    ),
    "two gzip members": ("a.jsonl.gz", write(gzip.compress(LINES) * 2), (4_000, 0, 0, 0, None)),
    "plain text called gzip": ("a.jsonl.gz", write(LINES), "a.jsonl.gz: expected gzip data, but it looks like JSON"),
    **{
        f"an empty {suffix}": (f"a{suffix}", write(b""), f"a{suffix}: .*an empty file")
        for suffix in (".parquet", ".jsonl", ".arrow")
    },
    "an empty .jsonl.gz": ("a.jsonl.gz", write(b""), "a.jsonl.gz: "),
    "an empty .jsonl.zst": ("a.jsonl.zst", write(b""), "a.jsonl.zst: "),
    "an empty .txt": ("a.txt", write(b""), "the sources hold no documents"),
    "a parquet file without rows": ("a.parquet", lambda path: parquet(path, [], kind=pa.string()), "no documents"),
    "a byte-order mark": ("a.jsonl", write(b"\xef\xbb\xbf" + json_lines(GOOD)), (9, 0, 0, 0, None)),
    "CRLF": ("a.jsonl", write(json_lines(GOOD).replace(b"\n", b"\r\n")), (9, 0, 0, 0, None)),
    "no newline at the end": ("a.jsonl", write(json_lines(GOOD)[:-1]), (9, 0, 0, 0, None)),
    "blank lines are no rows": ("a.jsonl", write(json_lines(GOOD).replace(b"\n", b"\n\n \n")), (9, 0, 0, 0, None)),
    "a Git LFS pointer": ("a.parquet", write(b"version https://git-lfs.github.com/spec/v1\n"), "a Git LFS pointer"),
    "a name of blanks and newlines": ("a \n é\u2028 .jsonl", good_and(), (9, 0, 0, 0, None)),
}


@pytest.mark.parametrize("case", HARD_CASES)
def test_hard_cases_have_defined_outcomes(case: str, tmp_path: Path) -> None:
    name, make, expected = HARD_CASES[case]
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / name)
    run = lambda: build(tmp_path / "in", tmp_path / "out", execution=Execution(max_quarantined=0.5))  # noqa: E731
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            run()
        assert not (tmp_path / "out" / "manifest.json").exists()
        return
    documents, null, empty, quarantined, reason = expected
    result = run()
    rows = result.manifest.accounting
    assert (rows.documents, rows.null, rows.empty, rows.quarantined) == (documents, null, empty, quarantined)
    assert rows.rows == documents + null + empty + quarantined
    assert result.manifest.sources[0].name == name
    quarantine = tmp_path / "out" / "quarantine.jsonl"
    found = [json.loads(line) for line in quarantine.read_text().splitlines()] if quarantine.exists() else []
    assert [entry["reason"] for entry in found] == [reason] * quarantined
    assert all(entry["source"] == name for entry in found)


@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken", "fastokens"])
def test_one_end_of_text_a_document(engine: str, tmp_path: Path) -> None:
    if engine != "tiktoken":
        pytest.importorskip(engine)
    texts = ["<|endoftext|>", "a <|endoftext|><|endoftext|> b", "\0", "\ufffd \ufffd", "x" + " " * 1_000_000 + "x"]
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines([*texts[:3], b'{"text": "\\ud800 \\udc00"}\n', texts[4]]))
    result = build(source, tmp_path / "out", tokenizer="gpt2", execution=Execution(engine=engine))
    read = [document for part in result.manifest.parts for document in megatron_documents(tmp_path / "out" / part.file)]
    reference = load_tokenizer("gpt2")
    assert [list(document) for document in read] == [[50_256, *reference.encode(text).tolist()] for text in texts]
    assert all(list(document).count(50_256) == 1 for document in read)


def test_a_flipped_bit_that_parquet_itself_does_not_see(tmp_path: Path) -> None:
    """Without page checksums only the hashes of the plan tell."""
    source = tmp_path / "a.parquet"
    parquet(source, make_documents(300), compression="none", use_dictionary=False)
    original = source.read_bytes()
    times = source.stat()

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data_pipeline.build._Build._do_units", refuse)
        build(source, tmp_path / "out")
    at = original.index(b"window", len(original) // 2)
    source.write_bytes(original[:at] + b"W" + original[at + 1 :])
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "Window" in "".join(pq.read_table(source)["text"].to_pylist())  # an equally good parquet file
    with pytest.raises(DataError, match=r"a.parquet: changed since the plan was made \(block 0 of"):
        build(source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    source.write_bytes(original)
    assert build(source, tmp_path / "out").manifest_sha256 == build(source, tmp_path / "again").manifest_sha256


def test_too_many_quarantined_rows_keep_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines([*GOOD, b"{broken\n"]))
    with pytest.raises(DataError, match=r"1 of 10 rows \(10.00%\) are quarantined.* with --max-quarantined 0.1 ends"):
        build(source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.setattr("data_pipeline.workers.run_unit", lambda *_: pytest.fail("encoded again"))
    result = build(source, tmp_path / "out", execution=Execution(max_quarantined=0.1))
    assert result.manifest.accounting.documents == 9


def test_odd_names_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "x.parquet").mkdir(parents=True)
    (folder / "x.parquet" / "part.jsonl").write_bytes(json_lines(GOOD[:1]))
    (folder / "loop").symlink_to(folder)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "link.jsonl").symlink_to("real.jsonl")
    (folder / "real.jsonl").write_bytes(json_lines(GOOD[1:2]))
    result = build(folder, tmp_path / "out")
    assert [source.name for source in result.manifest.sources] == ["link.jsonl", "x.parquet/part.jsonl"]
    assert result.manifest.accounting.documents == 2
    with pytest.raises(DataError, match=r"loop.jsonl: "):
        build(folder / "loop.jsonl", tmp_path / "other")


def test_two_sources_of_one_name_and_size(tmp_path: Path) -> None:
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(json_lines([f"text {number} {row}" for row in range(200)]))
    specs = [str(tmp_path / folder / "a.jsonl") for folder in ("one", "two")]
    settings: dict[str, Any] = {"tokenizer": "bytes", "options": OPTIONS, "workers": 1, "log": io.StringIO()}
    result = prepare(specs, tmp_path / "out", **settings)
    assert prepare(specs[::-1], tmp_path / "other", **settings).manifest_sha256 == result.manifest_sha256
    assert [source.name for source in result.manifest.sources] == ["a.jsonl", "a.jsonl"]
    assert result.manifest.accounting.documents == 400
