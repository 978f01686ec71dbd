"""Metrics to services outside the run - Weights & Biases, TensorBoard - none of which can stop or block it.

A tracker itself is a plain class that may raise or hang. `BackgroundTracker` runs any tracker on a daemon
thread behind a bounded queue and turns each kind of trouble into one warning line. The log file of the run
does not depend on any of this.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

WandbMode = Literal["online", "offline", "disabled"]

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the tracker; `config` is the resolved configuration of the run."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of one step; steps do not decrease."""
        ...

    def finish(self) -> None:
        """Sends what is still held and closes."""
        ...


class WandbTracker:
    """Weights & Biases.

    Args:
        project: Project name.
        name: Run name.
        mode: `offline` writes a run folder to be sent later with `wandb sync`; `disabled` does nothing.
        tags: Run tags.
        directory: Where the `wandb` folder is made.
        upload_seconds: How long the upload may take at the end; what is left stays on disk for `wandb sync`.

    Raises:
        ValueError: A mode that does not exist.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        mode: WandbMode = "online",
        tags: Sequence[str] = (),
        directory: str | os.PathLike[str] = ".",
        upload_seconds: float = 50.0,
    ) -> None:
        if mode not in ("online", "offline", "disabled"):
            raise ValueError(f"wandb mode must be online, offline or disabled, got {mode!r}")
        self.project = project
        self.name = name
        self.mode: WandbMode = mode
        self.tags = tuple(tags)
        self.directory = Path(directory)
        self.upload_seconds = upload_seconds
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens a run.

        Raises:
            ImportError: wandb is not installed.
            RuntimeError: Online mode without an API key.
        """
        if self.mode == "disabled":
            return
        import wandb

        # Asked for here because `init` would prompt for a key on the terminal, from a background thread.
        if self.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no wandb API key: run `wandb login`, set WANDB_API_KEY, or use mode offline")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            tags=self.tags,
            dir=str(self.directory),
            mode=self.mode,
            config=dict(config),
            # Its console capture replaces stdout, which launchers and our own aligned lines share. The time
            # limit also bounds its exit hook, which would hold the finished process when the network is gone.
            settings=wandb.Settings(silent=True, console="off", finish_timeout=self.upload_seconds),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of one step."""
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Closes the run; in online mode this waits for the upload, at most `upload_seconds`."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class TensorBoardTracker:
    """TensorBoard event files.

    Args:
        directory: Where the event files are written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the event file.

        Raises:
            ImportError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard is not installed: pip install tensorboard") from error
        self._writer = SummaryWriter(str(self.directory))
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes each metric as a scalar."""
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class BackgroundTracker:
    """Any tracker, made harmless: no call raises, and only `finish` waits, no longer than its deadline.

    A tracker whose start fails, or is not done in time, is given up. A failing `log` is reported once, and
    the next ones are still tried. With a full queue the newest metrics are left out and counted.

    Args:
        tracker: The one that does the work, always from one thread.
        start_seconds: How long its start may take.
        finish_seconds: How long `finish` waits for the queue and the tracker's own finish.
        capacity: Steps that may wait in the queue.
        warn: Called with one line a trouble, from either thread; default is a log record of level WARNING.
    """

    def __init__(
        self,
        tracker: Tracker,
        start_seconds: float = 30.0,
        finish_seconds: float = 30.0,
        capacity: int = 1000,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__
        self._start_seconds = start_seconds
        self._finish_seconds = finish_seconds
        self._warn = warn
        self._queue: queue.Queue[tuple[dict[str, float], int]] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._finishing = threading.Event()
        self._given_up = threading.Event()
        self._start_deadline = math.inf
        self._num_lost = 0
        self._log_failed = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Starts the tracker in the background and returns at once; a second start is ignored."""
        if self._thread is not None:
            return
        self._start_deadline = time.monotonic() + self._start_seconds
        self._thread = threading.Thread(target=self._work, args=(dict(config),), name=self._name, daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queues metrics, or drops them when the tracker does not keep up or is gone."""
        if self._thread is None or self._finishing.is_set() or self._gone():
            return
        try:
            self._queue.put_nowait((dict(metrics), step))
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                self._warn(f"{self._name} does not keep up: metrics from step {step} on are partly left out")

    def finish(self, seconds: float = math.inf) -> None:
        """Waits until everything is sent, at most for the deadline or `seconds`; then the run goes on without it."""
        if self._thread is None or self._finishing.is_set():
            return
        self._finishing.set()
        if not self._gone():
            seconds = min(seconds, self._finish_seconds)
            self._thread.join(seconds)
            if self._thread.is_alive() and not self._given_up.is_set():
                self._give_up(f"did not finish within {seconds:g} s and was left behind")
        num_lost = self._num_lost + self._queue.qsize()
        if num_lost:
            self._warn(f"{self._name} lost the metrics of {num_lost} steps; the log file has them all")

    def _gone(self) -> bool:
        if not self._started.is_set() and time.monotonic() > self._start_deadline and not self._given_up.is_set():
            self._give_up(f"did not start within {self._start_seconds:g} s; the run goes on without it")
        return self._given_up.is_set()

    def _give_up(self, reason: str) -> None:
        self._given_up.set()
        self._warn(f"{self._name} {reason}")

    def _work(self, config: dict[str, Any]) -> None:
        """The thread: start, send until told to finish and the queue is empty, finish."""
        try:
            self._tracker.start(config)
        except BaseException as error:  # Some clients leave through sys.exit, which would end the thread in silence.
            if not self._given_up.is_set():
                self._give_up(f"could not start and is left out: {_one_line(error)}")
            return
        self._started.set()
        while not self._given_up.is_set():
            with contextlib.suppress(queue.Empty):
                self._send(*self._queue.get(timeout=0.1))
                continue
            if self._finishing.is_set():
                break
        try:
            self._tracker.finish()
        except Exception as error:
            if not self._given_up.is_set():
                self._warn(f"{self._name} could not finish: {_one_line(error)}")

    def _send(self, metrics: dict[str, float], step: int) -> None:
        try:
            self._tracker.log(metrics, step)
        except Exception as error:
            self._num_lost += 1
            if not self._log_failed:
                self._log_failed = True
                self._warn(f"{self._name} failed at step {step}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
