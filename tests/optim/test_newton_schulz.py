"""The Newton-Schulz family: polynomials, forms, costs, batches and what the config refuses."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mars_ds.optim import OptimizerConfig, orthogonal, reference
from mars_ds.optim.newton_schulz import (
    COEFFICIENTS,
    FORMS,
    coefficients_of,
    iterate_gram,
    newton_schulz,
    newton_schulz_flops,
    uses_gram,
)
from mars_ds.optim.orthogonal import matrices_per_batch, orthogonalize, wire_dtype

SETS = list(COEFFICIENTS)


def steps_of(name: str) -> int:
    return COEFFICIENTS[name].num_steps or 5


def polynomial(name: str, sigma: Tensor) -> Tensor:
    """The scalar map in fp64, written out; `sigma` relative to the Frobenius norm."""
    x = sigma / {"polar_express": 1.02}.get(name, 1.0)
    for a, b, c in coefficients_of(name, steps_of(name)):
        x = a * x + b * x**3 + c * x**5
    return x


def with_spectrum(values: Tensor, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(left, right, matrix) in fp64 with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(len(values), columns, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(random, full_matrices=False)
    return left, right, (left * values) @ right


def power_law(rows: int, columns: int) -> Tensor:
    return with_spectrum(1 / torch.arange(1, rows + 1, dtype=torch.float64), columns)[2]


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def settings(**changes: object) -> dict:
    return OptimizerConfig(kind="mars-m", **changes).group_settings("matrix")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SETS)
def test_singular_values_follow_the_scalar_polynomial(name: str, form: str) -> None:
    values = torch.logspace(0, -4, 24, dtype=torch.float64)
    left, right, matrix = with_spectrum(values, 56)
    got = newton_schulz(matrix, steps=steps_of(name), coefficients=name, eps=0.0, dtype=torch.float64, form=form)
    want = (left * polynomial(name, values / values.norm())) @ right
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "slope", "low", "high", "near", "far"),
    [
        ("original", 485, 0.682, 1.134, 0.318, 0.529),
        ("you", 493, 0.978, 1.032, 0.032, 0.525),
        ("polar_express", 970, 0.859, 1.141, 0.141, 0.153),
        ("cans", 1049, 0.884, 1.120, 0.120, 0.120),
        ("deepseek_v4", 79263, None, None, 0.001, 0.001),
    ],
)
def test_published_ranges_of_the_sets(
    name: str, slope: float, low: float | None, high: float | None, near: float, far: float
) -> None:
    sigma = torch.logspace(-3, 0, 50_001, dtype=torch.float64)
    image, upper = polynomial(name, sigma), polynomial(name, sigma[sigma >= 1e-2])
    tiny = torch.tensor(1e-12, dtype=torch.float64)
    assert (polynomial(name, tiny) / tiny).item() == pytest.approx(slope, abs=0.6)
    assert (upper - 1).abs().max().item() == pytest.approx(near, abs=6e-4)
    assert (image - 1).abs().max().item() == pytest.approx(far, abs=6e-4)
    if low is not None:
        assert (upper.min().item(), upper.max().item()) == pytest.approx((low, high), abs=6e-4)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (24, 25), (1, 9), (9, 1), (16, 24)])
def test_gram_is_the_standard_form_in_fp64(shape: tuple[int, int], name: str) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"steps": steps_of(name), "coefficients": name, "dtype": torch.float64}
    torch.testing.assert_close(
        newton_schulz(matrix, form="gram", **options), newton_schulz(matrix, **options), rtol=0, atol=1e-10
    )


def test_gram_falls_back_to_the_standard_products_up_to_the_break_even() -> None:
    assert not uses_gram(10, 15) and not uses_gram(15, 10) and uses_gram(10, 16)
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    norm = torch.linalg.vector_norm(matrix)
    standard = newton_schulz(matrix, dtype=torch.float32, norm=norm)
    assert torch.equal(newton_schulz(matrix, dtype=torch.float32, form="gram"), standard)
    # Break-even: neither form is cheaper.
    assert newton_schulz_flops(20, 30) == 8 * 20**2 * 30 + 28 * 20**3


@pytest.mark.parametrize("rows", [96, 128])
def test_gram_in_fp32_and_fp16_is_closer_to_fp64_than_the_published_form(rows: int) -> None:
    for matrix in (power_law(rows, 384), torch.randn(rows, 384, dtype=torch.float64)):
        exact = newton_schulz(matrix, dtype=torch.float64)
        published = distance(newton_schulz(matrix.float()), exact)
        half = distance(newton_schulz(matrix.float(), dtype=torch.float16, form="gram"), exact)
        single = distance(newton_schulz(matrix.float(), dtype=torch.float32, form="gram"), exact)
        assert single < 1e-5
        assert half < 6e-3
        assert half < published / 4


def test_the_restart_saves_a_power_law_spectrum() -> None:
    matrix = power_law(192, 768)
    exact = newton_schulz(matrix, dtype=torch.float64)
    triples = coefficients_of("original", 5)
    for dtype, with_restart, without in ((torch.float32, 1e-5, 5e-5), (torch.float16, 5e-3, 1e-1)):
        x = (matrix / matrix.norm()).to(dtype)
        assert distance(iterate_gram(x, triples), exact) < with_restart
        assert distance(iterate_gram(x, triples, restart=5), exact) > without


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16), (10, 15), (1, 7)])
def test_counted_flops_are_the_formula(shape: tuple[int, int], form: str, name: str) -> None:
    steps = steps_of(name)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape), steps=steps, coefficients=name, dtype=torch.float32, form=form)
    assert counter.get_total_flops() == newton_schulz_flops(*shape, steps=steps, form=form)


@pytest.mark.parametrize("steps", range(1, 12))
def test_counted_flops_of_any_number_of_steps(steps: int) -> None:
    for form in FORMS:
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(2, 6, 20), steps=steps, dtype=torch.float32, form=form)
        assert counter.get_total_flops() == 2 * newton_schulz_flops(6, 20, steps, form)


def test_gram_flops_at_five_steps() -> None:
    n, m = 1600, 6400
    assert newton_schulz_flops(n, m, form="gram") == 8 * n * n * m + 28 * n**3
    assert newton_schulz_flops(n, m, form="gram") / newton_schulz_flops(n, m) == pytest.approx(0.667, abs=1e-3)
    assert newton_schulz_flops(3 * n, n, form="gram") / newton_schulz_flops(3 * n, n) == pytest.approx(0.743, abs=1e-3)
    assert newton_schulz_flops(n, n, form="gram") == newton_schulz_flops(n, n)


# fp16 rounds eps to zero in the published forms, so zero is divided by zero: the config refuses that pair.
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, dtype) for form in FORMS for dtype in (torch.bfloat16, torch.float32)] + [("gram", torch.float16)],
)
@pytest.mark.parametrize("name", SETS)
def test_a_zero_matrix_stays_zero(name: str, form: str, dtype: torch.dtype) -> None:
    for shape in ((3, 4, 12), (3, 5, 5)):
        zero = torch.zeros(shape)
        got = newton_schulz(zero, steps=steps_of(name), coefficients=name, dtype=dtype, form=form)
        assert torch.equal(got, zero.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tiny_matrix_follows_the_polynomial_of_its_quotient(dtype: torch.dtype) -> None:
    """Norms far below eps: the update goes to zero with the slope of the polynomial, not to noise."""
    direction = torch.randn(8, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    direction /= direction.norm()
    for norm in (1e-5, 1e-8, 1e-10, 1e-12, 1e-30):
        got = newton_schulz((direction * norm).float(), dtype=dtype, form="gram")
        quotient = norm / (norm + 1e-7) * direction
        x = quotient
        for a, b, c in coefficients_of("original", 5):
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        # Absolute: half precision stops at 6e-8 (fp16) per element of the quotient.
        tolerance = {torch.float16: 6e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
        assert torch.isfinite(got).all()
        assert (got.double() - x).norm().item() <= tolerance * x.norm().item() + (2e-4 if dtype == torch.float16 else 0)


def test_norm_travels_before_the_cast_in_the_gram_form() -> None:
    for kind in ("mars-m", "moonlight", "muon", "mars-shampoo"):
        gram = OptimizerConfig(kind=kind, ns_form="gram").group_settings("matrix")
        assert gram["norm_before_cast"]
        assert OptimizerConfig(kind=kind).group_settings("matrix")["norm_before_cast"] == (kind == "mars-shampoo")
    matrix = torch.randn(6, 20, generator=torch.Generator().manual_seed(4))
    norm = torch.linalg.vector_norm(matrix)
    for dtype in (torch.float32, torch.float16):
        given = newton_schulz(matrix, dtype=dtype, norm=norm, form="gram")
        assert torch.equal(given, newton_schulz(matrix, dtype=dtype, form="gram"))


@pytest.mark.parametrize(
    ("ns_dtype", "wire"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float32),
        ("float32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_the_wire_loses_nothing(ns_dtype: str, wire: torch.dtype) -> None:
    """Casting before the wire gives the bits of one process that never cast."""
    group = settings(ns_form="gram", ns_dtype=ns_dtype)
    assert wire_dtype(group) == wire
    momentum = torch.randn(8, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        torch.float64 if ns_dtype == "float64" else torch.float32
    ) * (1e-9 if ns_dtype == "float16" else 1.0)
    norm = torch.linalg.vector_norm(momentum)
    got = orthogonalize({"w": momentum.to(wire)}, group, {"w": norm})["w"]
    assert got.dtype == wire
    cast = momentum.to(wire) if wire == torch.bfloat16 else momentum
    want = newton_schulz(cast, dtype=getattr(torch, ns_dtype), norm=norm, form="gram")
    assert torch.equal(got, want.to(wire))
    assert got.any()


@pytest.mark.parametrize(
    ("form", "ns_dtype"),
    [("standard", "bfloat16"), ("nested", "bfloat16"), ("gram", "bfloat16"), ("gram", "float16"), ("gram", "float32")],
)
def test_batch_splits_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, form: str, ns_dtype: str) -> None:
    group = settings(ns_form=form, ns_dtype=ns_dtype)
    generator = torch.Generator().manual_seed(6)
    shapes = [(16, 64)] * 5 + [(64, 16)] * 3 + [(24, 24)] * 4 + [(1, 8)] * 2
    matrices = {
        f"m{i}": torch.randn(shape, generator=generator).to(wire_dtype(group)) for i, shape in enumerate(shapes)
    }
    norms = {name: torch.linalg.vector_norm(m.float()) for name, m in matrices.items()} if form == "gram" else None
    together = orthogonalize(matrices, group, norms)
    for per_batch in (1, 2, 3):
        item = wire_dtype(group).itemsize if ns_dtype != "float16" else 2
        limit = per_batch * orthogonal.WORKSPACE_COPIES * 16 * 64 * item
        monkeypatch.setattr(orthogonal, "WORKSPACE_BYTES", limit)
        split = orthogonalize(matrices, group, norms)
        assert list(split) == list(together)
        assert all(torch.equal(split[name], together[name]) for name in matrices)


def test_the_batch_cap_is_in_bytes() -> None:
    assert matrices_per_batch(6400 * 1600, torch.bfloat16) == 6
    assert matrices_per_batch(6400 * 1600, torch.float32) == 3
    assert matrices_per_batch(1 << 40, torch.bfloat16) == 1


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_agrees(form: str, name: str) -> None:
    matrix = torch.randn(12, 40, generator=torch.Generator().manual_seed(7))
    group = settings(ns_form=form, ns_coefficients=name, ns_dtype="float32")
    norms = {"w": torch.linalg.vector_norm(matrix)} if group["norm_before_cast"] else None
    got = orthogonalize({"w": matrix}, group, norms)["w"]
    torch.testing.assert_close(got, reference.orthogonal_factor(matrix, group), rtol=0, atol=2e-5)


def test_fixed_steps_are_taken_from_the_set_or_refused() -> None:
    assert settings(ns_coefficients="deepseek_v4")["ns_steps"] == 10
    assert settings(ns_coefficients="you")["ns_steps"] == 5
    assert settings(ns_coefficients="original", ns_steps=7)["ns_steps"] == 7
    with pytest.raises(ValueError, match=r"ns_steps is 5, but ns_coefficients 'deepseek_v4' are 10 fixed steps"):
        OptimizerConfig(kind="mars-m", ns_coefficients="deepseek_v4", ns_steps=5)
    with pytest.raises(ValueError, match="expected one of original, you, polar_express, cans, deepseek_v4"):
        OptimizerConfig(kind="mars-m", ns_coefficients="aol")
    with pytest.raises(ValueError, match="5 fixed steps, not 6"):
        newton_schulz(torch.randn(4, 8), steps=6, coefficients="cans")


def test_combinations_that_lose_the_update_are_refused() -> None:
    with pytest.raises(ValueError, match="float16 needs ns_form: gram"):
        OptimizerConfig(kind="mars-m", ns_dtype="float16")
    with pytest.raises(ValueError, match="diverges in bfloat16"):
        OptimizerConfig(kind="mars-m", ns_form="gram", ns_coefficients="deepseek_v4")
    assert settings(ns_form="gram", ns_dtype="float16")["ns_dtype"] == "float16"
