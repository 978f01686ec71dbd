import fcntl
import hashlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from data_pipeline.blocks import hash_file
from data_pipeline.errors import DataError, Stopped
from data_pipeline.hub import download as download_module
from data_pipeline.hub import space
from data_pipeline.hub.download import download, local_path, part_path
from data_pipeline.hub.listing import PRESETS, RemoteFile, describe, is_hub_spec, list_files, read_footer
from data_pipeline.hub.retry import RetryPolicy, TransientError, retried
from data_pipeline.hub.space import check_space
from tests.data_pipeline import hub_standin
from tests.data_pipeline.hub_standin import CHUNK_BYTES, COMMIT, StandIn, cut_after, html_page, status, wrong_bytes

REPOSITORY = Path(__file__).parents[2]
FAST = RetryPolicy(tries=4, first_wait_seconds=0.01, longest_wait_seconds=0.02, timeout_seconds=5.0)
IMPATIENT = RetryPolicy(tries=4, first_wait_seconds=0.01, longest_wait_seconds=0.02, timeout_seconds=0.5)
OWNER = "somebody/texts"
DATA = random.Random(0).randbytes(300_000)
SPEC = f"hf://datasets/{OWNER}/data/*.parquet"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A Hub with one file, which this process takes for the real one."""
    with hub_standin.running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        server.add(OWNER, {"data/a.parquet": DATA})
        yield server


def remote(path: str = "data/a.parquet", data: bytes = DATA, repo_id: str = OWNER) -> RemoteFile:
    return RemoteFile(repo_id, COMMIT, path, len(data), hashlib.sha256(data).hexdigest())


def parquet_bytes(rows: int, group: int, columns: int = 1) -> bytes:
    sink = io.BytesIO()
    table = pa.table({f"column_{number}": [f"text {row}" for row in range(rows)] for number in range(columns)})
    pq.write_table(table, sink, row_group_size=group)
    return sink.getvalue()


def child(hub: StandIn, code: str) -> "subprocess.Popen[str]":
    """A process that finds the Hub as a user's does: by HF_ENDPOINT."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    )


# Listing


