"""`OptimizerConfig`: everything that decides an update, checked against the table of kinds."""

import difflib
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mars_ds.optim.kinds import KINDS, OPTIMIZE_1D_RULE, Role, Rule
from mars_ds.optim.newton_schulz import COEFFICIENTS

KindName = Literal["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight", "muon", "adamw", "lion"]
FloatName = Literal["bfloat16", "float16", "float32", "float64"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


class GroupOverride(BaseModel):
    """Settings of the parameters that one pattern names, in place of those of their role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: NonNegative | None = None
    """Peak learning rate; keeps its ratio to `optimizer.lr` under every schedule."""
    weight_decay: NonNegative | None = None
    gamma: NonNegative | None = None
    momentum: Beta | None = None
    betas: tuple[Beta, Beta] | None = None


class OptimizerConfig(BaseModel):
    """Hyper-parameters of one optimizer of the family.

    A field left at None takes the default of its kind (`mars_ds.optim.kinds.KINDS`); a field that the
    kind does not read is refused unless it is None, so no setting is ever ignored. `resolved()` returns
    the config with every default filled in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: KindName
    """Which optimizer: the rule for matrices, embeddings and vectors (design table)."""
    lr: NonNegative | None = None
    """Peak learning rate of matrices (and of embeddings)."""
    betas: tuple[Beta, Beta] | None = None
    """(beta1, beta2) of the matrix rule of adamw- and lion-type kinds."""
    momentum: Beta | None = None
    """Momentum of Muon-type kinds (mars-m, moonlight, muon)."""
    eps: Positive | None = None
    """Epsilon of the AdamW denominator."""
    weight_decay: NonNegative | None = None
    """Decoupled weight decay of matrices."""
    weight_decay_embedding: NonNegative | None = None
    """Decoupled weight decay of embeddings; default: as the matrix."""
    lr_1d: NonNegative | None = None
    """Peak learning rate of vectors, and of embeddings where a Muon-type kind gives them to AdamW; keeps its
    ratio to `lr` under every schedule. Default: as `lr` (muon: 3e-3)."""
    betas_1d: tuple[Beta, Beta] | None = None
    """AdamW betas of vectors (and of embeddings where a Muon-type kind gives them to AdamW)."""
    weight_decay_1d: NonNegative | None = None
    """Decoupled weight decay of vectors. mars-*: 0.1, as the reference does to LayerNorm gains."""
    gamma: NonNegative | None = None
    """Strength of the variance reduction: c = g + gamma * beta1 / (1 - beta1) * (g - last_grad)."""
    correction_clip: Literal["per_tensor", "none"] | None = None
    """Clip of the corrected gradient to `clip_threshold` per tensor; `none` turns mars-m into the
    memory-efficient form that keeps no `last_grad`."""
    clip_threshold: Positive | None = None
    """Frobenius norm above which the corrected gradient of one tensor is scaled down."""
    mode: Literal["approx", "exact"] | None = None
    """approx: last_grad is last step's gradient. exact: the gradient of this batch at last step's
    weights, at twice the forward/backward cost."""
    first_step: Literal["reference", "paper"] | None = None
    """reference: last_grad starts at zero (c = (1 + k) g). paper: at the first gradient (c = g)."""
    last_grad_dtype: Literal["float32", "bfloat16"] | None = None
    """Storage of `last_grad`."""
    ns_steps: Annotated[int, Field(ge=1)] | None = None
    """Newton-Schulz iterations. Default: 5, or the number of steps of the coefficient set."""
    ns_coefficients: str | None = None
    """Named coefficient set of the Newton-Schulz polynomial: original (as published), you, polar_express,
    cans, deepseek_v4. With any but the first the learning rate must be tuned again."""
    ns_dtype: FloatName | None = None
    """Precision of the Newton-Schulz iteration. float16 is for the gram form on a GPU."""
    ns_eps: NonNegative | None = None
    """Added to the norm before the first iteration."""
    ns_form: Literal["standard", "nested", "gram"] | None = None
    """Order of the products of an iteration: mars-shampoo published `nested`, the others `standard`.
    `gram` is the same polynomial with less work and less rounding, the norm taken in fp32 before the cast."""
    amsgrad: bool | None = None
    """Use the running maximum of the second moment."""
    optimize_1d: bool | None = None
    """mars-*: treat vectors as matrices (correction, clip, betas, lr and decay of the matrix)."""
    gradient_scale: Positive | None = None
    """The averaged gradient is multiplied by this before the global clip (reference runs: 4 or 12)."""
    routes: dict[str, Role] | None = None
    """Glob pattern -> role, overriding the routing by name and shape."""
    overrides: dict[str, GroupOverride] | None = None
    """Glob pattern -> settings of a param group of its own; the first pattern that names a parameter counts."""

    @model_validator(mode="after")
    def _refuse_unused_keys(self) -> Self:
        accepted = KINDS[self.kind].defaults
        for key in type(self).model_fields:
            if key == "kind" or getattr(self, key) is None or key in accepted:
                continue
            users = [name for name, kind in KINDS.items() if key in kind.defaults]
            nearest = difflib.get_close_matches(key, accepted, n=1, cutoff=0.4)
            hint = f"; nearest key it reads: {nearest[0]}" if nearest else ""
            raise ValueError(f"{key} is not used by kind {self.kind} (used by {', '.join(users)}){hint}")
        if self.lr == 0 and self.lr_1d:
            raise ValueError("lr_1d is a fixed ratio of lr, so lr must be above 0 when lr_1d is")
        return self

    @model_validator(mode="after")
    def _check_newton_schulz(self) -> Self:
        if self.ns_coefficients is not None:
            if self.ns_coefficients not in COEFFICIENTS:
                names = ", ".join(COEFFICIENTS)
                raise ValueError(f"ns_coefficients is {self.ns_coefficients!r}, expected one of {names}")
            num_steps = COEFFICIENTS[self.ns_coefficients].num_steps
            if num_steps is not None and self.ns_steps not in (None, num_steps):
                raise ValueError(
                    f"ns_steps is {self.ns_steps}, but ns_coefficients {self.ns_coefficients!r} are {num_steps} fixed "
                    f"steps; leave ns_steps out, or set it to {num_steps}"
                )
        if self.ns_dtype == "float16" and self.ns_form != "gram":
            raise ValueError(
                "ns_dtype float16 needs ns_form: gram, which divides by the norm before the cast; the other forms "
                "cast the raw momentum, and a small one is zero in float16 (nearest that works: bfloat16)"
            )
        # Ten steps amplify the rounding of the iterated Gram matrix until it diverges (docs/newton_schulz.md).
        if self.ns_form == "gram" and self.ns_coefficients == "deepseek_v4" and self.ns_dtype in (None, "bfloat16"):
            raise ValueError(
                "ns_form gram with ns_coefficients deepseek_v4 diverges in bfloat16 on small singular values; "
                "set ns_dtype: float16 or float32, or ns_form: standard"
            )
        return self

    def resolved(self) -> "OptimizerConfig":
        """Returns a copy in which every key that the kind reads has its value."""
        values = {
            key: getattr(self, key) if getattr(self, key) is not None else default
            for key, default in KINDS[self.kind].defaults.items()
        }
        if self.ns_steps is None and values.get("ns_coefficients") in COEFFICIENTS:
            values["ns_steps"] = COEFFICIENTS[values["ns_coefficients"]].num_steps or values["ns_steps"]
        for key, matrix_key in (
            ("lr_1d", "lr"),
            ("weight_decay_1d", "weight_decay"),
            ("weight_decay_embedding", "weight_decay"),
            ("betas_1d", "betas"),
        ):
            if key in values and values[key] is None:
                values[key] = values[matrix_key]
        return OptimizerConfig(kind=self.kind, **values)

    def rule(self, role: Role) -> Rule:
        """The rule of `role`, `optimize_1d` taken into account."""
        if role == "vector" and self.optimize_1d:
            return OPTIMIZE_1D_RULE[self.kind]
        return KINDS[self.kind].rule(role)

    def group_settings(self, role: Role) -> dict[str, Any]:
        """Settings of the param group of `role`: what `Mars` reads at each step.

        They live in the group so that they are saved, restored, scheduled and overridden with it. The
        scheduled `lr` is multiplied by `lr_factor` (1 except where `lr_1d` serves).
        """
        config, rule = self.resolved(), self.rule(role)
        one_d = rule.one_dimensional
        orthogonal = rule.precondition == "orthogonal"
        corrected = rule.corrected and config.gamma is not None
        adamw_part = one_d or (role == "embedding" and KINDS[self.kind].adamw_embeddings)
        decay = {
            "matrix": config.weight_decay,
            "embedding": config.weight_decay_embedding,
            "vector": config.weight_decay_1d if one_d else config.weight_decay,
        }[role]
        settings: dict[str, Any] = {
            "role": role,
            "rule": rule.precondition,
            "momentum_form": rule.momentum_form,
            "lr": config.lr,
            "adamw_part": adamw_part,
            "lr_factor": config.lr_1d / config.lr if adamw_part and config.lr and config.lr_1d is not None else 1.0,
            "weight_decay": decay,
            "gradient_scale": config.gradient_scale,
            "gamma": config.gamma if corrected else None,
            "clip_threshold": config.clip_threshold if corrected and config.correction_clip != "none" else None,
            "exact": corrected and config.mode == "exact",
            "first_step": config.first_step if corrected else None,
            "last_grad_dtype": config.last_grad_dtype if corrected else None,
        }
        if config.momentum is not None and not adamw_part:
            settings["momentum"] = config.momentum
        else:
            settings["betas"] = config.betas_1d if adamw_part else config.betas
        if rule.precondition == "adamw":
            settings |= {
                "eps": config.eps,
                "eps_placement": rule.eps_placement,
                "amsgrad": bool(config.amsgrad),
            }
        if orthogonal:
            settings |= {
                "scale": rule.scale,
                "norm_before_cast": rule.norm_before_cast or config.ns_form == "gram",
                "debias_momentum": rule.debias_momentum,
                "ns_steps": config.ns_steps,
                "ns_coefficients": config.ns_coefficients,
                "ns_dtype": config.ns_dtype,
                "ns_eps": config.ns_eps,
                "ns_form": config.ns_form,
            }
        return settings


def correction_factor(gamma: float, beta1: float) -> float:
    """k = gamma * beta1 / (1 - beta1): the weight of g - last_grad in the corrected gradient."""
    return gamma * beta1 / (1.0 - beta1)


def update_scale(scale: str, rows: int, columns: int) -> float:
    """Factor on the orthogonal update of a rows x columns matrix (Muon's aspect, Moonlight's RMS match)."""
    if scale == "aspect":
        return math.sqrt(max(1.0, rows / columns))
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0
