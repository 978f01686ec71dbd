"""The plan of a run that is about to start, or that is only asked for: `mars_ds.planning` with the model and data."""

import os

import psutil
import torch

from data_pipeline import DataError
from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import plan_batch
from mars_ds.planning.fitting import Available
from mars_ds.planning.plan import RunPlan
from mars_ds.training.data import check_vocabulary, open_split
from mars_ds.training.engine_config import deepspeed_config
from mars_ds.training.model import build_model, check_can_compile
from mars_ds.zero.support import check_supported


def plan_run(
    config: RunConfig,
    world_size: int,
    *,
    data: bool = True,
    device: str | None = None,
    efficiency: float | None = None,
) -> RunPlan:
    """Checks everything that can be known without the other ranks, and plans the run.

    Args:
        config: The run.
        world_size: Ranks.
        data: Look at the data too.
        device: Name of the accelerators, or None when they are not known.
        efficiency: Share of their peak, or None for the anchor of the model's size.

    Raises:
        ConfigError, UnsupportedError: What does not fit together, with the nearest that does.
        data_pipeline.DataError: The data is not there.
    """
    batch = plan_batch(config.global_batch, config.batch.micro_batch, world_size)
    check_supported(config.optimizer.resolved(), deepspeed_config(config, batch))
    check_can_compile(config)
    model = build_model(config, device="meta")
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters() if p.requires_grad}
    windows = None
    if data:
        train = open_split(config, "train")
        check_vocabulary(train, model)
        windows = train.num_windows
        if config.evaluation.interval_steps:
            check_vocabulary(open_split(config, "val"), model)
    plan = RunPlan(config, batch, shapes, model.flops_per_token, windows, device, efficiency)
    try:
        _ = plan.layout
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return plan


def plan_with_or_without_data(
    config: RunConfig, world_size: int, device: str | None = None, efficiency: float | None = None
) -> tuple[RunPlan, str | None]:
    """The plan, and what is wrong with the data when it could not be looked at."""
    try:
        return plan_run(config, world_size, device=device, efficiency=efficiency), None
    except DataError as error:
        return plan_run(config, world_size, data=False, device=device, efficiency=efficiency), str(error)


def device_name() -> str:
    """Name of this rank's accelerator; "cpu" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def available_memory(world_size: int) -> Available:
    """Memory that this rank may take: free on its accelerator, and its share of free host memory."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size)
    host = int(psutil.virtual_memory().available) // max(1, local_ranks)
    if torch.cuda.is_available():
        return Available(int(torch.cuda.mem_get_info()[0]), host, False, device_name())
    return Available(host, host, True, "host memory for this rank")
