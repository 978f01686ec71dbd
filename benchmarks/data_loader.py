"""Windows a second of the reader, beside a memmap opened for every batch as nanoGPT's `get_batch` does.

    python benchmarks/data_loader.py [--megabytes 1000] [--repeats 5] [--batches 400] [--directory DIR]

Makes a data set of random bytes (tokenizer `bytes`: two bytes a token) in parts of 100 million tokens, and the same
tokens as one headerless file, with our exporter. Batches of 16 windows of 1,024 inputs become two int64 tensors, inputs
and targets, at places drawn uniformly with replacement, nanoGPT's sampling and our `random_offsets`; one row has our
default, the permutation. All ways take turns, once on a warm page cache and once on a cold one: before each cold pass
the files' pages are dropped from the cache (POSIX_FADV_DONTNEED), which leaves the host's own cache, if there is one,
as it is. Medians are printed; CPU time counts all threads. "checked" holds every page that is read against its sum
(`data.verify_reads`), "ahead" reads two batches ahead in a thread (`data.prefetch_steps`).
"""

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from data_pipeline import open_dataset
from data_pipeline.build import BuildOptions, prepare
from data_pipeline.export import export_nanogpt
from data_pipeline.prefetch import Prefetcher
from data_pipeline.sampling import make_sampling

BATCH, LENGTH, AHEAD = 16, 1_024, 2
_TEXT_BYTES = 50_000_000
Run = Callable[[int, int], None]


@dataclass(frozen=True)
class Pass:
    """One way, one pass.

    Attributes:
        wall_rate: windows per second of wall time.
        cpu_rate: windows per second of CPU time.
        grown_bytes: resident memory after it, less that before.
    """

    wall_rate: float
    cpu_rate: float
    grown_bytes: int


def make_data(directory: Path, megabytes: float) -> tuple[Path, Path]:
    """A data set of about this size and its export; returns both directories."""
    dataset, export = directory / "dataset", directory / "export"
    if not export.exists():
        texts = directory / "texts"
        texts.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(2_357)
        for number in range(max(1, round(megabytes * 1e6 / 2 / _TEXT_BYTES))):
            (texts / f"{number:04d}.txt").write_bytes(
                generator.integers(32, 127, _TEXT_BYTES, dtype=np.uint8).tobytes()
            )
        prepare([str(texts)], dataset, tokenizer="bytes", options=BuildOptions(val_fraction=0.0))
        export_nanogpt(dataset, export)
    return dataset, export


def nanogpt_way(export: Path) -> Run:
    """A memmap for every batch, a slice and a cast for every window, a stack for inputs and one for targets."""

    def run(start: int, batches: int) -> None:
        generator = torch.Generator().manual_seed(start)
        for _ in range(batches):
            data = np.memmap(export / "train.bin", dtype=np.uint16, mode="r")
            places = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
            inputs = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in places])
            targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places])
            _consume(inputs, targets)

    return run


def our_way(dataset: Path, access: str, *, checked: bool, ahead: int = 0, sampling_name: str = "random_offsets") -> Run:
    """The reader, and the copy that the trainer makes of each batch."""
    windows = open_dataset(dataset, "train", LENGTH, access, verify_reads=checked)
    sampling = make_sampling(sampling_name, windows.part_tokens, LENGTH, 0)

    def fill(position: int, out: np.ndarray) -> None:
        windows.read_at(sampling.positions(position, BATCH), out)

    def run(start: int, batches: int) -> None:
        prefetcher = Prefetcher(fill, (BATCH, LENGTH + 1), BATCH, ahead)
        buffer = np.empty((BATCH, LENGTH + 1), np.int64)
        for position in range(start * BATCH, (start + batches) * BATCH, BATCH):
            if ahead:
                buffer = prefetcher.get(position)
                prefetcher.release_before(position)
            else:
                fill(position, buffer)
            tokens = torch.from_numpy(buffer).clone()
            _consume(tokens[:, :-1], tokens[:, 1:])
        prefetcher.close()
        windows.close()

    return run


