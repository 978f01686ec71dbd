"""Reads the shard layout out of a live DeepSpeed engine, per wrapper, and checks it bit for bit.

DeepSpeed's own fragment map (`_hp_mapping`) is wrong under `round_robin_gradients`; what is read here is
the arithmetic of each wrapper's partitioning, and `verify` compares it with the live weights, so that a
release that changes a layout fails at start-up and not in the loss.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.optim import Fragment, Mars
from mars_ds.zero.layout import LayoutError, Shard


@dataclass(frozen=True)
class LocalShard:
    """One flat tensor of this rank with the parameters it holds pieces of.

    Attributes:
        tensor: What DeepSpeed puts into `param_groups` for `step()`.
        shard: Its fragments.
        group_index: Param group of `Mars` it belongs to.
        sources: For each fragment, the low-precision elements that it must equal now, flat.
    """

    tensor: Tensor
    shard: Shard
    group_index: int
    sources: tuple[Tensor, ...]


@dataclass(frozen=True)
class EngineLayout:
    """This rank's shards, and the group over which the state is partitioned.

    Attributes:
        local: In the order in which `step()` will be called.
        process_group: Ranks that share the state.
        replicated: Every rank holds everything (stage 0).
        sharded: Every parameter is cut over all ranks (stage 3).
    """

    local: tuple[LocalShard, ...]
    process_group: Any
    replicated: bool = False
    sharded: bool = False


def read_layout(engine: Any, optimizer: Mars, names: Mapping[Tensor, str]) -> EngineLayout:
    """Reads which elements this rank's flat tensors hold.

    Args:
        engine: Just after `deepspeed.initialize`.
        optimizer: The `Mars` inside it.
        names: Model parameter -> dotted name.

    Returns:
        Shards in the order in which `step()` will be called.
    """
    wrapper = engine.optimizer
    if wrapper is optimizer:
        return EngineLayout(tuple(_plain(optimizer, names)), engine.data_parallel_group, replicated=True)
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        local = tuple(_stage_3(wrapper, names))
        return EngineLayout(local, wrapper.dp_process_group, sharded=True)
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        return EngineLayout(tuple(_stage_1_2(wrapper, names)), wrapper.real_dp_process_group[0])
    if hasattr(wrapper, "fp32_groups_flat_partition"):
        return EngineLayout(tuple(_bf16_optimizer(wrapper, names)), wrapper.real_dp_process_group[0])
    if hasattr(wrapper, "fp32_groups") and hasattr(wrapper, "fp16_groups"):
        local = tuple(_unfused(wrapper, names))
        return EngineLayout(local, engine.data_parallel_group, replicated=True)
    raise LayoutError(
        f"unknown DeepSpeed wrapper {type(wrapper).__name__}; tested with DeepSpeed 0.19.8, stages 0 to 3"
    )


def _plain(optimizer: Mars, names: Mapping[Tensor, str]) -> Iterator[LocalShard]:
    """Stage 0, fp32: the model's own parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield _whole(p, p, names[p], index)


def _unfused(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[LocalShard]:
    """Stage 0, bf16 (`FP16_UnfusedOptimizer`): an fp32 clone of each parameter."""
    for index, (masters, params) in enumerate(zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)):
        for master, p in zip(masters, params, strict=True):
            yield _whole(master, p, names[p], index)


def _whole(tensor: Tensor, source: Tensor, name: str, index: int) -> LocalShard:
    fragment = Fragment(name, tuple(source.shape), 0, source.numel(), 0)
    return LocalShard(tensor, Shard(index, tensor.numel(), (fragment,)), index, (source.detach().view(-1),))


def _stage_1_2(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[LocalShard]:
    """`DeepSpeedZeroOptimizer`: one flat partition per group, possibly in round-robin order."""
    all_offsets = getattr(wrapper, "round_robin_bit16_offsets", None)
    for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        params = wrapper.round_robin_bit16_groups[index]
        if all_offsets:
            offsets = list(all_offsets[index])
        else:
            offsets = [sum(p.numel() for p in params[:k]) for k in range(len(params))]
        first = dist.get_rank(wrapper.real_dp_process_group[index]) * wrapper.partition_size[index]
        yield _cut(flat, params, offsets, first, names, index)


def _bf16_optimizer(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[LocalShard]:
    """`BF16_Optimizer` (stage 1, bf16, fp32 accumulation): one flat partition per group, model order."""
    for index, flat in enumerate(wrapper.fp32_groups_flat_partition):
        params = wrapper.bf16_groups[index]
        offsets = [sum(p.numel() for p in params[:k]) for k in range(len(params))]
        first = dist.get_rank(wrapper.real_dp_process_group[index]) * flat.numel()
        yield _cut(flat, params, offsets, first, names, index)


def _cut(
    flat: Tensor,
    params: list[Tensor],
    offsets: list[int],
    first: int,
    names: Mapping[Tensor, str],
    index: int,
) -> LocalShard:
    """The intersection of each parameter at `offsets` with [first, first + flat.numel())."""
    fragments, sources = [], []
    for p, at in sorted(zip(params, offsets, strict=True), key=lambda item: item[1]):
        start, stop = max(at, first), min(at + p.numel(), first + flat.numel())
        if start < stop:
            fragments.append(Fragment(names[p], tuple(p.shape), start - at, stop - start, start - first))
            sources.append(p.detach().view(-1)[start - at : stop - at])
    return LocalShard(flat, Shard(index, flat.numel(), tuple(fragments)), index, tuple(sources))


def _stage_3(wrapper: Any, names: Mapping[Tensor, str]) -> Iterator[LocalShard]:
    """`DeepSpeedZeroOptimizer_Stage3`: each parameter cut over all ranks, one flat per sub-group."""
    for call, (params, flat) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)):
        fragments, sources, offset = [], [], 0
        for p in params:
            per_rank = p.ds_tensor.ds_numel
            start = dist.get_rank(p.ds_process_group) * per_rank
            # What lies beyond the parameter's end is padding, and uninitialised memory.
            numel = max(0, min(per_rank, p.ds_numel - start))
            if numel:
                fragments.append(Fragment(names[p], tuple(p.ds_shape), start, numel, offset))
                sources.append(p.ds_tensor.detach().view(-1)[:numel])
            offset += per_rank
        index = wrapper.sub_group_to_group_id[call]
        yield LocalShard(flat, Shard(call, flat.numel(), tuple(fragments)), index, tuple(sources))


def verify(local: tuple[LocalShard, ...]) -> None:
    """Compares every fragment with the live weights, bit for bit.

    Raises:
        LayoutError: Naming the first parameter whose elements are not where the layout says.
    """
    for shard in local:
        flat = shard.tensor.detach().view(-1)
        for fragment, source in zip(shard.shard.fragments, shard.sources, strict=True):
            held = fragment.view(flat)
            if not torch.equal(held, source.to(device=held.device, dtype=held.dtype)):
                raise LayoutError(
                    f"{fragment.name}: elements {fragment.start}..{fragment.stop} are not at offset "
                    f"{fragment.offset} of the flat tensor of call {shard.shard.call}; this DeepSpeed "
                    "lays its partitions out differently from 0.19.8"
                )