def test_specs() -> None:
    assert [is_hub_spec(spec) for spec in (*PRESETS, "hf://datasets/a/b/c", "./openwebtext", "data/*.parquet")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    for wrong in ("hf://datasets/a", "hf://datasets/a/b", "hf://a/b/c.parquet", "hf://datasets/a/b@/x"):
        with pytest.raises(
            DataError, match=r"expected hf://datasets/OWNER/NAME\[@REVISION\]/PATTERN.*fineweb-edu-100b"
        ):
            list_files(wrong)


def test_listing_takes_what_matches(hub: StandIn) -> None:
    files = {
        f"data/{name}": name.encode()
        for name in ("b.parquet", "a.parquet", "c.jsonl.gz", "README.md", "deep/d.parquet", "deep/er/e.parquet")
    }
    hub.add(OWNER, files)

    def paths(spec: str) -> list[str]:
        return [file.path for file in list_files(f"hf://datasets/{OWNER}{spec}", FAST)]

    assert paths("/data/*.parquet") == ["data/a.parquet", "data/b.parquet"]
    assert paths("/data/*") == ["data/a.parquet", "data/b.parquet", "data/c.jsonl.gz"]
    assert paths("/data/**/*.parquet") == [f"data/{name}.parquet" for name in ("a", "b", "deep/d", "deep/er/e")]
    assert paths("/**/[de].parquet") == ["data/deep/d.parquet", "data/deep/er/e.parquet"]
    assert paths(f"@{COMMIT}/data/a.parquet") == ["data/a.parquet"]
    (file,) = list_files(f"hf://datasets/{OWNER}@main/data/a.parquet", FAST)
    assert file == remote(data=b"a.parquet")
    assert describe("x", [file]) == f"x: 1 files, 0.00 GB, of {OWNER}@{COMMIT}, data/a.parquet to data/a.parquet"
    assert {request.authorization for request in hub.requests} == {"Bearer hf_token"}


def test_revisions_with_slashes(hub: StandIn) -> None:
    other = "f" * 40
    hub.add(OWNER, {"p/train/0.parquet": b"converted"}, "refs/convert/parquet", other)
    expected = RemoteFile(OWNER, other, "p/train/0.parquet", 9, hashlib.sha256(b"converted").hexdigest())
    for revision in ("refs/convert/parquet", "refs%2Fconvert%2Fparquet", other):
        assert list_files(f"hf://datasets/{OWNER}@{revision}/p/train/*.parquet", FAST) == [expected]


def test_presets(hub: StandIn) -> None:
    hub.add("HuggingFaceFW/fineweb-edu", {f"sample/{size}BT/0.parquet": size.encode() for size in ("10", "100", "350")})
    assert [file.path for file in list_files("fineweb-edu-100b", FAST)] == ["sample/100BT/0.parquet"]
    assert [file.path for file in list_files("fineweb-edu-10b", FAST)] == ["sample/10BT/0.parquet"]


def test_openwebtext_is_taken_where_it_is_whole(hub: StandIn) -> None:
    name, converted = "Skylion007/openwebtext", "c" * 40
    hub.add(name, {"openwebtext.py": b"script"})
    with pytest.raises(DataError) as error:
        list_files("openwebtext", FAST)
    assert "plain_text/*.parquet matches no file" in str(error.value)
    assert "no revision refs/convert/parquet" in str(error.value)
    hub.add(name, {"plain_text/partial-train/0.parquet": b"a tenth"}, "refs/convert/parquet", converted)
    with pytest.raises(
        DataError, match=r"plain_text/train/\*\.parquet matches no file of .*@refs/convert/parquet; nea"
    ):
        list_files("openwebtext", FAST)
    hub.add(name, {"plain_text/train/0000.parquet": b"all"}, "refs/convert/parquet", converted)
    assert [(file.revision, file.path) for file in list_files("openwebtext", FAST)] == [
        (converted, "plain_text/train/0000.parquet")
    ]
    hub.add(name, {"plain_text/train-00000-of-00080.parquet": b"main"})
    assert [(file.revision, file.path) for file in list_files("openwebtext", FAST)] == [
        (COMMIT, "plain_text/train-00000-of-00080.parquet")
    ]


def test_listing_says_what_is_wrong(hub: StandIn) -> None:
    def message(spec: str) -> str:
        with pytest.raises(DataError) as error:
            list_files(spec, FAST)
        assert str(error.value).startswith(spec)
        return str(error.value)

    text = message("hf://datasets/some/thing/*.parquet")
    assert f"no dataset repository some/thing, or it is private (HTTP 401). Check the name on {hub.url}" in text
    assert "HF_TOKEN" in text
    assert "no such revision" in message(f"hf://datasets/{OWNER}@nope/data/*.parquet")
    text = message(f"hf://datasets/{OWNER}/dato/*.parquet")
    assert "dato/*.parquet matches no file of somebody/texts@main; nearest patterns that do: data/*.parquet" in text
    assert "nearest patterns that do: data/*.parquet" in message(f"hf://datasets/{OWNER}/data/z.parquet")

    hub.add(OWNER, {"README.md": b"hello", "small.parquet": b"in git"}).in_git = {"README.md", "small.parquet"}
    assert "*.md matches 1 files of somebody/texts@main, such as README.md, but none is .parquet" in message(
        f"hf://datasets/{OWNER}/*.md"
    )
    assert "small.parquet has no SHA-256 on the Hub" in message(f"hf://datasets/{OWNER}/*.parquet")
    hub.add(OWNER, {"../../evil.parquet": b"x"})
    assert "lists a file outside of itself: '../../evil.parquet'" in message(f"hf://datasets/{OWNER}/**")


@pytest.mark.parametrize("token", ["hf_token", None])
def test_gated(hub: StandIn, token: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.repositories[OWNER].gated = True
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if not token:
        monkeypatch.delenv("HF_TOKEN")
    expected = rf"no access.*{OWNER} \(HTTP {403 if token else 401}\).*licence on {hub.url}/datasets/{OWNER} .*HF_TOKEN"
    with pytest.raises(DataError, match=expected):
        list_files(SPEC, FAST)
    with pytest.raises(DataError, match=expected):
        download(remote(), tmp_path, policy=FAST)
    assert len(hub.requests) == 2  # no second try
    assert not list(tmp_path.rglob("*.part"))


def test_refused_token(hub: StandIn) -> None:
    hub.api_faults = [status(401, x_error_message="Invalid credentials in Authorization header")]
    with pytest.raises(DataError, match="refuses the token; set HF_TOKEN to a valid one"):
        list_files(SPEC, FAST)


def test_listing_outlasts_bad_moments(hub: StandIn) -> None:
    hub.api_faults = [status(500), status(503), html_page, status(429), html_page, html_page]
    assert list_files(SPEC, RetryPolicy(tries=7, first_wait_seconds=0.01)) == [remote()]
    assert len(hub.requests) == 8
    hub.api_faults = [html_page] * 4
    with pytest.raises(
        DataError, match="4 tries in a row failed, the last one with: expected JSON, the answer is text/h"
    ):
        list_files(SPEC, FAST)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"ConnectError.*http://127.0.0.1:9; run the same command again"):
        list_files(SPEC, FAST)
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example")
    with pytest.raises(
        DataError, match=r"HF_ENDPOINT is .hub\.example.; expected a URL such as https://huggingface\.co"
    ):
        list_files(SPEC, FAST)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set, so nothing can be fetched; unset it"):
        list_files(SPEC, FAST)


# Footers


def test_footer_in_few_bytes(hub: StandIn) -> None:
    small, large = parquet_bytes(1000, 100), parquet_bytes(4000, 10, columns=5)
    assert len(large) > 400_000
    hub.add(OWNER, {"small.parquet": small, "large.parquet": large})
    for name, data, requests in (("small", small, 1), ("large", large, 2)):
        hub.requests.clear()
        hub.body_bytes = 0
        footer = read_footer(remote(f"{name}.parquet", data), FAST)
        assert footer.equals(pq.read_metadata(io.BytesIO(data)))
        assert len(hub.content_requests()) == requests
        assert hub.body_bytes <= min(len(data), (1 << 16) + footer.serialized_size + 8)
    hub.faults = [status(500), html_page, hub_standin.other_range]
    assert read_footer(remote("small.parquet", small), FAST).num_row_groups == 10


def test_footer_of_something_else(hub: StandIn) -> None:
    damaged = parquet_bytes(100, 10)[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1"
    hub.add(OWNER, {"text.parquet": b"hello, this is text", "damaged.parquet": damaged})
    with pytest.raises(DataError, match=r"/text.parquet: expected a parquet file, but it does not end with PAR1"):
        read_footer(remote("text.parquet", b"hello, this is text"), FAST)
    with pytest.raises(DataError, match="damaged parquet file: a footer of 1,073,741,824 bytes in"):
        read_footer(remote("damaged.parquet", damaged), FAST)


# Downloads


class Fetched(NamedTuple):
    """What a download did: bytes reported, starts of its ranges."""

    reported: int
    starts: list[int | None]


def fetch(hub: StandIn, folder: Path, file: RemoteFile | None = None, policy: RetryPolicy = FAST) -> Fetched:
    """Download and check everything that must hold after any success."""
    file = file or remote()
    before, counts = len(hub.content_requests()), []
    path, hashes = download(file, folder, on_bytes=counts.append, policy=policy)
    assert path == folder / file.repo_id / file.path
    assert hashes == hash_file(path)
    assert (hashes.size_bytes, hashes.sha256) == (file.size_bytes, file.sha256)
    assert sorted(path.parent.iterdir()) == [path]
    return Fetched(sum(counts), [request.start for request in hub.content_requests()[before:]])


def test_download_once(hub: StandIn, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [0])
    assert local_path(remote(), tmp_path).read_bytes() == DATA
    assert hub.body_bytes == len(DATA)
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [])
    assert hub.body_bytes == len(DATA)
    # The token goes to the Hub, never to the storage that the Hub leads to.
    tokens = {(request.path.split("/")[1], request.authorization) for request in hub.requests}
    assert tokens == {("datasets", "Bearer hf_token"), ("storage", None)}
    assert {request.encodings for request in hub.requests} == {"identity"}


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES])
def test_sizes(hub: StandIn, tmp_path: Path, size: int) -> None:
    file = remote("data/s.parquet", DATA[:size])
    hub.add(OWNER, {file.path: DATA[:size]})
    assert fetch(hub, tmp_path, file) == Fetched(size, [0] if size else [])


