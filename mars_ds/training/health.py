"""Health: steps that must not be applied, and a run that must not go on.

A loss that is not finite turns the gradient into NaN on the device, whatever the model makes of it; DeepSpeed then
skips the update on all ranks alike, and nobody waits for the host. With `health.spike_policy: skip` a loss far above
its running mean does the same. A run of skipped steps ends with a bundle that a command replays.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.config import HealthSection
from mars_ds.training.bundle import write_bundle
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.signals import Reason

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

# Steps over which the running mean forgets, and those before it is trusted.
_WINDOW_STEPS = 128
_WARM_UP_STEPS = 32


class LossGuard:
    """Decides on the device whether a window's gradient may be used, and knows whether the last loss was a spike.

    With `spike_policy: skip` the ranks follow their common mean loss, since they must decide alike; otherwise each
    follows its own, and nothing is exchanged before somebody asks.

    Args:
        section: `health` of the config.
        device: Where losses are.
    """

    def __init__(self, section: HealthSection, device: torch.device) -> None:
        self._threshold, self._skips = section.spike_zscore, section.spike_policy == "skip"
        # Number, mean and variance of the losses so far, and the last loss.
        self._statistics = torch.zeros(3, dtype=torch.float64, device=device)
        self._before_last, self._last = self._statistics, torch.zeros((), dtype=torch.float64, device=device)

    def factor(self, loss: Tensor, window_loss: Tensor | None) -> Tensor:
        """1 where the gradient of `loss` may be used, else NaN; multiplies the loss before the backward pass.

        Args:
            loss: Of one micro-batch, on this rank.
            window_loss: Mean over all micro-batches of the step on this rank, with the last one; None before.
        """
        usable = torch.isfinite(loss.detach())
        if self._threshold and window_loss is not None:
            spike = self._observe(window_loss.detach().double())
            usable = usable & ~spike if self._skips else usable
        return torch.where(usable, 1.0, torch.nan).to(loss.dtype)

    def last_is_spike(self) -> bool:
        """Of the last window, over all ranks, which ask together: the means of their losses and statistics decide."""
        if not self._threshold:
            return False
        facts = self._mean_over_ranks(torch.cat([self._last.view(1), self._before_last]))
        return bool(self._stands_out(facts[0], facts[1:]))

    def state(self) -> list[float]:
        """For a checkpoint, the mean over the ranks; all of them call it."""
        return [float(value) for value in self._mean_over_ranks(self._statistics)]

    def load_state(self, state: list[float]) -> None:
        """Continues the statistics."""
        self._statistics = torch.tensor(state, dtype=torch.float64, device=self._statistics.device)

    def _observe(self, loss: Tensor) -> Tensor:
        """Whether a loss is a spike; one that is, or is not finite, leaves the statistics as they are."""
        if self._skips:
            loss = self._mean_over_ranks(loss)
        self._before_last, self._last = self._statistics, loss
        count, mean, variance = self._statistics
        spike = self._stands_out(loss, self._statistics)
        weight = 1.0 / torch.clamp(count + 1, max=_WINDOW_STEPS)
        step = loss - mean
        updated = torch.stack([count + 1, mean + weight * step, (1 - weight) * (variance + weight * step * step)])
        self._statistics = torch.where(spike | ~torch.isfinite(loss), self._statistics, updated)
        return spike

    def _stands_out(self, loss: Tensor, statistics: Tensor) -> Tensor:
        count, mean, variance = statistics
        far: Tensor = loss - mean > self._threshold * variance.clamp_min(1e-12).sqrt()
        result: Tensor = far & (count >= _WARM_UP_STEPS)
        return result

    @staticmethod
    def _mean_over_ranks(values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        mean: Tensor = values / dist.get_world_size()
        return mean


class HealthWatch(Callback):
    """Counts skipped steps, tells them loudly, and stops the run when there are too many in a row.

    Attributes:
        skipped_steps: Since the start of the run.
        in_a_row: Up to now.
    """

    def __init__(self, section: HealthSection) -> None:
        self._section = section
        self.skipped_steps = 0
        self.in_a_row = 0

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Every rank sees the same `applied`."""
        if result.applied:
            self.in_a_row = 0
            return
        self.skipped_steps += 1
        self.in_a_row += 1
        limit = self._section.max_skipped_in_a_row
        trainer.print(
            f"step {trainer.step}: loss or gradient is not finite (or a spike); the update was skipped: "
            f"{self.in_a_row} of at most {limit} in a row, {self.skipped_steps} in all"
        )
        if self.in_a_row >= limit:
            write_bundle(trainer, f"{limit} updates in a row were skipped")
            trainer.stop.request(Reason.UNHEALTHY)
            trainer.stop.settle()  # all ranks are here: no further step

    def is_healthy(self, result: StepResult) -> bool:
        """Whether this state may replace the last good checkpoint; all ranks ask, and get the same answer."""
        finite = torch.isfinite(result.loss).to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite) and self.in_a_row == 0
