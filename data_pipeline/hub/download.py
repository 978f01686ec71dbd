"""Files of the Hub on this disk: resumed, checked against the Hub's SHA-256, safe for any number of processes.

A download grows in ``NAME.SHA256.part`` beside its destination and is renamed once its hash is right, so a file
under its own name is whole, and a part file never holds bytes of another version.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import get_session

from data_pipeline.blocks import FileHashes, hash_file
from data_pipeline.durable import sync_directory
from data_pipeline.errors import DataError, Stopped
from data_pipeline.hub.remote import RemoteFile, check_range, file_url, request_headers
from data_pipeline.hub.retry import (
    DEFAULT_POLICY,
    RetryPolicy,
    TransientError,
    check_answer,
    failure_reason,
    retried,
)

_WHOLE_FETCHES = 3
_PROGRESS_BYTES = 1 << 20  # this much more starts the count of failures anew
_SLOWEST_BYTES = 1 << 14  # in each time-out's length; less is a stalled connection
_LOCK_POLL_SECONDS = 0.1
_LOG = logging.getLogger(__name__)


def download(
    file: RemoteFile,
    folder: Path,
    *,
    on_bytes: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> tuple[Path, FileHashes]:
    """Fetch a file to ``folder``/OWNER/NAME/<its path in the repository>, unless it is there and right already.

    Any number of threads and processes may ask for the same file; one of them fetches.

    Args:
        file: which.
        folder: made if it is missing.
        on_bytes: told how many more bytes are here, negative where some were thrown away; the sum over one call
            is the file's size, whether they came from the network or were found on the disk.
        stopped: asked between pieces, between tries and while another process fetches.
        policy: how long to go on without progress.

    Returns:
        The path and the hashes of what lies there, equal to the Hub's record.

    Raises:
        DataError: the Hub does not answer or gives other bytes three times, or the disk is full.
        Stopped: as ``stopped`` says; the same call goes on from what was fetched.
    """
    target = local_path(file, folder)
    part = part_path(file, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    count = on_bytes or (lambda count: None)
    stopped = stopped or (lambda: False)
    with _locked(part, stopped, file) as descriptor:
        if file_size(target) == file.size_bytes:
            hashes = hash_file(target)
            if hashes.sha256 == file.sha256:
                part.unlink()
                count(file.size_bytes)
                return target, hashes
        target.unlink(missing_ok=True)
        hashes = _Transfer(file, part, descriptor, count, stopped, policy).run()
        os.fsync(descriptor)
        os.replace(part, target)
        sync_directory(target.parent)
        return target, hashes


def local_path(file: RemoteFile, folder: Path) -> Path:
    """Where `download` puts a file; `DataError` for a path that leads out of ``folder``."""
    if os.path.isabs(file.path) or ".." in file.path.split("/"):
        raise DataError(f"{file}: the path leads out of the download directory {folder}")
    return folder / file.repo_id / file.path


def part_path(file: RemoteFile, folder: Path) -> Path:
    """Where a download grows: named by its content, so another revision's bytes are never gone on from."""
    target = local_path(file, folder)
    return target.with_name(f"{target.name}.{file.sha256[:16]}.part")


