"""Which combinations run; the others are refused at start-up with the nearest one that does.

`RULES` is the one source: `check_supported` applies it and `support_table` prints it, so the documentation
cannot promise what the code refuses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from mars_ds.optim import OptimizerConfig
from mars_ds.optim.kinds import KINDS


class UnsupportedError(ValueError):
    """A combination of DeepSpeed settings that this optimizer does not run under."""


@dataclass(frozen=True)
class Combination:
    """What decides whether a run is possible.

    Attributes:
        kind: Optimizer.
        mode: `approx` or `exact`.
        stage: ZeRO stage.
        dtype: `bf16`, `fp32` or `fp16`.
        accumulation: `bf16` or `fp32`; dtype of gradient accumulation.
        offload_optimizer: `none`, `cpu` or `nvme`.
        offload_parameters: `none`, `cpu` or `nvme`.
    """

    kind: str
    mode: str = "approx"
    stage: int = 1
    dtype: str = "bf16"
    accumulation: str = "fp32"
    offload_optimizer: str = "none"
    offload_parameters: str = "none"


@dataclass(frozen=True)
class Refusal:
    """A rule: which combinations it refuses, why, and what comes nearest."""

    applies: Callable[[Combination], bool]
    reason: str
    nearest: str


RULES: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.dtype == "fp16",
        "fp16 weights: this optimizer was never tested with DeepSpeed's loss scaler",
        "precision.dtype: bfloat16",
    ),
    Refusal(
        lambda c: c.stage == 0 and c.dtype == "bf16" and c.accumulation == "fp32",
        "zero.stage 0 with bf16 weights and fp32 accumulation: DeepSpeed has no wrapper for it",
        "zero.stage: 1, or precision.accumulation_dtype: bfloat16",
    ),
    Refusal(
        lambda c: c.dtype == "fp32" and c.accumulation == "bf16",
        "fp32 weights with bf16 accumulation: DeepSpeed has no wrapper for it",
        "precision.accumulation_dtype: float32",
    ),
    Refusal(
        lambda c: "nvme" in (c.offload_optimizer, c.offload_parameters),
        "NVMe offload: other sub-groups may be on disk while one steps, so matrices cannot be exchanged",
        "zero.offload: optimizer (to the CPU)",
    ),
    Refusal(
        lambda c: c.stage == 0 and (c.offload_optimizer != "none" or c.offload_parameters != "none"),
        "offload at zero.stage 0: nothing is partitioned, so DeepSpeed ignores it",
        "zero.stage: 1",
    ),
    Refusal(
        lambda c: c.stage in (1, 2) and c.offload_parameters != "none",
        "parameter offload below zero.stage 3: DeepSpeed keeps whole parameters there",
        "zero.stage: 3, or zero.offload: optimizer",
    ),
)


def refusal(combination: Combination) -> Refusal | None:
    """The first rule that refuses a combination, or None when it runs."""
    return next((rule for rule in RULES if rule.applies(combination)), None)


def combination_of(config: OptimizerConfig, deepspeed_config: Mapping[str, Any]) -> Combination:
    """Reads the combination out of an optimizer and a DeepSpeed config."""
    zero = deepspeed_config.get("zero_optimization", {})
    halves = [name for name in ("bf16", "fp16") if deepspeed_config.get(name, {}).get("enabled", False)]
    dtype = halves[0] if halves else "fp32"
    names = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    accumulation = deepspeed_config.get("data_types", {}).get("grad_accum_dtype") or dtype
    return Combination(
        kind=config.kind,
        mode=config.mode or "approx",
        stage=zero.get("stage", 0),
        dtype=dtype,
        accumulation=names.get(accumulation, accumulation),
        offload_optimizer=(zero.get("offload_optimizer") or {}).get("device", "none") or "none",
        offload_parameters=(zero.get("offload_param") or {}).get("device", "none") or "none",
    )


def check_supported(config: OptimizerConfig, deepspeed_config: Mapping[str, Any]) -> None:
    """Refuses DeepSpeed settings under which the optimizer would not be what the config says.

    Raises:
        UnsupportedError: Naming the key, the reason and the nearest setting that works.
    """
    found = refusal(combination_of(config, deepspeed_config))
    if found is not None:
        raise UnsupportedError(f"{found.reason}; nearest: {found.nearest}")
    zero = deepspeed_config.get("zero_optimization", {})
    offload = zero.get("offload_optimizer") or {}
    sizes = (deepspeed_config.get("tensor_parallel") or {}).get("autotp_size", 1)
    refused = (
        ("optimizer" in deepspeed_config, "optimizer", "the optimizer is given by its own section"),
        ("scheduler" in deepspeed_config, "scheduler", "DeepSpeed's schedulers overwrite every group's lr"),
        (bool(zero.get("zenflow")), "zero_optimization.zenflow", "it steps with an optimizer of its own"),
        (bool(offload.get("super_offload")), "zero_optimization.offload_optimizer.super_offload", "it steps CPUAdam"),
        (offload.get("ratio", 1.0) < 1.0, "zero_optimization.offload_optimizer.ratio", "below 1 it steps an Adam"),
        (bool(zero.get("round_robin_gradients")), "zero_optimization.round_robin_gradients", "its maps are wrong"),
        ((sizes or 1) > 1, "tensor_parallel", "a shard of a matrix is not the matrix"),
    )
    for applies, key, reason in refused:
        if applies:
            raise UnsupportedError(f"deepspeed.{key}: not supported ({reason}); nearest: remove it")


def combinations() -> list[Combination]:
    """Every cell of the table."""
    cells = product(
        KINDS,
        ("approx", "exact"),
        (0, 1, 2, 3),
        (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")),
        (("none", "none"), ("cpu", "none"), ("cpu", "cpu")),
    )
    return [
        Combination(kind, mode, stage, dtype, accumulation, *offload)
        for kind, mode, stage, (dtype, accumulation), offload in cells
        if mode == "approx" or "mode" in KINDS[kind].defaults
    ]


def support_table() -> str:
    """The table of the documentation, in Markdown."""
    lines = ["| stage | weights | accumulation | offload | runs |", "|---|---|---|---|---|"]
    seen = set()
    for c in combinations():
        key = (c.stage, c.dtype, c.accumulation, c.offload_optimizer, c.offload_parameters)
        if key in seen:
            continue
        seen.add(key)
        offload = {
            ("none", "none"): "none",
            ("cpu", "none"): "optimizer to CPU",
            ("cpu", "cpu"): "optimizer and parameters to CPU",
        }[c.offload_optimizer, c.offload_parameters]
        rule = refusal(c)
        answer = "yes" if rule is None else f"no: {rule.reason}; nearest: {rule.nearest}"
        lines.append(f"| {c.stage} | {c.dtype} | {c.accumulation} | {offload} | {answer} |")
    return "\n".join(lines)
