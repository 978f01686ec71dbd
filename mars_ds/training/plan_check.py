"""Holds the plan against what is there: at step 20, or at the last step of a shorter run, once."""

from typing import TYPE_CHECKING, Any

import torch

from mars_ds.optim.mars import true_shape
from mars_ds.planning.memory import memory_plan
from mars_ds.planning.plan import RunPlan
from mars_ds.planning.state import GRADIENTS
from mars_ds.telemetry.console import format_bytes, format_count
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.live_state import live_state
from mars_ds.training.planning import device_name

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

CHECKED_STEP = 20


class PlanCheck(Callback):
    """Prints plan against reality on rank 0 and keeps both in the log; needs no collective and no second step."""

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Compares when it is time: after the step was logged, so that its speed is known."""
        if trainer.rank == 0 and trainer.step == min(CHECKED_STEP, trainer.config.schedule.steps):
            record = compare(trainer)
            trainer.log.write(record)
            trainer.print(describe(record))


def compare(trainer: "Trainer") -> dict[str, Any]:
    """The plan of rank 0 and what its engine holds now, as a record of the log; bytes, and tokens a second.

    Gradients are let go when a step ends and are left out.
    """
    shapes = {n: tuple(true_shape(p)) for n, p in trainer.model.module.named_parameters() if p.requires_grad}
    plan = RunPlan(trainer.config, trainer.batch, shapes, trainer.model.flops_per_token, device=device_name())
    memory = memory_plan(plan.layout, trainer.batch.micro_batch, trainer.batch.accumulation_steps, rank=trainer.rank)
    planned = {item.name: item.num_bytes for item in memory.items if item.exact and item.name != GRADIENTS}
    live = {name: size for name, size in live_state(trainer.engine).items() if name != GRADIENTS}
    on_device = torch.cuda.is_available()
    seconds = trainer.log.seconds_per_step
    return {
        "kind": "plan",
        "step": trainer.step,
        "state_bytes_planned": planned,
        "state_bytes_live": live,
        "peak_bytes_planned": memory.peak() if on_device and memory.complete else None,
        "peak_bytes_seen": torch.cuda.max_memory_allocated() if on_device else None,
        "received_bytes_planned": {f"{t.collective}: {t.purpose}": t.received_bytes for t in plan.traffic},
        "tokens_per_second_planned": plan.time.tokens_per_second,
        "tokens_per_second_seen": trainer.config.tokens_per_step / seconds if seconds else None,
        "device": plan.device,
    }


def describe(record: dict[str, Any]) -> str:
    """The record for a person."""
    planned, live = record["state_bytes_planned"], record["state_bytes_live"]
    names = dict.fromkeys([*planned, *live])
    differing = [name for name in names if planned.get(name) != live.get(name)]
    lines = [f"plan against reality after step {record['step']}, rank 0:"]
    sums = f"{format_bytes(sum(planned.values()))} planned, {format_bytes(sum(live.values()))} live"
    if differing:
        details = "; ".join(f"{n} {planned.get(n, 0):,} planned, {live.get(n, 0):,} live" for n in differing)
        lines.append(f"  state     {sums}: {details} (bytes)")
    else:
        lines.append(f"  state     {sums}: {len(planned)} items, each equal to the byte")
    lines.append("  peak      " + _against(record, "peak_bytes", format_bytes, "not measured without an accelerator"))
    lines.append("  tokens/s  " + _against(record, "tokens_per_second", format_count, "device of unknown speed"))
    return "\n".join(lines)


def _against(record: dict[str, Any], key: str, text: Any, unknown: str) -> str:
    planned, seen = record[f"{key}_planned"], record[f"{key}_seen"]
    if planned is None or seen is None:
        return (f"{text(seen)} seen, " if seen is not None else "") + unknown
    return f"{text(planned)} planned, {text(seen)} seen: {seen / planned - 1:+.1%}"
