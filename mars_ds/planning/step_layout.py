"""What every part of the plan starts from: param groups, who holds which elements, who owns which matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from mars_ds.config import RunConfig
from mars_ds.optim.grouping import ParameterGroup, plan_groups
from mars_ds.optim.orthogonal import wire_dtype
from mars_ds.optim.state import required_buffers
from mars_ds.zero.layout import Shard, ShardLayout, flat_layout, replicated_layout, sharded_layout
from mars_ds.zero.ordering import aligned_order
from mars_ds.zero.placement import CallWork, ExchangePlan, plan_step

Shapes = Mapping[str, tuple[int, ...]]

# DeepSpeed's defaults, which a run may change under `deepspeed.zero_optimization`.
STAGE_3_DEFAULTS = {
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
}
_SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StepLayout:
    """The layout of one run, for all ranks.

    Attributes:
        config: The run.
        shapes: Trainable parameters by name, in model order.
        world_size: Ranks.
        groups: Param groups.
        layout: Shards of all ranks.
        group_of_call: Param group of each call.
        plans: Call -> owners of its matrices, for calls under the orthogonal rule.
    """

    config: RunConfig
    shapes: Shapes
    world_size: int
    groups: tuple[ParameterGroup, ...]
    layout: ShardLayout
    group_of_call: tuple[int, ...]
    plans: Mapping[int, ExchangePlan]

    @property
    def num_elements(self) -> int:
        """Elements of all trainable parameters."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of the weights."""
        return _SIZES[self.config.precision.dtype]

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of one element of accumulated and communicated gradients."""
        return _SIZES[self.config.precision.accumulation_dtype]

    @property
    def wrapper(self) -> str:
        """What DeepSpeed 0.19.8 wraps the optimizer in: `none`, `unfused`, `bf16`, `stage_1_2` or `stage_3`."""
        stage, half = self.config.zero.stage, self.weight_bytes == 2
        if stage == 0:
            return "unfused" if half else "none"
        if stage == 3:
            return "stage_3"
        accumulates_apart = half and self.accumulation_bytes == 4
        return "bf16" if stage == 1 and accumulates_apart and self.config.zero.offload == "none" else "stage_1_2"

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """Flat tensors of one rank."""
        return self.layout.shards[rank]

    def settings(self, call: int) -> dict[str, Any]:
        """Settings of the param group of a call."""
        return self.groups[self.group_of_call[call]].settings

    def buffers(self, call: int) -> dict[str, torch.dtype]:
        """Optimizer buffers of a call, with their dtypes."""
        return required_buffers(self.settings(call), torch.float32)

    def wire_bytes(self, call: int) -> int:
        """Bytes of an element of a matrix that travels to its owner."""
        return wire_dtype(self.settings(call)).itemsize

    def stage_3_setting(self, key: str) -> int:
        """One of `STAGE_3_DEFAULTS`, as this run has it."""
        return int(self.config.deepspeed.get("zero_optimization", {}).get(key, STAGE_3_DEFAULTS[key]))

    @cached_property
    def small_weights(self) -> dict[str, int]:
        """Parameters that stage 3 keeps gathered on every rank, with their elements."""
        threshold = self.stage_3_setting("stage3_param_persistence_threshold")
        if self.config.zero.stage != 3:
            return {}
        return {name: prod(shape) for name, shape in self.shapes.items() if prod(shape) <= threshold}

    @cached_property
    def exchanged(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that each rank sends and receives in a step's exchange of matrices."""
        sent, received = [0] * self.world_size, [0] * self.world_size
        for call, plan in self.plans.items():
            size = self.wire_bytes(call)
            for matrix in plan.matrices:
                if plan.replicated:
                    sent[matrix.owner] += size * matrix.numel * (self.world_size - 1)
                    for rank in range(self.world_size):
                        received[rank] += size * matrix.numel * (rank != matrix.owner)
                    continue
                for piece in matrix.pieces:
                    if piece.rank != matrix.owner:
                        for end in (piece.rank, matrix.owner):
                            sent[end] += size * piece.numel
                            received[end] += size * piece.numel
        return tuple(sent), tuple(received)


def step_layout(config: RunConfig, shapes: Shapes, world_size: int) -> StepLayout:
    """Plans the layout.

    Args:
        config: The run.
        shapes: Trainable parameters by name, in model order.
        world_size: Ranks.

    Raises:
        ValueError: A route or an override that matches nothing.
    """
    groups = tuple(plan_groups(shapes, config.optimizer))
    members = [list(group.shapes.items()) for group in groups]
    orthogonal = [index for index, group in enumerate(groups) if group.settings["rule"] == "orthogonal"]
    if config.zero.stage == 0:
        layout = replicated_layout(members, world_size)
    elif config.zero.stage == 3:
        layout = sharded_layout(members, world_size, config.zero.sub_group_elements)
    else:
        for index in orthogonal if config.zero.parameter_order == "aligned" else ():
            settings = groups[index].settings
            order = aligned_order(members[index], world_size, steps=settings["ns_steps"], form=settings["ns_form"])
            members[index] = [(name, groups[index].shapes[name]) for name in order]
        layout = flat_layout(members, world_size)
    group_of_name = {name: index for index, group in enumerate(groups) for name in group.shapes}
    if config.zero.stage == 3:
        # A call's first parameter has its first elements on rank 0.
        group_of_call = tuple(group_of_name[shard.fragments[0].name] for shard in layout.shards[0])
    else:
        group_of_call = tuple(range(len(groups)))
    work = {
        call: CallWork(
            list(groups[index].shapes), groups[index].settings["ns_steps"], groups[index].settings["ns_form"]
        )
        for call, index in enumerate(group_of_call)
        if index in orthogonal
    }
    plans = plan_step(layout, work) if work else {}
    return StepLayout(config, shapes, world_size, groups, layout, group_of_call, plans)
