"""`mars_ds.initialize`: a DeepSpeed engine whose optimizer is one of the MARS family, bound and checked."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from mars_ds.optim import Mars, OptimizerConfig, build_optimizer
from mars_ds.optim.mars import true_shape
from mars_ds.optim.routing import role_of
from mars_ds.zero.binding import EngineSharding, bind
from mars_ds.zero.distributed import join
from mars_ds.zero.ordering import aligned_order
from mars_ds.zero.proof import StartupProof
from mars_ds.zero.support import check_supported

# DeepSpeed chooses these by itself when they are missing, and has changed its choice between releases.
EXPLICIT_KEYS = ("gradient_clipping", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def initialize(
    model: nn.Module,
    config: OptimizerConfig,
    deepspeed_config: dict[str, Any],
    lr_schedule: Callable[[int], float] | None = None,
    *,
    parameter_order: Literal["natural", "aligned"] = "natural",
) -> Any:
    """Wraps a model in a DeepSpeed engine that steps with `config.kind` on ZeRO shards.

    Args:
        model: Any module; parameters are routed by name and shape, frozen ones left out.
        config: Optimizer settings.
        deepspeed_config: An ordinary DeepSpeed config without `optimizer`. `gradient_clipping`,
            `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` must be written out.
            The clip acts on the averaged gradient times `config.gradient_scale`. Where they are missing,
            `data_types.grad_accum_dtype` and `communication_data_type` become fp32 (bf16 at stage 0 in bf16)
            and `reduce_scatter` true, instead of what this release of DeepSpeed would choose.
        lr_schedule: Applied step (from 0) -> factor of the peak lr; None leaves `lr` to the caller.
        parameter_order: Order of the matrices in their flat group at stages 1 and 2. `aligned` chooses one in
            which as few as possible are cut between ranks; checkpoints do not depend on it.

    Returns:
        The engine: `loss = engine(...)`, `engine.backward(loss)`, `engine.step()`. `engine.mars` is the
        optimizer, `engine.mars_sharding` its layout and plans, `engine.mars_proof` the proof that runs in
        the first two steps and raises `ProofError` on every rank when it fails.

    Raises:
        UnsupportedError: A combination that does not run, with the nearest that does.
        LayoutError: This DeepSpeed lays shards out in an unknown way.
        ValueError: A key that must be explicit is missing.
    """
    join()
    for key in EXPLICIT_KEYS:
        if key not in deepspeed_config:
            raise ValueError(f"deepspeed config: {key} must be written out (DeepSpeed would choose a default)")
    config = config.resolved()
    check_supported(config, deepspeed_config)
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    named = list(model.named_parameters())
    if parameter_order == "aligned":
        named = _aligned(named, config)
    optimizer = build_optimizer(named, config, _transposed(model))
    # FP16_UnfusedOptimizer (stage 0, bf16) steps once while it is built.
    optimizer.suspended = True
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=_scheduler(lr_schedule) if lr_schedule is not None else None,
        config=_complete(deepspeed_config, config),
    )
    optimizer.suspended = False
    # Stage 0 in fp32 has no wrapper, and so nobody who looks for overflow; the engine reads `overflow` from us.
    optimizer.skip_non_finite = engine.optimizer is optimizer
    device = torch.device(get_accelerator().current_device_name())
    engine.mars_sharding = bind(engine, optimizer, names, device)
    engine.mars = optimizer
    engine.mars_proof = StartupProof(optimizer, engine.mars_sharding)
    return engine


def optimizer_of(engine: Any) -> Mars:
    """The `Mars` inside an engine made by `initialize`."""
    optimizer: Mars = engine.mars
    return optimizer


def sharding_of(engine: Any) -> EngineSharding:
    """The bound layout and plans of an engine made by `initialize`."""
    sharding: EngineSharding = engine.mars_sharding
    return sharding


def _transposed(model: nn.Module) -> set[str]:
    """Weights of `transformers`' Conv1D, which are stored as (inputs, outputs)."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    }


def _aligned(named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> list[tuple[str, nn.Parameter]]:
    """Reorders the matrices under the orthogonal rule; the others keep their places behind them."""
    if config.rule("matrix").precondition != "orthogonal":
        return named
    shapes = [
        (name, true_shape(p))
        for name, p in named
        if p.requires_grad and role_of(name, true_shape(p), config.routes) == "matrix"
    ]
    order = aligned_order(shapes, dist.get_world_size(), steps=config.ns_steps or 5, form=config.ns_form or "standard")
    place = {name: index for index, name in enumerate(order)}
    return sorted(named, key=lambda item: place.get(item[0], len(place)))


def _scheduler(schedule: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
    # Multiplicative, so that groups with their own lr keep their ratio.
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)


def _complete(deepspeed_config: dict[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    """The user's DeepSpeed config plus what running a client optimizer under ZeRO needs."""
    completed = copy.deepcopy(deepspeed_config)
    completed["zero_allow_untested_optimizer"] = True
    completed["zero_force_ds_cpu_optimizer"] = False
    half = deepspeed_config.get("bf16", {}).get("enabled", False)
    zero = completed.setdefault("zero_optimization", {})
    zero.setdefault("reduce_scatter", True)
    # Differences of gradients lose most to bf16 sums; stage 0 has no wrapper that accumulates in fp32.
    precise = "bf16" if half and zero.get("stage", 0) == 0 else "fp32"
    accumulation = completed.setdefault("data_types", {}).setdefault("grad_accum_dtype", precise)
    completed.setdefault("communication_data_type", accumulation)
    # Mars multiplies by gradient_scale after the clip, so a clip of C / scale here is a clip of C there.
    completed["gradient_clipping"] = deepspeed_config["gradient_clipping"] / (config.gradient_scale or 1.0)
    return completed
