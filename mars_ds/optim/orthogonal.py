"""Orthogonal preconditioner: Newton-Schulz over all matrices of a call, equal shapes in one batch."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mars_ds.optim.newton_schulz import newton_schulz

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

# Elements of one batch; the iteration holds about three copies. 2^26 elements are 384 MiB in bf16.
BATCH_ELEMENTS = 1 << 26


def wire_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Dtype in which matrices travel and are iterated: nothing is lost, the iteration casts first."""
    return DTYPES[group["ns_dtype"]]


def orthogonalize(
    matrices: Mapping[str, Tensor], group: Mapping[str, Any], norms: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Orthogonalizes whole matrices.

    Args:
        matrices: Name -> (rows, columns) in the dtype of `wire_dtype(group)`.
        group: Settings `ns_steps, ns_coefficients, ns_eps, ns_dtype`.
        norms: Name -> 0-dim Frobenius norm before the cast, or None for the norm after it.

    Returns:
        Name -> (rows, columns), same dtype.
    """
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        by_shape[matrix.shape].append(name)
    updates: dict[str, Tensor] = {}
    for shape, names in by_shape.items():
        per_batch = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(names), per_batch):
            batch = names[first : first + per_batch]
            result = newton_schulz(
                torch.stack([matrices[name] for name in batch]),
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                eps=group["ns_eps"],
                dtype=wire_dtype(group),
                form=group["ns_form"],
                norm=torch.stack([norms[name] for name in batch]) if norms is not None else None,
            )
            updates.update(zip(batch, result.unbind(0), strict=True))
    return updates
