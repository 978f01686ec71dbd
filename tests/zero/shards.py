"""`Mars` on shards of a pure layout, without an engine: the reduced gradients can be any bits we like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_ds.optim import Fragment, Mars, OptimizerConfig, build_optimizer
from mars_ds.zero.binding import EngineSharding
from mars_ds.zero.engine_layout import EngineLayout, LocalShard
from mars_ds.zero.layout import NamedShapes, Shard, ShardLayout

Values = Mapping[str, Tensor]


def groups_of(optimizer: Mars) -> list[NamedShapes]:
    """(name, shape) of each param group, in order: what the layouts are made from."""
    return [list(zip(g["names"], g["shapes"], strict=True)) for g in optimizer.param_groups]


def cut_layout(groups: Sequence[NamedShapes], cuts: Sequence[Sequence[int]]) -> ShardLayout:
    """Flat groups cut where `cuts` says.

    Args:
        groups: Parameters of each group.
        cuts: For each group, ascending positions between 0 and its number of elements; equal ones leave a rank
            with nothing but one element of padding, which every shard has.
    """
    shards: list[list[Shard]] = [[] for _ in range(len(cuts[0]) + 1)]
    for call, (group, inner) in enumerate(zip(groups, cuts, strict=True)):
        bounds = [0, *inner, sum(prod(shape) for _, shape in group)]
        for rank, (first, last) in enumerate(pairwise(bounds)):
            fragments, at = [], 0
            for name, shape in group:
                start, stop = max(at, first), min(at + prod(shape), last)
                if start < stop:
                    fragments.append(Fragment(name, shape, start - at, stop - start, start - first))
                at += prod(shape)
            shards[rank].append(Shard(call, last - first + 1, tuple(fragments)))
    return ShardLayout(tuple(tuple(rank) for rank in shards))


@dataclass
class ShardedMars:
    """One rank's part of an optimizer on shards; padding is NaN everywhere, so that a leak shows."""

    optimizer: Mars
    local: tuple[LocalShard, ...]
    layout: ShardLayout

    def set_gradients(self, gradients: Values) -> None:
        """Puts this rank's elements of the reduced gradients into `.grad`."""
        for shard in self.local:
            shard.tensor.grad = _flat(shard.shard, gradients).view_as(shard.tensor)

    def step(self) -> None:
        """One `step()` per call, the params of all other calls left out, as DeepSpeed does it."""
        for call in self.layout.calls():
            for group in self.optimizer.param_groups:
                group["params"] = []
            for shard in self.local:
                if shard.shard.call == call:
                    self.optimizer.param_groups[shard.group_index]["params"].append(shard.tensor)
            self.optimizer.step()

    def capture(self) -> None:
        """Exact mode: the gradients in `.grad` are those of the next batch."""
        self.optimizer.capturing = True
        self.step()
        self.optimizer.capturing = False

    def pieces(self) -> list[tuple[Fragment, str, Tensor]]:
        """(fragment, buffer, elements) of the weights (`weight`) and of every state buffer."""
        found: list[tuple[Fragment, str, Tensor]] = []
        for shard in self.local:
            buffers: dict[str, Any] = {"weight": shard.tensor.view(-1), **self.optimizer.state[shard.tensor]}
            for name, flat in buffers.items():
                if isinstance(flat, Tensor):
                    found += [(f, name, f.view(flat)) for f in shard.shard.fragments]
        return found


def shard_mars(config: OptimizerConfig, values: Values, make_layout: Any, process_group: Any) -> ShardedMars:
    """Builds this rank's part.

    Args:
        config: Optimizer settings.
        values: Initial weights by name, whole.
        make_layout: Groups of (name, shape) -> `ShardLayout`.
        process_group: Whose ranks the layout numbers.
    """
    optimizer = build_optimizer([(name, nn.Parameter(v.clone())) for name, v in values.items()], config)
    layout = make_layout(groups_of(optimizer))
    layout.check_tiling({name: tuple(v.shape) for name, v in values.items()})
    group_of = {name: index for index, g in enumerate(optimizer.param_groups) for name in g["names"]}
    local = []
    for shard in layout.shards[dist.get_rank(process_group)]:
        flat = _flat(shard, values)
        if layout.replicated:
            flat = flat.view(shard.fragments[0].shape)
        index = group_of[next(iter(layout.holders(shard.call)))]
        local.append(LocalShard(flat, shard, index, ()))
    engine_layout = EngineLayout(tuple(local), process_group, layout.replicated)
    optimizer.bind(EngineSharding(layout, engine_layout, optimizer, torch.device("cpu")))
    return ShardedMars(optimizer, tuple(local), layout)


def _flat(shard: Shard, values: Values) -> Tensor:
    flat = torch.full((shard.numel,), torch.nan)
    for f in shard.fragments:
        f.view(flat).copy_(values[f.name].reshape(-1)[f.start : f.stop])
    return flat
