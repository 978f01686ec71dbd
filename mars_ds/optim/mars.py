"""`Mars`: every optimizer of the family as one pipeline on flat tensors.

One call of `step()` treats each param group it is given in three phases, so that the collectives of a
group are batched:

1. per flat tensor: correct the gradient, collect per-parameter sums; one sum over ranks;
2. clip by whole-parameter norms, update the moments, form the direction (matrices: gather to owners,
   Newton-Schulz, return);
3. decay and apply.

DeepSpeed calls `step()` once per group (stages 1, 2) or per sub-group (stage 3) with flat fp32 shards,
so nothing here assumes one call per optimizer step, and every counter lives beside its tensor.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mars_ds.optim.adamw import adamw_direction
from mars_ds.optim.config import OptimizerConfig, correction_factor, update_scale
from mars_ds.optim.correction import (
    clip_scales,
    corrected_gradient,
    inner_products,
    scale_fragments,
    squared_norms,
)
from mars_ds.optim.grouping import plan_groups
from mars_ds.optim.orthogonal import orthogonalize, wire_dtype
from mars_ds.optim.routing import matrix_shape
from mars_ds.optim.sharding import Fragment, Sharding, WholeTensors
from mars_ds.optim.sign import lion_direction, sign_direction
from mars_ds.optim.state import compute_dtype, is_folded, required_buffers

Group = dict[str, Any]


@dataclass(frozen=True)
class Direction:
    """Part of an update before the learning rate: `scale * values` at `fragment` of `tensor`, or all of it."""

    tensor: Tensor
    fragment: Fragment | None
    values: Tensor
    scale: float = 1.0


class Observer(Protocol):
    """Watches steps from inside (the start-up proof); every method is called on every rank alike."""

    def begin(self, group: Group, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Before anything changes; `gradients` are scaled and clipped globally, flat."""

    def corrected(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The corrected gradients before the per-tensor clip."""

    def finish(self, group: Group, directions: Sequence[Direction]) -> None:
        """The directions, before they are applied."""


class Mars(torch.optim.Optimizer):
    """MARS-AdamW/-Lion/-Shampoo, MARS-M and their baselines; made by `build_optimizer`.

    On one device an ordinary torch optimizer. Under ZeRO `mars_ds.initialize` binds it to the shards;
    the mathematics below does not change. A parameter without a gradient counts as zero gradient.

    Exact mode: before each `step()`, put the gradient of the *next* batch at the current weights into
    `.grad` and call `capture_next_grad()`; then the gradient of the current batch, and `step()`.

    Args:
        groups: Param groups with the settings of `OptimizerConfig.group_settings` and the lists
            `names` and `shapes` beside `params`.
        config: The resolved config the groups were made from.

    Attributes:
        suspended: `step()` does nothing.
        capturing: `step()` captures instead of updating (`mars_ds.zero.lookahead`).
        skip_non_finite: `step()` changes nothing and sets `overflow` when a gradient is not finite, for engines
            that do not check; costs one host synchronisation.
        observer: Watches steps from inside.
    """

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        super().__init__(groups, {})
        self.config = config
        self.suspended = False
        self.capturing = False
        self.skip_non_finite = False
        self.overflow = False
        self.observer: Observer | None = None
        names = {t: n for g in self.param_groups for t, n in zip(g["params"], g["names"], strict=True)}
        self._sharding: Sharding = WholeTensors(names)

    def bind(self, sharding: Sharding) -> None:
        """Replaces one-device sharding by that of a partitioned engine and forgets all state."""
        self._sharding = sharding
        self.state.clear()

    def init_state(self, tensors: Iterable[Tensor], group: Group) -> None:
        """Makes the buffers of `tensors` now: flat, zero, one element per shard element."""
        for tensor in tensors:
            state = self.state[tensor]
            if "step" not in state:
                state["step"] = 0
            for name, dtype in required_buffers(group, tensor.dtype).items():
                if name not in state:
                    state[name] = torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)

    @torch.no_grad()
    def capture_next_grad(self) -> None:
        """Exact mode: stores the gradients in `.grad` as those of the next batch at today's weights.

        Raises:
            RuntimeError: No group is in exact mode.
        """
        if not any(group["exact"] for group in self.param_groups):
            raise RuntimeError("capture_next_grad needs optimizer.mode: exact, which no param group has")
        for group in self.param_groups:
            self._capture_group(group)

    def drop_capture(self) -> None:
        """Exact mode: the gradient of the next batch is not finite; its step will use c = g instead."""
        for state in self.state.values():
            if "next_grad" in state:
                state["captured"], state["dropped"] = True, True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies one update to every tensor in the param groups.

        Raises:
            RuntimeError: Exact mode without `capture_next_grad()` since the last step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # DeepSpeed's stage-0 bf16 wrapper calls step() while it initializes; that must change nothing.
        if self.suspended:
            return loss
        if self.skip_non_finite:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.overflow = not bool(torch.nn.utils.get_total_norm(gradients).isfinite())
            if self.overflow:
                return loss
        for group in self.param_groups:
            if group["params"] and self.capturing:
                self._capture_group(group)
            elif group["params"]:
                self._step_group(group)
        return loss

    def _gradient(self, tensor: Tensor, group: Group) -> Tensor:
        """The flat gradient in compute dtype, times `gradient_scale`; never a view that we would write."""
        dtype = compute_dtype(tensor.dtype)
        if tensor.grad is None:
            return torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)
        gradient = tensor.grad.reshape(-1).to(dtype)
        return gradient if group["gradient_scale"] == 1.0 else gradient * group["gradient_scale"]

    def _capture_group(self, group: Group) -> None:
        if not (group["exact"] and group["gamma"]):
            return
        self.init_state(group["params"], group)
        for tensor in group["params"]:
            state = self.state[tensor]
            if state.get("captured"):
                # The step between the two captures was skipped: its batch is gone, and what was captured for the
                # coming one becomes its last gradient.
                self._take_captured(state)
            state["next_grad"].copy_(self._gradient(tensor, group))
            state["captured"] = True

    def _step_group(self, group: Group) -> None:
        tensors: list[Tensor] = group["params"]
        self.init_state(tensors, group)
        gradients = [self._gradient(tensor, group) for tensor in tensors]
        if self.observer:
            self.observer.begin(group, tensors, gradients)
        for tensor in tensors:
            self.state[tensor]["step"] += 1
        corrected = self._correct(tensors, gradients, group)
        corrected, norms = self._clip(tensors, corrected, group)
        momenta = self._update_momentum(tensors, corrected, group)
        if group["rule"] == "orthogonal":
            directions = self._orthogonal_directions(tensors, momenta, norms, group)
        else:
            directions = self._elementwise_directions(tensors, momenta, corrected, group)
        if self.observer:
            self.observer.finish(group, directions)
        self._apply(tensors, directions, group)

    def _correct(self, tensors: Sequence[Tensor], gradients: list[Tensor], group: Group) -> list[Tensor]:
        """Variance-reduced gradients before the clip; also moves `last_grad` forward."""
        if not group["gamma"] or is_folded(group):
            return gradients
        factor = correction_factor(group["gamma"], _beta1(group))
        corrected = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            state = self.state[tensor]
            if state.pop("restart", False) or (state["step"] == 1 and group["first_step"] == "paper"):
                state["last_grad"].copy_(gradient)
            corrected.append(corrected_gradient(gradient, state["last_grad"], factor))
            self._advance_last_grad(tensor, gradient, group)
        if self.observer:
            self.observer.corrected(tensors, corrected)
        return corrected

    def _clip(
        self, tensors: Sequence[Tensor], corrected: list[Tensor], group: Group
    ) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """The per-tensor clip, and what else needs sums over whole parameters, with one sum over ranks.

        Returns:
            The clipped gradients, and, where Newton-Schulz takes the norm before the cast, the Frobenius norm of
            each momentum to come by name (0-dim, compute dtype). That norm follows from <m, c>, |m| and |c| with
            the clip known only after the sum: |a m + b c|^2 = a^2 |m|^2 + 2 a b <m, c> + b^2 |c|^2.
        """
        needs_norm = group["rule"] == "orthogonal" and group["norm_before_cast"]
        if group["clip_threshold"] is None and not needs_norm:
            return corrected, None
        index = {name: row for row, name in enumerate(group["names"])}
        fragments = [self._sharding.fragments(tensor) for tensor in tensors]
        columns = [squared_norms(zip(corrected, fragments, strict=True), index)]
        if needs_norm:
            momenta = [self.state[tensor]["exp_avg"] for tensor in tensors]
            columns.append(inner_products(zip(momenta, corrected, fragments, strict=True), index))
            columns.append(squared_norms(zip(momenta, fragments, strict=True), index))
        sums = self._sharding.sum_over_ranks(tensors, torch.stack(columns))
        scales = torch.ones_like(sums[0])
        if group["clip_threshold"] is not None:
            scales = clip_scales(sums[0], group["clip_threshold"])
            if not group["gamma"]:
                corrected = [c.clone() for c in corrected]
            for c, pieces in zip(corrected, fragments, strict=True):
                scale_fragments(c, pieces, scales, index)
        if not needs_norm:
            return corrected, None
        _, _, a, b = self._momentum_weights(group, self.state[tensors[0]]["step"])
        squared = a * a * sums[2] + 2 * a * b * scales * sums[1] + (b * scales).square() * sums[0]
        norms = squared.clamp_min(0).sqrt().mul(_debias(group)).to(corrected[0].dtype)
        return corrected, {name: norms[row] for name, row in index.items()}

    def _advance_last_grad(self, tensor: Tensor, gradient: Tensor, group: Group) -> None:
        state = self.state[tensor]
        if not group["exact"]:
            # A copy: engines zero, reuse and free gradient buffers.
            state["last_grad"].copy_(gradient)
            return
        if not state.get("captured"):
            raise RuntimeError("exact mode: call capture_next_grad() with the next batch's gradient before step()")
        self._take_captured(state)

    @staticmethod
    def _take_captured(state: dict[str, Any]) -> None:
        """Exact mode: the gradient captured for the coming batch becomes its `last_grad`."""
        state["captured"] = False
        if state.pop("dropped", False):
            state["restart"] = True
        else:
            state["last_grad"], state["next_grad"] = state["next_grad"], state["last_grad"]

    def _update_momentum(self, tensors: Sequence[Tensor], gradients: list[Tensor], group: Group) -> list[Tensor]:
        """What the preconditioner reads, per flat tensor; `exp_avg` itself where nothing is added."""
        momenta = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            exp_avg = self.state[tensor]["exp_avg"]
            if group["momentum_form"] == "lion":
                momenta.append(lion_direction(exp_avg, gradient, group["betas"]))
                continue
            keep, add, _, _ = self._momentum_weights(group, self.state[tensor]["step"])
            exp_avg.mul_(keep).add_(gradient, alpha=add)
            if group["momentum_form"] == "nesterov":
                momenta.append(gradient.add(exp_avg, alpha=keep))
            elif is_folded(group):
                momenta.append(exp_avg.add(gradient, alpha=group["gamma"]))
            else:
                momenta.append(exp_avg)
        return momenta

    @staticmethod
    def _momentum_weights(group: Group, step: int) -> tuple[float, float, float, float]:
        """Weights of the old momentum m and the gradient c: (keep, add) of the stored one, (a, b) of the one used."""
        beta = _beta1(group)
        if group["momentum_form"] == "nesterov":
            return beta, 1.0, beta * beta, 1.0 + beta
        if is_folded(group):
            gamma = group["gamma"]
            first = step == 1 and group["first_step"] == "paper"
            add = 1.0 - beta - gamma if first else (1.0 - beta) * (1.0 - gamma)
            return beta, add, beta, add + gamma
        return beta, 1.0 - beta, beta, 1.0 - beta

    def _elementwise_directions(
        self, tensors: Sequence[Tensor], momenta: list[Tensor], gradients: list[Tensor], group: Group
    ) -> list[Direction]:
        directions = []
        for tensor, momentum, gradient in zip(tensors, momenta, gradients, strict=True):
            state = self.state[tensor]
            if group["rule"] == "adamw":
                beta2 = group["betas"][1]
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
                values = adamw_direction(
                    momentum,
                    state["exp_avg_sq"],
                    state.get("max_exp_avg_sq"),
                    step=state["step"],
                    betas=group["betas"],
                    eps=group["eps"],
                    eps_placement=group["eps_placement"],
                )
            else:
                values = momentum if group["momentum_form"] == "lion" else sign_direction(momentum)
            directions.append(Direction(tensor, None, values))
        return directions

    def _orthogonal_directions(
        self, tensors: Sequence[Tensor], momenta: list[Tensor], norms: dict[str, Tensor] | None, group: Group
    ) -> list[Direction]:
        debias, dtype = _debias(group), wire_dtype(group)
        located = [
            (tensor, fragment, fragment.view(momentum))
            for tensor, momentum in zip(tensors, momenta, strict=True)
            for fragment in self._sharding.fragments(tensor)
        ]
        pieces = {f.name: (piece if debias == 1.0 else piece * debias).to(dtype) for _, f, piece in located}
        owned = self._sharding.gather_matrices(tensors, pieces)
        updates = self._sharding.scatter_updates(tensors, orthogonalize(owned, group, norms))
        return [Direction(tensor, f, updates[f.name], self._update_scale(f, group)) for tensor, f, _ in located]

    @staticmethod
    def _update_scale(fragment: Fragment, group: Group) -> float:
        rows, columns = matrix_shape(fragment.shape)
        if fragment.name in group["transposed"]:
            rows, columns = columns, rows
        return update_scale(group["scale"], rows, columns)

    def _apply(self, tensors: Sequence[Tensor], directions: Sequence[Direction], group: Group) -> None:
        lr = group["lr"] * group["lr_factor"]
        for tensor in tensors:
            tensor.mul_(1.0 - lr * group["weight_decay"])
        for part in directions:
            # view(-1): DeepSpeed's shards are flat, one-device parameters keep their shape.
            flat = part.tensor.view(-1)
            target = flat if part.fragment is None else part.fragment.view(flat)
            target.add_(part.values, alpha=-lr * part.scale)


def _beta1(group: Group) -> float:
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


def _debias(group: Group) -> float:
    """MARS-Shampoo orthogonalizes m / (1 - beta1)."""
    return 1.0 / (1.0 - _beta1(group)) if group.get("debias_momentum") else 1.0


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]], config: OptimizerConfig, transposed: Collection[str] = ()
) -> Mars:
    """Routes parameters to rules and makes the optimizer of `config.kind`.

    Args:
        named_parameters: (dotted name, parameter), as `model.named_parameters()` gives them: tied
            weights once. Parameters that need no gradient are left out.
        config: Optimizer settings.
        transposed: Names of matrices stored as (inputs, outputs), like those of Hugging Face's GPT-2; their
            aspect scale is that of the layer, not of the storage. `mars_ds.initialize` finds them itself.

    Returns:
        A `Mars` with a param group per role and override that has parameters (DeepSpeed drops empty groups
        in place, which breaks schedulers).

    Raises:
        ValueError: No trainable parameter, or a route or override that matches nothing.
    """
    config = config.resolved()
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no parameter with requires_grad")
    parameters = dict(trainable)
    groups: list[Group] = []
    for planned in plan_groups({name: true_shape(p) for name, p in trainable}, config):
        members = {
            "params": [parameters[name] for name in planned.shapes],
            "names": list(planned.shapes),
            "shapes": list(planned.shapes.values()),
            "transposed": [name for name in planned.shapes if name in transposed],
        }
        groups.append(planned.settings | members)
    return Mars(groups, config)


def true_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also where `zero.Init` has replaced it by an empty one."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
