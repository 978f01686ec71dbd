"""Bytes that a rank receives in one step, by collective.

Of n bytes an all-reduce receives 2 n (W - 1) / W (a ring), a reduce-scatter or an all-gather of n in all n (W - 1) / W,
an all-to-all what comes from other ranks. A few sums of some bytes each (norms, overflow, the per-tensor clip) are
left out. `tests/planning/test_collectives.py` holds this against the collectives of live engines.
"""

from dataclasses import dataclass

from mars_ds.planning.step_layout import StepLayout


@dataclass(frozen=True)
class Traffic:
    """One kind of transfer of a step.

    Attributes:
        collective: As torch names it.
        purpose: What it carries.
        received_bytes: Of one rank.
        from_deepspeed: False for what the optimizer exchanges.
    """

    collective: str
    purpose: str
    received_bytes: int
    from_deepspeed: bool = True


def step_traffic(plan: StepLayout, accumulation_steps: int, rank: int | None = None) -> list[Traffic]:
    """Plans the transfers of one step.

    Args:
        plan: Layout of the run.
        accumulation_steps: Micro-batches of a step.
        rank: Which rank; None takes the one that receives most in the exchange of matrices.
    """
    world_size = plan.world_size
    if world_size == 1:
        return []
    padded = world_size * sum(shard.numel for shard in plan.shards(0))
    gradients, weights = plan.accumulation_bytes, plan.weight_bytes
    once = (world_size - 1) / world_size
    found = []
    if plan.wrapper in ("none", "unfused"):
        found.append(Traffic("all_reduce", "gradients", round(2 * once * gradients * plan.num_elements)))
    elif plan.wrapper == "stage_3":
        found += _stage_3(plan, accumulation_steps, padded, once)
    else:
        # Stage 2 reduces in every micro-batch, stage 1 once; the wrapper of fp32 accumulation reduces padding too.
        times = accumulation_steps if plan.config.zero.stage == 2 else 1
        reduced = padded if plan.wrapper == "bf16" else plan.num_elements
        found.append(Traffic("all_reduce", "gradients", round(2 * once * gradients * reduced) * times))
        found.append(Traffic("all_gather", "weights", round(once * weights * padded)))
    received = plan.exchanged[1]
    most = received[rank] if rank is not None else max(received)
    if most:
        found.append(Traffic("all_to_all_single", "matrices of Newton-Schulz", most, from_deepspeed=False))
    return found


def _stage_3(plan: StepLayout, accumulation_steps: int, padded: int, once: float) -> list[Traffic]:
    """Gradients are scattered in every micro-batch; weights gathered in it, small ones after the update."""
    small = sum(-(-n // plan.world_size) * plan.world_size for n in plan.small_weights.values())
    large = padded - small
    # In the backward pass weights are gathered again, but for those used last: they are kept where their next use
    # is near enough, first forward, then backward, and no more of them than may be alive.
    near = min(
        plan.stage_3_setting("stage3_max_reuse_distance") // 2, plan.stage_3_setting("stage3_max_live_parameters")
    )
    gathered = large + max(0, large - near)
    size = plan.weight_bytes
    return [
        Traffic("reduce_scatter", "gradients", round(once * plan.accumulation_bytes * padded) * accumulation_steps),
        Traffic("all_gather", "weights", round(once * size * (gathered * accumulation_steps + small))),
    ]
