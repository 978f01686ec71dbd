"""Orthogonal preconditioner: Newton-Schulz over all matrices of a call, equal shapes in one batch."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mars_ds.optim.newton_schulz import newton_schulz

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}

# Device memory that the iteration of one batch may take beside the matrices themselves: 1 GiB, next to
# 80 GB enough for six 6400 x 1600 matrices in bf16, which already fill a GPU. Raising it saves launches only.
WORKSPACE_BYTES = 1 << 30
# Matrices of workspace per matrix of a batch, at most, as measured: the stacked input, X, and the temporaries
# of one step. Square shapes need all eight, 1 x 4 ones 5 (gram) to 7 (nested).
WORKSPACE_COPIES = 8


def wire_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Dtype in which matrices travel to their owner and updates return: one that loses nothing.

    An iteration that begins with a cast of the raw matrix loses nothing by a cast before the wire. An
    fp16 one divides by the norm before it casts, since a raw momentum can lie below the smallest fp16
    number, so its matrices travel in fp32.
    """
    dtype = DTYPES[group["ns_dtype"]]
    return torch.float32 if dtype == torch.float16 else dtype


def matrices_per_batch(numel: int, dtype: torch.dtype) -> int:
    """Matrices of `numel` elements that are iterated together in `dtype`, by `WORKSPACE_BYTES`; at least 1."""
    return max(1, WORKSPACE_BYTES // (WORKSPACE_COPIES * numel * dtype.itemsize))


def orthogonalize(
    matrices: Mapping[str, Tensor], group: Mapping[str, Any], norms: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Orthogonalizes whole matrices.

    Args:
        matrices: Name -> (rows, columns) in the dtype of `wire_dtype(group)`.
        group: Settings `ns_steps, ns_coefficients, ns_eps, ns_dtype, ns_form`.
        norms: Name -> 0-dim Frobenius norm before the cast, or None for the norm after it.

    Returns:
        Name -> (rows, columns), same dtype.
    """
    dtype = DTYPES[group["ns_dtype"]]
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        by_shape[matrix.shape].append(name)
    updates: dict[str, Tensor] = {}
    for shape, names in by_shape.items():
        per_batch = matrices_per_batch(shape.numel(), dtype)
        for first in range(0, len(names), per_batch):
            batch = names[first : first + per_batch]
            result = newton_schulz(
                torch.stack([matrices[name] for name in batch]),
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                eps=group["ns_eps"],
                dtype=dtype,
                form=group["ns_form"],
                # Under offload the norms were summed on the host, where the state is.
                norm=torch.stack([norms[n] for n in batch]).to(matrices[batch[0]].device) if norms else None,
            )
            updates.update(zip(batch, result.to(wire_dtype(group)).unbind(0), strict=True))
    return updates
