"""Peak memory of a rank: the exact state, and estimates of what exists only for a moment.

A step has two phases. In `backward` there are activations, logits and unreduced gradients; in `step` copies of the
largest flat tensor, the exchange of matrices and the workspace of Newton-Schulz. The peak is what exists always plus
the larger of the two. docs/planning.md gives every formula.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from mars_ds.config import RunConfig
from mars_ds.optim.orthogonal import DTYPES, WORKSPACE_COPIES, matrices_per_batch
from mars_ds.planning.state import BUCKET, GRADIENTS, Item, state_items, touched_elements
from mars_ds.planning.step_layout import StepLayout

BACKWARD, STEP = ("backward",), ("step",)
# fp32 flats of the largest call beside its masters and buffers while it is updated: gradient, corrected gradient,
# direction, and what it is multiplied with.
STEP_COPIES = 4
# Elements per token and unit of width that autograd keeps of a block: residual (2), two norms, q, k, v, attention,
# GELU's input and output (4 each); measured by tests/planning/test_memory.py.
BLOCK_UNITS = 16
# Of these, what selective checkpointing keeps: a block's input, c_attn (3), attention, c_proj, c_fc (4), c_proj.
SELECTIVE_UNITS = 11
# Gradients of the two widest activations of a block, while it is differentiated.
BACKWARD_UNITS = 8
# Elements that DeepSpeed copies together before it all-reduces them, where nothing is partitioned.
WHOLE_REDUCTION_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        items: In the order in which they are shown.
        rank: Which rank.
        complete: False where activations are unknown (`model.factory`).
    """

    items: tuple[Item, ...]
    rank: int
    complete: bool

    def peak(self, on_host: bool = False, at_least: bool = False) -> int:
        """Bytes at the peak.

        Args:
            on_host: In host memory; else on the accelerator.
            at_least: Only what is exact: below this no run fits, whatever the estimates are worth.
        """
        items = [item for item in self.items if item.on_host == on_host and (item.exact or not at_least)]
        return max(sum(item.num_bytes for item in items if phase in item.phases) for phase in ("backward", "step"))


def memory_plan(plan: StepLayout, micro_batch: int, accumulation_steps: int, rank: int | None = None) -> MemoryPlan:
    """Plans the memory of a rank.

    Args:
        plan: Layout of the run.
        micro_batch: Sequences of one forward and backward.
        accumulation_steps: Micro-batches of a step.
        rank: Which rank; None takes the one with the highest peak on the accelerator.
    """
    if rank is not None:
        return _of_rank(plan, micro_batch, accumulation_steps, rank)
    shared = _shared_items(plan, micro_batch)
    plans = (_of_rank(plan, micro_batch, accumulation_steps, rank, shared) for rank in range(plan.world_size))
    return max(plans, key=lambda found: (found.peak(), -found.rank))


def _of_rank(
    plan: StepLayout, micro_batch: int, accumulation_steps: int, rank: int, shared: Iterable[Item] | None = None
) -> MemoryPlan:
    shared = _shared_items(plan, micro_batch) if shared is None else shared
    items = [
        *state_items(plan, rank, accumulation_steps),
        *shared,
        *_gradient_estimates(plan, rank, accumulation_steps),
    ]
    items += _step_items(plan, rank)
    present = tuple(item for item in items if item.num_bytes)
    return MemoryPlan(present, rank, plan.config.model.factory is None)


def _shared_items(plan: StepLayout, micro_batch: int) -> list[Item]:
    """What every rank has alike: activations, logits, gathered weights."""
    items = [Item(name, size, False, BACKWARD, False) for name, size in activation_bytes(plan.config, micro_batch)]
    if plan.config.zero.stage == 3:
        alive = min(plan.num_elements, plan.stage_3_setting("stage3_max_live_parameters"))
        items.append(Item("weights, gathered", plan.weight_bytes * alive, False, BACKWARD, False))
    return items


def activation_bytes(config: RunConfig, micro_batch: int) -> list[tuple[str, int]]:
    """(item, bytes) of a forward and backward of our GPT-2; nothing for a factory's model."""
    model = config.model
    if model.factory is not None:
        return []
    size = 2 if config.precision.dtype == "bfloat16" else 4
    tokens = micro_batch * model.sequence_length
    block = saved_by_block(config, micro_batch)
    residual = size * model.width * tokens
    # full keeps each block's input, selective what its products and its attention give as well; one block at a time
    # is then whole.
    recomputed = {"none": 0, "full": residual, "selective": SELECTIVE_UNITS * residual}[model.activation_checkpointing]
    saved = model.num_layers * recomputed + block if recomputed else model.num_layers * block
    # Input and output of the last norm, and what the backward of one block takes.
    saved += 2 * residual + BACKWARD_UNITS * residual
    chunk = min(tokens, model.loss_chunk_tokens or tokens)
    # Logits, their fp32 copy, and a temporary of the softmax; all at once the gradient comes to it.
    logits = chunk * model.vocab_size * (size + (8 if model.loss_chunk_tokens else 12))
    # The chunked loss sums the gradient of the embedding in fp32, and makes each chunk's share.
    head = model.vocab_size * model.width * (4 + size) if model.loss_chunk_tokens else 0
    return [("activations", saved), ("logits", logits + head)]


