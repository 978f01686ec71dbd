"""Page sums: a reader of a few windows knows that their bytes are those that were written.

Beside each part lies a ``.sums`` file: XXH3-64 of every 4,096 bytes of the ``.bin``, little-endian, 8 bytes each, the
last page shorter; 0.2 % of the part. A window of 1,025 tokens lies in one or two pages, so checking it costs about
two microseconds, and no damaged token reaches training between two runs of ``verify``.
"""

import array
import hashlib
import mmap
from pathlib import Path

import numpy as np
import xxhash

from data_pipeline.errors import DataError

PAGE_BYTES = 4_096
SUM_BYTES = 8
_PAGES_AT_ONCE = 256


def hash_pages(path: Path) -> tuple[str, bytes]:
    """The SHA-256 of a file in hexadecimal, and the content of its ``.sums`` file, in one pass."""
    whole = hashlib.sha256()
    sums = array.array("Q")
    with open(path, "rb") as file:
        while data := file.read(PAGE_BYTES * _PAGES_AT_ONCE):
            whole.update(data)
            view = memoryview(data)
            sums.extend(xxhash.xxh3_64_intdigest(view[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES))
    return whole.hexdigest(), np.array(sums, dtype="<u8").tobytes()


def num_pages(file_bytes: int) -> int:
    """Pages of a file of this size."""
    return -(-file_bytes // PAGE_BYTES)


class PageSums:
    """The ``.sums`` file of one part, mapped."""

    def __init__(self, path: Path, part: Path, part_bytes: int) -> None:
        """Open the sums of ``part``, which has ``part_bytes`` bytes.

        Raises:
            DataError: the file is missing or has not one sum a page.
        """
        self._path = path
        self._part = part
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DataError(
                f"{path}: missing, so {part.name} cannot be checked while it is read; copy it anew, or train with "
                "data.verify_reads: false"
            ) from None
        except ValueError as error:  # an empty file cannot be mapped
            raise self._wrong_size() from error
        if len(self._map) != num_pages(part_bytes) * SUM_BYTES:
            raise self._wrong_size()
        self._sums = memoryview(self._map).cast("Q")

    def check(self, first_page: int, pages: memoryview) -> None:
        """Hold whole pages, the first of them number ``first_page``, against their sums.

        Raises:
            DataError: a page differs.
        """
        for number, at in enumerate(range(0, len(pages), PAGE_BYTES), start=first_page):
            if xxhash.xxh3_64_intdigest(pages[at : at + PAGE_BYTES]) != self._sums[number]:
                raise DataError(
                    f"{self._part}: bytes {number * PAGE_BYTES:,} to {(number + 1) * PAGE_BYTES - 1:,} are not what "
                    f"was written (or {self._path.name} is damaged); nothing of them was used. Copy both files anew; "
                    f"`python -m data_pipeline verify {self._part.parent}` names all damage"
                )

    def close(self) -> None:
        """Unmap the file."""
        self._sums.release()
        self._map.close()

    def _wrong_size(self) -> DataError:
        return DataError(f"{self._path}: has not one sum for each page of {self._part.name}; copy both files anew")
