"""The folder of a run: what lies where, and whether this start is a new run or a resume."""

from dataclasses import dataclass
from pathlib import Path

from mars_ds.checkpoint import CheckpointReader, newest_checkpoint
from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError

LOG_NAME = "log.jsonl"
CONFIG_NAME = "config.yaml"
CARD_NAME = "optimizer_card.txt"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        path: The folder.
        resume_from: Checkpoint to continue from, or None for a new run.
    """

    path: Path
    resume_from: Path | None

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

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
    newest = newest_checkpoint(path / "checkpoints")
    if config.run.resume == "required" and newest is None:
        raise ConfigError(f"run.resume is required, but {path / 'checkpoints'} holds no committed checkpoint")
    if config.run.resume == "never":
        if (path / LOG_NAME).exists() or newest is not None:
            raise ConfigError(
                f"run.resume is never, but {path} already holds a run; choose another run.name, or resume: auto"
            )
        newest = None
    if newest is not None and config.run.init_from is not None:
        # The start of the run is behind us: its weights are in the checkpoint.
        return RunFolder(path, newest)
    if newest is None and config.run.init_from is not None:
        CheckpointReader(config.run.init_from)
    return RunFolder(path, newest)
