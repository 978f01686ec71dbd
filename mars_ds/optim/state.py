"""Registry of optimizer buffers: which exist for a group, in which dtype. All are flat, like the shard."""

from collections.abc import Mapping
from typing import Any

import torch

# Order in which buffers are made, saved and listed.
BUFFERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "last_grad", "next_grad")


def compute_dtype(parameter_dtype: torch.dtype) -> torch.dtype:
    """Dtype of moments and arithmetic: fp32, or fp64 for fp64 parameters."""
    return torch.float64 if parameter_dtype == torch.float64 else torch.float32


def is_folded(group: Mapping[str, Any]) -> bool:
    """True where the correction is folded into the momentum, so that no `last_grad` is kept.

    Without the clip, and when the update reads c only through the momentum, variance-reduced momentum is
    M = gamma g + b with b <- beta b + (1 - beta)(1 - gamma) g: the memory-efficient form of MARS-M.
    """
    return (
        group["gamma"] is not None
        and group["clip_threshold"] is None
        and not group["exact"]
        and group["rule"] != "adamw"
    )


def required_buffers(group: Mapping[str, Any], parameter_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Buffers that one param group's rule reads, with their dtypes, in the order of `BUFFERS`."""
    dtype = compute_dtype(parameter_dtype)
    needed = {"exp_avg": dtype}
    if group["rule"] == "adamw":
        needed["exp_avg_sq"] = dtype
        if group["amsgrad"]:
            needed["max_exp_avg_sq"] = dtype
    if group["gamma"] and not is_folded(group):
        stored = torch.bfloat16 if group["last_grad_dtype"] == "bfloat16" else dtype
        needed["last_grad"] = stored
        if group["exact"]:
            needed["next_grad"] = stored
    return needed
