"""Learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Any

from mars_ds.config import OptimizerConfig, ScheduleSection


@dataclass(frozen=True)
class Schedule:
    """lr of a run, for any peak and floor.

    Attributes:
        kind: `cosine`, `wsd` (warm-up, stable, linear decay) or `constant`.
        steps: Steps of the run.
        warmup_steps: Linear from 0 at step 0.
        decay_steps: wsd: steps of the decay at the end.
    """

    kind: str
    steps: int
    warmup_steps: int
    decay_steps: int

    @classmethod
    def from_config(cls, section: ScheduleSection) -> "Schedule":
        """Reads the config's section."""
        decay = int(section.steps * section.decay_fraction) if section.kind == "wsd" else 0
        return cls(section.kind, section.steps, section.warmup_steps, decay)

    def lr(self, step: int, peak: float, floor: float) -> float:
        """Learning rate of the update that makes step `step` + 1 (so the first is 0 under a warm-up).

        Args:
            step: Updates applied before, from 0.
            peak: lr after the warm-up.
            floor: lr at the end of the decay.
        """
        if step < self.warmup_steps:
            return peak * step / self.warmup_steps
        return floor + (peak - floor) * self._remaining(step)

    def _remaining(self, step: int) -> float:
        """1 at the start of the decay, 0 at its end."""
        if self.kind == "cosine":
            span = max(1, self.steps - self.warmup_steps)
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / span)))
        if self.kind == "wsd" and self.decay_steps:
            return min(1.0, max(0.0, (self.steps - step) / self.decay_steps))
        return 1.0


def set_learning_rates(
    optimizer: Any, schedule: Schedule, section: ScheduleSection, config: OptimizerConfig, step: int
) -> float:
    """Sets every group's lr for the coming update.

    A group's effective lr is `lr * lr_factor`; a floor of its own (`min_lr_1d`) is honoured by dividing
    the factor out again.

    Returns:
        The lr of matrices.
    """
    peak = config.resolved().lr or 0.0
    lr = schedule.lr(step, peak, section.min_lr)
    for group in optimizer.param_groups:
        group["lr"] = lr
        factor = group["lr_factor"]
        if group["adamw_part"] and factor and section.min_lr_1d is not None:
            group["lr"] = schedule.lr(step, peak * factor, section.min_lr_1d) / factor
    return lr
