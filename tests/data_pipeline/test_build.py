import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.binformat import read_document_lengths
from data_pipeline.build import WORK_DIRECTORY, BuildResult, Execution, prepare
from data_pipeline.errors import DataError
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import open_dataset
from data_pipeline.split import is_validation, text_hash
from data_pipeline.tokenizer import BytesTokenizer, load_tokenizer
from data_pipeline.verify import verify
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.test_binformat import megatron_documents

WriteJsonl = Callable[[str, Sequence[Any]], Path]
REPOSITORY = Path(__file__).parents[2]
OPTIONS = BuildOptions(val_fraction=0.1, part_tokens=2_000)


def build(source: Path, output: Path, **changes: Any) -> BuildResult:
    arguments: dict[str, Any] = {"tokenizer": "bytes", "options": OPTIONS, "workers": 1, "log": io.StringIO()}
    return prepare([str(source)], output, **{**arguments, **changes})


def content(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder that must be equal between builds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "provenance.jsonl")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    """Eight files of 25 documents, about 10 KB and a unit each, some rows with problems."""
    for number in range(8):
        rows: list[Any] = list(make_documents(25, seed=number))
        if number == 3:
            rows[4:4] = [{"text": None}, "", " \n ", b"{broken", {"text": 7}]
        write_jsonl(f"corpus/{number}.jsonl", rows)
    return tmp_path / "corpus"


def test_every_document_is_stored_once_in_order(corpus: Path, tmp_path: Path) -> None:
    result = build(corpus, tmp_path / "out")
    documents = [text for number in range(8) for text in make_documents(25, seed=number)]
    tokenizer = BytesTokenizer()
    for split in ("train", "val"):
        stored = [
            document
            for part in result.manifest.parts_of(split)
            for document in megatron_documents(tmp_path / "out" / part.file)
        ]
        expected = [text for text in documents if is_validation(text_hash(text.encode()), 0.1) == (split == "val")]
        assert all(document[0] == 256 and 256 not in document[1:] for document in stored)
        assert [tokenizer.decode(document[1:]) for document in stored] == expected
        data = open_dataset(tmp_path / "out", split, 64)
        assert data.num_documents == len(expected)
        assert data.bytes_of_text == sum(len(text.encode()) for text in expected)
        assert data.num_tokens == data.bytes_of_text + data.num_documents
        assert data.max_token_id == 256
        assert data.manifest_sha256 == result.manifest_sha256
    assert verify(tmp_path / "out") == (result.manifest, [])


def test_accounting_closes_and_problems_are_listed(corpus: Path, tmp_path: Path) -> None:
    result = build(corpus, tmp_path / "out")
    rows = result.manifest.accounting
    assert (rows.rows, rows.documents, rows.null, rows.empty, rows.quarantined) == (205, 200, 1, 2, 2)
    assert result.manifest.sources[3].counts.rows == 30
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"source": "3.jsonl", "row": 7, "reason": "invalid JSON"},
        {"source": "3.jsonl", "row": 8, "reason": "the text is not a string"},
    ]


def test_the_identity_is_the_hash_of_the_manifest_and_tells_no_place(corpus: Path, tmp_path: Path) -> None:
    result = build(corpus, tmp_path / "out")
    data = (tmp_path / "out" / "manifest.json").read_bytes()
    assert hashlib.sha256(data).hexdigest() == result.manifest_sha256
    assert (tmp_path / "out" / "manifest.sha256").read_text() == f"{result.manifest_sha256}  manifest.json\n"
    assert str(tmp_path).encode() not in data
    value = json.loads(data)
    assert value["tokenizer"]["vocabulary_sha256"] == BytesTokenizer.vocabulary_sha256
    assert value["sources"][0]["sha256"] == hashlib.sha256((corpus / "0.jsonl").read_bytes()).hexdigest()
    assert value["tokens"]["train"] == sum(part["tokens"] for part in value["parts"] if part["split"] == "train")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["manifest.json", "manifest.sha256", "provenance.jsonl", "quarantine.jsonl", "receipts.jsonl"]
        + [Path(part["file"]).stem + end for part in value["parts"] for end in (".bin", ".idx", ".sums")]
    )


