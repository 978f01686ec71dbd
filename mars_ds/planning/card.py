"""The plan card: what a run will be, from the config and a world size alone."""

from collections.abc import Mapping, Sequence
from math import prod

from mars_ds.config import RunConfig
from mars_ds.optim.grouping import plan_groups
from mars_ds.planning.batch import BatchPlan
from mars_ds.telemetry.console import card, format_bytes, format_count
from mars_ds.zero.layout import flat_layout, replicated_layout, sharded_layout
from mars_ds.zero.ordering import aligned_order
from mars_ds.zero.placement import CallWork, ExchangePlan, plan_step

Shapes = Mapping[str, tuple[int, ...]]


def newton_schulz_plans(config: RunConfig, shapes: Shapes, world_size: int) -> list[ExchangePlan]:
    """Owners and bytes of the orthogonal matrices, one plan a param group; empty where the optimizer has none.

    Args:
        config: The run.
        shapes: Trainable parameters by name, in model order.
        world_size: Ranks.
    """
    groups = plan_groups(shapes, config.optimizer)
    members = [list(group.shapes.items()) for group in groups]
    work = {
        call: CallWork(list(group.shapes), group.settings["ns_steps"], group.settings["ns_form"])
        for call, group in enumerate(groups)
        if group.settings["rule"] == "orthogonal"
    }
    if config.zero.stage == 0:
        layout = replicated_layout(members, world_size)
    elif config.zero.stage == 3:
        layout = sharded_layout(members, world_size)
    else:
        if config.zero.parameter_order == "aligned":
            for call, item in work.items():
                order = aligned_order(members[call], world_size, steps=item.steps, form=item.form)
                members[call] = [(name, groups[call].shapes[name]) for name in order]
        layout = flat_layout(members, world_size)
    return list(plan_step(layout, work).values()) if work else []


def plan_card(
    config: RunConfig, batch: BatchPlan, shapes: Shapes, flops_per_token: int, num_windows: int | None
) -> str:
    """The card, as text.

    Args:
        config: The run.
        batch: Cut of a step.
        shapes: Trainable parameters by name.
        flops_per_token: Forward and backward.
        num_windows: Training windows, or None when the data is not there yet.
    """
    tokens = config.tokens_per_step * config.schedule.steps
    rows: list[tuple[str, str]] = [
        ("run", f"{config.run.name} in {config.run_dir}"),
        ("model", _model_line(config, shapes)),
        *_optimizer_rows(config, shapes),
        ("batch", f"{batch.equation()}\n= {config.tokens_per_step:,} tokens"),
        ("length", _length_line(config, tokens, num_windows)),
        (
            "compute",
            f"{flops_per_token * tokens:.3g} FLOPs ({flops_per_token:.3g} a token, forward and backward)",
        ),
        ("precision", _precision_line(config)),
        ("partitioning", f"ZeRO stage {config.zero.stage} over {batch.world_size} rank{'s' * (batch.world_size > 1)}"),
        ("state", _state_line(config, shapes, batch.world_size)),
    ]
    plans = newton_schulz_plans(config, shapes, batch.world_size)
    if plans:
        rows.append(("Newton-Schulz", "\n".join(plan.describe() for plan in plans)))
    return card("plan", rows)


def _model_line(config: RunConfig, shapes: Shapes) -> str:
    parameters = sum(prod(shape) for shape in shapes.values())
    model = config.model
    kind = model.factory or f"GPT-2, {model.num_layers} layers, {model.num_heads} heads, width {model.width}"
    return f"{kind}: {parameters:,} parameters, {model.sequence_length} tokens a sequence"


def _optimizer_rows(config: RunConfig, shapes: Shapes) -> Sequence[tuple[str, str]]:
    resolved = config.optimizer.resolved()
    lines = []
    for group in plan_groups(shapes, config.optimizer):
        settings = group.settings
        corrected = f", gamma {settings['gamma']}" if settings["gamma"] is not None else ""
        elements = sum(prod(shape) for shape in group.shapes.values())
        lines.append(
            f"{group.override or group.role}: {settings['rule']}{corrected}, "
            f"peak lr {settings['lr'] * settings['lr_factor']:g}, decay {settings['weight_decay']:g}; "
            f"{len(group.shapes)} tensors, {format_count(elements)} elements"
        )
    return [("optimizer", f"{resolved.kind}\n" + "\n".join(lines))]


def _length_line(config: RunConfig, tokens: int, num_windows: int | None) -> str:
    line = f"{config.schedule.steps:,} steps, {format_count(tokens)} tokens"
    if num_windows:
        line += f", {config.global_batch * config.schedule.steps / num_windows:.2f} epochs of the data"
    return f"{line}; {config.schedule.kind}, {config.schedule.warmup_steps:,} steps of warm-up"


def _precision_line(config: RunConfig) -> str:
    precision = config.precision
    return f"{precision.dtype} weights, {precision.accumulation_dtype} accumulation, float32 masters and state"


def _state_line(config: RunConfig, shapes: Shapes, world_size: int) -> str:
    """Bytes of optimizer state and masters per rank, padding left out."""
    import torch

    from mars_ds.optim.state import required_buffers

    total = 0
    for group in plan_groups(shapes, config.optimizer):
        buffers = required_buffers(group.settings, torch.float32)
        per_element = 4 + sum(torch.empty(0, dtype=dtype).element_size() for dtype in buffers.values())
        total += per_element * sum(prod(shape) for shape in group.shapes.values())
    share = total if config.zero.stage == 0 else total / world_size
    return f"{format_bytes(share)} of masters and optimizer state a rank"
