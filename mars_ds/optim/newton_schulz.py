"""Newton-Schulz iteration: the orthogonal factor of a matrix without a singular value decomposition.

One step is X <- a X + b (X X^T) X + c (X X^T)^2 X on the short side. Five steps with the published
coefficients send every singular value between about 1e-2 and 1 (of the normalised matrix) into
0.68 ... 1.13, which is what MARS-M, MARS-Shampoo, Muon and Moonlight mean by "orthogonalized".

In bf16 the order of the products decides the third digit of the result, so the published orders are kept
apart: `standard` (MARS-M, Muon, Moonlight) squares the Gram matrix, `nested` (MARS-Shampoo) multiplies
the matrix by it twice. `gram` is the same polynomial with fewer and smaller products: it iterates on the
Gram matrix alone and touches the matrix only at the restart and at the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Triple = tuple[float, float, float]
FORMS = ("standard", "nested", "gram")

# Steps of the gram form between two computations of X X^T. The iterated Gram matrix carries an absolute
# error, which the small singular values turn into a relative one; from the fourth step on that is what
# limits the result (docs/newton_schulz.md), and five steps then need one restart.
GRAM_RESTART = 3
# Long side over short side up to which the gram form costs as much as the standard one or more:
# 8 n^2 m + 28 n^3 against 20 n^2 m + 10 n^3 at five steps, and equal at 1.5 for ten steps too.
GRAM_BREAK_EVEN = 1.5


@dataclass(frozen=True)
class CoefficientSet:
    """A named polynomial.

    Attributes:
        triples: (a, b, c) of each step.
        repeats: One triple for any number of steps; otherwise the steps are exactly `triples`.
        norm_factor: The Frobenius norm is multiplied by it, for a set that diverges just above 1.
        source: Where the numbers come from, and what using them means.
    """

    triples: tuple[Triple, ...]
    repeats: bool = False
    norm_factor: float = 1.0
    source: str = ""

    @property
    def num_steps(self) -> int | None:
        """The only number of steps that the set has, or None for any."""
        return None if self.repeats else len(self.triples)


_ORIGINAL: Triple = (3.4445, -4.7750, 2.0315)

# Every set but `original` changes the size of an update (its singular values come closer to 1, or cover
# smaller ones), so the learning rate of a run with `original` must be tuned again.
COEFFICIENTS: dict[str, CoefficientSet] = {
    "original": CoefficientSet(
        (_ORIGINAL,),
        repeats=True,
        source="K. Jordan, Muon (2024): the polynomial of every published MARS, Muon and Moonlight result",
    ),
    "you": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="J. You (2025), in modded-nanogpt: within 0.03 of 1 above 1e-2; retune lr",
    ),
    "polar_express": CoefficientSet(
        (
            (8.1566, -22.4833, 15.8788),
            (4.0429, -2.8089, 0.5000),
            (3.8917, -2.7725, 0.5061),
            (3.2858, -2.3681, 0.4645),
            (2.3465, -1.7098, 0.4232),
        ),
        norm_factor=1.02,
        source="Polar Express (arXiv 2505.16932) with a 2% cushion: within 0.16 of 1 above 1e-3; retune lr",
    ),
    "cans": CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        source="CANS (arXiv 2506.10935): within 0.12 of 1 above 1e-3, diverges 2% above 1; retune lr",
    ),
    "deepseek_v4": CoefficientSet(
        (_ORIGINAL,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4: eight original steps, two that converge to 1; twice the work; retune lr",
    ),
}


def coefficients_of(name: str, steps: int) -> tuple[Triple, ...]:
    """(a, b, c) of each of `steps` iterations.

    Raises:
        ValueError: The set has another number of steps.
    """
    chosen = COEFFICIENTS[name]
    if chosen.num_steps not in (None, steps):
        raise ValueError(f"the coefficients {name!r} are {chosen.num_steps} fixed steps, not {steps}")
    return chosen.triples * steps if chosen.repeats else chosen.triples


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
        dtype: Precision of the whole iteration; bf16 is the published form. In fp16 only the gram form is
            safe, because it divides before the cast; CPU products in fp16 are right but several times
            slower than in fp32.
        norm: (...,) Frobenius norms taken before the cast (MARS-Shampoo). None: the norm is taken
            after the cast, in `dtype` (MARS-M, Muon); the gram form takes it before, in fp32 or wider.
        form: `standard`, `nested` or `gram`.

    Returns:
        (..., rows, columns) in `dtype`; zero for a zero matrix.

    Raises:
        ValueError: `steps` does not fit `coefficients`.
    """
    triples = coefficients_of(coefficients, steps)
    if form == "gram":
        x = _normalised_before_cast(matrix, norm, eps, coefficients, dtype)
    else:
        x = matrix.to(dtype)
        if norm is None:
            norm = torch.linalg.vector_norm(x, dim=(-2, -1))
        # The sum norm + eps stays in the norm's dtype and only the quotient is rounded, as in the reference.
        x = (x / (_enlarged(norm, coefficients) + eps)[..., None, None]).to(dtype)
    transposed = x.size(-2) > x.size(-1)
    if transposed:
        x = x.mT
    if form == "gram" and uses_gram(*x.shape[-2:]):
        x = iterate_gram(x, triples)
    else:
        x = _iterate(x, triples, nested=form == "nested")
    return x.mT if transposed else x


