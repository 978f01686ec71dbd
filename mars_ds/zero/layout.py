"""Who holds which elements: the layout of all ranks as plain values. No process group, no tensor.

A `Shard` is one flat tensor of one rank, cut into `Fragment`s. A *call* is what DeepSpeed hands the
optimizer in one `step()` for one param group: all parameters of a group at stage 0, one flat partition
at stages 1 and 2, one sub-group at stage 3. Every rank walks the same calls in the same order, so a call
is the unit of collectives.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mars_ds.optim.sharding import Fragment

# DeepSpeed pads the flat buffer of stages 1 and 2 to a multiple of 2 * world size.
FLAT_ALIGNMENT = 2


class LayoutError(RuntimeError):
    """The layout read from the engine contradicts itself or the live weights: training would be wrong."""


@dataclass(frozen=True)
class Shard:
    """One flat tensor of one rank.

    Attributes:
        call: Which `step()` call it takes part in.
        numel: Elements including padding.
        fragments: Ascending offsets; elements in no fragment are padding.
    """

    call: int
    numel: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True)
class ShardLayout:
    """The shards of every rank.

    Attributes:
        shards: [rank][i].
        replicated: Every rank holds every element (stage 0).
        sharded: Every parameter is cut over all ranks (stage 3), so a matrix may as well be given to any
            rank as to a holder.
    """

    shards: tuple[tuple[Shard, ...], ...]
    replicated: bool = False
    sharded: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks that share the state."""
        return len(self.shards)

    def calls(self) -> tuple[int, ...]:
        """Call ids in ascending order, equal on all ranks."""
        return tuple(sorted({shard.call for rank in self.shards for shard in rank}))

    def holders(self, call: int) -> dict[str, list[tuple[int, Fragment]]]:
        """Parameter name -> (rank, fragment) in ascending `start`, for one call.

        The order of names is that of the parameters in the call, equal on all ranks.
        """
        return self._holders.get(call, {})

    @cached_property
    def _holders(self) -> dict[int, dict[str, list[tuple[int, Fragment]]]]:
        found: dict[int, dict[str, list[tuple[int, Fragment]]]] = {}
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                names = found.setdefault(shard.call, defaultdict(list))
                for fragment in shard.fragments:
                    names[fragment.name].append((rank, fragment))
        for names in found.values():
            for held in names.values():
                held.sort(key=lambda item: item[1].start)
        return {call: dict(names) for call, names in found.items()}

    def check_tiling(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the fragments cover every parameter exactly once (each rank whole, if replicated).

        Args:
            shapes: True shape of every parameter that the optimizer owns.

        Raises:
            LayoutError: Naming the first parameter that is not tiled, and the gap or overlap.
        """
        for rank_shards in self.shards:
            for shard in rank_shards:
                _check_offsets(shard)
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for rank, shards in enumerate(self.shards):
            for shard in shards:
                for f in shard.fragments:
                    if f.name not in shapes or f.shape != tuple(shapes[f.name]):
                        raise LayoutError(f"{f.name} of shape {f.shape} on rank {rank} is not a known parameter")
                    spans[f.name].append((f.start, f.stop))
        copies = self.world_size if self.replicated else 1
        for name, shape in shapes.items():
            want = [(0, prod(shape))] * copies if self.replicated else None
            got = sorted(spans[name])
            if (want is not None and got != want) or (want is None and not _tiles(got, prod(shape))):
                raise LayoutError(f"{name}: elements 0..{prod(shape)} are held as {got}, not exactly once each")


def _check_offsets(shard: Shard) -> None:
    at = 0
    for f in shard.fragments:
        if f.offset < at or f.offset + f.numel > shard.numel or f.numel < 1:
            raise LayoutError(f"{f.name}: offset {f.offset}+{f.numel} overlaps or leaves the shard of {shard.numel}")
        at = f.offset + f.numel


def _tiles(spans: Sequence[tuple[int, int]], numel: int) -> bool:
    at = 0
    for start, stop in spans:
        if start != at:
            return False
        at = stop
    return at == numel


NamedShapes = Sequence[tuple[str, tuple[int, ...]]]


def replicated_layout(groups: Sequence[NamedShapes], world_size: int) -> ShardLayout:
    """Stage 0: every rank holds every parameter as a tensor of its own."""
    shards = tuple(
        Shard(call, prod(shape), (Fragment(name, shape, 0, prod(shape), 0),))
        for call, group in enumerate(groups)
        for name, shape in group
    )
    return ShardLayout((shards,) * world_size, replicated=True)


def flat_layout(groups: Sequence[NamedShapes], world_size: int, alignment: int = FLAT_ALIGNMENT) -> ShardLayout:
    """Stages 1 and 2: each group is concatenated, padded to `alignment * world_size` and cut equally."""
    cuts = [_cut_flat(call, group, world_size, alignment) for call, group in enumerate(groups)]
    return ShardLayout(tuple(tuple(cut[rank] for cut in cuts) for rank in range(world_size)))


def _cut_flat(call: int, group: NamedShapes, world_size: int, alignment: int) -> list[Shard]:
    total = sum(prod(shape) for _, shape in group)
    unit = alignment * world_size
    size = -(-total // unit) * unit // world_size
    fragments: list[list[Fragment]] = [[] for _ in range(world_size)]
    at = 0
    for name, shape in group:
        start, numel = 0, prod(shape)
        while start < numel:
            rank, offset = divmod(at + start, size)
            taken = min(numel - start, size - offset)
            fragments[rank].append(Fragment(name, shape, start, taken, offset))
            start += taken
        at += numel
    return [Shard(call, size, tuple(f)) for f in fragments]


def sharded_layout(
    groups: Sequence[NamedShapes], world_size: int, sub_group_elements: int | None = None
) -> ShardLayout:
    """Stage 3: each parameter is padded and cut into `world_size` parts of ceil(numel / world_size).

    A rank that lies beyond the end of a tiny parameter holds only its padding, and no fragment.

    Args:
        groups: Parameters of each param group, in order.
        world_size: Ranks.
        sub_group_elements: DeepSpeed's `sub_group_size`, in elements of one rank: a group that holds more is
            split in order into sub-groups, each closed by the parameter that reaches the size. Every sub-group is
            one flat tensor and one call. None: one call per group.
    """
    calls: list[list[tuple[str, tuple[int, ...]]]] = []
    for group in groups:
        calls += _sub_groups(group, world_size, sub_group_elements)
    cuts = [_cut_each(call, members, world_size) for call, members in enumerate(calls)]
    return ShardLayout(tuple(tuple(cut[rank] for cut in cuts) for rank in range(world_size)), sharded=True)


def _sub_groups(
    group: NamedShapes, world_size: int, sub_group_elements: int | None
) -> list[list[tuple[str, tuple[int, ...]]]]:
    parts = [-(-prod(shape) // world_size) for _, shape in group]
    if not sub_group_elements or sub_group_elements >= sum(parts):
        return [list(group)] if group else []
    calls: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for member, part in zip(group, parts, strict=True):
        if filled >= sub_group_elements:
            calls.append([])
            filled = 0
        calls[-1].append(member)
        filled += part
    return calls


def _cut_each(call: int, members: NamedShapes, world_size: int) -> list[Shard]:
    fragments: list[list[Fragment]] = [[] for _ in range(world_size)]
    at = 0
    for name, shape in members:
        numel = prod(shape)
        part = -(-numel // world_size)
        for rank, start in enumerate(range(0, numel, max(1, part))):
            fragments[rank].append(Fragment(name, shape, start, min(part, numel - start), at))
        at += part
    return [Shard(call, at, tuple(f)) for f in fragments]


def state_elements(layout: ShardLayout, names: Iterable[str]) -> list[int]:
    """Elements of the named parameters on each rank, padding excluded."""
    wanted = set(names)
    return [sum(f.numel for shard in shards for f in shard.fragments if f.name in wanted) for shards in layout.shards]