def test_bytes_do_not_depend_on_workers_or_place(corpus: Path, tmp_path: Path) -> None:
    alone = build(corpus, tmp_path / "one")
    together = build(corpus, tmp_path / "two", workers=2)
    moved = tmp_path / "elsewhere"
    corpus.rename(moved)
    again = build(moved, tmp_path / "three")
    assert alone.manifest_sha256 == together.manifest_sha256 == again.manifest_sha256
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "three")


def test_small_files_share_parts(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    for number in range(60):
        write_jsonl(f"many/{number:03d}.jsonl", make_documents(2, seed=number))
    result = build(tmp_path / "many", tmp_path / "out", options=BuildOptions(val_fraction=0.1, part_tokens=20_000))
    train = [part.tokens for part in result.manifest.parts_of("train")]
    assert [part.file for part in result.manifest.parts][: len(train)] == [
        f"data_train_{number:06d}.bin" for number in range(len(train))
    ]
    assert len(train) <= 4
    assert max(train) <= 20_000
    # Validation documents of all units are packed together.
    assert len(result.manifest.parts_of("val")) == 1


KILLER = """
import os, signal, sys
import data_pipeline.build as build
from data_pipeline.plan import BuildOptions

countdown = int(sys.argv[3])
def counted(function):
    def call(*arguments, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

os.rename, os.replace, os.fsync = counted(os.rename), counted(os.replace), counted(os.fsync)
options = BuildOptions(val_fraction=0.1, part_tokens=2_000)
build.prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", options=options, workers=1)
"""


def stage(output: Path) -> str:
    """How far a build got."""
    if (output / "manifest.json").exists():
        return "manifest written"
    if (output / "manifest.sha256").exists():
        return "hash of the manifest written"
    if list(output.glob("*.bin")):
        return "parts published"
    return "units committed" if list((output / WORK_DIRECTORY).glob("unit-*[0-9]")) else "nothing committed"


def test_a_killed_build_resumes_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    expected = build(corpus, tmp_path / "expected")
    stages = []
    # Each run dies at its Nth sync or rename and the next goes on from there: in leaps through the units and
    # the publishing of parts, in small steps to the end of it, then once at each of the last nine operations.
    for countdown in [20, *[61] * 8, *[8] * 24, *range(1, 20)]:
        killed = subprocess.run(
            [sys.executable, "-c", KILLER, str(corpus), str(tmp_path / "out"), str(countdown)],
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        stages.append(stage(tmp_path / "out"))
    assert list(dict.fromkeys(stages)) == [
        "nothing committed",
        "units committed",
        "parts published",
        "hash of the manifest written",
        "manifest written",
    ], stages
    assert build(corpus, tmp_path / "out").manifest_sha256 == expected.manifest_sha256
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_committed_units_are_not_done_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build(corpus, tmp_path / "expected").manifest_sha256
    encode, encoded = BytesTokenizer.encode, 0

    def failing(self: BytesTokenizer, text: str) -> Any:
        nonlocal encoded
        encoded += 1
        if encoded == 120:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "out")
    committed = [path.name for path in (tmp_path / "out" / WORK_DIRECTORY).glob("unit-*")]
    assert sorted(committed) == [f"unit-{number:06d}" for number in range(4)]
    log = io.StringIO()
    assert build(corpus, tmp_path / "out", log=log).manifest_sha256 == expected
    assert "8 units of work" in log.getvalue()
    assert "4 of the units done before" in log.getvalue()
    assert encoded == 120 + 100


@pytest.fixture
def long_build(tmp_path: Path, write_jsonl: WriteJsonl) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """``prepare`` with two workers in the middle of its first unit, and its output directory."""
    for number in range(2):
        write_jsonl(f"large/{number}.jsonl", make_documents(15_000, seed=number, words=20))
    process = start_long_build(tmp_path)
    work = tmp_path / "out" / WORK_DIRECTORY
    while not list(work.glob("unit-*.tmp")):
        assert process.poll() is None
        time.sleep(0.005)
    yield process, tmp_path / "out"
    process.kill()


def start_long_build(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--source", str(tmp_path / "large")]
    command += ["--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "2"]
    command += ["--part-tokens", "100000", "--val-fraction", "0.01"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True)


LongBuild = tuple[subprocess.Popen[str], Path]


def test_a_killed_parent_takes_its_workers_along(long_build: LongBuild, tmp_path: Path) -> None:
    process, output = long_build
    process.kill()
    process.communicate(timeout=10)  # to the end of the pipe, which the workers hold open as well
    assert not (output / "manifest.json").exists()
    resumed = start_long_build(tmp_path)
    _, stderr = resumed.communicate()
    assert resumed.returncode == 0, stderr
    assert verify(output)[1] == []


def kill_worker(output: Path) -> str:
    """SIGKILL the worker of the first open unit; returns the unit's name. Its process id is in the directory's."""
    while not (found := sorted((output / WORK_DIRECTORY).glob("unit-*.tmp"))):
        time.sleep(0.005)
    os.kill(int(found[0].name.split("-")[-2]), signal.SIGKILL)
    return found[0].name.split(".")[0]


def test_a_dead_worker_is_replaced_and_its_unit_done_again(long_build: LongBuild) -> None:
    process, output = long_build
    kill_worker(output)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert verify(output)[1] == []


def test_a_unit_that_kills_every_worker_is_named(corpus: Path, tmp_path: Path) -> None:
    # A tokenizer that ends its process without a word, as the kernel does when memory is short.
    script = f"""
import os
from data_pipeline.build import prepare
from data_pipeline.plan import BuildOptions
from data_pipeline.tokenizer import BytesTokenizer

def fatal(self, text):
    os._exit(9)

BytesTokenizer.encode = fatal
if __name__ == "__main__":
    prepare([{str(corpus)!r}], {str(tmp_path / "out")!r}, tokenizer="bytes", workers=2,
            options=BuildOptions(val_fraction=0.1, part_tokens=2_000))
"""
    (tmp_path / "fatal.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    dead = subprocess.run(
        [sys.executable, "fatal.py"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert dead.returncode == 1
    assert "ended its worker process 3 times (exit code 9" in dead.stderr
    assert "0.jsonl" in dead.stderr or "1.jsonl" in dead.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_is_obeyed_cleanly(long_build: LongBuild, number: int, status: int) -> None:
    process, output = long_build
    os.killpg(process.pid, number)  # as a terminal and a scheduler do: to the parent and the workers
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == status
    assert "interrupted; the same command continues where it stopped" in stderr
    assert "Traceback" not in stderr
    assert list((output / WORK_DIRECTORY).glob("unit-*.tmp")) == []


def test_up_to_date(corpus: Path, tmp_path: Path) -> None:
    first = build(corpus, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    second = build(corpus, tmp_path / "out", workers=2)
    assert (first.up_to_date, second.up_to_date) == (False, True)
    assert second.manifest_sha256 == first.manifest_sha256
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_another_data_set_is_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match=r"holds another data set \(other options\)"):
        build(corpus, tmp_path / "out", options=BuildOptions(val_fraction=0.2, part_tokens=2_000))
    with pytest.raises(DataError, match=r"holds another data set \(other tokenizer\)"):
        build(corpus, tmp_path / "out", tokenizer="gpt2")
    with pytest.raises(DataError, match=r"holds another data set \(other sources\)"):
        build(corpus / "0.jsonl", tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(DataError, match="holds parts of another data set"):
        build(corpus, tmp_path / "out")
    del before["manifest.json"]
    assert content(tmp_path / "out") == before


def test_builds_that_share_a_directory_divide_the_work(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    for number in range(4):
        write_jsonl(f"large/{number}.jsonl", make_documents(4_000, seed=number, words=20))
    options = BuildOptions(val_fraction=0.01, part_tokens=50_000)
    expected = build(tmp_path / "large", tmp_path / "alone", options=options)
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--source", str(tmp_path / "large"), "--world", "3"]
    command += ["--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "1"]
    command += ["--part-tokens", "50000", "--val-fraction", "0.01"]
    nodes = [
        subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for rank in range(3)
    ]
    for node in nodes:
        _, stderr = node.communicate(timeout=120)
        assert node.returncode == 0, stderr
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert (tmp_path / "out" / "manifest.sha256").read_text().split()[0] == expected.manifest_sha256
    assert not (tmp_path / "out" / WORK_DIRECTORY).exists()


def test_a_finished_data_set_with_a_missing_part_is_not_up_to_date(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    (tmp_path / "out" / "data_train_000000.bin").unlink()
    with pytest.raises(DataError, match=r"data_train_000000.bin: the part is missing"):
        build(corpus, tmp_path / "out")


def test_an_unfinished_build_of_another_plan_is_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.build.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(corpus, tmp_path / "out")
    with pytest.raises(DataError, match="holds an unfinished build of other options"):
        build(corpus, tmp_path / "out", options=BuildOptions(val_fraction=0.2, part_tokens=2_000))
    assert not build(corpus, tmp_path / "out").up_to_date


def test_an_empty_split_is_refused_with_a_fraction_that_does(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="validation split is empty: none of 200 documents") as caught:
        build(corpus, tmp_path / "out", options=BuildOptions(val_fraction=1e-7, part_tokens=2_000))
    fraction = float(str(caught.value).split("--val-fraction ")[2].split()[0])
    # The refused build is gone: the suggestion can be followed with the same --output.
    result = build(corpus, tmp_path / "out", options=BuildOptions(val_fraction=fraction, part_tokens=2_000))
    assert sum(part.tokens for part in result.manifest.parts_of("val")) >= 1_025


def test_no_validation_split_on_request(corpus: Path, tmp_path: Path) -> None:
    result = build(corpus, tmp_path / "out", options=BuildOptions(val_fraction=0.0, part_tokens=2_000))
    assert result.manifest.parts_of("val") == []
    with pytest.raises(DataError, match="the val split is empty"):
        open_dataset(tmp_path / "out", "val", 8)


def test_duplicates_stay_on_one_side(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    documents = make_documents(50)
    for name in ("a", "b", "c"):
        write_jsonl(f"copies/{name}.jsonl", documents)
    result = build(tmp_path / "copies", tmp_path / "out")
    stored = {
        split: [
            tuple(document)
            for part in result.manifest.parts_of(split)
            for document in megatron_documents(tmp_path / "out" / part.file)
        ]
        for split in ("train", "val")
    }
    assert not set(stored["train"]) & set(stored["val"])
    assert len(stored["val"]) == 3 * len(set(stored["val"])) > 0


def test_gpt2_tokens_reach_the_windows(corpus: Path, tmp_path: Path) -> None:
    options = BuildOptions(name="owt", val_fraction=0.1, part_tokens=10_000)
    build(corpus, tmp_path / "out", tokenizer="gpt2", options=options)
    data = open_dataset(tmp_path / "out", "train", 64)
    assert (data.tokenizer_name, data.vocab_size, data.max_token_id) == ("gpt2", 50_257, 50_256)
    first = next(text for text in make_documents(25) if not is_validation(text_hash(text.encode()), 0.1))
    ids = [50_256, *load_tokenizer("gpt2").encode(first).tolist()]
    assert data.read([0])[0, : len(ids)].tolist() == ids[:65]
    lengths = read_document_lengths(tmp_path / "out" / "owt_train_000000.idx")
    assert lengths[0] == len(ids)


def test_special_token_text_is_text(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    source = write_jsonl("a.jsonl", [f"{n} before <|endoftext|> after" for n in range(60)])
    result = build(source, tmp_path / "out", tokenizer="gpt2")
    read = [d for part in result.manifest.parts for d in megatron_documents(tmp_path / "out" / part.file)]
    assert len(read) == 60
    assert all(document.count(50_256) == 1 and document[0] == 50_256 for document in read)


class PanicException(BaseException):
    """Stands for pyo3's exception of this name, which is no `Exception` either."""


def test_a_tokenizer_that_fails_costs_one_document(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = BytesTokenizer.encode
    victim, impostor = make_documents(25, seed=1)[7], make_documents(25, seed=2)[0]

    def fragile(self: BytesTokenizer, text: str) -> Any:
        if text == victim:
            raise PanicException
        return encode(self, text) + (65_536 if text == impostor else 0)

    monkeypatch.setattr(BytesTokenizer, "encode", fragile)
    result = build(corpus, tmp_path / "out", execution=Execution(max_quarantined=0.02))
    assert (result.manifest.accounting.documents, result.manifest.accounting.quarantined) == (198, 4)
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[:2]] == [
        {"source": "1.jsonl", "row": 7, "reason": "tokenizer failed: PanicException"},
        {"source": "2.jsonl", "row": 0, "reason": "tokenizer failed: ValueError"},
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"options": BuildOptions(part_tokens=2**31)}, "--part-tokens 2,147,483,648 is out of range"),
        ({"options": BuildOptions(part_tokens=10)}, "--part-tokens 10 is out of range"),
        ({"options": BuildOptions(val_fraction=1.0)}, "--val-fraction 1.0 is out of range"),
        ({"options": BuildOptions(name="a/b")}, "--name 'a/b' must be"),
        ({"workers": 0}, "--workers 0 is out of range"),
        ({"tokenizer": "nothing"}, "unknown tokenizer 'nothing'"),
    ],
)
def test_options_out_of_range_are_refused(corpus: Path, tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        build(corpus, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_among_many_stops_the_build_by_name(corpus: Path, tmp_path: Path) -> None:
    (corpus / "5.jsonl").write_bytes(b"<html>502 Bad Gateway</html>")
    with pytest.raises(DataError, match=r"5.jsonl: .*an HTML page"):
        build(corpus, tmp_path / "out", workers=2)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="not a directory"):
        build(corpus / "0.jsonl", tmp_path / "file")


@pytest.mark.parametrize("name", ["data_train_000001.bin", "data_val_000000.idx", "quarantine.jsonl"])
def test_verify_finds_one_flipped_bit(corpus: Path, tmp_path: Path, name: str) -> None:
    build(corpus, tmp_path / "out")
    path = tmp_path / "out" / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    _, problems = verify(tmp_path / "out")
    assert len(problems) == 1
    assert str(path) in problems[0]


def test_verify_finds_missing_and_foreign_files(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(corpus, out)
    (out / "data_train_000000.bin").rename(out / "data_train_000099.bin")
    (out / "data_train_000001.idx").unlink()
    _, problems = verify(out)
    assert [problem.split(": ", 1) for problem in problems] == [
        [
            str(out / "data_train_000000.bin"),
            "the part is missing; run prepare again or copy the data set anew",
        ],
        [
            str(out / "data_train_000001.idx"),
            "the index is missing; run prepare again or copy the data set anew",
        ],
        [str(out / "data_train_000099.bin"), "not in the manifest"],
    ]


def test_a_changed_manifest_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"eot_id": 256', '"eot_id": 255'))
    for reading in (lambda: verify(tmp_path / "out"), lambda: open_dataset(tmp_path / "out", "train", 8)):
        with pytest.raises(DataError, match=r"not what manifest.sha256 says"):
            reading()
    (tmp_path / "out" / "manifest.sha256").write_text(f"{hashlib.sha256(b'{}').hexdigest()}  manifest.json\n")
    path.write_text("{}")
    with pytest.raises(DataError, match="not a manifest of data_pipeline version 2"):
        open_dataset(tmp_path / "out", "train", 8)


def test_a_part_of_another_data_set_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    (tmp_path / "out" / "data_train_000001.bin").replace(tmp_path / "out" / "data_train_000000.bin")
    with pytest.raises(DataError, match=r"data_train_000000.bin: its header says .* the manifest"):
        open_dataset(tmp_path / "out", "train", 8)
