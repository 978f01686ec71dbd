"""Fills bins with things of few distinct sizes: subset sums with a budget, shared by owners and orders.

Models repeat a handful of matrix shapes over their layers, so a bin is a small vector of counts, and a
depth-first search over it finds perfect fills that greedy packing misses.
"""

from collections.abc import Sequence

# Search nodes per bin. With up to five distinct sizes and a dozen things a bin this is never reached;
# with hundreds of distinct sizes the search stops at the best fill so far.
NODES = 2_000
# Distinct sizes that one bin considers, the preferred ones first; bounds the depth of the search.
DISTINCT = 200
# Capacities that `balanced` tries after the lower bound: within 1/1000 of the range.
PROBES = 10


def best_fill(capacity: int, sizes: Sequence[int], counts: Sequence[int], nodes: int = NODES) -> list[int]:
    """How many of each size to take so that their sum comes closest to `capacity` from below.

    Args:
        capacity: Room of the bin.
        sizes: Distinct positive sizes, in order of preference: as many as possible of the first are tried first.
        counts: How many of each there are.
        nodes: Budget of the search.

    Returns:
        One count per size; all zero when nothing fits.
    """
    best, best_sum = [0] * len(sizes), 0
    taken = [0] * len(sizes)
    budget = nodes

    def search(index: int, total: int) -> bool:
        """Extends `taken` from `index` on; True ends the search (perfect, or out of budget)."""
        nonlocal best, best_sum, budget
        budget -= 1
        if total > best_sum:
            best, best_sum = list(taken), total
        if best_sum == capacity or budget <= 0:
            return True
        if index == len(sizes):
            return False
        room = (capacity - total) // sizes[index]
        for number in range(min(room, counts[index]), -1, -1):
            taken[index] = number
            if search(index + 1, total + number * sizes[index]):
                return True
        taken[index] = 0
        return False

    # Sizes that cannot appear would only deepen the recursion.
    usable = [i for i, size in enumerate(sizes) if size <= capacity and counts[i]][:DISTINCT]
    if len(usable) < len(sizes):
        fill = best_fill(capacity, [sizes[i] for i in usable], [counts[i] for i in usable], nodes) if usable else []
        spread = [0] * len(sizes)
        for i, number in zip(usable, fill, strict=True):
            spread[i] = number
        return spread
    search(0, 0)
    return best


def pack(sizes: Sequence[int], num_bins: int, capacity: int) -> list[int] | None:
    """Packs things into equal bins, each filled as well as possible from what is left.

    Args:
        sizes: Positive size of each thing.
        num_bins: Number of bins.
        capacity: Room of each.

    Returns:
        The bin of each thing, or None when this does not pack them all.
    """
    members: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        members.setdefault(size, []).append(i)
    distinct = sorted(members, reverse=True)
    bins, fill = [-1] * len(sizes), [0] * len(distinct)
    left = len(sizes)
    for number in range(num_bins):
        counts = [len(members[size]) for size in distinct]
        # A perfect fill serves again for as long as there is enough of everything.
        full = sum(n * size for n, size in zip(fill, distinct, strict=True)) == capacity
        if not full or any(n > count for n, count in zip(fill, counts, strict=True)):
            fill = best_fill(capacity, distinct, counts)
        for size, taken in zip(distinct, fill, strict=True):
            for _ in range(taken):
                bins[members[size].pop(0)] = number
                left -= 1
        if not left:
            return bins
    return None


def balanced(sizes: Sequence[int], num_bins: int, above: int) -> list[int] | None:
    """The packing with the lowest capacity found between the lower bound and `above` (multifit).

    Args:
        sizes: Positive size of each thing.
        num_bins: Number of bins.
        above: The largest bin that is already known to do.

    Returns:
        The bin of each thing with every bin below `above`, or None.
    """
    if not sizes:
        return None
    low, high = max(max(sizes), -(-sum(sizes) // num_bins)), above - 1
    found = pack(sizes, num_bins, low) if low <= high else None
    if found is not None:
        return found
    low += 1
    for _ in range(PROBES):
        if low > high:
            break
        capacity = (low + high) // 2
        packed = pack(sizes, num_bins, capacity)
        if packed is None:
            low = capacity + 1
        else:
            found, high = packed, capacity - 1
    return found
