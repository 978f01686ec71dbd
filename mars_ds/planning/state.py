"""Bytes of every tensor that a rank holds as state, exact to the byte: what DeepSpeed 0.19.8 and `Mars` allocate.

`tests/planning/test_state.py` holds each item against the live tensors of an engine at every stage. What exists only
for a moment is estimated elsewhere (`mars_ds.planning.memory`).
"""

from dataclasses import dataclass
from math import prod

from mars_ds.planning.step_layout import StepLayout

WEIGHTS = "weights"
SMALL_WEIGHTS = "small weights, gathered"
MASTERS = "fp32 masters"
GRADIENTS = "gradients"
ACCUMULATION = "accumulation buffers"
BUCKET = "reduce bucket"
OFFLOADED_GRADIENTS = "offloaded gradients"
STAGING = "offload staging"


@dataclass(frozen=True)
class Item:
    """Some memory of one rank.

    Attributes:
        name: What it is.
        num_bytes: Size.
        on_host: In host memory; else on the accelerator.
        phases: When it exists: `backward`, `step`, or both.
        exact: Equal to the storage of live tensors; else an estimate.
    """

    name: str
    num_bytes: int
    on_host: bool = False
    phases: tuple[str, ...] = ("backward", "step")
    exact: bool = True


def state_items(plan: StepLayout, rank: int, accumulation_steps: int = 1) -> list[Item]:
    """The state of one rank, item by item; `gradients` is what exists when the last backward of a step has ended.

    Args:
        plan: Layout of the run.
        rank: Which rank.
        accumulation_steps: Micro-batches of a step and rank.
    """
    offload = plan.config.zero.offload
    host = offload != "none"
    items = [Item(WEIGHTS, _weights(plan, rank), offload == "optimizer_and_parameters")]
    # Gathered in whole parts of every rank, padding included; one rank gathers nothing.
    gathered = sum(-(-n // plan.world_size) * plan.world_size for n in plan.small_weights.values())
    gathered *= plan.world_size > 1
    items.append(Item(SMALL_WEIGHTS, gathered * plan.weight_bytes))
    # Without a wrapper the weights are the masters.
    held = 0 if plan.wrapper == "none" else sum(shard.numel for shard in plan.shards(rank))
    items.append(Item(MASTERS, 4 * held, host))
    buffers: dict[str, int] = {}
    for shard in plan.shards(rank):
        for name, dtype in plan.buffers(shard.call).items():
            buffers[name] = buffers.get(name, 0) + dtype.itemsize * shard.numel
    items += [Item(name, size, host) for name, size in buffers.items()]
    items += _gradient_items(plan, rank)
    if host:
        items += _offload_items(plan, rank, accumulation_steps)
    return [item for item in items if item.num_bytes]


def _weights(plan: StepLayout, rank: int) -> int:
    if plan.config.zero.stage == 0:
        return plan.weight_bytes * plan.num_elements
    # Stages 1 and 2 keep whole flat groups, padded; stage 3 a part of each parameter, padded.
    copies = 1 if plan.config.zero.stage == 3 else plan.world_size
    return plan.weight_bytes * copies * sum(shard.numel for shard in plan.shards(rank))


def _gradient_items(plan: StepLayout, rank: int) -> list[Item]:
    held = sum(shard.numel for shard in plan.shards(rank))
    if plan.wrapper in ("none", "unfused"):
        return [Item(GRADIENTS, plan.weight_bytes * plan.num_elements)]
    if plan.wrapper == "bf16":
        # bf16 gradients of autograd, added to whole flat groups in fp32.
        return [
            Item(GRADIENTS, plan.weight_bytes * plan.num_elements),
            Item(ACCUMULATION, plan.accumulation_bytes * plan.world_size * held),
        ]
    if plan.wrapper == "stage_3":
        host = plan.config.zero.offload != "none"
        return [
            Item(ACCUMULATION, plan.accumulation_bytes * held, host),
            Item(BUCKET, plan.accumulation_bytes * plan.config.zero.reduce_bucket_elements),
        ]
    if plan.accumulation_bytes != plan.weight_bytes:
        return [Item(GRADIENTS, plan.accumulation_bytes * held)]
    if plan.config.zero.offload != "none":
        return []
    # Whole gradients of every parameter of which this rank holds a piece, and the padding apart.
    padding = held - sum(f.numel for shard in plan.shards(rank) for f in shard.fragments)
    return [Item(GRADIENTS, plan.weight_bytes * (touched_elements(plan, rank) + padding))]


def touched_elements(plan: StepLayout, rank: int) -> int:
    """Elements of the parameters of which a rank holds a piece, counted whole."""
    return sum(prod(f.shape) for shard in plan.shards(rank) for f in shard.fragments)


def _offload_items(plan: StepLayout, rank: int, accumulation_steps: int) -> list[Item]:
    held = sum(shard.numel for shard in plan.shards(rank))
    items = [Item(OFFLOADED_GRADIENTS, 4 * held, True)]
    if plan.wrapper != "stage_1_2":
        return items
    largest = max(prod(shape) for shape in plan.shapes.values())
    accumulated = plan.config.zero.stage == 2 and plan.accumulation_bytes == plan.weight_bytes
    if accumulated and accumulation_steps > 1:
        items = [Item(OFFLOADED_GRADIENTS, 4 * held + plan.weight_bytes * touched_elements(plan, rank), True)]
    return [
        *items,
        Item(f"{STAGING} (host)", plan.weight_bytes * (held + largest), True),
        Item(STAGING, plan.weight_bytes * largest),
    ]