@pytest.mark.parametrize("reset", [False, True])
def test_cut_connections_are_gone_on_from(hub: StandIn, tmp_path: Path, reset: bool) -> None:
    hub.faults = [cut_after(100_000, reset), cut_after(50_000, reset), cut_after(0, reset)]
    done = fetch(hub, tmp_path)
    assert done.reported == len(DATA)
    if not reset:  # a reset may destroy bytes that were on the way
        assert done.starts == [0, 100_000, 150_000, 150_000]
        assert hub.body_bytes == len(DATA)
    assert done.starts == sorted(done.starts)


def test_progress_counts_tries_anew(hub: StandIn, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(9 << 20)
    file = remote("data/big.parquet", data)
    hub.add(OWNER, {file.path: data})
    hub.faults = [cut_after(1 << 20)] * 8
    assert fetch(hub, tmp_path, file).starts == [number << 20 for number in range(9)]
    shutil.rmtree(tmp_path / OWNER / "data")
    hub.faults = [cut_after(1 << 17)] * 8
    with pytest.raises(DataError, match=r"4 tries in a row failed.*at byte 524,288 of 9,437,184: "):
        download(file, tmp_path, policy=FAST)
    hub.faults = []
    assert fetch(hub, tmp_path, file) == Fetched(len(data), [1 << 19])


def test_a_bad_server_is_left_after_a_bounded_number_of_tries(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [status(500)] * 9
    with pytest.raises(DataError, match=rf"4 tries in a row failed, .*HTTP 500\. The server asked was {hub.url}"):
        download(remote(), tmp_path, policy=FAST)
    assert len(hub.faults) == 5
    hub.faults = [status(code) for code in (500, 502, 503)]
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [0] * 4)


@pytest.mark.parametrize(
    "headers",
    [{"Retry_After": "1"}, {"RateLimit": '"resolvers";r=0;t=1'}],
)
def test_the_wait_that_the_server_asks_for(hub: StandIn, tmp_path: Path, headers: dict[str, str]) -> None:
    hub.faults = [status(429, **headers)]
    started = time.monotonic()
    assert fetch(hub, tmp_path).starts == [0, 0]
    assert 1.0 <= time.monotonic() - started < 10.0


def test_a_date_and_a_day_as_retry_after(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")]
    assert fetch(hub, tmp_path).starts == [0, 0]
    local_path(remote(), tmp_path).unlink()
    hub.faults = [status(429, Retry_After="86400")]
    with pytest.raises(
        DataError, match="HTTP 429, and the server asks to wait 86,400 s; run the same command again aft"
    ):
        download(remote(), tmp_path, policy=FAST)


def test_waits_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("data_pipeline.hub.retry._wait", lambda seconds, what, stopped: waits.append(seconds))

    def fails() -> None:
        raise TransientError("no")

    with pytest.raises(DataError, match="8 tries in a row failed, the last one with: no"):
        retried("it", fails)
    longest = [1, 2, 4, 8, 16, 32, 60]
    assert len(waits) == len(longest)
    assert all(limit / 2 <= seconds <= limit for seconds, limit in zip(waits, longest, strict=True))


def test_stalled_and_trickling_connections(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [hub_standin.stall_after(CHUNK_BYTES, 30.0), hub_standin.trickle(0.02)]
    started = time.monotonic()
    done = fetch(hub, tmp_path, policy=IMPATIENT)
    assert done.starts[:2] == [0, CHUNK_BYTES]
    assert CHUNK_BYTES < (done.starts[2] or 0) < CHUNK_BYTES + 1000
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (html_page, "the answer is an HTML page, not the file"),
        (hub_standin.other_page, "the answer has 14 bytes, the file 300,000"),
        (
            hub_standin.other_range,
            "asked for bytes from 100,000 of 300,000, the answer holds bytes 100001-299999/300000",
        ),
    ],
)
def test_what_is_not_the_file_never_touches_it(
    hub: StandIn, tmp_path: Path, fault: hub_standin.Fault, reason: str
) -> None:
    hub.faults = [cut_after(100_000), fault, fault, fault]
    with pytest.raises(DataError, match=reason.replace("?", r"\?")):
        download(remote(), tmp_path, policy=FAST)
    assert part_path(remote(), tmp_path).read_bytes() == DATA[:100_000]
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [100_000])


