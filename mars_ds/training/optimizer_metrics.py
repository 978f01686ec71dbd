"""What the optimizer does, seen from inside at log steps: correction, per-tensor clip and update size by role.

    correction/ROLE    |c - g| / |g| over all tensors of a role: how much the variance reduction changes the gradient
    clipped/ROLE       share of the tensors whose corrected gradient was scaled down to the threshold
    update_rms/ROLE    root mean square of the update's direction, before the learning rate

Nothing is read from the device before the step is over, and steps that are not logged are not looked at.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.config import RunConfig
from mars_ds.optim.mars import Direction, Group
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.progress import is_log_step

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

# Sums of squares per parameter: gradient, correction c - g, corrected gradient, direction; and its elements.
_GRADIENT, _CORRECTION, _CORRECTED, _DIRECTION, _ELEMENTS = range(5)


class OptimizerMetrics(Callback):
    """An observer of `Mars` that is switched on for steps that are logged, once the start-up proof has left.

    Attributes:
        values: Of the last logged step, by name; empty before the first.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.values: dict[str, float] = {}
        self._rows: dict[str, int] = {}
        self._sums: Tensor | None = None
        self._sharding: Any = None
        self._group: Group = {}
        self._gradients: dict[int, Tensor] = {}

    def start(self, trainer: "Trainer") -> None:
        """A row for each parameter."""
        self._sharding = trainer.engine.mars_sharding
        groups = trainer.engine.mars.param_groups
        self._rows = {name: row for row, name in enumerate(name for group in groups for name in group["names"])}

    def before_step(self, trainer: "Trainer") -> None:
        """Looks at the coming step if it is logged."""
        optimizer = trainer.engine.mars
        if is_log_step(self._config, trainer.step + 1) and optimizer.observer is None:
            self._sums = None
            optimizer.observer = self

    def begin(self, group: Group, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """See `Observer`."""
        self._group = group
        self._gradients = {id(tensor): gradient for tensor, gradient in zip(tensors, gradients, strict=True)}
        for tensor, gradient in zip(tensors, gradients, strict=True):
            self._add(tensor, gradient, _GRADIENT)

    def corrected(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """See `Observer`; not called where nothing is corrected."""
        for tensor, corrected in zip(tensors, gradients, strict=True):
            self._add(tensor, corrected, _CORRECTED)
            self._add(tensor, corrected - self._gradients[id(tensor)], _CORRECTION)

    def finish(self, group: Group, directions: Sequence[Direction]) -> None:
        """See `Observer`."""
        for part in directions:
            fragments = self._sharding.fragments(part.tensor) if part.fragment is None else [part.fragment]
            for fragment in fragments:
                values = fragment.view(part.values.reshape(-1)) if part.fragment is None else part.values
                self._put(fragment.name, _DIRECTION, _squares(values) * part.scale**2)
                self._put(fragment.name, _ELEMENTS, torch.full((), values.numel(), dtype=torch.float64))
        self._gradients = {}

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Sums over the ranks and gives the place of the observer back; all ranks come here alike."""
        optimizer = trainer.engine.mars
        if optimizer.observer is not self:
            return
        optimizer.observer = None
        sums = self._sums if self._sums is not None else torch.zeros(len(self._rows), 5, dtype=torch.float64)
        sums = sums.to(trainer.device)
        if not self._sharding.layout.replicated:
            dist.all_reduce(sums)
        self.values = self._by_role(sums.cpu(), optimizer.param_groups)

    def _add(self, tensor: Tensor, flat: Tensor, column: int) -> None:
        for fragment in self._sharding.fragments(tensor):
            self._put(fragment.name, column, _squares(fragment.view(flat)))

    def _put(self, name: str, column: int, value: Tensor) -> None:
        if self._sums is None:
            self._sums = torch.zeros(len(self._rows), 5, dtype=torch.float64, device=value.device)
        self._sums[self._rows[name], column] += value.to(self._sums.device)

    def _by_role(self, sums: Tensor, groups: list[Group]) -> dict[str, float]:
        values: dict[str, float] = {}
        for role in dict.fromkeys(group["role"] for group in groups):
            members = [group for group in groups if group["role"] == role]
            rows = torch.cat([sums[[self._rows[name] for name in group["names"]]] for group in members])
            total = rows.sum(0)
            if total[_ELEMENTS] == 0:
                continue  # the update was skipped
            values[f"update_rms/{role}"] = float((total[_DIRECTION] / total[_ELEMENTS]).sqrt())
            if total[_CORRECTED] > 0:
                values[f"correction/{role}"] = float((total[_CORRECTION] / total[_GRADIENT].clamp_min(1e-300)).sqrt())
            thresholds = [group["clip_threshold"] for group in members for _ in group["names"]]
            if all(threshold is not None for threshold in thresholds):
                norms = rows[:, _CORRECTED if total[_CORRECTED] > 0 else _GRADIENT].sqrt()
                values[f"clipped/{role}"] = float((norms > torch.tensor(thresholds)).double().mean())
        return values


def _squares(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
