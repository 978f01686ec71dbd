"""Accuracy of the Newton-Schulz forms: relative distance to the same polynomial in fp64.

    python benchmarks/newton_schulz_accuracy.py             accuracy of the forms
    python benchmarks/newton_schulz_accuracy.py --ranges    what each coefficient set does to a singular value

Prints the tables of docs/newton_schulz.md. CPU only, about half a minute on one core: products in fp16 are
rounded as on a GPU (fp32 accumulation, one rounding), only slower.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from mars_ds.optim.newton_schulz import COEFFICIENTS, coefficients_of, iterate_gram, newton_schulz, uses_gram

SPECTRA = ("gaussian", "power law", "log-uniform")


def matrix_with(spectrum: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random (rows, columns) matrix in fp32.

    Args:
        spectrum: `gaussian` independent entries; `power law` singular values 1/i; `log-uniform` singular
            values from 1 down to 1e-4, equally spaced in the logarithm.
        rows: Rows.
        columns: Columns.
        generator: Source of randomness.
    """
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if spectrum == "gaussian":
        return matrix.float()
    rank = min(rows, columns)
    values = {
        "power law": 1.0 / torch.arange(1, rank + 1, dtype=torch.float64),
        "log-uniform": torch.logspace(0, -4, rank, dtype=torch.float64),
    }[spectrum]
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return ((left * values) @ right).float()


def gram_restarted_every(restart: int, dtype: torch.dtype, coefficients: str, steps: int) -> Callable[[Tensor], Tensor]:
    """The gram form with another distance between restarts (at least `steps`: none)."""

    def orthogonalize(matrix: Tensor) -> Tensor:
        norm = matrix.norm() * COEFFICIENTS[coefficients].norm_factor
        x = (matrix / (norm + 1e-7)).to(dtype)
        x = x.mT if x.shape[0] > x.shape[1] else x
        x = iterate_gram(x, coefficients_of(coefficients, steps), restart)
        return x if x.shape == matrix.shape else x.mT

    return orthogonalize


def methods(coefficients: str, steps: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Row label -> the method, in the order of the table."""

    def form(name: str, dtype: torch.dtype, norm_first: bool = False) -> Callable[[Tensor], Tensor]:
        def orthogonalize(matrix: Tensor) -> Tensor:
            # fp16 has no published form; dividing first is the only way that works for a small momentum.
            source = matrix / matrix.norm() if norm_first else matrix
            return newton_schulz(source, steps=steps, coefficients=coefficients, dtype=dtype, form=name)

        return orthogonalize

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    rows = {
        "standard bf16 (published)": form("standard", bf16),
        "nested bf16 (published, MARS-Shampoo)": form("nested", bf16),
        "standard fp16, divided before the cast": form("standard", fp16, norm_first=True),
        "standard fp32": form("standard", fp32),
    }
    for label, dtype in (("bf16", bf16), ("fp16", fp16), ("fp32", fp32)):
        rows[f"gram {label}, restart every 3 steps (ours)"] = form("gram", dtype)
        rows[f"gram {label}, restart every 2 steps"] = gram_restarted_every(2, dtype, coefficients, steps)
        rows[f"gram {label}, no restart"] = gram_restarted_every(steps, dtype, coefficients, steps)
    return rows


def distances(
    rows: int, columns: int, coefficients: str, seeds: int, spectra: tuple[str, ...] = SPECTRA
) -> dict[str, list[float]]:
    """Row label -> relative Frobenius distance to fp64, one number per spectrum, the mean over seeds."""
    steps = COEFFICIENTS[coefficients].num_steps or 5
    table: dict[str, list[float]] = {label: [] for label in methods(coefficients, steps)}
    for spectrum in spectra:
        generator = torch.Generator().manual_seed(0)
        matrices = [matrix_with(spectrum, rows, columns, generator) for _ in range(seeds)]
        exact = [
            newton_schulz(m.double(), steps=steps, coefficients=coefficients, dtype=torch.float64) for m in matrices
        ]
        for label, method in methods(coefficients, steps).items():
            errors = [
                ((method(m).double() - want).norm() / want.norm()).item()
                for m, want in zip(matrices, exact, strict=True)
            ]
            table[label].append(sum(errors) / len(errors))
    return table


def ranges(coefficients: str) -> tuple[float, float, float, float, float]:
    """What a set does to a singular value (relative to the Frobenius norm), in fp64.

    Returns:
        (slope at 0, lowest and highest image on [1e-2, 1], farthest from 1 on [1e-2, 1], on [1e-3, 1]).
    """
    chosen = COEFFICIENTS[coefficients]
    sigma = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    image, slope = sigma / chosen.norm_factor, 1.0 / chosen.norm_factor
    for a, b, c in coefficients_of(coefficients, chosen.num_steps or 5):
        image, slope = a * image + b * image**3 + c * image**5, a * slope
    upper = image[sigma >= 1e-2]
    return (
        slope,
        upper.min().item(),
        upper.max().item(),
        (upper - 1).abs().max().item(),
        (image - 1).abs().max().item(),
    )


def print_ranges() -> None:
    """Prints one row per coefficient set."""
    print("| set | steps | slope at 0 | range on [1e-2, 1] | max abs(p - 1) on [1e-2, 1] | on [1e-3, 1] |")
    print("|---" * 6 + "|")
    for name, chosen in COEFFICIENTS.items():
        slope, low, high, near, far = ranges(name)
        steps = chosen.num_steps or "5 (any)"
        print(f"| `{name}` | {steps} | {slope:.0f} | {low:.3f} ... {high:.3f} | {near:.3f} | {far:.3f} |")


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=384, help="rows of the matrices (default 384)")
    parser.add_argument("--columns", type=int, default=1536, help="columns of the matrices (default 1536)")
    parser.add_argument("--coefficients", default="original", choices=list(COEFFICIENTS), help="coefficient set")
    parser.add_argument("--seeds", type=int, default=3, help="matrices per spectrum (default 3)")
    parser.add_argument("--ranges", action="store_true", help="print the table of the coefficient sets instead")
    arguments = parser.parse_args()
    if arguments.ranges:
        print_ranges()
        return
    if not uses_gram(arguments.rows, arguments.columns):
        print("near-square: the gram form falls back to the standard one, except in the rows with another restart")
    table = distances(arguments.rows, arguments.columns, arguments.coefficients, arguments.seeds)
    print(f"| {arguments.coefficients}, {arguments.rows} x {arguments.columns} | " + " | ".join(SPECTRA) + " |")
    print("|---" * (1 + len(SPECTRA)) + "|")
    for label, errors in table.items():
        print(f"| {label} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")


if __name__ == "__main__":
    main()