@dataclass
class _Transfer:
    """A download under way; the part file is locked by this process and open as ``descriptor``.

    ``mark`` is the size at which tries were last counted anew: a server without ranges may throw the part file back,
    and getting as far again is no progress.
    """

    file: RemoteFile
    part: Path
    descriptor: int
    count: Callable[[int], None]
    stopped: Callable[[], bool]
    policy: RetryPolicy
    mark: int = 0

    def run(self) -> FileHashes:
        """Complete the part file and check it; from scratch again where its hash is another one."""
        found = os.fstat(self.descriptor).st_size
        if found > self.file.size_bytes:
            os.ftruncate(self.descriptor, 0)
        else:
            self.count(found)
            self.mark = found
        for _ in range(_WHOLE_FETCHES):
            retried(str(self.file), self._fetch_rest, self.policy, self.stopped)
            hashes = hash_file(self.part)
            if (hashes.size_bytes, hashes.sha256) == (self.file.size_bytes, self.file.sha256):
                return hashes
            _LOG.warning("%s: SHA-256 %s, expected %s; fetched anew", self.file, hashes.sha256, self.file.sha256)
            os.ftruncate(self.descriptor, 0)
            self.count(-self.file.size_bytes)
            self.mark = 0
        raise DataError(
            f"{self.file}: fetched {_WHOLE_FETCHES} times and never right: the last one has SHA-256 {hashes.sha256}, "
            f"the Hub's record says {self.file.sha256}. Nothing of it was kept; look for a proxy or a mirror that "
            "changes files, or a failing disk"
        )

    def _fetch_rest(self) -> None:
        """One request for what the part file lacks, written as it comes.

        Bytes arrive in pieces of at most 64 KiB and each is written at once: a kill loses one piece.
        """
        size = self.file.size_bytes
        start = have = os.fstat(self.descriptor).st_size
        if have == size:
            return
        try:
            with get_session().stream(
                "GET", file_url(self.file), headers=request_headers(start), timeout=self.policy.timeout_seconds
            ) as response:
                if _first_byte(response, self.file, start) != start:
                    # A server without ranges: what is here must come again.
                    os.ftruncate(self.descriptor, 0)
                    self.count(-start)
                    have = 0
                window = _Window(self.policy.timeout_seconds)
                for piece in response.iter_raw():
                    if have + len(piece) > size:
                        raise TransientError(f"more than the file's {size:,} bytes came")
                    self._write(piece, have)
                    have += len(piece)
                    self.count(len(piece))
                    if self.stopped():
                        raise Stopped(str(self.file))
                    if have < size:
                        window.add(len(piece))
            if have < size:
                raise TransientError("the connection ended early")
        except httpx2.UnsupportedProtocol:
            raise
        except (TransientError, httpx2.TransportError) as error:
            wait = error.wait_seconds if isinstance(error, TransientError) else None
            progressed = have >= self.mark + _PROGRESS_BYTES
            if progressed:
                self.mark = have
            reason = f"at byte {have:,} of {size:,}: {failure_reason(error, self.policy)}"
            raise TransientError(reason, wait, progressed) from error

    def _write(self, piece: bytes, position: int) -> None:
        view = memoryview(piece)
        try:
            while view:
                written = os.pwrite(self.descriptor, view, position)
                position += written
                view = view[written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"{self.part}: the disk is full; {self.file.size_bytes - position:,} more bytes are needed for this "
                "file. Free them and run the same command again, it goes on from here"
            ) from error


class _Window:
    """Watches that a connection moves: a server that sends a byte now and then never times out by itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start()

    def _start(self) -> None:
        self._end, self._bytes = time.monotonic() + self._seconds, 0

    def add(self, count: int) -> None:
        """Count bytes; `TransientError` where too few came in the window that just ended."""
        self._bytes += count
        if time.monotonic() > self._end:
            if self._bytes < _SLOWEST_BYTES:
                raise TransientError(f"only {self._bytes:,} bytes came in {self._seconds:g} s")
            self._start()


def _first_byte(response: httpx2.Response, file: RemoteFile, start: int) -> int:
    """The position of the first byte that an answer holds, after checking that it is one of this file."""
    if response.status_code == 416:
        raise TransientError("HTTP 416: the server's file is a shorter one")
    check_answer(response, str(file), file.repo_id)
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/html"):
        raise TransientError("the answer is an HTML page, not the file (a proxy's or a login page?)")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TransientError(f"the answer is compressed ({response.headers['content-encoding']})")
    if response.status_code == 206:
        check_range(response, file, start)
        return start
    length = response.headers.get("content-length")
    if length and int(length) != file.size_bytes:
        raise TransientError(f"the answer has {int(length):,} bytes, the file {file.size_bytes:,}")
    return 0


@contextmanager
def _locked(part: Path, stopped: Callable[[], bool], file: RemoteFile) -> Iterator[int]:
    """The part file, open and nobody else's; a process that dies leaves no lock behind."""
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not _try_lock(descriptor):
                if stopped():
                    raise Stopped(str(file))
                time.sleep(_LOCK_POLL_SECONDS)
            elif _same(part, descriptor):
                # Else whoever had it before renamed or deleted it, and this locks nothing that has a name.
                try:
                    yield descriptor
                finally:
                    if _same(part, descriptor) and not os.fstat(descriptor).st_size:
                        part.unlink()
                return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def file_size(path: Path) -> int:
    """Size in bytes, -1 where there is no such file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1
