"""Whether a build from the Hub will fit on the disks, asked before the first byte is fetched."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.hub.download import file_size, local_path, part_path
from data_pipeline.hub.remote import RemoteFile

# .bin bytes per byte of parquet: 100 B tokens of 2 bytes from 260 GB of FineWeb-Edu.
OUTPUT_PER_SOURCE_BYTE = 0.8


def check_space(files: Sequence[RemoteFile], folder: Path, output: Path, *, keep: bool, ahead: int) -> None:
    """Check before the start that everything will fit; what is on the disk already needs no room any more.

    Quotas are not seen, and others may fill the disk later.

    Args:
        files: all that will be downloaded.
        folder: the download directory.
        output: the data set's directory.
        keep: whether downloads stay; otherwise at most ``ahead`` of them lie there at a time.
        ahead: see ``keep``.

    Raises:
        DataError: they will not; it names the bytes and the option that would do.
    """
    left = sorted((file.size_bytes - _present_bytes(file, folder) for file in files), reverse=True)
    rolling = sum(left[: max(ahead, 1)])
    downloads = sum(left) if keep else rolling
    estimate = int(OUTPUT_PER_SOURCE_BYTE * sum(file.size_bytes for file in files))
    tokens = max(0, estimate - _tree_bytes(output, apart=folder))
    disks = {path: _disk(path) for path in (folder, output)}
    shared = disks[folder][0] == disks[output][0]
    free = disks[folder][1]
    advice = "give --output and --download-dir on a larger file system"
    if shared:
        if downloads + tokens <= free:
            return
        if keep and rolling + tokens <= free:
            advice = f"--delete-downloads needs {rolling + tokens:,} bytes and would do"
        elif tokens <= free:
            advice = "give another --download-dir, on a file system of its own"
        raise DataError(
            f"{folder} and {output}: not enough space on their file system: {downloads + tokens:,} bytes are needed "
            f"({downloads:,} for downloads, about {tokens:,} for the output), {free:,} are free; {advice}"
        )
    if downloads > free:
        would_do = keep and rolling <= free
        advice = (
            f"--delete-downloads needs {rolling:,} bytes and would do" if would_do else "give another --download-dir"
        )
        raise DataError(
            f"{folder}: not enough space for downloads: {downloads:,} bytes are needed, {free:,} are free; {advice}"
        )
    if tokens > disks[output][1]:
        raise DataError(
            f"{output}: not enough space for the output: about {tokens:,} bytes are needed, {disks[output][1]:,} are "
            "free; give another --output"
        )


def _present_bytes(file: RemoteFile, folder: Path) -> int:
    """Bytes of a file that need not be fetched any more, judged by sizes."""
    if file_size(local_path(file, folder)) == file.size_bytes:
        return file.size_bytes
    return min(max(0, file_size(part_path(file, folder))), file.size_bytes)


def _tree_bytes(directory: Path, apart: Path) -> int:
    """Bytes of all files below a directory, those of ``apart`` left out."""
    total = 0
    if _is(directory, apart):
        return 0
    for base, names, files in os.walk(directory):
        names[:] = [name for name in names if not _is(Path(base, name), apart)]
        total += sum(max(0, file_size(Path(base, name))) for name in files)
    return total


def _is(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def _disk(path: Path) -> tuple[int, int]:
    """File system and free bytes of where ``path`` is or will be."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return os.stat(existing).st_dev, shutil.disk_usage(existing).free
