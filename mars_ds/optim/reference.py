"""Every rule on one whole tensor, written to be read beside the paper: the oracle of the tests and proofs.

Nothing is shared with the fast path except the tables of kinds and coefficients: no fragments, no flat
views, no batching.
The caller keeps a plain dict of whole-tensor state per parameter.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mars_ds.optim.newton_schulz import COEFFICIENTS, coefficients_of

Settings = dict[str, Any]
State = dict[str, Any]  # whole-tensor buffers by name, and the integer "step"


def orthogonal_factor(matrix: Tensor, settings: Settings) -> Tensor:
    """Newton-Schulz of one matrix as published (MARS-M, Shampoo), line by line, in `ns_dtype`.

    The gram form is written as the standard loop after a division in fp32: the two are equal in exact
    arithmetic, and the distance between them is the rounding that the form saves.
    """
    dtype: torch.dtype = getattr(torch, settings["ns_dtype"])
    factor, eps = COEFFICIENTS[settings["ns_coefficients"]].norm_factor, settings["ns_eps"]
    if settings["ns_form"] == "gram":
        x = (matrix / (matrix.norm() * factor + eps)).to(dtype)
    elif settings["norm_before_cast"]:
        x = (matrix.to(dtype) / (matrix.norm() * factor + eps)).to(dtype)
    else:
        x = matrix.to(dtype)
        x = x / (x.norm() * factor + eps)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for a, b, c in coefficients_of(settings["ns_coefficients"], settings["ns_steps"]):
        gram = x @ x.T
        if settings["ns_form"] == "nested":
            x = a * x + b * (gram @ x) + (c * gram) @ (gram @ x)
        else:
            x = a * x + (b * gram + (c * gram) @ gram) @ x
    result: Tensor = x.T if transposed else x
    return result


def corrected(gradient: Tensor, state: State, settings: Settings) -> Tensor:
    """c_t: correction, then the clip to `clip_threshold` per tensor (strictly above, no epsilon)."""
    if settings["gamma"] is None:
        return gradient
    beta = _beta1(settings)
    if "last_grad" not in state:
        state["last_grad"] = gradient.clone() if settings["first_step"] == "paper" else torch.zeros_like(gradient)
    k = settings["gamma"] * beta / (1 - beta)
    c: Tensor = gradient + k * (gradient - state["last_grad"])
    state["last_grad"] = state.pop("next_grad") if settings["exact"] else gradient.clone()
    if settings["clip_threshold"] is not None:
        norm = c.double().norm()
        if norm > settings["clip_threshold"]:
            c = c * (settings["clip_threshold"] / norm)
    return c


def direction(gradient: Tensor, state: State, settings: Settings) -> Tensor:
    """The step before the learning rate, for any rule; advances `state` (whole-tensor buffers)."""
    state["step"] = state.get("step", 0) + 1
    c = corrected(gradient, state, settings)
    beta1 = _beta1(settings)
    m = state.get("exp_avg", torch.zeros_like(c))
    if settings["momentum_form"] == "lion":
        beta2 = settings["betas"][1]
        state["exp_avg"] = beta2 * m + (1 - beta2) * c
        return torch.sign(beta1 * m + (1 - beta1) * c)
    if settings["momentum_form"] == "nesterov":
        m = state["exp_avg"] = beta1 * m + c
        m = c + beta1 * m
    else:
        m = state["exp_avg"] = beta1 * m + (1 - beta1) * c
    if settings["rule"] == "sign":
        return torch.sign(m)
    if settings["rule"] == "orthogonal":
        rows, columns = m.shape[0], m[0].numel()
        matrix = m.reshape(rows, columns)
        if settings["debias_momentum"]:
            matrix = matrix / (1 - beta1)
        if settings.get("transposed"):
            rows, columns = columns, rows
        scale: float = {
            "aspect": math.sqrt(max(1.0, rows / columns)),
            "rms": 0.2 * math.sqrt(max(rows, columns)),
            "none": 1.0,
        }[settings["scale"]]
        factor = orthogonal_factor(matrix, settings).to(m.dtype).reshape(m.shape)
        return scale * factor
    return _adamw(m, c, state, settings)


def _adamw(m: Tensor, c: Tensor, state: State, settings: Settings) -> Tensor:
    beta1, beta2 = settings["betas"]
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(c)) + (1 - beta2) * c * c
    if settings["amsgrad"]:
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(v)), v)
    correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
    step: Tensor = m / (v.sqrt() + settings["eps"]) * (math.sqrt(correction2) / correction1)
    if settings["eps_placement"] == "corrected":
        step = m / ((v.sqrt() / math.sqrt(correction2) + settings["eps"]) * correction1)
    return step


def apply(parameter: Tensor, gradient: Tensor, state: State, settings: Settings) -> Tensor:
    """p - lr (weight_decay p + direction), a new tensor of the parameter's shape."""
    lr: float = settings["lr"] * settings["lr_factor"]
    step = direction(gradient * settings["gradient_scale"], state, settings)
    decay: float = settings["weight_decay"]
    return parameter - lr * (decay * parameter + step)


def _beta1(settings: Settings) -> float:
    return float(settings["momentum"] if "momentum" in settings else settings["betas"][0])