def _consume(inputs: Tensor, targets: Tensor) -> None:
    assert inputs.shape == targets.shape == (BATCH, LENGTH)


def measured(run: Run, start: int, batches: int) -> Pass:
    """One pass over ``batches`` batches from batch number ``start``."""
    before, wall, cpu = _resident_bytes(), time.perf_counter(), time.process_time()
    run(start, batches)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pass(batches * BATCH / wall, batches * BATCH / cpu, _resident_bytes() - before)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def drop_pages(files: list[Path]) -> float:
    """Drop the files from the page cache; returns the share of them that stayed there."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not on the disk yet are never dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return cached_share(files)


def cached_share(files: list[Path]) -> float:
    """Share of the files' pages that the page cache holds."""
    cached = pages = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in files:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            count = -(-len(mapped) // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * count)()
            address = ctypes.c_char.from_buffer(mapped)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(len(mapped)), resident):
                raise OSError(ctypes.get_errno(), "mincore")
            del address
            cached += int((np.frombuffer(resident, np.uint8) & 1).sum())
            pages += count
    return cached / pages


def main() -> None:
    """Prints a table for the warm cache and one for the cold one, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1_000, help="size of the tokens")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each way")
    parser.add_argument("--batches", type=int, default=400, help="batches of a warm pass")
    parser.add_argument("--cold-batches", type=int, default=40, help="batches of a cold pass")
    parser.add_argument("--directory", type=Path, help="where to work, kept; default: a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        dataset, export = make_data(arguments.directory or Path(temporary), arguments.megabytes)
        files = sorted([*dataset.glob("*.bin"), *dataset.glob("*.sums"), export / "train.bin"])
        ways = {
            "memmap per batch (nanoGPT)": nanogpt_way(export),
            "pread, checked": our_way(dataset, "pread", checked=True),
            "pread, checked, ahead": our_way(dataset, "pread", checked=True, ahead=AHEAD),
            "pread, checked, permutation": our_way(dataset, "pread", checked=True, sampling_name="permutation"),
            "pread": our_way(dataset, "pread", checked=False),
            "mmap, checked": our_way(dataset, "mmap", checked=True),
            "mmap": our_way(dataset, "mmap", checked=False),
        }
        print(f"{(export / 'train.bin').stat().st_size / 1e6:,.0f} MB of tokens, batch {BATCH}, {LENGTH} inputs\n")
        for cache, batches in (("warm", arguments.batches), ("cold", arguments.cold_batches)):
            if cache == "warm":
                for path in files:
                    path.read_bytes()
                print(f"Warm: {cached_share(files):.0%} of the files in the page cache\n")
            passes: dict[str, list[Pass]] = {way: [] for way in ways}
            stayed = 0.0
            for repeat in range(arguments.repeats):
                for way, run in ways.items():
                    if cache == "cold":
                        stayed = max(stayed, drop_pages(files))
                    passes[way].append(measured(run, repeat * batches, batches))
            if cache == "cold":
                print(f"\nCold: at most {stayed:.1%} of the files stayed in the page cache\n")
            print_table(passes)


def print_table(passes: dict[str, list[Pass]]) -> None:
    """One row a way: rates in thousands of windows, and how they compare with the first row's."""
    base = next(iter(passes.values()))
    base_wall, base_cpu = (
        statistics.median(getattr(each, rate) for each in base) for rate in ("wall_rate", "cpu_rate")
    )
    columns = ["way", "1,000 windows/s", "times", "Mtok/s", "1,000 windows/CPU s", "times", "memory grown, MB"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for way, each in passes.items():
        wall = statistics.median(one.wall_rate for one in each)
        cpu = statistics.median(one.cpu_rate for one in each)
        grown = max(one.grown_bytes for one in each)
        print(
            f"| {way} | {wall / 1e3:,.1f} | {wall / base_wall:.1f} | {wall * LENGTH / 1e6:,.1f} "
            f"| {cpu / 1e3:,.1f} | {cpu / base_cpu:.1f} | {grown / 1e6:,.1f} |"
        )


if __name__ == "__main__":
    main()
