"""Copies checkpoints to and from anything that fsspec reaches: data first, the marker last, all of it read back.

A destination is a folder of checkpoints, `DESTINATION/step_NNNNNNNN`. What is there already and equal is not copied
again, so that an interrupted copy goes on where it was.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

from mars_ds.checkpoint.layout import INDEX, MARKER, STEP_PATTERN, sync_file, write_durably
from mars_ds.errors import CheckpointError, ConfigError

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Place:
    """A folder on some file system.

    Attributes:
        files: fsspec's file system.
        path: In its own spelling, without the protocol.
        url: As a person writes it.
    """

    files: Any
    path: str
    url: str

    @classmethod
    def open(cls, url: str) -> "Place":
        """Finds the file system of a URL, or of a path.

        Raises:
            ConfigError: fsspec knows none, or its package is not installed.
        """
        protocol = url.split("://", 1)[0] if "://" in url else "file"
        try:
            files, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            known = known_implementations.get(protocol, {}).get("class", "")
            package = known.split(".")[0] or "its package"
            raise ConfigError(f"{url}: {protocol}:// needs a package that is missing: pip install {package}") from error
        except ValueError as error:
            raise ConfigError(
                f"{url}: no file system for {protocol}://; expected a path, or a URL such as s3://, gs://, file://"
            ) from error
        return cls(files, path.rstrip("/") or "/", url.rstrip("/"))

    def __truediv__(self, name: str) -> "Place":
        return Place(self.files, f"{self.path.rstrip('/')}/{name}", f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file systems."""
        return isinstance(self.files, LocalFileSystem)

    def read(self) -> bytes | None:
        """Content of a small file, or None where there is none."""
        try:
            return self.files.cat_file(self.path)  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        """Writes a small file whole."""
        if self.is_local:
            write_durably(Path(self.path), content.decode())
        else:
            self.files.pipe_file(self.path, content)

    def size(self) -> int | None:
        """Bytes of a file, or None where there is none."""
        try:
            self.files.invalidate_cache()
            return int(self.files.info(self.path)["size"])
        except FileNotFoundError:
            return None

    def sha256(self) -> str:
        """Of what the file system gives back."""
        digest = hashlib.sha256()
        with self.files.open(self.path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


def find(place: Place, every: bool = False) -> list[Place]:
    """The checkpoint at a place, or those of a run or a folder of checkpoints there, oldest first.

    Args:
        place: Checkpoint, folder of checkpoints, or run.
        every: All of them; else the newest.

    Raises:
        CheckpointError: None is committed there.
    """
    place.files.invalidate_cache()
    if place.files.exists((place / MARKER).path):
        return [place]
    for folder in (place / "checkpoints", place):
        found = sorted(path.rsplit("/", 2)[-2] for path in place.files.glob(f"{folder.path}/{STEP_PATTERN}/{MARKER}"))
        if found:
            return [folder / name for name in (found if every else found[-1:])]
    raise CheckpointError(
        f"{place.url}: no committed checkpoint; expected a checkpoint, a folder of checkpoints (step_NNNNNNNN with a "
        f"{MARKER} marker), or a run that has some"
    )


def copy_checkpoint(
    source: Place,
    destination: Place,
    replace: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Place:
    """Copies one checkpoint into a folder of checkpoints.

    Args:
        source: The checkpoint.
        destination: The folder; the checkpoint becomes `destination/step_NNNNNNNN`.
        replace: Also take the place of another committed checkpoint of that step.
        tell: Gets a line a file.

    Returns:
        The copy, committed and read back.

    Raises:
        CheckpointError: The source is damaged, another one is there, or the copy is not equal.
        OSError: What the file system says.
    """
    marker, text = (source / MARKER).read(), (source / INDEX).read()
    if marker is None or text is None or hashlib.sha256(text).hexdigest() != marker.strip().decode("ascii", "replace"):
        raise CheckpointError(f"{source.url}: damaged ({INDEX} does not fit {MARKER}); nothing was copied")
    index = json.loads(text)
    target = destination / f"step_{int(index['step']):08d}"
    there = (target / MARKER).read()
    if there is not None and there != marker:
        if not replace:
            raise CheckpointError(
                f"{target.url}: holds another checkpoint of this step; choose another destination, or --replace"
            )
        target.files.rm_file((target / MARKER).path)
    target.files.makedirs(target.path, exist_ok=True)
    for name, facts in sorted(index["files"].items()):
        _copy_file(source / name, target / name, facts["bytes"], facts["sha256"], tell)
    (target / INDEX).write(text)
    if (target / INDEX).read() != text:
        raise CheckpointError(f"{(target / INDEX).url}: not what was written; no marker was set")
    if target.is_local:
        sync_file(Path(target.path))
    if there != marker:
        (target / MARKER).write(marker)
    if (target / MARKER).read() != marker:
        raise CheckpointError(f"{(target / MARKER).url}: not what was written")
    return target


def _copy_file(source: Place, target: Place, num_bytes: int, sha256: str, tell: Callable[[str], None]) -> None:
    if target.size() == num_bytes and target.sha256() == sha256:
        tell(f"{target.url}: there already, equal")
        return
    digest = hashlib.sha256()
    try:
        with source.files.open(source.path, "rb") as read, target.files.open(target.path, "wb") as write:
            while chunk := read.read(_CHUNK_BYTES):
                digest.update(chunk)
                write.write(chunk)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source.url}: missing ({error}); no marker was set") from error
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{source.url}: damaged (its hash is not the one in {INDEX}); no marker was set")
    if target.is_local:
        sync_file(Path(target.path))
    if target.size() != num_bytes or target.sha256() != sha256:
        raise CheckpointError(f"{target.url}: what was read back is not what was written; no marker was set")
    tell(f"{target.url}: copied and read back, {num_bytes:,} bytes")