def test_a_server_without_ranges(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [hub_standin.no_ranges(100_000), hub_standin.no_ranges(len(DATA))]
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [0, 100_000])
    assert hub.body_bytes == 100_000 + len(DATA)


def test_a_server_without_ranges_that_never_gets_through(hub: StandIn, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 << 20)
    file = remote("data/big.parquet", data)
    hub.add(OWNER, {file.path: data})
    hub.faults = [hub_standin.no_ranges(3 << 19), hub_standin.no_ranges(0)] * 9
    with pytest.raises(DataError, match="4 tries in a row failed"):
        download(file, tmp_path, policy=FAST)
    assert len(hub.faults) == 14


def test_wrong_bytes_are_fetched_anew(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [wrong_bytes, wrong_bytes]
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [0, 0, 0])


def test_wrong_bytes_always(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [wrong_bytes] * 9
    wrong = hashlib.sha256(bytes([DATA[0] ^ 1]) + DATA[1:]).hexdigest()
    with pytest.raises(DataError, match=f"fetched 3 times and never right.*SHA-256 {wrong}.*says {remote().sha256}"):
        download(remote(), tmp_path, policy=FAST)
    assert len(hub.faults) == 6
    assert list((tmp_path / OWNER / "data").iterdir()) == []


def test_damage_on_the_disk_is_repaired(hub: StandIn, tmp_path: Path) -> None:
    path = local_path(remote(), tmp_path)
    path.parent.mkdir(parents=True)
    for damaged in (bytes(len(DATA)), DATA[:1000], DATA + b"x"):
        path.write_bytes(damaged)
        assert fetch(hub, tmp_path) == Fetched(len(DATA), [0])
        path.unlink()
    for damaged, starts in ((b"x" * 1000, [1000, 0]), (DATA + b"x", [0]), (DATA, []), (bytes(len(DATA)), [0])):
        part_path(remote(), tmp_path).write_bytes(damaged)
        assert fetch(hub, tmp_path) == Fetched(len(DATA), starts)
        path.unlink()


def test_another_version_is_another_part_file(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [cut_after(100_000)]
    with pytest.raises(DataError):
        download(remote(), tmp_path, policy=RetryPolicy(tries=1))
    other = remote(data=DATA[::-1])
    hub.add(OWNER, {other.path: DATA[::-1]})
    _, hashes = download(other, tmp_path, policy=FAST)
    assert hashes.sha256 == other.sha256
    assert [request.start for request in hub.content_requests()] == [0, 0]


def test_expired_addresses_are_asked_for_again(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [cut_after(100_000), status(403)]
    assert fetch(hub, tmp_path).starts == [0, 100_000, 100_000]
    assert sum(request.path.startswith("/datasets/") for request in hub.requests) == 3


def test_deleted_from_the_hub(hub: StandIn, tmp_path: Path) -> None:
    hub.add(OWNER, {"data/b.parquet": b"b"})
    with pytest.raises(DataError, match=rf"a\.parquet: not found in {OWNER} \(HTTP 404\)"):
        download(remote(), tmp_path, policy=FAST)
    assert len(hub.requests) == 1
    with pytest.raises(DataError, match="the path leads out of the download directory"):
        download(remote("../a.parquet"), tmp_path, policy=FAST)


def test_stopped(hub: StandIn, tmp_path: Path) -> None:
    counts: list[int] = []
    with pytest.raises(Stopped):
        download(remote(), tmp_path, on_bytes=counts.append, stopped=lambda: sum(counts) >= 100_000, policy=FAST)
    fetched = part_path(remote(), tmp_path).stat().st_size
    assert 100_000 <= fetched == sum(counts) < len(DATA)
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [fetched])

    shutil.rmtree(tmp_path / OWNER / "data")
    hub.faults = [status(429, Retry_After="60")]
    started = time.monotonic()
    with pytest.raises(Stopped):
        download(remote(), tmp_path, stopped=lambda: time.monotonic() - started > 0.3, policy=FAST)
    assert time.monotonic() - started < 10.0


def test_many_threads_one_download(hub: StandIn, tmp_path: Path) -> None:
    hub.faults = [cut_after(100_000), cut_after(100_000)]
    barrier = threading.Barrier(6)

    def ask(_: int) -> str:
        barrier.wait()
        return download(remote(), tmp_path, policy=FAST)[1].sha256

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {remote().sha256}
    assert [request.start for request in hub.content_requests()] == [0, 100_000, 200_000]
    assert [path.name for path in (tmp_path / OWNER / "data").iterdir()] == ["a.parquet"]


def test_stopped_while_another_one_fetches(hub: StandIn, tmp_path: Path) -> None:
    part = part_path(remote(), tmp_path)
    part.parent.mkdir(parents=True)
    started = time.monotonic()
    with open(part, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Stopped):
            download(remote(), tmp_path, stopped=lambda: time.monotonic() - started > 0.2, policy=FAST)
    assert hub.requests == []


def test_a_part_file_renamed_between_open_and_lock(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process that finishes at that moment does."""
    part, target = part_path(remote(), tmp_path), local_path(remote(), tmp_path)
    try_lock = download_module._try_lock
    locked = []

    def late(descriptor: int) -> bool:
        if not locked:
            part.write_bytes(DATA)
            part.rename(target)
        locked.append(descriptor)
        return try_lock(descriptor)

    monkeypatch.setattr(download_module, "_try_lock", late)
    assert fetch(hub, tmp_path) == Fetched(len(DATA), [])
    assert len(locked) == 2


def test_full_disk(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def full(descriptor: int, data: memoryview, position: int) -> int:
        if position >= 1 << 16:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: (1 << 16) - position], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match=r"a\.parquet\..*\.part: the disk is full; 234,464 more bytes are needed"):
        download(remote(), tmp_path, policy=FAST)
    monkeypatch.undo()
    assert part_path(remote(), tmp_path).read_bytes() == DATA[: 1 << 16]


# Processes


def test_killed_downloads_are_finished_by_others(hub: StandIn, tmp_path: Path) -> None:
    """By HF_ENDPOINT, as a user would: list, lose the process in the middle, ask twice at once for the rest."""
    hub.faults = [hub_standin.stall_after(100_000, 60.0)]
    code = (
        "import sys; from pathlib import Path\n"
        "from data_pipeline.hub.listing import list_files; from data_pipeline.hub.download import download\n"
        f"file, = list_files({SPEC!r})\n"
        f"print(download(file, Path({str(tmp_path)!r}))[1].sha256)\n"
    )
    part = part_path(remote(), tmp_path)
    with child(hub, code) as first:
        deadline = time.monotonic() + 15
        while not (part.exists() and part.stat().st_size == 100_000) and time.monotonic() < deadline:
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    assert part.read_bytes() == DATA[:100_000]
    with child(hub, code) as second, child(hub, code) as third:
        outputs = [process.communicate(timeout=30)[0] for process in (second, third)]
    assert outputs == [f"{remote().sha256}\n"] * 2  # and nothing else on stdout
    assert local_path(remote(), tmp_path).read_bytes() == DATA
    assert [request.start for request in hub.content_requests()] == [0, 100_000]
    assert hub.body_bytes == len(DATA)
    assert [path.name for path in (tmp_path / OWNER / "data").iterdir()] == ["a.parquet"]


def test_the_official_client_takes_the_stand_in_for_a_hub(hub: StandIn, tmp_path: Path) -> None:
    hub.add(OWNER, {f"data/{number}.parquet": f"{number}".encode() for number in range(5)})
    code = (
        "from huggingface_hub import HfApi, hf_hub_download\n"
        f"api = HfApi(); sha = api.dataset_info({OWNER!r}).sha\n"
        f"tree = api.list_repo_tree({OWNER!r}, 'data', recursive=True, revision=sha, repo_type='dataset')\n"
        "print([(file.path, file.size, file.lfs.sha256) for file in tree])\n"
        f"path = hf_hub_download({OWNER!r}, 'data/3.parquet', repo_type='dataset', revision=sha,"
        f" local_dir={str(tmp_path)!r})\n"
        "print(sha, open(path).read())\n"
    )
    with child(hub, code) as process:
        output = process.communicate(timeout=30)[0]
    ours = list_files(SPEC, FAST)
    assert len(ours) == 5
    assert output == f"{[(file.path, file.size_bytes, file.sha256) for file in ours]}\n{COMMIT} 3\n"


# Space


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, tuple[int, int]]:
    """Number and free bytes of the file systems of the two directories."""
    table = {"raw": (1, 0), "out": (1, 0)}
    monkeypatch.setattr(space, "_disk", lambda path: table[path.name])
    return table


def test_space(disks: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    folder, output = tmp_path / "raw", tmp_path / "out"
    files = [RemoteFile(OWNER, COMMIT, f"{number}.parquet", 1000, "a" * 64) for number in range(10)]

    def message(keep: bool, ahead: int = 3) -> str:
        try:
            check_space(files, folder, output, keep=keep, ahead=ahead)
        except DataError as error:
            return str(error)
        return "fits"

    # One file system: 10,000 (or 3 x 1,000) of downloads and 8,000 of output.
    disks.update(raw=(1, 17_999), out=(1, 17_999))
    assert message(keep=True) == (
        f"{folder} and {output}: not enough space on their file system: 18,000 bytes are needed (10,000 for downloads, "
        "about 8,000 for the output), 17,999 are free; --delete-downloads needs 11,000 bytes and would do"
    )
    assert message(keep=False) == "fits"
    disks.update(raw=(1, 18_000), out=(1, 18_000))
    assert message(keep=True) == "fits"
    disks.update(raw=(1, 10_999), out=(1, 10_999))
    assert message(keep=False).endswith(
        "11,000 bytes are needed (3,000 for downloads, about 8,000 for the output), 10,999 are free; "
        "give another --download-dir, on a file system of its own"
    )
    disks.update(raw=(1, 7_999), out=(1, 7_999))
    assert message(keep=True).endswith("give --output and --download-dir on a larger file system")
    # Two.
    disks.update(raw=(1, 9_999), out=(2, 8_000))
    assert message(keep=True) == (
        f"{folder}: not enough space for downloads: 10,000 bytes are needed, 9,999 are free; "
        "--delete-downloads needs 3,000 bytes and would do"
    )
    assert message(keep=False) == "fits"
    disks.update(raw=(1, 2_999), out=(2, 7_999))
    assert message(keep=False).endswith("3,000 bytes are needed, 2,999 are free; give another --download-dir")
    disks.update(raw=(1, 10_000))
    assert message(keep=True) == (
        f"{output}: not enough space for the output: about 8,000 bytes are needed, 7,999 are free; "
        "give another --output"
    )
    # What is here needs no room: a whole file, a part of one, and bytes of the output.
    local_path(files[0], folder).parent.mkdir(parents=True)
    (output / ".build").mkdir(parents=True)
    local_path(files[0], folder).write_bytes(bytes(1000))
    local_path(files[1], folder).write_bytes(bytes(999))  # another size: fetched again
    part_path(files[2], folder).write_bytes(bytes(400))
    (output / ".build/unit.bin").write_bytes(bytes(5_000))
    disks.update(raw=(1, 11_599), out=(1, 11_599))
    assert "11,600 bytes are needed (8,600 for downloads, about 3,000 for the output)" in message(keep=True)
    disks.update(raw=(1, 11_600), out=(1, 11_600))
    assert message(keep=True) == "fits"


def test_space_for_the_largest_at_a_time(disks: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    files = [RemoteFile(OWNER, COMMIT, f"{size}.parquet", size, "a" * 64) for size in (100, 5000, 300, 4000)]
    disks.update(raw=(1, 8_999), out=(2, 10_000))
    with pytest.raises(DataError, match="9,000 bytes are needed"):
        check_space(files, tmp_path / "raw", tmp_path / "out", keep=False, ahead=2)
    check_space(files, tmp_path / "raw", tmp_path / "out", keep=False, ahead=1)


def test_space_of_real_directories(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    huge = RemoteFile(OWNER, COMMIT, "huge.parquet", 4 * free, "a" * 64)
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path / 'a/b'} and {tmp_path / 'c'}: not enough space on their")
    ):
        check_space([huge], tmp_path / "a/b", tmp_path / "c", keep=True, ahead=1)
    check_space([remote()], tmp_path / "a/b", tmp_path / "c", keep=True, ahead=1)
    assert list(tmp_path.iterdir()) == []
