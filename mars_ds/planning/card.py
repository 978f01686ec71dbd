"""The plan card: what a run will be, from the config and a world size alone."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from mars_ds.config import RunConfig
from mars_ds.planning.batch import BatchPlan
from mars_ds.planning.fitting import runs
from mars_ds.planning.memory import MemoryPlan, with_other
from mars_ds.planning.plan import RunPlan
from mars_ds.planning.step_layout import Shapes, step_layout
from mars_ds.telemetry.console import card, format_bytes, format_count, format_seconds
from mars_ds.zero.placement import ExchangePlan, imbalance

# Columns of the table of all stages, for precisions that run there.
CHOICES = (
    ("0", 0, "none"),
    ("1", 1, "none"),
    ("1 opt", 1, "optimizer"),
    ("2", 2, "none"),
    ("2 opt", 2, "optimizer"),
    ("3", 3, "none"),
    ("3 opt", 3, "optimizer"),
    ("3 all", 3, "optimizer_and_parameters"),
)
_NAME, _CELL = 28, 12


def newton_schulz_plans(config: RunConfig, shapes: Shapes, world_size: int) -> list[ExchangePlan]:
    """Owners and bytes of the orthogonal matrices, one plan a call; empty where the optimizer has none.

    Args:
        config: The run.
        shapes: Trainable parameters by name, in model order.
        world_size: Ranks.
    """
    return list(step_layout(config, shapes, world_size).plans.values())


def plan_card(plan: RunPlan) -> str:
    """The card, as text of at most 100 columns."""
    config, batch = plan.config, plan.batch
    rows: list[tuple[str, str]] = [
        ("run", f"{config.run.name} in {config.run_dir}"),
        ("model", _model_line(config, plan.shapes)),
        *_optimizer_rows(plan),
        ("batch", f"{batch.equation()}\n= {config.tokens_per_step:,} tokens"),
        ("length", _length_line(plan)),
        ("precision", _precision_line(config)),
        ("partitioning", _partitioning_line(config, batch)),
        ("", ""),
        ("memory", _memory_table(plan.memory)),
        ("", ""),
        ("traffic", _traffic_table(plan)),
        *_newton_schulz_rows(plan),
        ("compute", _compute_line(plan)),
        ("time", _time_line(plan)),
        ("checkpoints", _checkpoint_line(plan)),
    ]
    return card("plan", rows)


def _model_line(config: RunConfig, shapes: Shapes) -> str:
    parameters = sum(prod(shape) for shape in shapes.values())
    model = config.model
    kind = model.factory or f"GPT-2, {model.num_layers} layers, {model.num_heads} heads, width {model.width}"
    return f"{kind}: {parameters:,} parameters, {model.sequence_length} tokens a sequence"


def _optimizer_rows(plan: RunPlan) -> Sequence[tuple[str, str]]:
    resolved = plan.config.optimizer.resolved()
    lines = []
    for group in plan.layout.groups:
        settings = group.settings
        corrected = f", gamma {settings['gamma']}" if settings["gamma"] is not None else ""
        elements = sum(prod(shape) for shape in group.shapes.values())
        lines.append(
            f"{group.override or group.role}: {settings['rule']}{corrected}, "
            f"peak lr {settings['lr'] * settings['lr_factor']:g}, decay {settings['weight_decay']:g}; "
            f"{len(group.shapes)} tensors, {format_count(elements)} elements"
        )
    return [("optimizer", f"{resolved.kind}\n" + "\n".join(lines))]


def _length_line(plan: RunPlan) -> str:
    schedule = plan.config.schedule
    line = f"{schedule.steps:,} steps, {format_count(plan.tokens)} tokens"
    if plan.epochs is not None:
        line += f", {plan.epochs:.2f} epochs of the data"
    return f"{line}; {schedule.kind}, {schedule.warmup_steps:,} steps of warm-up"


def _precision_line(config: RunConfig) -> str:
    precision = config.precision
    return f"{precision.dtype} weights, {precision.accumulation_dtype} accumulation, float32 masters and state"


def _partitioning_line(config: RunConfig, batch: BatchPlan) -> str:
    offload = "" if config.zero.offload == "none" else f", {config.zero.offload.replace('_', ' ')} in host memory"
    return f"ZeRO stage {config.zero.stage} over {batch.world_size} rank{'s' * (batch.world_size > 1)}{offload}"


def _memory_table(memory: MemoryPlan) -> str:
    """Items of the rank with the highest peak, with the phases they count in; `~` marks an estimate."""
    lines = [f"{f'rank {memory.rank}, per item':<{_NAME}}{'backward':>{_CELL}}{'step':>{_CELL}}"]
    for item in memory.items:
        size = ("" if item.exact else "~") + format_bytes(item.num_bytes)
        cells = "".join(f"{size if phase in item.phases else '-':>{_CELL}}" for phase in ("backward", "step"))
        lines.append(f"{item.name:<{_NAME}}{cells}{'  host' if item.on_host else ''}")
    unknown = "" if memory.complete else ", without the activations of this model, which are not known"
    estimated = any(not item.exact for item in memory.items)
    lines.append(f"{'peak':<{_NAME}}{('~' if estimated else '') + format_bytes(memory.peak()):>{_CELL}}{unknown}")
    if memory.peak(on_host=True):
        lines.append(f"{'peak in host memory':<{_NAME}}{'~' + format_bytes(memory.peak(on_host=True)):>{_CELL}}")
    return "\n".join(lines)


def _traffic_table(plan: RunPlan) -> str:
    if not plan.traffic:
        return "one rank: nothing is sent"
    width = max(len(item.collective) for item in plan.traffic) + 2
    lines = [
        f"{item.collective:<{width}}{item.purpose:<28}{format_bytes(item.received_bytes):>10}" for item in plan.traffic
    ]
    total = sum(item.received_bytes for item in plan.traffic)
    lines.append(f"{'received by a rank in a step':<{width + 28}}{format_bytes(total):>10}")
    return "\n".join(lines)


def _newton_schulz_rows(plan: RunPlan) -> list[tuple[str, str]]:
    plans = list(plan.layout.plans.values())
    if not plans:
        return []
    shapes: dict[tuple[int, int], int] = {}
    owned = [0] * plan.batch.world_size
    for exchange in plans:
        for matrix in exchange.matrices:
            shapes[matrix.rows, matrix.columns] = shapes.get((matrix.rows, matrix.columns), 0) + 1
            owned[matrix.owner] += 1
    flops = [sum(exchange.flops[rank] for exchange in plans) for rank in range(plan.batch.world_size)]
    kinds = ", ".join(f"{count} of {rows} x {columns}" for (rows, columns), count in sorted(shapes.items()))
    sent = sum(plan.layout.exchanged[0])
    if not any(exchange.needs_exchange for exchange in plans):
        moved = "none is cut between ranks, nothing moves"
    else:
        straddlers = sum(exchange.straddlers() for exchange in plans)
        cut = "every rank holds all" if plan.config.zero.stage == 0 else f"{straddlers} cut between ranks"
        busiest = max(plan.layout.exchanged[0])
        moved = f"{cut}: {sent / 1e6:,.1f} MB sent a step, {busiest / 1e6:,.1f} MB by the busiest rank"
    text = (
        f"{sum(shapes.values())} matrices, each on one owner: {kinds}\n"
        f"{min(owned)} to {max(owned)} a rank; {sum(flops):.3g} FLOPs a step in all, busiest rank "
        f"{imbalance(flops):.2f}x the even share\n{moved}"
    )
    return [("Newton-Schulz", text)]


def _compute_line(plan: RunPlan) -> str:
    time = plan.time
    total = time.flops_per_step * plan.config.schedule.steps
    share = time.newton_schulz_flops / time.flops_per_step
    line = f"{total:.3g} FLOPs ({time.flops_per_token:.3g} a token, forward and backward)"
    return f"{line}; Newton-Schulz {share:.1%} of it" if time.newton_schulz_flops else line


def _time_line(plan: RunPlan) -> str:
    time = plan.time
    if time.seconds is None or time.efficiency is None or time.tokens_per_second is None:
        if time.device is None:
            return "device not named: launch/plan.py --device NAME estimates it"
        if plan.config.precision.dtype != "bfloat16":
            return f"{time.device}: not estimated, its peak is known for bfloat16 only"
        return f"{time.device}: unknown device, no estimate"
    ranks = plan.batch.world_size
    source = "as given" if plan.efficiency is not None else "a published anchor for this size, not measured"
    return (
        f"{format_seconds(time.seconds)} on {ranks} x {time.device}: {format_count(time.tokens_per_second)} tokens/s, "
        f"{format_count(time.tokens_per_second / ranks)} a device\n"
        f"at {time.efficiency:.0%} of the dense bf16 peak ({source}), evaluation and saving left out"
    )


def _checkpoint_line(plan: RunPlan) -> str:
    checkpoint, size, steps = plan.config.checkpoint, plan.checkpoint_bytes, plan.config.schedule.steps
    permanent = steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    # The last healthy one is kept besides, and one more is being written.
    total = (checkpoint.keep_last + 2 + permanent) * size
    kept = f"{checkpoint.keep_last} newest kept and a healthy one" + (f", {permanent} for good" if permanent else "")
    return f"{format_bytes(size)} each, {kept}: up to {format_bytes(total)} of disk"


def stage_table(plan: RunPlan) -> str:
    """Peak and exact state per rank at every stage and offload, as text of at most 100 columns."""
    columns = []
    for title, stage, offload in CHOICES:
        config = with_other(plan.config, "zero", stage=stage, offload=offload)
        columns.append((title, replace(plan, config=config) if runs(config) else None))
    rows: dict[str, list[str]] = {"ZeRO stage, offload": [title for title, _ in columns]}
    memories = [None if choice is None else choice.memory for _, choice in columns]
    names = dict.fromkeys(
        (item.name, item.on_host) for memory in memories if memory for item in memory.items if item.exact
    )
    for name, on_host in sorted(names, key=lambda key: key[1]):
        sizes = [_item_bytes(memory, name, on_host) for memory in memories]
        rows[f"{name}{', host' * (on_host and 'host' not in name)}"] = sizes
    if plan.config.model.factory is None:
        for words, value in (("kept", "none"), ("selective", "selective"), ("recomputed", "full")):
            peaks = []
            for _, choice in columns:
                if choice is None:
                    peaks.append("-")
                    continue
                changed = replace(choice, config=with_other(choice.config, "model", activation_checkpointing=value))
                changed.__dict__["layout"] = replace(choice.layout, config=changed.config)
                peaks.append("~" + format_bytes(changed.memory.peak()))
            rows[f"peak, activations {words}"] = peaks
    else:
        rows["peak without activations"] = ["-" if m is None else "~" + format_bytes(m.peak()) for m in memories]
    rows["peak in host memory"] = [
        "-" if m is None or not m.peak(on_host=True) else "~" + format_bytes(m.peak(on_host=True)) for m in memories
    ]
    rows["received a step"] = [
        "-" if choice is None else format_bytes(sum(t.received_bytes for t in choice.traffic)) for _, choice in columns
    ]
    label = max(len(name) for name in rows)
    cells = [f"{name:<{label}}" + "".join(f"{_short(cell):>8}" for cell in row) for name, row in rows.items()]
    return "\n".join([cells[0], "-" * len(cells[0]), *cells[1:], _LEGEND])


_LEGEND = (
    "opt: masters and optimizer state in host memory; all: weights too. ~ estimated, the rest is exact.\n"
    "Bytes of the rank with the highest peak; K, M, G are binary."
)


def _item_bytes(memory: MemoryPlan | None, name: str, on_host: bool) -> str:
    if memory is None:
        return "-"
    size = sum(i.num_bytes for i in memory.items if i.exact and (i.name, i.on_host) == (name, on_host))
    return format_bytes(size) if size else "-"


def _short(text: str) -> str:
    """`1.5 GiB` as `1.5G`: eight columns must fit."""
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        text = text.replace(f" {unit}", unit[0])
    return text.replace(" B", "B")
