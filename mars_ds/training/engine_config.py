"""The DeepSpeed config of a run, every choice written out."""

from typing import Any

import torch

from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan


def deepspeed_config(config: RunConfig, batch: BatchPlan) -> dict[str, Any]:
    """DeepSpeed's JSON from our sections, with `deepspeed:` laid over it.

    Accumulation and communication dtypes, clipping and reduce-scatter have defaults that changed between
    DeepSpeed releases, so none is left to them. `overlap_comm` is off: races were reported with it.
    """
    precision, zero = config.precision, config.zero
    names = {"float32": "fp32", "bfloat16": "bf16"}
    generated: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": config.batch.gradient_clipping,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": zero.stage,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": zero.reduce_bucket_elements,
            "allgather_bucket_size": zero.reduce_bucket_elements,
            "contiguous_gradients": True,
            "round_robin_gradients": False,
        },
    }
    if zero.stage == 3:
        generated["zero_optimization"]["sub_group_size"] = zero.sub_group_elements
    if zero.offload != "none":
        pinned = torch.cuda.is_available()
        generated["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
        if zero.offload == "optimizer_and_parameters":
            generated["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    if precision.dtype == "bfloat16":
        generated["bf16"] = {"enabled": True}
    generated["data_types"] = {"grad_accum_dtype": names[precision.accumulation_dtype]}
    generated["communication_data_type"] = names[precision.accumulation_dtype]
    _refuse_contradictions(generated, config.deepspeed)
    return _laid_over(generated, config.deepspeed)


# Raw keys that a section of ours decides: the plan, the data order or the log would no longer be true.
OURS = {
    "train_batch_size": "batch.global_batch_sequences",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.global_batch_sequences",
    "gradient_clipping": "batch.gradient_clipping",
    "bf16": "precision.dtype",
    "fp16": "precision.dtype",
    "data_types": "precision.accumulation_dtype",
    "communication_data_type": "precision.accumulation_dtype",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer": "zero.offload",
    "zero_optimization.offload_param": "zero.offload",
    "zero_optimization.sub_group_size": "zero.sub_group_elements",
    "zero_optimization.reduce_bucket_size": "zero.reduce_bucket_elements",
}


def _refuse_contradictions(generated: dict[str, Any], raw: dict[str, Any], prefix: str = "") -> None:
    """Refuses raw DeepSpeed keys that contradict a section of ours.

    Raises:
        ConfigError: Naming the raw key and the key to set instead.
    """
    for key, value in raw.items():
        dotted = prefix + key
        inner = generated.get(key)
        if dotted in OURS and not _is_within(value, inner):
            raise ConfigError(f"deepspeed.{dotted}: set {OURS[dotted]} instead, which decides it (now {inner!r})")
        if isinstance(inner, dict) and not isinstance(value, dict):
            raise ConfigError(f"deepspeed.{dotted}: expected a mapping, got {value!r}")
        if isinstance(inner, dict) and dotted not in OURS:
            _refuse_contradictions(inner, value, f"{dotted}.")


def _is_within(value: Any, generated: Any) -> bool:
    """True when a raw value adds to what is generated without changing any of it."""
    if isinstance(value, dict) and isinstance(generated, dict):
        return all(_is_within(value[key], generated[key]) for key in value.keys() & generated.keys())
    return bool(value == generated)


def _laid_over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _laid_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
