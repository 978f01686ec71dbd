"""Evaluates what a run has saved, apart from the run: no engine, no optimizer, the whole model on every rank."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline.durable import canonical_json, write_atomic
from mars_ds.checkpoint import CheckpointReader, newest_checkpoint
from mars_ds.config import RunConfig, load_config
from mars_ds.errors import CheckpointError
from mars_ds.training.evaluation import Evaluation, open_evaluators
from mars_ds.training.model import build_model
from mars_ds.zero.distributed import join

RESULT_NAME = "evaluation.json"


def evaluate_run(path: str, overrides: Iterable[str] = (), output: str | None = None) -> dict[str, Evaluation]:
    """Evaluates a checkpoint on its validation split and its other sets, over all ranks of the launch.

    Weights are rounded to `precision.dtype` as in training, so that the loss is the one that the run itself would log.

    Args:
        path: Run folder, whose newest checkpoint is taken, or checkpoint folder.
        overrides: Dotted `section.key=value`, laid over the config that the checkpoint holds.
        output: Where rank 0 writes the result as JSON; default: `evaluation.json` in the run folder.

    Returns:
        Results by the name of the set, the same on every rank.

    Raises:
        CheckpointError: No intact checkpoint there, or of another model than the overrides make of it.
        ConfigError, data_pipeline.DataError: Input that does not fit.
    """
    folder = newest_checkpoint(Path(path) / "checkpoints") or Path(path)
    reader = CheckpointReader(folder, verify=True)
    config = _stored_config(reader, overrides)
    join()
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    model = build_model(config)
    try:
        model.module.load_state_dict(reader.model_state(), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {str(error).splitlines()[-1].strip()}") from error
    module = model.module.to(device, getattr(torch, config.precision.dtype))
    results = {}
    for name, evaluator in open_evaluators(config, model, config.batch.micro_batch, device).items():
        result = evaluator.run(module)
        assert result is not None  # nobody asks it to stop
        results[name] = result
        if dist.get_rank() == 0:
            print(f"step {reader.step}: {result.line(name)}", flush=True)
    if dist.get_rank() == 0:
        run_folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
        target = Path(output) if output else run_folder / RESULT_NAME
        sets = {name: asdict(result) for name, result in results.items()}
        write_atomic(target, canonical_json({"checkpoint": str(folder), "step": reader.step, "sets": sets}))
        print(f"written to {target}", flush=True)
    dist.barrier()
    return results


def _stored_config(reader: CheckpointReader, overrides: Iterable[str]) -> RunConfig:
    """The config inside a checkpoint, which may lie anywhere without its run folder."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"config of {reader.folder.name}.yaml"
        file.write_text(json.dumps(reader.index["config"]), encoding="utf-8")
        return load_config(file, overrides)
