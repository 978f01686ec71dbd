"""The optimizer family as data: which rule each kind applies to a matrix, an embedding and a vector.

Every optimizer here is one pipeline (scale -> correct -> clip -> momentum -> precondition -> decay and
apply). A `Rule` says what the pipeline does to one role of parameter; a `Kind` is three rules and the
defaults of the keys that the kind reads. A key that is missing from `Kind.defaults` is refused by
`OptimizerConfig`, so this table is also the list of what each kind accepts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["matrix", "embedding", "vector"]
Precondition = Literal["adamw", "sign", "orthogonal"]
MomentumForm = Literal["ema", "nesterov", "lion"]

ROLES: tuple[Role, ...] = ("matrix", "embedding", "vector")


@dataclass(frozen=True)
class Rule:
    """What one role of parameter goes through.

    Attributes:
        precondition: `adamw` (second moment), `sign`, or `orthogonal` (Newton-Schulz).
        corrected: The gradient is variance-reduced (gamma) and, unless switched off, clipped per tensor.
        momentum_form: `ema` m = b m + (1-b) c; `nesterov` m = b m + c, used as c + b m; `lion` two betas.
        eps_placement: Where epsilon enters the AdamW denominator: `corrected` adds it to the
            bias-corrected root of v (torch, MARS), `uncorrected` to the raw root (MARS-M, Moonlight).
        scale: Factor on an orthogonal update: `aspect` sqrt(max(1, rows/cols)), `rms`
            0.2 sqrt(max(rows, cols)).
        norm_before_cast: The Newton-Schulz norm is taken in fp32 before the cast (MARS-Shampoo) instead
            of after it (MARS-M). The gram form always takes it before.
        debias_momentum: Divide the momentum by (1 - beta1) before Newton-Schulz (MARS-Shampoo).
        one_dimensional: Reads `lr_1d`, `betas_1d` and `weight_decay_1d` instead of the matrix values.
    """

    precondition: Precondition
    corrected: bool = False
    momentum_form: MomentumForm = "ema"
    eps_placement: Literal["corrected", "uncorrected"] = "corrected"
    scale: Literal["none", "aspect", "rms"] = "none"
    norm_before_cast: bool = False
    debias_momentum: bool = False
    one_dimensional: bool = False


@dataclass(frozen=True)
class Kind:
    """One optimizer: a rule for each role, and the keys it reads with their defaults.

    Attributes:
        matrix: Rule of matrices.
        embedding: Rule of embeddings.
        vector: Rule of vectors.
        defaults: Keys that the kind reads, with their defaults; None means "as the matrix".
        adamw_embeddings: Embeddings belong to the AdamW part, so `lr_1d` and `betas_1d` serve them too.
    """

    matrix: Rule
    embedding: Rule
    vector: Rule
    defaults: Mapping[str, Any] = field(default_factory=dict)
    adamw_embeddings: bool = False

    def rule(self, role: Role) -> Rule:
        """Returns the rule of `role`."""
        return {"matrix": self.matrix, "embedding": self.embedding, "vector": self.vector}[role]


_MARS_ADAMW = Rule("adamw", corrected=True)
_VECTOR_ADAMW = Rule("adamw", one_dimensional=True)
_LATE_EPS_ADAMW = Rule("adamw", eps_placement="uncorrected")
_LATE_EPS_VECTOR = replace(_LATE_EPS_ADAMW, one_dimensional=True)

# "as the matrix" for a 1-D or embedding value is spelled None and resolved by OptimizerConfig.
_SHARED: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "weight_decay_embedding": None,
    "gradient_scale": 1.0,
    "routes": {},
    "overrides": {},
}
_ONE_D = {"lr_1d": None, "betas_1d": (0.9, 0.95), "weight_decay_1d": None}
_VARIANCE_REDUCED = {
    "gamma": 0.025,
    "correction_clip": "per_tensor",
    "clip_threshold": 1.0,
    "mode": "approx",
    "first_step": "reference",
    "last_grad_dtype": "float32",
}
_NEWTON_SCHULZ = {"ns_steps": 5, "ns_coefficients": "original", "ns_dtype": "bfloat16", "ns_form": "standard"}
_MARS = {
    **_SHARED,
    **_ONE_D,
    **_VARIANCE_REDUCED,
    "lr": 3e-3,
    "weight_decay": 0.0,
    "weight_decay_1d": 0.1,
    "betas": (0.95, 0.99),
    "eps": 1e-8,
    "amsgrad": False,
    "optimize_1d": False,
}
_MUON = {**_SHARED, **_ONE_D, **_NEWTON_SCHULZ, "momentum": 0.95, "eps": 1e-8, "ns_eps": 1e-7}

KINDS: dict[str, Kind] = {
    "mars-adamw": Kind(_MARS_ADAMW, _MARS_ADAMW, _VECTOR_ADAMW, _MARS),
    "mars-lion": Kind(Rule("sign", corrected=True), Rule("sign", corrected=True), _VECTOR_ADAMW, _MARS),
    "mars-shampoo": Kind(
        matrix=Rule("orthogonal", corrected=True, scale="aspect", norm_before_cast=True, debias_momentum=True),
        embedding=Rule("orthogonal", corrected=True, scale="aspect", norm_before_cast=True, debias_momentum=True),
        vector=_VECTOR_ADAMW,
        defaults={**_MARS, **_NEWTON_SCHULZ, "ns_eps": 1e-8, "ns_form": "nested"},
    ),
    "mars-m": Kind(
        matrix=Rule("orthogonal", corrected=True, scale="rms"),
        embedding=_LATE_EPS_ADAMW,
        vector=_LATE_EPS_VECTOR,
        defaults={**_MUON, **_VARIANCE_REDUCED},
        adamw_embeddings=True,
    ),
    "moonlight": Kind(
        matrix=Rule("orthogonal", momentum_form="nesterov", scale="rms"),
        embedding=_LATE_EPS_ADAMW,
        vector=_LATE_EPS_VECTOR,
        defaults=_MUON,
        adamw_embeddings=True,
    ),
    "muon": Kind(
        matrix=Rule("orthogonal", momentum_form="nesterov", scale="aspect"),
        embedding=_LATE_EPS_ADAMW,
        vector=_LATE_EPS_VECTOR,
        defaults={
            **_MUON,
            "lr": 2e-2,
            "weight_decay": 0.0,
            "weight_decay_1d": 0.1,
            "weight_decay_embedding": 0.1,
        },
        adamw_embeddings=True,
    ),
    "adamw": Kind(
        matrix=Rule("adamw"),
        embedding=Rule("adamw"),
        vector=Rule("adamw", one_dimensional=True),
        defaults={**_SHARED, **_ONE_D, "betas": (0.9, 0.95), "betas_1d": None, "eps": 1e-8, "amsgrad": False},
    ),
    "lion": Kind(
        matrix=Rule("sign", momentum_form="lion"),
        embedding=Rule("sign", momentum_form="lion"),
        vector=Rule("sign", momentum_form="lion", one_dimensional=True),
        defaults={**_SHARED, **_ONE_D, "lr": 1e-4, "betas": (0.9, 0.99), "betas_1d": None},
    ),
}

# mars-* with `optimize_1d`: a vector takes the matrix rule, except that a vector has no singular
# vectors, so mars-shampoo falls back to mars-adamw (algorithms: branch A, rule A4d).
OPTIMIZE_1D_RULE: dict[str, Rule] = {
    "mars-adamw": _MARS_ADAMW,
    "mars-lion": Rule("sign", corrected=True),
    "mars-shampoo": _MARS_ADAMW,
}
