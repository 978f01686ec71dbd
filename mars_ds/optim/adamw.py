"""AdamW preconditioner on flat tensors: second moment, bias corrections, the two places of epsilon."""

import math

import torch
from torch import Tensor


def adamw_direction(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    *,
    step: int,
    betas: tuple[float, float],
    eps: float,
    eps_placement: str,
) -> Tensor:
    """The step before the learning rate.

    Args:
        exp_avg: First moment, already updated, any shape.
        exp_avg_sq: Second moment, already updated, same shape.
        max_exp_avg_sq: AMSGrad's running maximum, updated here, or None.
        step: Applied steps including this one, from 1.
        betas: (beta1, beta2).
        eps: Epsilon.
        eps_placement: `corrected`: m / ((sqrt(v)/sqrt(1-b2^t) + eps) (1-b1^t));
            `uncorrected`: m / (sqrt(v) + eps) * sqrt(1-b2^t) / (1-b1^t).

    Returns:
        A new tensor of the same shape.
    """
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        second = max_exp_avg_sq
    correction1 = 1.0 - betas[0] ** step
    root_correction2 = math.sqrt(1.0 - betas[1] ** step)
    if eps_placement == "corrected":
        denominator = second.sqrt().div_(root_correction2).add_(eps).mul_(correction1)
    else:
        denominator = second.sqrt().add_(eps).mul_(correction1 / root_correction2)
    return torch.div(exp_avg, denominator, out=denominator)
