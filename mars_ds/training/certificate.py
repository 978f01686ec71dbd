"""The resume certificate: what was found, where the run goes on, and that no sample is replayed or skipped."""

import platform
import socket
from typing import TYPE_CHECKING, Any

import torch

from mars_ds.checkpoint.api import load_checkpoint
from mars_ds.checkpoint.choose import newest_verified
from mars_ds.checkpoint.reader import CheckpointReader
from mars_ds.errors import CheckpointError, ConfigError
from mars_ds.training.initial_weights import load_initial_weights

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer


def environment() -> dict[str, Any]:
    """What this run runs on, for the index of each checkpoint and the start line of the log."""
    import deepspeed

    return {
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def checkpoint_extra(trainer: "Trainer") -> dict[str, Any]:
    """What the trainer adds to a checkpoint's index; all ranks call it, since the data state is a sum over them."""
    return {
        "data": trainer.loader.state(),
        "trainer": {
            "skipped_steps": trainer.health.skipped_steps,
            "tokens": trainer.step * trainer.config.tokens_per_step,
            "lr": _lr(trainer),
            "guard": trainer.guard.state(),
        },
        "environment": environment(),
        "config": trainer.config.model_dump(mode="json"),
    }


def resume(trainer: "Trainer") -> None:
    """Continues from the newest intact checkpoint of the run folder, or starts from `run.init_from`, or afresh.

    Raises:
        ConfigError: No checkpoint is intact, or it does not fit this run.
    """
    config = trainer.config
    if trainer.folder.resume_from is not None:
        chosen, passed_over = newest_verified(trainer.folder.checkpoints)
        for problem in passed_over:
            trainer.print(f"passed over a damaged checkpoint: {problem}")
        if chosen is None:
            raise ConfigError(
                f"{trainer.folder.checkpoints}: no checkpoint is intact, and starting over would lose the run; move "
                "the folder away, or choose another run.name"
            )
        reader = load_checkpoint(trainer.engine, chosen, group_settings=False, verify=False)
        if "data" not in reader.index:
            raise ConfigError(
                f"{reader.folder}: was not written by this trainer and has no data position; to take its weights, "
                "start a new run with run.init_from"
            )
        trainer.loader.load_state(reader.index["data"])
        trainer.step = reader.step
        saved = reader.index["trainer"]
        trainer.health.skipped_steps = saved["skipped_steps"]
        if "guard" in saved:
            trainer.guard.load_state(saved["guard"])
        trainer.print("\n".join(certificate(trainer, reader)))
    elif config.run.init_from is not None:
        trainer.print(load_initial_weights(trainer.engine, config.run.init_from))
    elif config.run.resume == "auto":
        trainer.print(f"new run: {trainer.folder.checkpoints} holds no checkpoint (run.resume: auto)")


def certificate(trainer: "Trainer", reader: CheckpointReader) -> list[str]:
    """Lines for a person: what was found, and what of it is continued.

    Raises:
        CheckpointError: The state that was loaded is not the state that was saved.
    """
    index, config = reader.index, trainer.config
    data = index["data"]
    before = index.get("config", {})
    samples_before = int(data["position"])
    replayed, skipped = (
        max(0, samples_before - trainer.loader.position),
        max(0, trainer.loader.position - samples_before),
    )
    if replayed or skipped or trainer.loader.state()["window_hash"] != data["window_hash"]:
        raise CheckpointError(
            f"{reader.folder}: the data position was not restored; this is a defect, please report it"
        )
    lines = [
        f"resumed    {reader.folder}, written by {index['world_size']} ranks at ZeRO stage {index['zero_stage']}; "
        f"here {trainer.world_size} ranks at stage {config.zero.stage}",
        f"  position step {trainer.step}, sample {trainer.loader.position:,}, epoch {trainer.loader.epoch():.3f}; "
        f"replayed {replayed}, skipped {skipped}",
        f"  windows  hash {data['window_hash']} of all {trainer.loader.position:,} samples consumed",
    ]
    lr_now = _lr(trainer)
    lr_then = index["trainer"].get("lr", lr_now)
    lines.append(
        f"  lr       {lr_now:.6g} for step {trainer.step + 1}" + _changed(lr_then, lr_now, "in the checkpoint")
    )
    masters = sorted({str(t.dtype).removeprefix("torch.") for t in trainer.engine.mars_sharding.local_shards})
    dtype_then = before.get("precision", {}).get("dtype", config.precision.dtype)
    lines.append(
        f"  dtypes   weights {config.precision.dtype}, masters and optimizer state {'/'.join(masters) or 'elsewhere'}"
        + _changed(dtype_then, config.precision.dtype, "in the checkpoint")
    )
    return lines


def _lr(trainer: "Trainer") -> float:
    """Learning rate of matrices of the coming step."""
    peak = trainer.config.optimizer.resolved().lr or 0.0
    return trainer.schedule.lr(trainer.step, peak, trainer.config.schedule.min_lr)


def _changed(then: Any, now: Any, what: str) -> str:
    return "" if then == now else f" (changed: {then} {what}; the config decides)"
