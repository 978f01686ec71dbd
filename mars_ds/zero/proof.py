"""The start-up proof: that the configured optimizer is the one running, shown on the live shards.

Before the first step every parameter's group settings are compared with the table of kinds, read anew from the
config and the parameter's true shape. In the first two steps sampled parameters are put together from all ranks
before and after the optimizer's own arithmetic, and their direction (before the learning rate, which may still be
0) must equal `mars_ds.optim.reference`; an orthogonalized one must have the spectrum of Newton-Schulz; and in step
2 the variance correction must not be zero. A failed proof raises on every rank alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.optim import Fragment, Mars, reference
from mars_ds.optim.mars import Direction, Group
from mars_ds.optim.routing import matrix_shape, role_of
from mars_ds.optim.state import BUFFERS
from mars_ds.zero.binding import EngineSharding

STEPS = 2

# Exact mode under a warm-up from 0: the weights have not moved before the second step with a positive lr, and until
# then the correction is rightly zero.
MAX_STEPS = 4

# Relative Frobenius distance to the reference. A sign counts 2 where it differs; bf16 Newton-Schulz rounds
# differently on another device or batch.
LIMITS = {"adamw": 1e-3, "sign": 0.1, "orthogonal": 1e-3, "orthogonal in 16 bits": 0.15}

# Largest singular value of a Newton-Schulz result: 1.134 for the published polynomial, 1.15 for any set here, and
# rounding. A result whose largest is below the lower bound was not orthogonalized.
SPECTRUM = (0.4, 1.35)

# Samples are put together on every rank; a larger tensor is passed over (GPT-2 XL's largest hidden matrix has 10.2 M).
MAX_SAMPLE_ELEMENTS = 1 << 24

# Settings that follow from the kind alone; the others may be changed per group by the user.
STRUCTURE = ("rule", "momentum_form", "scale", "norm_before_cast", "debias_momentum", "eps_placement")


class ProofError(RuntimeError):
    """The optimizer that runs is not the one that was configured."""


class StartupProof:
    """Observes the first two applied steps of a bound optimizer.

    Args:
        optimizer: Bound.
        sharding: Its layout.

    Attributes:
        lines: What was shown, for the card; complete when `done`.
        done: Two steps were observed and nothing failed.

    Raises:
        ProofError: A group's settings contradict the config.
    """

    def __init__(self, optimizer: Mars, sharding: EngineSharding) -> None:
        self.optimizer, self.sharding = optimizer, sharding
        self.lines: list[str] = []
        self.done = False
        check_structure(optimizer)
        self.samples = choose_samples(optimizer, sharding)
        for group in optimizer.param_groups:
            if not self.samples.keys() & set(group["names"]):
                self.lines.append(
                    f"{group['role']}: not sampled, every tensor has over {MAX_SAMPLE_ELEMENTS:,} elements"
                )
        self._seen: dict[str, int] = dict.fromkeys(self.samples, 0)
        self._moved: dict[str, bool] = dict.fromkeys(self.samples, False)
        self._open = set(self.samples)
        self._pieces: dict[tuple[str, str], tuple[int, Tensor]] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        optimizer.observer = self

    def begin(self, group: Group, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Takes gradient and state of the sampled fragments as they are before the step."""
        self._pieces.clear()
        self._scalars.clear()
        for tensor, fragment in self._sampled(tensors):
            state = self.optimizer.state[tensor]
            gradient = gradients[[t is tensor for t in tensors].index(True)]
            self._take(fragment, "gradient", fragment.view(gradient))
            for buffer in BUFFERS:
                if buffer in state:
                    self._take(fragment, buffer, fragment.view(state[buffer]))
            self._scalars[fragment.name] = {"step": state["step"], "restart": state.get("restart", False)}

    def corrected(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Takes the corrected gradients before the clip."""
        for tensor, fragment in self._sampled(tensors):
            gradient = gradients[[t is tensor for t in tensors].index(True)]
            self._take(fragment, "corrected", fragment.view(gradient))

    def finish(self, group: Group, directions: Sequence[Direction]) -> None:
        """Puts the samples together from all ranks and compares; the same verdict everywhere."""
        for part in directions:
            for _, fragment in self._sampled([part.tensor]):
                if part.fragment is None:
                    self._take(fragment, "direction", fragment.view(part.values.reshape(-1)) * part.scale)
                elif part.fragment.name == fragment.name:
                    self._take(fragment, "direction", part.values.to(torch.float32) * part.scale)
        for name in (n for n in group["names"] if n in self.samples):
            self._judge_if_here(name, group)
        if not self._open:
            self.optimizer.observer = None
            self.done = True

    def _judge_if_here(self, name: str, group: Group) -> None:
        """Gathers one sample; under stage 3 it may belong to another call of the same group."""
        mine = {kind: piece for (n, kind), piece in self._pieces.items() if n == name}
        gathered: list[Any] = [None] * self.sharding.layout.world_size
        dist.all_gather_object(gathered, (mine, self._scalars.get(name)), group=self.sharding.group)
        scalars = next((s for _, s in gathered if s is not None), None)
        if scalars is None:
            return
        shape = self.samples[name]
        whole = _assemble([pieces for pieces, _ in gathered], shape)
        self._seen[name] += 1
        expected = self._correction_expected(name, group)
        self.lines.append(judge(self.optimizer, name, shape, group, whole, scalars, expected))
        if self._seen[name] >= MAX_STEPS or (self._seen[name] >= STEPS and (expected or not group["gamma"])):
            self._open.discard(name)
        self._moved[name] = bool(group["lr"] * group["lr_factor"])

    def _correction_expected(self, name: str, group: Group) -> bool:
        """Whether last_grad must differ from the gradient: another batch, or the same one at moved weights."""
        return self._seen[name] >= STEPS and (not group["exact"] or self._moved[name])

    def _sampled(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Fragment]]:
        return [(t, f) for t in tensors for f in self.sharding.fragments(t) if f.name in self.samples]

    def _take(self, fragment: Fragment, kind: str, values: Tensor) -> None:
        self._pieces[fragment.name, kind] = (fragment.start, values.detach().to("cpu", torch.float32, copy=True))


def check_structure(optimizer: Mars) -> None:
    """Compares every group with what the config's kind says of each of its parameters.

    Raises:
        ProofError: Naming the first parameter, the setting, and both values.
    """
    for group in optimizer.param_groups:
        for name, shape in zip(group["names"], group["shapes"], strict=True):
            wanted = optimizer.config.group_settings(role_of(name, shape, optimizer.config.routes))
            for key in STRUCTURE:
                if wanted.get(key) != group.get(key):
                    raise ProofError(
                        f"start-up proof: {name} of shape {tuple(shape)} runs with {key} {group.get(key)!r}, but "
                        f"{optimizer.config.kind} gives it {wanted.get(key)!r}: the routing is wrong"
                    )


def choose_samples(optimizer: Mars, sharding: EngineSharding) -> dict[str, tuple[int, ...]]:
    """One or two parameters per group: the smallest that is cut between ranks and the smallest that is not.

    One-row and one-column matrices are passed over where there is another: their spectrum says nothing. A group
    whose tensors are all above `MAX_SAMPLE_ELEMENTS` has no sample.
    """
    pieces: dict[str, int] = defaultdict(int)
    for call in sharding.layout.calls():
        for name, held in sharding.layout.holders(call).items():
            pieces[name] = 1 if sharding.layout.replicated else len(held)
    samples = {}
    for group in optimizer.param_groups:
        candidates = [
            (len(shape) > 1 and min(matrix_shape(shape)) == 1, prod(shape), name, tuple(shape))
            for name, shape in zip(group["names"], group["shapes"], strict=True)
            if 0 < prod(shape) <= MAX_SAMPLE_ELEMENTS
        ]
        for cut in (True, False):
            members = sorted(c for c in candidates if (pieces[c[2]] > 1) == cut)
            if members:
                samples[members[0][2]] = members[0][3]
    return samples


def judge(
    optimizer: Mars,
    name: str,
    shape: tuple[int, ...],
    group: Group,
    whole: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    correction_expected: bool,
) -> str:
    """Compares one sampled parameter with the reference.

    Args:
        optimizer: For its config.
        name: Parameter.
        shape: True shape.
        group: Its param group.
        whole: `gradient`, `direction`, `corrected` and the state before the step, put together, fp32.
        scalars: `step` before.
        correction_expected: A zero correction is an error in this step.

    Returns:
        The line of the card.

    Raises:
        ProofError: With what differs and by how much.
    """
    step = scalars["step"] + 1
    settings = optimizer.config.group_settings(role_of(name, shape, optimizer.config.routes))
    settings |= {key: value for key, value in group.items() if key in settings and key not in STRUCTURE}
    settings["transposed"] = name in group["transposed"]
    state: dict[str, Any] = {b: whole[b].clone() for b in BUFFERS if b in whole}
    state["step"] = scalars["step"]
    if (scalars["step"] == 0 and settings["first_step"] == "paper") or scalars["restart"]:
        state["last_grad"] = whole["gradient"].clone()
    want = reference.direction(whole["gradient"], state, settings)
    rule = settings["rule"]
    limit = LIMITS["orthogonal in 16 bits" if rule == "orthogonal" and "16" in settings["ns_dtype"] else rule]
    difference = float((whole["direction"] - want).norm() / want.norm().clamp_min(1e-30))
    what = f"{name} ({group['role']}, {rule})"
    if not difference <= limit:
        raise ProofError(
            f"start-up proof: step {step}: the direction of {what} differs from the reference by {difference:.2g} "
            f"(limit {limit:g}): what runs is not {optimizer.config.kind}"
        )
    line = f"step {step}: {what} equals the reference within {difference:.1g}"
    if rule == "orthogonal" and float(whole["gradient"].abs().max()) > 0:
        line += _spectrum(whole["direction"], shape, settings, what, step)
    if settings["gamma"] and "corrected" in whole:
        line += _correction(whole, what, step, correction_expected)
    return line


def _spectrum(direction: Tensor, shape: tuple[int, ...], settings: Mapping[str, Any], what: str, step: int) -> str:
    from mars_ds.optim.config import update_scale

    rows, columns = matrix_shape(shape)
    outputs, inputs = (columns, rows) if settings["transposed"] else (rows, columns)
    unscaled = direction.reshape(rows, columns) / update_scale(settings["scale"], outputs, inputs)
    largest = float(torch.linalg.matrix_norm(unscaled, 2))
    if not SPECTRUM[0] <= largest <= SPECTRUM[1]:
        raise ProofError(
            f"start-up proof: step {step}: the direction of {what} has a largest singular value of {largest:.3g}, "
            f"outside {SPECTRUM[0]} to {SPECTRUM[1]}: it was not orthogonalized"
        )
    return f", largest singular value {largest:.3f}"


def _correction(whole: Mapping[str, Tensor], what: str, step: int, expected: bool) -> str:
    gradient = whole["gradient"]
    norm = float(gradient.norm())
    ratio = float((whole["corrected"] - gradient).norm()) / norm if norm else 0.0
    if expected and norm and ratio == 0.0:
        raise ProofError(
            f"start-up proof: step {step}: the variance correction of {what} is zero: last_grad is the gradient itself"
        )
    return f", correction |c - g| / |g| {ratio:.3f}"


def _assemble(gathered: Sequence[Mapping[str, tuple[int, Tensor]]], shape: tuple[int, ...]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for pieces in gathered:
        for kind, (start, values) in pieces.items():
            flat = whole.setdefault(kind, torch.zeros(prod(shape)))
            flat[start : start + values.numel()] = values
    return {kind: flat.view(shape) for kind, flat in whole.items()}
