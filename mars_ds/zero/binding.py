"""Gives `Mars` its layout, its plans and its process group: what makes it run on shards.

`EngineSharding` is the ZeRO twin of `mars_ds.optim.sharding.WholeTensors`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.optim import Fragment, Mars
from mars_ds.optim.orthogonal import wire_dtype
from mars_ds.zero.engine_layout import EngineLayout, read_layout, verify
from mars_ds.zero.exchange import MatrixExchange
from mars_ds.zero.layout import LayoutError, ShardLayout
from mars_ds.zero.placement import CallWork, ExchangePlan, plan_step


class EngineSharding:
    """Fragments, sums and matrix exchanges of a bound engine.

    Attributes:
        layout: Shards of all ranks.
        plans: Call id -> plan, for calls under the orthogonal rule.
    """

    def __init__(self, layout: ShardLayout, local: EngineLayout, optimizer: Mars, device: torch.device) -> None:
        self.layout = layout
        self.group = local.process_group
        self.device = device
        self.rank = dist.get_rank(self.group)
        self._local = {shard.tensor: shard for shard in local.local}
        groups = {shard.shard.call: optimizer.param_groups[shard.group_index] for shard in local.local}
        orthogonal = {call: group for call, group in sorted(groups.items()) if group["rule"] == "orthogonal"}
        work = {call: CallWork(g["names"], g["ns_steps"], g["ns_form"]) for call, g in orthogonal.items()}
        self.plans: dict[int, ExchangePlan] = plan_step(layout, work)
        self._exchanges = {
            call: MatrixExchange(plan, self.group, self.rank, device, wire_dtype(orthogonal[call]))
            for call, plan in self.plans.items()
        }

    @property
    def local_shards(self) -> Mapping[Tensor, Any]:
        """Flat tensor -> `LocalShard` of this rank."""
        return self._local

    def fragments(self, tensor: Tensor) -> Sequence[Fragment]:
        return self._local[tensor].shard.fragments

    def sum_over_ranks(self, tensors: Sequence[Tensor], sums: Tensor) -> Tensor:
        if self.layout.replicated or self.layout.world_size == 1:
            return sums
        on_device = sums.to(self.device)
        dist.all_reduce(on_device, group=self.group)
        return on_device.to(sums.device)

    def gather_matrices(self, tensors: Sequence[Tensor], pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._exchange_of(tensors).gather(pieces)

    def scatter_updates(self, tensors: Sequence[Tensor], updates: dict[str, Tensor]) -> dict[str, Tensor]:
        held = tensors[0].device
        return {n: update.to(held) for n, update in self._exchange_of(tensors).scatter(updates).items()}

    def _exchange_of(self, tensors: Sequence[Tensor]) -> MatrixExchange:
        return self._exchanges[self._local[tensors[0]].shard.call]


def bind(engine: Any, optimizer: Mars, names: Mapping[Tensor, str], device: torch.device) -> EngineSharding:
    """Reads, checks and installs the layout of a fresh engine, and makes all state now.

    Every rank gathers the layout of all, checks that it tiles each parameter exactly once, compares its
    own shards with the live weights bit for bit, and compares the plans by hash. State is made eagerly:
    DeepSpeed links optimizer states after the first group's step, and a lazily made one hangs
    `safe_get_full_optimizer_state`.

    Raises:
        LayoutError: On every rank, when any rank found a mismatch.
    """
    local = read_layout(engine, optimizer, names)
    shards = tuple(shard.shard for shard in local.local)
    gathered: list[Any] = [None] * dist.get_world_size(local.process_group)
    dist.all_gather_object(gathered, shards, group=local.process_group)
    layout = ShardLayout(tuple(gathered), local.replicated, local.sharded)
    shapes = {
        name: shape
        for group in optimizer.param_groups
        for name, shape in zip(group["names"], group["shapes"], strict=True)
    }
    layout.check_tiling(shapes)
    _on_all_ranks(lambda: verify(local.local), local.process_group)
    sharding = EngineSharding(layout, local, optimizer, device)
    _compare_plans(sharding)
    optimizer.bind(sharding)
    for shard in local.local:
        optimizer.init_state([shard.tensor], optimizer.param_groups[shard.group_index])
    return sharding


def _on_all_ranks(check: Any, group: Any) -> None:
    """Runs a local check and raises its error on every rank, so that none waits for the others."""
    message: str | None = None
    try:
        check()
    except LayoutError as error:
        message = str(error)
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    for rank, found in enumerate(messages):
        if found is not None:
            raise LayoutError(f"rank {rank}: {found}")


def _compare_plans(sharding: EngineSharding) -> None:
    digest = [plan.digest() for _, plan in sorted(sharding.plans.items())]
    digests: list[Any] = [None] * sharding.layout.world_size
    dist.all_gather_object(digests, digest, group=sharding.group)
    if any(other != digest for other in digests):
        raise LayoutError("ranks computed different Newton-Schulz plans from one layout")
