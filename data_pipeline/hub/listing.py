"""Data sets on the Hugging Face Hub: which files a source names, with size and SHA-256, before any download.

The listing is asked for here and not through ``HfApi``, whose pages of a listing are fetched without a time-out.
"""

import difflib
import fnmatch
import itertools
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from huggingface_hub import constants, get_session

from data_pipeline.errors import DataError
from data_pipeline.hub.remote import RemoteFile, read_footer, request_headers
from data_pipeline.hub.retry import DEFAULT_POLICY, RetryPolicy, TransientError, check_answer, retried

__all__ = ["KINDS", "PRESETS", "RemoteFile", "describe", "is_hub_spec", "list_files", "read_footer"]

# Repository, then (revision, pattern) pairs; the first pair that lists a file is taken.
PRESETS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "fineweb-edu-100b": ("HuggingFaceFW/fineweb-edu", (("main", "sample/100BT/*.parquet"),)),
    "fineweb-edu-10b": ("HuggingFaceFW/fineweb-edu", (("main", "sample/10BT/*.parquet"),)),
    # The Hub's own conversion also had a `partial-train`, an incomplete copy: never taken.
    "openwebtext": (
        "Skylion007/openwebtext",
        (("main", "plain_text/*.parquet"), ("refs/convert/parquet", "plain_text/train/*.parquet")),
    ),
}
# What can be read a piece at a time once it is here.
KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst")
_SPEC = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?/(?P<pattern>[^/].*)"
)


def is_hub_spec(spec: str) -> bool:
    """Whether a source is on the Hub: a name of `PRESETS` or an ``hf://`` address (``./NAME`` names a local file)."""
    return spec in PRESETS or spec.startswith("hf://")


def list_files(spec: str, policy: RetryPolicy = DEFAULT_POLICY) -> list[RemoteFile]:
    """The files of `KINDS` that ``spec`` names, sorted by path; see `describe` for a line about them.

    Args:
        spec: a name of `PRESETS`, or ``hf://datasets/OWNER/NAME[@REVISION]/PATTERN`` where ``*`` stays inside a
            folder and ``**`` crosses any number of them.
        policy: how long to go on when the Hub does not answer.

    Raises:
        DataError: no such repository or revision, no access, no file of these kinds, or one without a SHA-256.
    """
    repo_id, candidates = _parse(spec)
    missing = []
    for revision, pattern in candidates:
        try:
            commit, entries = _matching(repo_id, revision, pattern, spec, policy)
        except _NothingListed as error:
            missing.append(str(error))
            continue
        return sorted((_remote_file(repo_id, commit, entry, spec) for entry in entries), key=lambda file: file.path)
    raise DataError(f"{spec}: {'; '.join(missing)}")


def describe(spec: str, files: Sequence[RemoteFile]) -> str:
    """One line for the log: what was taken, from which repository and commit."""
    size = sum(file.size_bytes for file in files)
    return (
        f"{spec}: {len(files)} files, {size / 1e9:,.2f} GB, of {files[0].repo_id}@{files[0].revision}, "
        f"{files[0].path} to {files[-1].path}"
    )


class _NothingListed(Exception):
    """A candidate without files to read; the text tells what there is instead."""


