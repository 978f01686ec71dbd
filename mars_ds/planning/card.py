"""The plan card: what a run will be, from the config and a world size alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from mars_ds.config import RunConfig
from mars_ds.optim.kinds import ROLES
from mars_ds.optim.routing import role_of
from mars_ds.planning.batch import BatchPlan
from mars_ds.telemetry.console import card, format_bytes, format_count
from mars_ds.zero.layout import flat_layout, replicated_layout, sharded_layout
from mars_ds.zero.ordering import aligned_order
from mars_ds.zero.placement import ExchangePlan, plan_exchange

Shapes = Mapping[str, tuple[int, ...]]


def newton_schulz_plan(config: RunConfig, shapes: Shapes, world_size: int) -> ExchangePlan | None:
    """Owners and bytes of the orthogonal matrices, or None where the optimizer has none.

    Args:
        config: The run.
        shapes: Trainable parameters by name, in model order.
        world_size: Ranks.
    """
    groups = group_by_role(config, shapes)
    orthogonal = [i for i, (role, _) in enumerate(groups) if config.optimizer.rule(role).precondition == "orthogonal"]
    if not orthogonal:
        return None
    resolved = config.optimizer.resolved()
    steps, form = resolved.ns_steps or 5, resolved.ns_form or "standard"
    members = [members for _, members in groups]
    if config.zero.stage == 0:
        layout = replicated_layout(members, world_size)
    elif config.zero.stage == 3:
        layout = sharded_layout(members, world_size)
    else:
        if config.zero.parameter_order == "aligned":
            shaped = dict(members[orthogonal[0]])
            order = aligned_order(members[orthogonal[0]], world_size, steps=steps, form=form)
            members[orthogonal[0]] = [(name, shaped[name]) for name in order]
        layout = flat_layout(members, world_size)
    names = [name for name, _ in members[orthogonal[0]]]
    return plan_exchange(layout, orthogonal[0], names, steps=steps, form=form)


def group_by_role(config: RunConfig, shapes: Shapes) -> list[tuple]:  # type: ignore[type-arg]
    """(role, [(name, shape)]) of every role that has parameters, in the order of the param groups."""
    routes = config.optimizer.resolved().routes
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, shape in shapes.items():
        found[role_of(name, shape, routes)].append((name, shape))
    return [(role, found[role]) for role in ROLES if found[role]]


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
    plan = newton_schulz_plan(config, shapes, batch.world_size)
    if plan is not None:
        rows.append(("Newton-Schulz", plan.describe()))
    return card("plan", rows)


def _model_line(config: RunConfig, shapes: Shapes) -> str:
    parameters = sum(prod(shape) for shape in shapes.values())
    model = config.model
    kind = model.factory or f"GPT-2, {model.num_layers} layers, {model.num_heads} heads, width {model.width}"
    return f"{kind}: {parameters:,} parameters, {model.sequence_length} tokens a sequence"


def _optimizer_rows(config: RunConfig, shapes: Shapes) -> Sequence[tuple[str, str]]:
    resolved = config.optimizer.resolved()
    lines = []
    for role, members in group_by_role(config, shapes):
        settings = config.optimizer.group_settings(role)
        corrected = f", gamma {settings['gamma']}" if settings["gamma"] is not None else ""
        elements = sum(prod(shape) for _, shape in members)
        lines.append(
            f"{role}: {settings['rule']}{corrected}, peak lr {settings['lr'] * settings['lr_factor']:g}, decay "
            f"{settings['weight_decay']:g}; {len(members)} tensors, {format_count(elements)} elements"
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
    for role, members in group_by_role(config, shapes):
        buffers = required_buffers(config.optimizer.group_settings(role), torch.float32)
        per_element = 4 + sum(torch.empty(0, dtype=dtype).element_size() for dtype in buffers.values())
        total += per_element * sum(prod(shape) for _, shape in members)
    share = total if config.zero.stage == 0 else total / world_size
    return f"{format_bytes(share)} of masters and optimizer state a rank"
