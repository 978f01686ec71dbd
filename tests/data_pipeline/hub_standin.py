"""A small Hub on loopback: the listing, the ranged downloads and the bad moments of the real one.

The addresses, headers and shapes of the answers are those that huggingface_hub's own client reads; a test drives
that client against this server to hold it to that.
"""

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE_ENTRIES = 3
CHUNK_BYTES = 1 << 14


@dataclass
class Repository:
    """A dataset repository.

    Attributes:
        revisions: files of each revision by path.
        commits: the commit of each revision.
        in_git: paths stored in git itself, so without an LFS record.
        gated: whether every request is refused as the Hub refuses one without an accepted licence.
    """

    revisions: dict[str, dict[str, bytes]]
    commits: dict[str, str]
    in_git: set[str] = field(default_factory=set)
    gated: bool = False

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Files of a revision, by its name or commit."""
        names = {commit: name for name, commit in self.commits.items()}
        return self.revisions.get(names.get(revision, revision))


@dataclass(frozen=True)
class Request:
    """A request that came: method, path, where its range starts (None without one), token, encodings it takes."""

    method: str
    path: str
    start: int | None
    authorization: str | None
    encodings: str | None


# What goes wrong with a request, decided by the test: takes the handler and the body's bytes from the range's start,
# answers the request itself and returns True, or returns False for the ordinary answer.
Fault = Callable[["Handler", bytes], bool]


class StandIn(ThreadingHTTPServer):
    """The server.

    Attributes:
        repositories: by name.
        faults: taken from the front, one for each request of file content; an empty list is good weather.
        api_faults: the same for requests of the API.
        requests: all that came.
        body_bytes: bytes of file content that were sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.api_faults: list[Fault] = []
        self.requests: list[Request] = []
        self.body_bytes = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def storage_url(self) -> str:
        """The same server under another host name, as the real storage is: tokens must not be sent there."""
        return f"http://localhost:{self.server_port}"

    def add(self, repo_id: str, files: dict[str, bytes], revision: str = "main", commit: str = COMMIT) -> Repository:
        repository = self.repositories.setdefault(repo_id, Repository({}, {}))
        repository.revisions[revision] = files
        repository.commits[revision] = commit
        return repository

    def content_requests(self) -> list[Request]:
        return [request for request in self.requests if request.path.startswith("/storage/")]

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StandIn

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else None
        with self.server.lock:
            self.server.requests.append(
                Request(self.command, path, start, self.headers["Authorization"], self.headers["Accept-Encoding"])
            )
        if path.startswith("/api/datasets/"):
            self._api(path.removeprefix("/api/datasets/"))
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]))
        elif path.startswith("/storage/"):
            self._storage(path.removeprefix("/storage/"), ranged)
        else:
            self.answer(404, b"{}")

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """A whole answer; ``x_error_code="..."`` becomes X-Error-Code."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def start_content(self, rest: bytes, status: int = 206) -> None:
        """Headers of an answer with file content from the range's start on."""
        start, total = self.range
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(rest) - 1}/{total}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def send_content(self, data: bytes) -> None:
        """File content, counted."""
        for offset in range(0, len(data), CHUNK_BYTES):
            piece = data[offset : offset + CHUNK_BYTES]
            self.wfile.write(piece)
            with self.server.lock:
                self.server.body_bytes += len(piece)

    def cut(self) -> None:
        """End the connection in order, with the answer unfinished."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def reset(self) -> None:
        """End the connection with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Silent."""

    def _api(self, path: str) -> None:
        if self._fault(self.server.api_faults, b""):
            return
        owner, name, action, revision, *rest = (*path.split("/", 4), "", "", "")
        repo_id = f"{owner}/{name}"
        repository = self.server.repositories.get(repo_id)
        if not self._may_read(repository):
            return
        files = repository.at(unquote(revision or "main"))
        if files is None:
            self.answer(404, b'{"error": "Invalid rev id"}', x_error_code="RevisionNotFound")
        elif action in ("revision", ""):
            commit = repository.commits.get(unquote(revision or "main"), unquote(revision))
            self.answer(200, json.dumps({"id": repo_id, "sha": commit, "siblings": []}).encode())
        else:
            self._tree(repository, files, unquote(rest[0]).strip("/"))

    def _tree(self, repository: Repository, files: dict[str, bytes], folder: str) -> None:
        inside = sorted(path for path in files if not folder or path.startswith(f"{folder}/"))
        if folder and not inside:
            self.answer(404, b'{"error": "no such entry"}', x_error_code="EntryNotFound")
            return
        folders = sorted({path.rpartition("/")[0] for path in inside} - {"", folder})
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders]
        for path in inside:
            entry = {"type": "file", "oid": "1" * 40, "size": len(files[path]), "path": path}
            if path not in repository.in_git:
                sha256 = hashlib.sha256(files[path]).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(files[path]), "pointerSize": 134}
            entries.append(entry)
        query = parse_qs(urlsplit(self.path).query)
        first = int(query.get("cursor", ["0"])[0])
        page, more = entries[first : first + PAGE_ENTRIES], len(entries) > first + PAGE_ENTRIES
        following = f"{self.server.url}{urlsplit(self.path).path}?recursive=true&cursor={first + PAGE_ENTRIES}"
        self.answer(200, json.dumps(page).encode(), **({"Link": f'<{following}>; rel="next"'} if more else {}))

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self.server.repositories.get(repo_id)
        if not self._may_read(repository):
            return
        files = repository.at(revision)
        if files is None or path not in files:
            self.answer(404, b"", x_error_code="EntryNotFound" if files is not None else "RevisionNotFound")
            return
        sha256 = hashlib.sha256(files[path]).hexdigest()
        self.answer(
            302,
            b"",
            X_Repo_Commit=repository.commits.get(revision, revision),
            X_Linked_Etag=f'"{sha256}"',
            X_Linked_Size=str(len(files[path])),
            Location=f"{self.server.storage_url}/storage/{sha256}?signature=secret",
        )

    def _storage(self, sha256: str, ranged: re.Match[str] | None) -> None:
        contents = (
            data
            for repository in self.server.repositories.values()
            for files in repository.revisions.values()
            for data in files.values()
        )
        data = next(data for data in contents if hashlib.sha256(data).hexdigest() == sha256)
        start = int(ranged[1]) if ranged else 0
        stop = int(ranged[2]) + 1 if ranged and ranged[2] else len(data)
        self.range = start, len(data)
        self.whole = data
        rest = data[start:stop]
        if self._fault(self.server.faults, rest):
            return
        if start >= len(data):
            self.answer(416, b"", Content_Range=f"bytes */{len(data)}")
            return
        self.start_content(rest, 206 if ranged else 200)
        if self.command != "HEAD":
            self.send_content(rest)

    def _may_read(self, repository: Repository | None) -> bool:
        """Refuse as the Hub does: 401 for what is not there (it does not tell), 401 or 403 for what is gated."""
        if repository is None:
            self.answer(401, b'{"error": "Repository not found"}', x_error_code="RepoNotFound")
        elif repository.gated:
            status = 403 if self.headers.get("Authorization") else 401
            self.answer(status, b'{"error": "Access to dataset is restricted"}', x_error_code="GatedRepo")
        else:
            return True
        return False

    def _fault(self, faults: list[Fault], rest: bytes) -> bool:
        with self.server.lock:
            fault = faults.pop(0) if faults else None
        return fault(self, rest) if fault else False


def status(code: int, **headers: str) -> Fault:
    """Answer with a status."""

    def fault(handler: Handler, rest: bytes) -> bool:
        handler.answer(code, b'{"error": "later"}', **headers)
        return True

    return fault


def cut_after(count: int, reset: bool = False) -> Fault:
    """Promise everything, send ``count`` bytes, go away."""

    def fault(handler: Handler, rest: bytes) -> bool:
        handler.start_content(rest)
        handler.send_content(rest[:count])
        handler.reset() if reset else handler.cut()
        return True

    return fault


def stall_after(count: int, seconds: float) -> Fault:
    """Send ``count`` bytes, then nothing, with the connection open."""

    def fault(handler: Handler, rest: bytes) -> bool:
        handler.start_content(rest)
        handler.send_content(rest[:count])
        time.sleep(seconds)
        handler.cut()
        return True

    return fault


def trickle(pause_seconds: float) -> Fault:
    """Send a byte now and then, so that no read times out."""

    def fault(handler: Handler, rest: bytes) -> bool:
        handler.start_content(rest)
        for offset in range(len(rest)):
            handler.send_content(rest[offset : offset + 1])
            time.sleep(pause_seconds)
        return True

    return fault


def wrong_bytes(handler: Handler, rest: bytes) -> bool:
    """All bytes, one bit of them another."""
    handler.start_content(rest)
    handler.send_content(bytes([rest[0] ^ 1]) + rest[1:])
    return True


def html_page(handler: Handler, rest: bytes) -> bool:
    """What a proxy in the way says."""
    handler.answer(200, b"<!DOCTYPE html><html><body>Please log in</body></html>", "text/html; charset=utf-8")
    return True


def other_page(handler: Handler, rest: bytes) -> bool:
    """The same from a proxy that does not tell the type."""
    handler.answer(200, b"quota exceeded", "application/octet-stream")
    return True


def no_ranges(count: int) -> Fault:
    """The file from its start, whatever the range, and of that the first ``count`` bytes."""

    def fault(handler: Handler, rest: bytes) -> bool:
        whole = handler.whole
        handler.start_content(whole, 200)
        handler.send_content(whole[:count])
        if count < len(whole):
            handler.cut()
        return True

    return fault


def other_range(handler: Handler, rest: bytes) -> bool:
    """A 206 that starts somewhere else."""
    start, total = handler.range
    handler.range = start + 1, total
    handler.start_content(rest[1:])
    handler.send_content(rest[1:])
    return True


@contextmanager
def running() -> Iterator[StandIn]:
    """A server on a free port of loopback."""
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