def _parse(spec: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Repository and candidates of a source."""
    if spec in PRESETS:
        return PRESETS[spec]
    match = _SPEC.fullmatch(spec)
    if not match:
        raise DataError(
            f"{spec}: expected hf://datasets/OWNER/NAME[@REVISION]/PATTERN, such as "
            f"hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet, or one of {', '.join(PRESETS)}"
        )
    return match["repo"], ((unquote(match["revision"] or "main"), match["pattern"]),)


def _matching(
    repo_id: str, revision: str, pattern: str, spec: str, policy: RetryPolicy
) -> tuple[str, list[dict[str, Any]]]:
    """The commit of a revision and its files that match."""
    api = f"{constants.ENDPOINT}/api/datasets/{repo_id}"
    # Only a preset has other candidates: a revision that somebody typed must exist.
    answer = _get_json(f"{api}/revision/{quote(revision, safe='')}", spec, repo_id, policy, spec in PRESETS)
    commit = answer[0].get("sha") if answer and isinstance(answer[0], dict) else None
    if answer is not None and not re.fullmatch(r"[0-9a-f]{40}", str(commit)):
        raise DataError(f"{spec}: the server {constants.ENDPOINT} gave no commit for {repo_id}@{revision}")
    if commit is None:
        raise _NothingListed(f"{repo_id} has no revision {revision}")
    parts = pattern.split("/")
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), parts[:-1]))
    tree = f"{api}/tree/{commit}"
    folder = f"{tree}/{quote('/'.join(fixed), safe='')}" if fixed else tree
    files = _list_tree(folder, spec, repo_id, policy)
    matched = [entry for entry in files or [] if _matches(entry["path"].split("/"), parts)]
    found = [entry for entry in matched if entry["path"].endswith(KINDS)]
    if not found:
        if matched:
            raise _NothingListed(
                f"{pattern} matches {len(matched)} files of {repo_id}@{revision}, such as {matched[0]['path']}, but "
                f"none is {', '.join(KINDS)}"
            )
        everything = [entry["path"] for entry in _list_tree(tree, spec, repo_id, policy) or []]
        raise _NothingListed(f"{pattern} matches no file of {repo_id}@{revision}; {_nearest(pattern, everything)}")
    return str(commit), found


def _list_tree(url: str, spec: str, repo_id: str, policy: RetryPolicy) -> list[dict[str, Any]] | None:
    """All files below a folder, page by page; None where the folder does not exist."""
    files = []
    query = "recursive=true&expand=false"
    while query:
        answer = _get_json(f"{url}?{query}", spec, repo_id, policy, missing_ok=True)
        if answer is None:
            return None
        entries, query = answer
        if not isinstance(entries, list):
            raise DataError(f"{spec}: the server {constants.ENDPOINT} answered {url} with something else than a list")
        files += [entry for entry in entries if entry.get("type") == "file"]
    return files


def _get_json(url: str, spec: str, repo_id: str, policy: RetryPolicy, missing_ok: bool) -> tuple[Any, str] | None:
    """A JSON answer and the query of the next page, empty on the last; None for a missing folder or revision."""

    def attempt() -> tuple[Any, str] | None:
        response = get_session().get(url, headers=request_headers(), timeout=policy.timeout_seconds)
        if missing_ok and response.headers.get("x-error-code") in ("EntryNotFound", "RevisionNotFound"):
            return None
        check_answer(response, spec, repo_id)
        # Of the next page's address the query alone: a mirror may name another host, which must not see the token.
        following = urlsplit(response.links.get("next", {}).get("url", "")).query
        try:
            return response.json(), following
        except ValueError as error:
            kind = response.headers.get("content-type", "no type")
            raise TransientError(f"expected JSON, the answer is {kind}: {response.text[:60]!r}") from error

    return retried(spec, attempt, policy)


def _remote_file(repo_id: str, commit: str, entry: dict[str, Any], spec: str) -> RemoteFile:
    path, lfs = entry["path"], entry.get("lfs") or {}
    sha256, size = lfs.get("oid", ""), lfs.get("size", -1)
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(f"{spec}: {repo_id} lists a file outside of itself: {path!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256) or size < 0:
        raise DataError(
            f"{spec}: {path} has no SHA-256 on the Hub, so a download could not be checked; only files stored by "
            f"Git LFS or Xet have one. Download it by other means and name it as a local --source"
        )
    return RemoteFile(repo_id, commit, path, size, sha256)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _nearest(pattern: str, paths: Sequence[str]) -> str:
    usable = [path for path in paths if path.endswith(KINDS)]
    if not usable:
        return f"none of its {len(paths)} files is {', '.join(KINDS)}"
    # Folders: what is wrong is rarely the number of one file.
    patterns = {str(PurePosixPath(path).with_name("*" + _kind(path))) for path in usable}
    near = difflib.get_close_matches(pattern, sorted(patterns), n=3, cutoff=0.0)
    return f"nearest patterns that do: {', '.join(near)}"


def _kind(path: str) -> str:
    return next(kind for kind in KINDS if path.endswith(kind))
