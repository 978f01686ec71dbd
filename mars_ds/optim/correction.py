"""Scaled gradient correction and per-tensor clip, on flat tensors cut into fragments.

Paper: MARS (arXiv 2411.10438) Algorithm 1, c_t = g_t + gamma beta1/(1-beta1) (g_t - last_grad), then
c_t is scaled to norm at most 1 per tensor. The norm couples all elements of a parameter, wherever its
fragments lie; it is the one place where an element-wise MARS needs a collective.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mars_ds.optim.sharding import Fragment


def corrected_gradient(gradient: Tensor, last_gradient: Tensor, factor: float) -> Tensor:
    """c = (g - last) * k + g, a new tensor in the dtype of `gradient`."""
    return (gradient - last_gradient).mul_(factor).add_(gradient)


def squared_norms(parts: Iterable[tuple[Tensor, Sequence[Fragment]]], index: Mapping[str, int]) -> Tensor:
    """Sums of squares per parameter over the local fragments, padding excluded.

    Args:
        parts: Flat tensors with their fragments.
        index: Parameter name -> row.

    Returns:
        (len(index),) fp64, zero where this rank holds nothing. Accumulated in fp64 so that where a
        tensor is cut does not decide the last bit of the fp32 scale.
    """
    rows: list[int] = []
    squares: list[Tensor] = []
    device = None
    for flat, fragments in parts:
        device = flat.device
        for fragment in fragments:
            rows.append(index[fragment.name])
            squares.append(torch.linalg.vector_norm(fragment.view(flat), dtype=torch.float64).square())
    sums = torch.zeros(len(index), dtype=torch.float64, device=device)
    if squares:
        sums.index_add_(0, torch.tensor(rows, device=device), torch.stack(squares))
    return sums


def clip_scales(squared: Tensor, threshold: float) -> Tensor:
    """threshold / norm where the norm is strictly above the threshold, else 1 (also for a NaN norm).

    Args:
        squared: (n,) fp64 squared norms of whole parameters.
        threshold: Norm above which a parameter's corrected gradient is scaled.

    Returns:
        (n,) fp64; no host synchronisation.
    """
    norms = squared.sqrt()
    return torch.where(norms > threshold, threshold / norms, torch.ones_like(norms))


def scale_fragments(flat: Tensor, fragments: Sequence[Fragment], scales: Tensor, index: Mapping[str, int]) -> None:
    """Multiplies each fragment of `flat` in place by the scale of its parameter."""
    for fragment in fragments:
        fragment.view(flat).mul_(scales[index[fragment.name]])
