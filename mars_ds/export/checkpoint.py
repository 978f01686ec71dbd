"""Takes a GPT-2 out of a checkpoint, whatever stage and world size wrote it; no DeepSpeed needed."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mars_ds.checkpoint import CheckpointReader, newest_checkpoint
from mars_ds.config import ModelSection
from mars_ds.errors import CheckpointError
from mars_ds.model.config import GPT2Config
from mars_ds.training.model import gpt2_config


@dataclass(frozen=True)
class StoredGPT2:
    """A model as it was saved.

    Attributes:
        config: Shape.
        state: fp32 weights by name.
        tokenizer: Name of the data set's tokenizer.
        step: Optimizer steps it was trained.
        optimizer: Kind of the optimizer.
        data_set: Identity of the data set.
    """

    config: GPT2Config
    state: dict[str, Tensor]
    tokenizer: str
    step: int
    optimizer: str
    data_set: str


def load_gpt2(path: str | Path) -> StoredGPT2:
    """Reads a checkpoint folder, or the newest checkpoint of a run folder.

    Raises:
        CheckpointError: No checkpoint there, or it holds a model of a factory.
    """
    folder = Path(path)
    newest = newest_checkpoint(folder / "checkpoints")
    reader = CheckpointReader(newest or folder)
    section = ModelSection.model_validate(reader.index["config"]["model"])
    if section.factory is not None:
        raise CheckpointError(f"{reader.folder}: holds a model of {section.factory}, not our GPT-2")
    data = reader.index["data"]
    return StoredGPT2(
        config=gpt2_config(section),
        state=reader.model_state(),
        tokenizer=data["tokenizer"],
        step=reader.step,
        optimizer=reader.index["optimizer"]["kind"],
        data_set=data["data set"],
    )
