"""The contract with a scheduler's script: variables that `launch/slurm` sets, all of them optional.

    MARS_DS_EXPECTED_WORLD_SIZE   ranks that the script has started; another number is refused
    MARS_DS_STOP_FILE             a request to stop this attempt; the script owns it, no start deletes it
    MARS_DS_STATE_FILE            where rank 0 tells what became of the run
    MARS_DS_LOG_FOLDER            each rank appends all its output to a file there
    MARS_DS_COMMAND               what continues the run, for messages

A launcher may bend exit codes on their way (DeepSpeed's ends with 0 when its own child is killed by a signal), so what
became of a run is told in a file of one line, `STATE STEP [REASON]`, that is replaced by rename:

    running 1200             training; a crash loses what came after the checkpoint of step 1200
    stopped 1234 SIGUSR1     saved on request; the same command goes on
    done 4000                the last step is saved, and every rank has come to the end
    failed 0 BAD_INPUT       starting again would not help
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mars_ds.errors import LaunchError

EXPECTED_WORLD_SIZE = "MARS_DS_EXPECTED_WORLD_SIZE"
STOP_FILE = "MARS_DS_STOP_FILE"
STATE_FILE = "MARS_DS_STATE_FILE"
LOG_FOLDER = "MARS_DS_LOG_FOLDER"
COMMAND = "MARS_DS_COMMAND"


def log_to_file(environ: Mapping[str, str], rank: int) -> None:
    """Appends everything that this process prints, its libraries' C code included, to `rank_NNNNN.log`.

    Args:
        environ: Usually `os.environ`; without MARS_DS_LOG_FOLDER nothing is done.
        rank: This process's.
    """
    folder = environ.get(LOG_FOLDER)
    if folder is None:
        return
    try:
        file = os.open(Path(folder) / f"rank_{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"warning: {LOG_FOLDER}: {folder}: {error.strerror}; the output stays here", file=sys.stderr, flush=True)
        return
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


@dataclass
class Job:
    """What the script asks of this launch, and rank 0's answer.

    Attributes:
        expected_world_size: Ranks that the script has started; None when nobody counts.
        stop_file: A request to stop this attempt. The script owns it: no start of a run deletes it.
        state_file: Where the answer goes; None where nobody reads it, and on ranks other than 0.
        saved_step: Step of the newest checkpoint of this run.
        is_watched: Whether a script reads the state file; the same on every rank. A stop then ends with exit code 0,
            because launchers take any other code for a crash, and end the other ranks with it.
    """

    expected_world_size: int | None = None
    stop_file: Path | None = None
    state_file: Path | None = None
    saved_step: int = 0
    is_watched: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int) -> "Job":
        """Reads the variables.

        Raises:
            LaunchError: The expected world size is not a positive number.
        """
        wanted = environ.get(EXPECTED_WORLD_SIZE)
        if wanted is not None and not (wanted.isdecimal() and int(wanted) > 0):
            raise LaunchError(f"{EXPECTED_WORLD_SIZE} is {wanted!r}; expected a positive number of ranks, or unset")
        stop, state = environ.get(STOP_FILE), environ.get(STATE_FILE)
        return cls(
            int(wanted) if wanted else None,
            Path(stop) if stop else None,
            Path(state) if state and rank == 0 else None,
            is_watched=bool(state),
        )

    def check_world_size(self, world_size: int) -> None:
        """Refuses a launch that has come up smaller or larger than the script meant.

        Raises:
            LaunchError: For instance after a hostfile that was not found: DeepSpeed's launcher only warns, and the
                first node would train alone.
        """
        if self.expected_world_size not in (None, world_size):
            raise LaunchError(
                f"the launcher made {world_size} ranks, but the job's script expects {self.expected_world_size} "
                f"({EXPECTED_WORLD_SIZE}); is the hostfile there, with every node and its slots?"
            )

    def running(self, saved_step: int) -> None:
        """Tells how far the run is safe on disk."""
        self.saved_step = saved_step
        self._write("running")

    def ended(self, state: str, reason: str = "") -> None:
        """Tells how the run ended; the last word of an attempt.

        Args:
            state: `stopped`, `done` or `failed`.
            reason: One word.
        """
        self._write(state, reason)

    def _write(self, state: str, reason: str = "") -> None:
        if self.state_file is None:
            return
        # Here, because this module is imported before anything that takes time.
        from data_pipeline.durable import write_atomic

        try:
            write_atomic(self.state_file, (f"{state} {self.saved_step} {reason}".rstrip() + "\n").encode())
        except OSError as error:
            print(f"warning: {STATE_FILE}: {self.state_file}: {error.strerror}", file=sys.stderr, flush=True)
