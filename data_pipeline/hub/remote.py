"""One file of a dataset repository on the Hub: its record, its address, ranges of it, its parquet footer."""

import re
import struct
from dataclasses import dataclass

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants, get_session, get_token, hf_hub_url

from data_pipeline.errors import DataError
from data_pipeline.hub.retry import DEFAULT_POLICY, RetryPolicy, TransientError, check_answer, retried

_MAGIC = b"PAR1"
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RemoteFile:
    """One file of a dataset repository.

    Attributes:
        repo_id: OWNER/NAME.
        revision: the commit, 40 hexadecimal digits.
        path: in the repository.
        size_bytes: of the file.
        sha256: of the file, as the Hub recorded it when it was uploaded.
    """

    repo_id: str
    revision: str
    path: str
    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        """Its address, as one may type it as a source."""
        return f"hf://datasets/{self.repo_id}@{self.revision}/{self.path}"


def read_footer(file: RemoteFile, policy: RetryPolicy = DEFAULT_POLICY) -> pq.FileMetaData:
    """Read a parquet file's metadata in one or two ranged requests.

    Only the hash of the whole file vouches for these bytes: compare with the downloaded file's footer.

    Raises:
        DataError: not a parquet file, or the Hub does not answer.
    """
    tail = _read_tail(file, min(file.size_bytes, _TAIL_BYTES), policy)
    if len(tail) < 12 or tail[-4:] != _MAGIC:
        raise DataError(f"{file}: expected a parquet file, but it does not end with {_MAGIC.decode()}")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length + 12 > file.size_bytes:
        raise DataError(f"{file}: damaged parquet file: a footer of {length:,} bytes in {file.size_bytes:,} bytes")
    if length + 8 > len(tail):
        tail = _read_tail(file, length + 8, policy)
    try:
        return pq.read_metadata(pa.BufferReader(_MAGIC + tail[-length - 8 :]))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: damaged parquet footer: {error}") from error


def request_headers(start: int | None = None, stop: int | None = None) -> dict[str, str]:
    """Headers of a request: the user's token, no compression, and bytes ``start`` to before ``stop``.

    Made here because the library's ``build_hf_headers`` fetches a registry from the Hub on its own, for telemetry.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": "data_pipeline"}
    if not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and (token := get_token()):
        headers["Authorization"] = f"Bearer {token}"
    if start is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    return headers


def file_url(file: RemoteFile) -> str:
    """Where a file is fetched; the Hub leads on to a signed address of its storage."""
    url = hf_hub_url(file.repo_id, file.path, repo_type="dataset", revision=file.revision, endpoint=constants.ENDPOINT)
    return str(url)


def check_range(response: httpx2.Response, file: RemoteFile, start: int) -> None:
    """Check that a 206 holds bytes of ``file`` from ``start`` on; `TransientError` otherwise."""
    expected = re.compile(rf"bytes {start}-\d+/(?:{file.size_bytes}|\*)")
    found = response.headers.get("content-range", "nothing")
    if not expected.fullmatch(found.strip()):
        raise TransientError(f"asked for bytes from {start:,} of {file.size_bytes:,}, the answer holds {found}")


def _read_tail(file: RemoteFile, count: int, policy: RetryPolicy) -> bytes:
    """The last ``count`` bytes of a file."""
    start = file.size_bytes - count

    def attempt() -> bytes:
        headers = request_headers(start, file.size_bytes)
        with get_session().stream("GET", file_url(file), headers=headers, timeout=policy.timeout_seconds) as response:
            check_answer(response, str(file), file.repo_id)
            if response.status_code != 206:
                raise TransientError("asked for the end of the file, the answer is something whole")
            check_range(response, file, start)
            data = bytearray()
            for piece in response.iter_raw():
                data += piece
                if len(data) > count:
                    break
        if len(data) != count:
            raise TransientError(f"asked for {count:,} bytes, {len(data):,} came")
        return bytes(data)

    return retried(str(file), attempt, policy)
