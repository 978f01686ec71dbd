"""Newton-Schulz iteration: the orthogonal factor of a matrix without a singular value decomposition.

One step is X <- a X + b (X X^T) X + c (X X^T)^2 X on the short side. Five steps with the published
coefficients send every singular value between about 1e-2 and 1 (of the normalised matrix) into
0.68 ... 1.13, which is what MARS-M, MARS-Shampoo, Muon and Moonlight mean by "orthogonalized".

In bf16 the order of the products decides the third digit of the result, so the published orders are kept
apart: `standard` (MARS-M, Muon, Moonlight) squares the Gram matrix, `nested` (MARS-Shampoo) multiplies
the matrix by it twice.
"""

import torch
from torch import Tensor

Triple = tuple[float, float, float]
FORMS = ("standard", "nested")

# K. Jordan's quintic, repeated each step: the polynomial of every published MARS and Muon result.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {"original": ((3.4445, -4.7750, 2.0315),)}


def coefficient(name: str, step: int) -> Triple:
    """Coefficients (a, b, c) of iteration `step` (0-based); the last triple of a set repeats."""
    triples = COEFFICIENTS[name]
    return triples[min(step, len(triples) - 1)]


def newton_schulz(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: str = "original",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    norm: Tensor | None = None,
    form: str = "standard",
) -> Tensor:
    """Orthogonalizes each matrix of a batch.

    Args:
        matrix: (..., rows, columns), any float dtype.
        steps: Iterations.
        coefficients: Key of `COEFFICIENTS`.
        eps: Added to the Frobenius norm before the division.
        dtype: Precision of the whole iteration; bf16 is the published form.
        norm: (...,) Frobenius norms taken before the cast (MARS-Shampoo). None: the norm is taken
            after the cast, in `dtype` (MARS-M, Muon).
        form: Order of the products, `standard` or `nested`.

    Returns:
        (..., rows, columns) in `dtype`; zero for a zero matrix.
    """
    x = matrix.to(dtype)
    if norm is None:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1))
    # The sum norm + eps stays in the norm's dtype and only the quotient is rounded, as in the reference.
    x = (x / (norm + eps)[..., None, None]).to(dtype)
    transposed = x.size(-2) > x.size(-1)
    if transposed:
        x = x.mT
    for step in range(steps):
        a, b, c = coefficient(coefficients, step)
        gram = x @ x.mT
        # c multiplies a factor, not the product: rounding as published.
        if form == "nested":
            product = gram @ x
            x = a * x + b * product + (c * gram) @ product
        else:
            x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if transposed else x


def newton_schulz_flops(rows: int, columns: int, steps: int = 5, form: str = "standard") -> int:
    """Matrix-product FLOPs (2 per multiply-add) of `newton_schulz` on one rows x columns matrix.

    With short side n and long side m, a `standard` step is 4 n^2 m + 2 n^3, a `nested` one 6 n^2 m.
    """
    short, long = sorted((rows, columns))
    return steps * short * short * (6 * long if form == "nested" else 4 * long + 2 * short)
