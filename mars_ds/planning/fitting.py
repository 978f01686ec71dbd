"""Whether a run fits into memory, and the first change that makes it fit.

A run is refused only where what is exact is already too much: the state and the gradients, byte for byte. Where the
estimates alone say no, the run starts and the card says that it may end out of memory; so no key is needed to launch
a run against the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan, plan_batch
from mars_ds.planning.memory import with_other
from mars_ds.planning.plan import RunPlan
from mars_ds.planning.state import BUCKET
from mars_ds.telemetry.console import format_bytes
from mars_ds.zero.support import Combination, refusal

# Ranks are doubled up to here.
MOST_RANKS = 4096


@dataclass(frozen=True)
class Available:
    """Memory of one rank.

    Attributes:
        device_bytes: Of its accelerator; on a CPU its share of host memory, which then holds everything.
        host_bytes: Its share of host memory, None when it is not known.
        shared: True on a CPU: both are one.
        name: Of the device, for messages.
    """

    device_bytes: int
    host_bytes: int | None
    shared: bool
    name: str


def fits(plan: RunPlan, available: Available, at_least: bool = False) -> bool:
    """Whether the peaks of a run are within what there is.

    Args:
        plan: The run.
        available: Memory of one rank.
        at_least: Only what is exact.
    """
    device, host = _peaks(plan, available, at_least)
    if available.shared:
        return device + host <= available.device_bytes
    return device <= available.device_bytes and (available.host_bytes is None or host <= available.host_bytes)


def refuse_unfit(plan: RunPlan, available: Available) -> str | None:
    """Refuses a run that cannot fit.

    Returns:
        A warning where only the estimates do not fit, or None.

    Raises:
        ConfigError: With the bytes needed and available, and the first change that would fit.
    """
    if fits(plan, available):
        return None
    change = first_change(plan, available)
    nothing = "no micro-batch, checkpointing, stage, offload or number of ranks would fit; nearest: a smaller model"
    advice = f"would fit: {change}" if change else nothing
    if fits(plan, available, at_least=True):
        return f"may not fit: {_needed(plan, available, at_least=False)}; {advice}"
    raise ConfigError(f"the run cannot fit: {_needed(plan, available, at_least=True)}; {advice}")


def _peaks(plan: RunPlan, available: Available, at_least: bool) -> tuple[int, int]:
    """Peaks on the device and in host memory."""
    memory = plan.memory
    if available.shared:
        # A bucket larger than the model is never written to its end, and pages of host memory that are not written
        # take none.
        memory = replace(memory, items=tuple(item for item in memory.items if item.name != BUCKET))
    return memory.peak(at_least=at_least), memory.peak(on_host=True, at_least=at_least)


def _needed(plan: RunPlan, available: Available, at_least: bool) -> str:
    device, host = _peaks(plan, available, at_least)
    words = "state and gradients alone are" if at_least else "the peak is estimated at"
    where = f"rank {plan.memory.rank}, {words}"
    if available.shared:
        return f"{where} {_both(device + host)}, {_both(available.device_bytes)} of {available.name} is available"
    if device > available.device_bytes:
        return f"{where} {_both(device)}, {_both(available.device_bytes)} of {available.name} is available"
    return f"{where} {_both(host)} in host memory, {_both(available.host_bytes or 0)} of it is available"


def _both(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes:,} bytes)"


def first_change(plan: RunPlan, available: Available) -> str | None:
    """The first change that fits by all estimates, as keys to set; None when none does.

    Tried in this order, each alone and then upon those before it: a smaller micro-batch that keeps the batch whole,
    activation checkpointing, a higher ZeRO stage, offload, more ranks.
    """
    together = plan
    words: list[str] = []
    kinds = (_micro_batches, _checkpointing, _stages, _offloads, _ranks)
    for kind in kinds:
        for changed, word in kind(plan):
            if fits(changed, available):
                return word
    for kind in kinds:
        best = None
        for changed, word in kind(together):
            best = changed, word
            if fits(changed, available):
                return ", ".join([*words, word])
        if best is not None:
            together = best[0]
            words.append(best[1])
    return None


def _changed(plan: RunPlan, config: RunConfig, batch: BatchPlan | None = None) -> RunPlan:
    changed = replace(plan, config=config, batch=batch or plan.batch)
    if config.zero == plan.config.zero and changed.batch.world_size == plan.batch.world_size:
        # Owners of matrices do not depend on the micro-batch: they need not be sought again.
        changed.__dict__["layout"] = replace(plan.layout, config=config)
    return changed


def _micro_batches(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    batch = plan.batch
    share = batch.global_batch // batch.world_size
    for micro in range(batch.micro_batch - 1, 0, -1):
        if share % micro == 0:
            config = with_other(plan.config, "batch", micro_batch=micro)
            yield (
                _changed(plan, config, plan_batch(batch.global_batch, micro, batch.world_size)),
                (f"batch.micro_batch={micro}"),
            )


def _checkpointing(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    model = plan.config.model
    kinds = ("none", "selective", "full")
    for kind in kinds[kinds.index(model.activation_checkpointing) + 1 :] if model.factory is None else ():
        changed = with_other(plan.config, "model", activation_checkpointing=kind)
        yield _changed(plan, changed), f"model.activation_checkpointing={kind}"


def _stages(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    for stage in range(plan.config.zero.stage + 1, 4):
        config = with_other(plan.config, "zero", stage=stage)
        if runs(config):
            yield _changed(plan, config), f"zero.stage={stage}"


def _offloads(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    order = ("none", "optimizer", "optimizer_and_parameters")
    for offload in order[order.index(plan.config.zero.offload) + 1 :]:
        config = with_other(plan.config, "zero", offload=offload)
        if runs(config):
            yield _changed(plan, config), f"zero.offload={offload}"


def _ranks(plan: RunPlan) -> Iterator[tuple[RunPlan, str]]:
    batch = plan.batch
    world_size = batch.world_size
    while (world_size := 2 * world_size) <= MOST_RANKS:
        if batch.global_batch % (batch.micro_batch * world_size) == 0:
            cut = plan_batch(batch.global_batch, batch.micro_batch, world_size)
            yield _changed(plan, plan.config, cut), f"{world_size} ranks"


def runs(config: RunConfig) -> bool:
    """Whether our tests hold this combination of stage, precision and offload (`mars_ds.zero.support`)."""
    short = {"bfloat16": "bf16", "float32": "fp32"}
    offload = config.zero.offload
    optimizer = config.optimizer.resolved()
    combination = Combination(
        optimizer.kind,
        optimizer.mode or "approx",
        config.zero.stage,
        short[config.precision.dtype],
        short[config.precision.accumulation_dtype],
        "none" if offload == "none" else "cpu",
        "cpu" if offload == "optimizer_and_parameters" else "none",
    )
    return refusal(combination) is None