def uses_gram(rows: int, columns: int) -> bool:
    """Whether the gram form iterates on the Gram matrix at this shape, instead of the standard way."""
    return max(rows, columns) > GRAM_BREAK_EVEN * min(rows, columns)


def _enlarged(norm: Tensor, coefficients: str) -> Tensor:
    factor = COEFFICIENTS[coefficients].norm_factor
    return norm if factor == 1.0 else norm * factor


def _normalised_before_cast(
    matrix: Tensor, norm: Tensor | None, eps: float, coefficients: str, dtype: torch.dtype
) -> Tensor:
    """Divides by the norm in fp32 or wider, then casts: a tiny momentum would vanish in fp16."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    if norm is None:
        norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=wide)
    return (matrix.to(wide) / (_enlarged(norm, coefficients) + eps)[..., None, None]).to(dtype)


def _iterate(x: Tensor, triples: tuple[Triple, ...], *, nested: bool) -> Tensor:
    """The published loops on (..., short, long)."""
    for a, b, c in triples:
        gram = x @ x.mT
        # c multiplies a factor, not the product: rounding as published.
        if nested:
            product = gram @ x
            x = a * x + b * product + (c * gram) @ product
        else:
            x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x


def iterate_gram(x: Tensor, triples: tuple[Triple, ...], restart: int = GRAM_RESTART) -> Tensor:
    """The same polynomial on (..., short, long), through R = X X^T.

    With Z = a + b R + c R^2 a step is X <- Z X and therefore R <- Z R Z. The factors Z are collected in Q,
    and X <- Q X is done once per `restart` steps.
    """
    for first in range(0, len(triples), restart):
        segment = triples[first : first + restart]
        gram = x @ x.mT
        collected: Tensor | None = None
        for step, (a, b, c) in enumerate(segment):
            factor = b * gram + (c * gram) @ gram
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            collected = factor if collected is None else factor @ collected
            if step + 1 < len(segment):
                gram = factor @ gram @ factor
        assert collected is not None
        x = collected @ x
    return x


def newton_schulz_flops(rows: int, columns: int, steps: int = 5, form: str = "standard") -> int:
    """Matrix-product FLOPs (2 per multiply-add) of `newton_schulz` on one rows x columns matrix.

    With short side n and long side m, a `standard` step is 4 n^2 m + 2 n^3 and a `nested` one 6 n^2 m. In
    the `gram` form k steps without a restart are 4 n^2 m + (4 k - 3) 2 n^3: five steps with one restart
    are 8 n^2 m + 28 n^3.
    """
    short, long = sorted((rows, columns))
    if form == "nested":
        return steps * 6 * short * short * long
    if form == "gram" and uses_gram(rows, columns):
        lengths = [min(GRAM_RESTART, steps - first) for first in range(0, steps, GRAM_RESTART)]
        return sum(short * short * (4 * long + 2 * (4 * length - 3) * short) for length in lengths)
    return steps * short * short * (4 * long + 2 * short)
