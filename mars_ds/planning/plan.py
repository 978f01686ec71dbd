"""Everything that is known of a run before it starts, as values: what the card prints and what `--json` gives."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mars_ds.config import RunConfig
from mars_ds.planning.batch import BatchPlan
from mars_ds.planning.collectives import Traffic, step_traffic
from mars_ds.planning.memory import MemoryPlan, checkpoint_bytes, memory_plan
from mars_ds.planning.step_layout import Shapes, StepLayout, step_layout
from mars_ds.planning.timing import TimePlan, time_plan


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run.

    Attributes:
        config: The run.
        batch: Cut of a step.
        shapes: Trainable parameters by name, in model order.
        flops_per_token: Forward and backward.
        num_windows: Training windows, or None when the data is not there yet.
        device: Name of the accelerators, or None.
        efficiency: Share of their peak, or None for the anchor of the model's size.
    """

    config: RunConfig
    batch: BatchPlan
    shapes: Shapes
    flops_per_token: int
    num_windows: int | None = None
    device: str | None = None
    efficiency: float | None = None

    @cached_property
    def layout(self) -> StepLayout:
        """Param groups, shards and owners."""
        return step_layout(self.config, self.shapes, self.batch.world_size)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Of the rank with the highest peak."""
        return memory_plan(self.layout, self.batch.micro_batch, self.batch.accumulation_steps)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Of one step."""
        return step_traffic(self.layout, self.batch.accumulation_steps)

    @cached_property
    def time(self) -> TimePlan:
        """FLOPs, and time where the device is known."""
        flops = [sum(plan.flops[rank] for plan in self.layout.plans.values()) for rank in range(self.batch.world_size)]
        elements = self.layout.num_elements
        return time_plan(self.config, self.flops_per_token, elements, flops, self.device, self.efficiency)

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.config.tokens_per_step * self.config.schedule.steps

    @property
    def epochs(self) -> float | None:
        """Passes over the data, or None without data."""
        return self.config.global_batch * self.config.schedule.steps / self.num_windows if self.num_windows else None

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return checkpoint_bytes(self.layout)

    def to_json(self) -> dict[str, Any]:
        """The plan in JSON types; bytes and FLOPs as integers, times in seconds."""
        config, memory = self.config, self.memory
        return {
            "run": config.run.name,
            "world_size": self.batch.world_size,
            "stage": config.zero.stage,
            "offload": config.zero.offload,
            "parameters": self.layout.num_elements,
            "groups": [
                {"role": g.role, "rule": g.settings["rule"], "override": g.override, "tensors": len(g.shapes)}
                for g in self.layout.groups
            ],
            "batch": asdict(self.batch),
            "tokens_per_step": config.tokens_per_step,
            "steps": config.schedule.steps,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "memory": {
                "rank": memory.rank,
                "peak_bytes": memory.peak(),
                "at_least_bytes": memory.peak(at_least=True),
                "host_peak_bytes": memory.peak(on_host=True),
                "complete": memory.complete,
                "items": [asdict(item) for item in memory.items],
            },
            "traffic": [asdict(item) for item in self.traffic],
            "time": asdict(self.time),
            "checkpoint": {"bytes": self.checkpoint_bytes, "kept": config.checkpoint.keep_last},
            "newton_schulz": [_exchange_facts(plan) for plan in self.layout.plans.values()],
        }


def _exchange_facts(plan: Any) -> Mapping[str, Any]:
    return {
        "matrices": len(plan.matrices),
        "flops": list(plan.flops),
        "imbalance": plan.imbalance(),
        "exchanged_elements": plan.exchanged_elements(),
    }