def saved_by_block(config: RunConfig, micro_batch: int) -> int:
    """Bytes that autograd keeps of one block: `BLOCK_UNITS`, statistics of two norms, and of each head's softmax."""
    model = config.model
    size = 2 if config.precision.dtype == "bfloat16" else 4
    statistics = 2 * 2 * 4 + 4 * model.num_heads
    # Dropout keeps a mask of a byte for each of its two outputs.
    masks = 2 * model.width if model.dropout else 0
    return micro_batch * model.sequence_length * (BLOCK_UNITS * size * model.width + statistics + masks)


def _gradient_estimates(plan: StepLayout, rank: int, accumulation_steps: int) -> list[Item]:
    """What gradients take before they are reduced, beyond what is left of them afterwards."""
    bucket = plan.config.zero.reduce_bucket_elements
    largest = max(prod(shape) for shape in plan.shapes.values())
    if plan.wrapper == "stage_3":
        return []
    if plan.wrapper != "stage_1_2":
        copied = plan.accumulation_bytes * min(plan.num_elements, WHOLE_REDUCTION_ELEMENTS)
        return [Item("reduction copy", copied, False, STEP, False)]
    # A gradient larger than the bucket is reduced by itself.
    items = [Item(BUCKET, plan.accumulation_bytes * max(bucket, largest), False, exact=False)]
    left = sum(item.num_bytes for item in state_items(plan, rank) if item.name == GRADIENTS)
    if plan.config.zero.stage == 1:
        unreduced = plan.accumulation_bytes * plan.num_elements
    else:
        unreduced = plan.accumulation_bytes * touched_elements(plan, rank) * min(accumulation_steps, 2)
    return [*items, Item("gradients, unreduced", max(0, unreduced - left), False, BACKWARD, False)]


def _step_items(plan: StepLayout, rank: int) -> list[Item]:
    host = plan.config.zero.offload != "none"
    shards = plan.shards(rank)
    calls: dict[int, int] = {}
    for shard in shards:
        calls[shard.call] = calls.get(shard.call, 0) + shard.numel
    items = [Item("update", 4 * STEP_COPIES * max(calls.values(), default=0), host, STEP, False)]
    exchange = workspace = 0
    for call, exchanged in plan.plans.items():
        size, dtype = plan.wire_bytes(call), DTYPES[plan.settings(call)["ns_dtype"]]
        owned = [m for m in exchanged.matrices if m.owner == rank]
        shapes: dict[tuple[int, int], int] = {}
        for matrix in owned:
            shapes[matrix.rows, matrix.columns] = shapes.get((matrix.rows, matrix.columns), 0) + 1
        for (rows, columns), count in shapes.items():
            batch = min(count, matrices_per_batch(rows * columns, dtype))
            workspace = max(workspace, WORKSPACE_COPIES * batch * rows * columns * dtype.itemsize)
        # The pieces held and the matrices owned, each with its update.
        held = sum(f.numel for s in shards if s.call == call for f in s.fragments)
        exchange = max(exchange, 2 * size * (held + sum(m.numel for m in owned)))
    sent, received = plan.exchanged
    exchange += max(sent[rank], received[rank]) if plan.plans else 0
    if plan.config.checkpoint.asynchronous:
        # A thread writes from a copy of the masters and buffers while training goes on.
        copied = sum(s.numel * (4 + sum(d.itemsize for d in plan.buffers(s.call).values())) for s in shards)
        share = plan.world_size if plan.layout.replicated else 1
        items.append(Item("checkpoint being written", copied // share, True, exact=False))
    return [
        *items,
        Item("exchange workspace", exchange, False, STEP, False),
        Item("Newton-Schulz workspace", workspace, False, STEP, False),
    ]


def with_other(config: RunConfig, section: str, **values: object) -> RunConfig:
    """The config with keys of one section changed, checked again."""
    changed = config.model_dump()
    changed[section] = {**changed[section], **values}
    changed["optimizer"] = config.optimizer.model_dump(exclude_none=True)
    return RunConfig.model_validate(changed)


def checkpoint_bytes(plan: StepLayout) -> int:
    """Bytes of one checkpoint: masters and optimizer buffers of every element once, without padding."""
    total = 0
    for call in plan.layout.calls():
        elements = sum(prod(plan.shapes[name]) for name in plan.layout.holders(call))
        total += elements * (4 + sum(dtype.itemsize for dtype in plan.buffers(call).values()))
    return total
