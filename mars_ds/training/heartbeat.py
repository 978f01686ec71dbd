"""Heartbeats: a small file per rank with its step and phase, from which rank 0 names the one that is silent.

`heartbeats/rank_00003.json` holds host, process, step, phase, and since when; a thread renews it. A rank whose file
is old is dead or cut off; one whose file is fresh but whose step stands still is waiting, and its phase says for what.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = "heartbeats"


class Heartbeat:
    """This rank's file, and on rank 0 the watch over all.

    Args:
        folder: Run folder.
        rank: This rank.
        world_size: Ranks.
        interval_seconds: Between two writings; 0 switches everything off.
        silence_seconds: A step that takes longer is reported, with the rank to blame.
        warn: Console of rank 0.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        interval_seconds: float,
        silence_seconds: float,
        warn: Callable[[str], None],
    ) -> None:
        self._folder, self._rank, self._world_size = folder / FOLDER, rank, world_size
        self._interval, self._silence, self._warn = interval_seconds, silence_seconds, warn
        self._step, self._phase, self._since = 0, "starting", time.time()
        self._reported_at: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if interval_seconds > 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._clear_away()
            self._write()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def _clear_away(self) -> None:
        """Files of an earlier start with more ranks, which would count as silent."""
        for rank in read_heartbeats(self._folder):
            if rank >= self._world_size:
                heartbeat_file(self._folder, rank).unlink(missing_ok=True)

    @property
    def file(self) -> Path:
        """This rank's file."""
        return heartbeat_file(self._folder, self._rank)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what is done inside; nests."""
        before = self._phase
        self._phase, self._since = name, time.time()
        try:
            yield
        finally:
            self._phase, self._since = before, time.time()

    def step(self, step: int) -> None:
        """Counts a finished step."""
        self._step, self._since = step, time.time()

    def close(self) -> None:
        """Ends the thread; the file stays, with its last phase."""
        self._closed.set()
        if self._thread:
            self._thread.join(timeout=5.0)
            self._write("ended")

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._write()
            if self._rank == 0 and self._closed.is_set() is False:
                self._watch()

    def _write(self, phase: str | None = None) -> None:
        beat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step,
            "phase": phase or self._phase,
            "since": self._since,
            "time": time.time(),
        }
        aside = self.file.with_suffix(".tmp")
        # A full disk or a lost mount must not end a run that can go on without it.
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps(beat), encoding="utf-8")
            os.replace(aside, self.file)

    def _watch(self) -> None:
        stands_for = time.time() - self._since
        if stands_for < self._silence:
            self._reported_at = None
            return
        if self._reported_at is not None and time.time() - self._reported_at < self._silence:
            return
        self._reported_at = time.time()
        beats = read_heartbeats(self._folder)
        # Whoever reads the warning finds the files.
        self._dump()
        self._warn("\n".join(diagnose(beats, self._world_size, stands_for, self._interval)))

    def _dump(self) -> None:
        """Where rank 0's threads stand, and the last collectives from PyTorch's flight recorder."""
        with contextlib.suppress(OSError), open(self._folder / "stacks_rank_00000.txt", "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        # NCCL has a recorder of its own, which builds for the CPU lack; gloo writes into the common one.
        for backend, name in {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}.items():
            recorder = getattr(torch._C._distributed_c10d, name, None)
            if recorder is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    (self._folder / f"collectives_{backend}_rank_00000.json").write_bytes(recorder())


def heartbeat_file(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank_{rank:05d}.json"


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """The last beat of each rank that has one."""
    beats = {}
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads(path.read_text(encoding="utf-8"))
            beats[int(beat["rank"])] = beat
    return beats


def diagnose(beats: dict[int, dict[str, Any]], world_size: int, stands_for: float, interval: float) -> list[str]:
    """Lines that name who holds the others up.

    Args:
        beats: By rank.
        world_size: Ranks that there should be.
        stands_for: Seconds since rank 0's last progress.
        interval: Seconds between two beats.
    """
    lines = [f"no progress for {stands_for:.0f} s; what the ranks last said:"]
    newest = max((beat["time"] for beat in beats.values()), default=0.0)
    missing = sorted(set(range(world_size)) - set(beats))
    if missing:
        lines.append(f"  ranks {missing} have no heartbeat at all: they never started")
    silent = {rank for rank, beat in beats.items() if newest - beat["time"] > 3 * interval}
    for rank in sorted(silent):
        beat = beats[rank]
        lines.append(
            f"  rank {rank} ({beat['host']}, process {beat['pid']}) is silent since {newest - beat['time']:.0f} s: it "
            f"died or its node is cut off; last in {beat['phase']} of step {beat['step']}"
        )
    alive = {rank: beat for rank, beat in beats.items() if rank not in silent}
    behind = min((beat["step"] for beat in alive.values()), default=0)
    by_place: dict[tuple[int, str], list[int]] = {}
    for rank, beat in sorted(alive.items()):
        by_place.setdefault((beat["step"], beat["phase"]), []).append(rank)
    for (step, phase), ranks in sorted(by_place.items()):
        mark = "  <- behind" if step == behind and len(by_place) > 1 else ""
        lines.append(f"  ranks {_ranges(ranks)}: {phase} of step {step}{mark}")
    return lines


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in pieces)
