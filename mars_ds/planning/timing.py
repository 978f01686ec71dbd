"""How long a run takes on a known device, from its FLOPs and a stated share of the device's peak.

The share is an anchor, not a measurement of this code: published runs of GPT-2 sizes on H100 and what may be asked
there (124 M parameters 39 %, 355 M 45 %, 774 M 47 %, 1,558 M 48 %). It is taken for every device alike.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.telemetry.devices import known_devices, peak_flops_per_second

# (parameters, share of the dense bf16 peak that model FLOPs reach).
ANCHORS = ((124e6, 0.39), (355e6, 0.45), (774e6, 0.47), (1558e6, 0.48))


@dataclass(frozen=True)
class TimePlan:
    """What a run costs.

    Attributes:
        flops_per_token: Forward and backward.
        flops_per_step: The same over a step, of all ranks; twice it in exact mode.
        newton_schulz_flops: Of one step, all ranks.
        newton_schulz_busiest: Of the busiest rank.
        device: Name that was asked for or found, or None.
        efficiency: Share of the peak, None where the device's peak is unknown.
        tokens_per_second: Of all ranks, None likewise.
        seconds: Of all steps, None likewise.
    """

    flops_per_token: int
    flops_per_step: int
    newton_schulz_flops: int
    newton_schulz_busiest: int
    device: str | None
    efficiency: float | None
    tokens_per_second: float | None
    seconds: float | None


def expected_efficiency(num_parameters: int) -> float:
    """Share of the peak between the anchors, by the logarithm of the size; the nearest anchor beyond them."""
    if num_parameters <= ANCHORS[0][0]:
        return ANCHORS[0][1]
    for (low, share), (high, next_share) in pairwise(ANCHORS):
        if num_parameters <= high:
            part = math.log(num_parameters / low) / math.log(high / low)
            return share + part * (next_share - share)
    return ANCHORS[-1][1]


def time_plan(
    config: RunConfig,
    flops_per_token: int,
    num_parameters: int,
    newton_schulz: list[int],
    device: str | None,
    efficiency: float | None = None,
) -> TimePlan:
    """Plans the time of a run.

    Args:
        config: The run.
        flops_per_token: Forward and backward.
        num_parameters: For the efficiency.
        newton_schulz: FLOPs of one step by rank.
        device: Any name with the words of a device in it, "h100"; None or an unknown one gives no time.
        efficiency: Share of the peak, in place of the anchor.

    Raises:
        ConfigError: An efficiency outside (0, 1].
    """
    if efficiency is not None and not 0.0 < efficiency <= 1.0:
        raise ConfigError(f"--efficiency {efficiency:g}: expected a share above 0 and up to 1; nearest: 0.45")
    # Exact mode evaluates every batch twice.
    passes = 2 if config.optimizer.resolved().mode == "exact" else 1
    step = passes * flops_per_token * config.tokens_per_step
    common = (flops_per_token, step, sum(newton_schulz), max(newton_schulz), device)
    peak = peak_flops_per_second(device) if device else None
    # The table is of bf16: an fp32 run does not reach it, and its own peak depends on what the products may round.
    if peak is None or config.precision.dtype != "bfloat16":
        return TimePlan(*common, None, None, None)
    share = efficiency or expected_efficiency(num_parameters)
    ranks = len(newton_schulz)
    # Newton-Schulz waits for its busiest rank, at the same share of the peak.
    seconds = (step / ranks + max(newton_schulz)) / (share * peak)
    return TimePlan(*common, share, config.tokens_per_step / seconds, seconds * config.schedule.steps)


def check_device(name: str) -> None:
    """Refuses a `--device` that the table does not have.

    Raises:
        ConfigError: With what it has.
    """
    if peak_flops_per_second(name) is None:
        raise ConfigError(f"--device {name}: unknown device; known: {', '.join(known_devices())}")
