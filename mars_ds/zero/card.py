"""The optimizer card: which tensors go to which rule, and what Newton-Schulz costs each rank."""

import re
from collections import Counter
from math import prod

from mars_ds.optim import Mars
from mars_ds.telemetry.console import card, format_bytes, format_count
from mars_ds.zero.binding import EngineSharding
from mars_ds.zero.layout import state_elements


def optimizer_card(optimizer: Mars, sharding: EngineSharding) -> str:
    """The card as text, from the live optimizer and its layout."""
    rows: list[tuple[str, str]] = [("optimizer", optimizer.config.kind)]
    for group in optimizer.param_groups:
        elements = sum(prod(shape) for shape in group["shapes"])
        patterns = Counter(re.sub(r"\d+", "*", name) for name in group["names"])
        names = ", ".join(f"{pattern} x{count}" if count > 1 else pattern for pattern, count in patterns.items())
        corrected = f", gamma {group['gamma']:g}" if group["gamma"] is not None else ""
        rows.append(
            (
                group["role"],
                f"{group['rule']}{corrected}, decay {group['weight_decay']:g}: {len(group['names'])} tensors, "
                f"{format_count(elements)} elements\n{names}",
            )
        )
    rows += _newton_schulz_rows(sharding)
    rows.append(("state", _state_line(optimizer, sharding)))
    return card("optimizer", rows)


def _newton_schulz_rows(sharding: EngineSharding) -> list[tuple[str, str]]:
    if not sharding.plans:
        return []
    world_size = sharding.layout.world_size
    plans = sharding.plans.values()
    loads = [sum(plan.flops[rank] for plan in plans) for rank in range(world_size)]
    owned = Counter(matrix.owner for plan in plans for matrix in plan.matrices)
    busiest = max(loads) * world_size / sum(loads) if sum(loads) else 1.0
    moved = sum(plan.exchanged_elements() for plan in plans)
    return [
        (
            "Newton-Schulz",
            f"{sum(owned.values())} matrices, each orthogonalized by one rank: "
            f"{min(owned[r] for r in range(world_size))} to {max(owned[r] for r in range(world_size))} a rank\n"
            f"{sum(loads):.3g} FLOPs a step in all, busiest rank {busiest:.2f}x the even share, "
            f"{format_count(moved)} elements between ranks",
        )
    ]


def _state_line(optimizer: Mars, sharding: EngineSharding) -> str:
    """Buffers of this rank, and how often each needed element is stored over all ranks."""
    total = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "element_size")
    )
    names = [name for group in optimizer.param_groups for name in group["names"]]
    needed = sum(prod(shape) for group in optimizer.param_groups for shape in group["shapes"])
    copies = sum(state_elements(sharding.layout, names)) / needed
    return f"{format_bytes(total)} of buffers on this rank; each element is stored {copies:.3f} times over all ranks"
