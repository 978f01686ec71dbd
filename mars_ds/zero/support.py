"""Which combinations run; the others are refused at start-up with the nearest one that does."""

from collections.abc import Mapping
from typing import Any

from mars_ds.optim import OptimizerConfig


class UnsupportedError(ValueError):
    """A combination of DeepSpeed settings that this optimizer does not run under."""


def check_supported(config: OptimizerConfig, deepspeed_config: Mapping[str, Any]) -> None:
    """Refuses DeepSpeed settings under which the optimizer would not be what the config says.

    Raises:
        UnsupportedError: Naming the key, the reason and the nearest setting that works.
    """
    zero = deepspeed_config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    bf16 = deepspeed_config.get("bf16", {}).get("enabled", False)
    accumulation = deepspeed_config.get("data_types", {}).get("grad_accum_dtype")
    if "optimizer" in deepspeed_config:
        raise UnsupportedError(
            "deepspeed.optimizer: the optimizer is given by the `optimizer` section; remove this key"
        )
    if deepspeed_config.get("fp16", {}).get("enabled", False):
        raise UnsupportedError("deepspeed.fp16: not supported yet; nearest: precision.dtype: bfloat16")
    if stage not in (0, 1, 2):
        raise UnsupportedError(f"zero.stage {stage}: not supported yet; nearest: zero.stage: 2")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") not in ("none", None):
            raise UnsupportedError(f"zero_optimization.{key}: not supported yet; nearest: remove it, zero.stage: 2")
    if config.mode == "exact":
        raise UnsupportedError(
            "optimizer.mode exact: not supported under DeepSpeed yet; nearest: optimizer.mode: approx"
        )
    if stage == 0 and bf16 and accumulation in ("fp32", "float32"):
        raise UnsupportedError(
            "zero.stage 0 with bf16 weights and fp32 accumulation: DeepSpeed has no wrapper for it; nearest: "
            "zero.stage: 1, or precision.accumulation_dtype: bfloat16"
        )
    for key in ("zenflow", "round_robin_gradients"):
        if zero.get(key):
            raise UnsupportedError(f"zero_optimization.{key}: not supported; nearest: remove it")
