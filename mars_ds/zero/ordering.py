"""The order of the matrices in a flat group, chosen so that few straddle a partition boundary.

Stages 1 and 2 concatenate a group, pad it only at its very end and cut it into equal partitions. A boundary
is therefore free of straddlers only where the matrices before it fill whole partitions to the last element.
With layers that repeat that is often possible: on 64 ranks GPT-2 XL fills 48 partitions with (c_fc, c_proj,
attention c_proj) and 16 with three c_attn. Where it is not, the fewest elements should straddle.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod

from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.optim.routing import matrix_shape
from mars_ds.zero.layout import FLAT_ALIGNMENT, NamedShapes, flat_layout
from mars_ds.zero.packing import best_fill
from mars_ds.zero.placement import plan_exchange

Score = tuple[int, int, int]

# Sizes tried as straddler at one boundary.
STRADDLERS = 8


def aligned_order(
    shapes: NamedShapes,
    world_size: int,
    alignment: int = FLAT_ALIGNMENT,
    *,
    steps: int = 5,
    form: str = "standard",
) -> list[str]:
    """Orders the matrices of one flat group.

    Args:
        shapes: (name, true shape) of every matrix of the group, in natural order.
        world_size: Ranks.
        alignment: The group is padded to a multiple of `alignment * world_size` elements.
        steps: Newton-Schulz iterations, for the cost.
        form: Newton-Schulz form, for the cost.

    Returns:
        The names in the order with the lowest `order_score` of a portfolio. Natural order where nothing
        is better, so never a worse one. Deterministic: equal on all ranks.
    """
    natural = list(range(len(shapes)))
    best, best_score = natural, order_score(shapes, world_size, alignment, steps=steps, form=form)
    numels = [prod(shape) for _, shape in shapes]
    unit = alignment * world_size
    size = -(-sum(numels) // unit) * unit // world_size
    for make in _PORTFOLIO:
        # Nothing straddles and the work is even, or there is nothing to gain on one rank.
        if world_size == 1 or (best_score[0] == 0 and best_score[1] * world_size == _total(shapes, steps, form)):
            break
        order = make(numels, size, world_size)
        score = order_score([shapes[i] for i in order], world_size, alignment, steps=steps, form=form)
        if score < best_score:
            best, best_score = order, score
    return [shapes[i][0] for i in best]


def order_score(
    shapes: NamedShapes,
    world_size: int,
    alignment: int = FLAT_ALIGNMENT,
    *,
    steps: int = 5,
    form: str = "standard",
) -> Score:
    """(elements of matrices that straddle, FLOPs of the busiest rank, elements exchanged); lower is better."""
    layout = flat_layout([shapes], world_size, alignment)
    plan = plan_exchange(layout, 0, [name for name, _ in shapes], steps=steps, form=form)
    straddling = sum(m.numel for m in plan.matrices if len(m.pieces) > 1)
    return straddling, max(plan.flops, default=0), plan.exchanged_elements()


def _total(shapes: NamedShapes, steps: int, form: str) -> int:
    return sum(newton_schulz_flops(*matrix_shape(shape), steps, form) for _, shape in shapes)


def _largest_first(numels: Sequence[int], size: int, world_size: int) -> list[int]:
    return sorted(range(len(numels)), key=lambda i: (-numels[i], i))


def _first_fit(numels: Sequence[int], size: int, world_size: int) -> list[int]:
    """First fit, largest first, into partitions; full ones come first so that they stay aligned."""
    bins: list[list[int]] = [[] for _ in range(world_size)]
    room = [size] * world_size
    rest: list[int] = []
    for i in _largest_first(numels, size, world_size):
        rank = next((rank for rank in range(world_size) if room[rank] >= numels[i]), None)
        if rank is None:
            rest.append(i)
            continue
        bins[rank].append(i)
        room[rank] -= numels[i]
    ranks = sorted(range(world_size), key=lambda rank: (room[rank], rank))
    return [i for rank in ranks for i in bins[rank]] + rest


def _walk(numels: Sequence[int], size: int, preference: Callable[[int], int], cross: Callable[[int], int]) -> list[int]:
    """Fills the partitions one after the other, exactly where that is possible.

    Args:
        numels: Elements of each matrix.
        size: Elements of a partition.
        preference: Sort key of sizes for filling.
        cross: Sort key of sizes for the straddler, where a partition cannot be filled exactly.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for i, numel in enumerate(numels):
        members[numel].append(i)
    sizes = sorted(members, key=preference)
    order: list[int] = []
    room, straddler = size, 0
    memory: dict[int, list[int]] = {}
    while any(members.values()):
        counts = [len(members[s]) for s in sizes]
        fill = memory.get(room)
        if fill is None or any(n > count for n, count in zip(fill, counts, strict=True)):
            fill = best_fill(room, sizes, counts)
            memory[room] = fill
        filled = sum(n * s for n, s in zip(fill, sizes, strict=True))
        if filled != room:
            straddler, fill = _straddler(room, size, sizes, counts, fill, cross)
        for s, number in zip(sizes, fill, strict=True):
            for _ in range(number):
                order.append(members[s].pop(0))
        room -= sum(n * s for n, s in zip(fill, sizes, strict=True))
        if room and any(members.values()):
            order.append(members[straddler].pop(0))
            room -= straddler
        room = room % size or size
    return order


def _straddler(
    room: int,
    size: int,
    sizes: Sequence[int],
    counts: Sequence[int],
    fill: list[int],
    cross: Callable[[int], int],
) -> tuple[int, list[int]]:
    """(size of the matrix that crosses the boundary, what fills the partition before it).

    The first choice is one after which the next partition can be filled exactly; otherwise the
    preferred size after the best fill.
    """
    fallback: tuple[int, list[int]] | None = None
    for s in sorted((s for s, count in zip(sizes, counts, strict=True) if count), key=cross)[:STRADDLERS]:
        index = sizes.index(s)
        without = [count - (i == index) for i, count in enumerate(counts)]
        # The straddler must reach past the boundary, so less than its size may stay free before it.
        before = best_fill(room, sizes, without)
        if sum(n * t for n, t in zip(before, sizes, strict=True)) == room:
            before = fill
        free = room - sum(n * t for n, t in zip(before, sizes, strict=True))
        if not 0 < free < s or any(n > count for n, count in zip(before, without, strict=True)):
            continue
        fallback = fallback or (s, before)
        left = [count - n for n, count in zip(before, without, strict=True)]
        ahead = (free - s) % size
        after = best_fill(ahead, sizes, left) if ahead else []
        if sum(n * t for n, t in zip(after, sizes, strict=bool(after))) == ahead:
            return s, before
    if fallback is not None:
        return fallback
    present = [s for s, count in zip(sizes, counts, strict=True) if count]
    index = sizes.index(min(present, key=cross))
    return sizes[index], [min(n, counts[i] - (i == index)) for i, n in enumerate(fill)]


def _ascending(numel: int) -> int:
    return numel


def _descending(numel: int) -> int:
    return -numel


_PORTFOLIO: tuple[Callable[[Sequence[int], int, int], list[int]], ...] = (
    lambda numels, size, world_size: _walk(numels, size, _descending, _ascending),
    lambda numels, size, world_size: _walk(numels, size, _ascending, _ascending),
    lambda numels, size, world_size: _walk(numels, size, _descending, _descending),
    _largest_first,
    _first_fit,
)
