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
    sums = _Sums(index)
    for flat, fragments in parts:
        for f in fragments:
            sums.add(f.name, torch.linalg.vector_norm(f.view(flat), dtype=torch.float64).square())
        sums.device = flat.device
    return sums.total()


def inner_products(parts: Iterable[tuple[Tensor, Tensor, Sequence[Fragment]]], index: Mapping[str, int]) -> Tensor:
    """Inner products per parameter of two flat tensors over the local fragments; as `squared_norms`."""
    sums = _Sums(index)
    for a, b, fragments in parts:
        for f in fragments:
            sums.add(f.name, _dot_fp64(f.view(a), f.view(b)))
        sums.device = a.device
    return sums.total()


class _Sums:
    """0-dim values by parameter, added up into one vector without a host synchronisation."""

    def __init__(self, index: Mapping[str, int]) -> None:
        self.index = index
        self.device: torch.device | None = None
        self._rows: list[int] = []
        self._values: list[Tensor] = []

    def add(self, name: str, value: Tensor) -> None:
        self._rows.append(self.index[name])
        self._values.append(value)

    def total(self) -> Tensor:
        sums = torch.zeros(len(self.index), dtype=torch.float64, device=self.device)
        if self._values:
            sums.index_add_(0, torch.tensor(self._rows, device=self.device), torch.stack(self._values))
        return sums


# 64 MiB of fp64 scratch: large enough to be bandwidth-bound, small beside any shard.
_DOT_CHUNK = 1 << 22


def _dot_fp64(a: Tensor, b: Tensor) -> Tensor:
    """Inner product accumulated in fp64 without an fp64 copy of either tensor."""
    spans = range(0, a.numel(), _DOT_CHUNK)
    parts = [(a[i : i + _DOT_CHUNK].double(), b[i : i + _DOT_CHUNK].double()) for i in spans]
    return torch.stack([torch.dot(x, y) for x, y in parts]).sum()


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
