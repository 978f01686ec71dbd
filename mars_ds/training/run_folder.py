"""The folder of a run: what lies where, and whether this start is a new run or a resume."""

import errno
import fcntl
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from mars_ds.checkpoint import CheckpointReader, choose_checkpoint
from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError

# Prefix of `run.init_from` for weights of Hugging Face.
HUGGING_FACE = "hf:"
LOG_NAME = "log.jsonl"
CONFIG_NAME = "config.yaml"
CARD_NAME = "optimizer_card.txt"
LOCK_NAME = ".lock"
FLIGHT_FOLDER = "heartbeats"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        path: The folder.
        resume_from: Checkpoint to continue from, or None for a new run.
        passed_over: What is wrong with newer checkpoints than that.
    """

    path: Path
    resume_from: Path | None
    passed_over: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    def deadline(self, minutes: float | None) -> float | None:
        """When a process that may run so long must have ended, on `time.monotonic`'s clock; None without a limit."""
        if minutes is None:
            return None
        started = float(psutil.Process().create_time())
        return time.monotonic() + 60.0 * minutes - (time.time() - started)

    @property
    def log(self) -> Path:
        """JSONL log."""
        return self.path / LOG_NAME


def open_run_folder(config: RunConfig) -> RunFolder:
    """Decides how the run starts, without writing anything.

    Raises:
        ConfigError: `resume: required` without a checkpoint, or `resume: never` into a used folder.
    """
    path = config.run_dir
    newest, passed_over = choose_checkpoint(path / "checkpoints")
    if config.run.resume == "required" and newest is None:
        raise ConfigError(f"run.resume is required, but {path / 'checkpoints'} holds no intact checkpoint")
    if config.run.resume == "never" and ((path / LOG_NAME).exists() or newest is not None or passed_over):
        raise ConfigError(
            f"run.resume is never, but {path} already holds a run; choose another run.name, or resume: auto"
        )
    if newest is None and passed_over:
        raise ConfigError(
            f"{path / 'checkpoints'}: no checkpoint is intact, and starting over would lose the run: {passed_over[0]}; "
            "move the folder away, or choose another run.name"
        )
    source = config.run.init_from
    if newest is None and source is not None and not source.startswith(HUGGING_FACE):
        CheckpointReader(source)
    return RunFolder(path, newest, tuple(passed_over))


def hold(folder: RunFolder, wait_seconds: float = 0.0) -> IO[str]:
    """Makes the run folder and locks it, so that two runs cannot write into one; rank 0 only.

    Args:
        folder: The run's.
        wait_seconds: For a holder to let go: a file server keeps the lock of a machine that was lost for a while.

    Returns:
        The open lock file; the lock ends with it, also when the process is killed.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be made.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / LOCK_NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.output_dir: {folder.path} cannot be written: {error.strerror}") from error
    deadline = time.monotonic() + wait_seconds
    while not _locked(lock, folder.path):
        if time.monotonic() > deadline:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise ConfigError(f"{folder.path}: in use by {holder}; wait for it, or choose another run.name")
        time.sleep(1.0)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _locked(lock: IO[str], path: Path) -> bool:
    """False while another process has it; a file system without locks is told once and used without."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise ConfigError(f"{path}: cannot be locked: {error.strerror}") from error
        print(f"warning: {path}: its file system has no locks; nothing keeps a second run out", file=sys.stderr)
    return True
