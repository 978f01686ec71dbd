"""Sign preconditioners: MARS-Lion's single momentum and Lion's interpolation of two."""

from torch import Tensor


def sign_direction(exp_avg: Tensor) -> Tensor:
    """sign(m), a new tensor."""
    return exp_avg.sign()


def lion_direction(exp_avg: Tensor, gradient: Tensor, betas: tuple[float, float]) -> Tensor:
    """sign(b1 m + (1 - b1) g) with the momentum of the previous step, which is then updated in place.

    Lion (arXiv 2302.06675) Algorithm 2: the momentum kept for the next step decays with b2.
    """
    direction = exp_avg.mul(betas[0]).add_(gradient, alpha=1.0 - betas[0]).sign_()
    exp_avg.mul_(betas[1]).add_(gradient, alpha=1.0 - betas[1])
    return direction
