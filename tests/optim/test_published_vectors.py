"""The fp64 vectors and the properties that pin the mathematics down (deterministic, no recorded files)."""

import math

import pytest
import torch
from torch import Tensor

from mars_ds.optim import Mars, OptimizerConfig, build_optimizer

MARS = {
    "lr": 0.01,
    "betas": (0.95, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "gamma": 0.025,
    "lr_1d": 0.005,
    "betas_1d": (0.9, 0.95),
    "weight_decay_1d": 0.1,
}
MARS_M = {"lr": 0.01, "weight_decay": 0.01, "betas_1d": (0.9, 0.95), "ns_dtype": "float64"}


def gradients(t: float, s: float) -> tuple[Tensor, Tensor]:
    i, j = torch.arange(2, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)
    return s * torch.sin(1 + 3 * i + j + t), s * torch.cos(0.5 * j + t)


def fresh() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    w = 0.1 * (1 + torch.arange(6, dtype=torch.float64)).reshape(2, 3)
    return torch.nn.Parameter(w), torch.nn.Parameter(torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64))


def run(kind: str, s: float, steps: int = 3, exact: bool = False, **settings) -> tuple[Tensor, Tensor, Mars]:
    w, b = fresh()
    config = OptimizerConfig(kind=kind, mode="exact" if exact else None, **settings)
    optimizer = build_optimizer([("w", w), ("b", b)], config)
    for t in range(1, steps + 1):
        if exact:
            w.grad, b.grad = gradients(t + 0.3, s)
            optimizer.capture_next_grad()
        w.grad, b.grad = gradients(t, s)
        optimizer.step()
    return w.detach(), b.detach(), optimizer


SHAMPOO = {**MARS, "ns_dtype": "float64"}
NO_CLIP = {**MARS_M, "correction_clip": "none"}
MOONLIGHT = dict(MARS_M)
W_AFTER_3 = [
    ("mars-adamw", 0.1, False, MARS, "0.0849819214 0.2034227036 0.3276883309 0.4170111722 0.4987593288 0.5713586413"),
    ("mars-adamw", 1.0, False, MARS, "0.0855661696 0.2036296121 0.3277002452 0.4165745756 0.4983153661 0.5714129273"),
    ("mars-adamw", 0.1, True, MARS, "0.0837853406 0.2031579612 0.3278868525 0.4180492585 0.4993946856 0.5711564006"),
    ("mars-adamw", 1.0, True, MARS, "0.0848694266 0.2036206921 0.3279580485 0.4172739853 0.4983982654 0.5712349139"),
    ("mars-lion", 0.1, False, MARS, "0.0899730029 0.2099410059 0.3299070091 0.4298770121 0.4898490151 0.5698230179"),
    ("mars-lion", 1.0, False, MARS, "0.0899730029 0.2099410059 0.3299070091 0.4298770121 0.4898490151 0.5698230179"),
    ("mars-shampoo", 0.1, False, SHAMPOO, "0.1078278228 0.2189461341 0.3125902989 0.4200444486 0.5105833219 0.5912540423"),
    ("mars-shampoo", 1.0, False, SHAMPOO, "0.1083181001 0.2188017356 0.3119439839 0.4198339621 0.5099588446 0.5907897158"),
    ("mars-m", 0.1, False, MARS_M, "0.1026920228 0.2065239607 0.3043026410 0.4068652175 0.5035681591 0.5968526561"),
    ("mars-m", 1.0, False, MARS_M, "0.1028618664 0.2064739100 0.3040787123 0.4067922723 0.5033518204 0.5966918247"),
    ("mars-m", 1.0, False, NO_CLIP, "0.1026920308 0.2065239256 0.3043025951 0.4068651816 0.5035681432 0.5968526750"),
    ("mars-m", 0.1, False, {**MARS_M, "gamma": 0.05}, "0.1030499000 0.2063694552 0.3037778044 0.4066576473 0.5030618980 0.5965131582"),
    ("moonlight", 0.1, False, MOONLIGHT, "0.1030499063 0.2063694257 0.3037777663 0.4066576213 0.5030618888 0.5965131743"),
]  # fmt: skip
B_AFTER_3 = [
    ("mars-adamw", 0.1, MARS, "0.9955560326 0.5017073590 -0.4848063255"),
    ("mars-lion", 0.1, MARS, "0.9955560326 0.5017073590 -0.4848063255"),
    ("mars-shampoo", 0.1, SHAMPOO, "0.9955560326 0.5017073590 -0.4848063255"),
    ("mars-adamw", 1.0, MARS, "0.9955560321 0.5017073537 -0.4848063232"),
    ("mars-adamw", 0.1, {**MARS, "optimize_1d": True}, "0.9952049170 0.5043879140 -0.4711608774"),
    ("mars-adamw", 1.0, {**MARS, "optimize_1d": True}, "0.9896461924 0.5034977430 -0.4703749103"),
    ("mars-lion", 0.1, {**MARS, "optimize_1d": True}, "1.0097010299 0.5098510149 -0.4698530149"),
    ("mars-lion", 1.0, {**MARS, "optimize_1d": True}, "0.9897030299 0.5098510149 -0.4698530149"),
    ("mars-m", 0.1, MARS_M, "0.9938022964 0.5047587265 -0.4709501821"),
    ("moonlight", 0.1, MOONLIGHT, "0.9938022964 0.5047587265 -0.4709501821"),
]


def numbers(text: str) -> Tensor:
    return torch.tensor([float(x) for x in text.split()], dtype=torch.float64)


@pytest.mark.parametrize(("kind", "s", "exact", "settings", "want"), W_AFTER_3)
def test_matrix_after_three_steps(kind: str, s: float, exact: bool, settings: dict, want: str) -> None:
    # The embedding route would change the rule; "w" is a plain matrix.
    w, _, _ = run(kind, s, exact=exact, **settings)
    torch.testing.assert_close(w.flatten(), numbers(want), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "s", "settings", "want"), B_AFTER_3)
def test_vector_after_three_steps(kind: str, s: float, settings: dict, want: str) -> None:
    _, b, _ = run(kind, s, **settings)
    torch.testing.assert_close(b, numbers(want), rtol=0, atol=1e-9)


def test_first_moment_after_three_steps() -> None:
    want = "-0.0009272318 -0.0099561241 -0.0098314018 -0.0006677340 0.0091098454 0.0105118749"
    _, _, optimizer = run("mars-adamw", 0.1, **MARS)
    matrix = optimizer.param_groups[0]["params"][0]
    torch.testing.assert_close(optimizer.state[matrix]["exp_avg"], numbers(want), rtol=0, atol=1e-10)


def scalar_newton_schulz(sigma: float) -> float:
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return sigma


@pytest.mark.parametrize("form", ["standard", "nested"])
def test_newton_schulz_maps_singular_values(form: str) -> None:
    from mars_ds.optim.newton_schulz import newton_schulz

    published = {1e-4: 0.04847, 1e-3: 0.47054, 0.01: 0.69892, 0.1: 0.71212, 0.5: 0.76544, 1.0: 0.69644}
    for sigma, image in published.items():
        assert scalar_newton_schulz(sigma) == pytest.approx(image, abs=6e-6)
    sigmas = torch.tensor([0.8, 0.5, 0.3, 0.1], dtype=torch.float64)
    sigmas /= sigmas.norm()
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=generator))[0][:, :4]
    for matrix in (left @ sigmas.diag() @ right.T, right @ sigmas.diag() @ left.T):
        image = newton_schulz(3.0 * matrix, eps=0.0, dtype=torch.float64, form=form)
        got = torch.linalg.svdvals(image).sort().values
        want = torch.tensor(sorted(scalar_newton_schulz(float(x)) for x in sigmas), dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_gamma_zero_without_clip_is_adamw() -> None:
    settings = {"lr": 0.01, "betas": (0.95, 0.99), "weight_decay": 0.01}
    w, _, _ = run("mars-adamw", 0.1, gamma=0.0, **settings)
    want, _ = fresh()
    optimizer = torch.optim.AdamW([want], **settings)
    for t in (1, 2, 3):
        want.grad = gradients(t, 0.1)[0]
        optimizer.step()
    torch.testing.assert_close(w, want.detach(), rtol=1e-14, atol=1e-15)


def test_constant_gradient_is_seen_as_itself_after_the_first_step() -> None:
    w, _ = fresh()
    g = gradients(1, 0.01)[0]
    optimizer = build_optimizer([("w", w)], OptimizerConfig(kind="mars-lion", lr=0.0, betas=(0.95, 0.99)))
    seen = []
    for _ in range(3):
        w.grad = g.clone()
        before = optimizer.state[w]["exp_avg"].clone() if optimizer.state[w] else torch.zeros(6)
        optimizer.step()
        seen.append(((optimizer.state[w]["exp_avg"] - 0.95 * before) / 0.05).view(2, 3) / g)
    for factor, ratio in zip((1.475, 1.0, 1.0), seen, strict=True):
        torch.testing.assert_close(ratio, torch.full_like(ratio, factor), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("norm", "scaled"), [(1.0, False), (1.0 + 1e-12, True), (0.0, False), (math.nan, False)])
def test_clip_is_strict_and_has_no_epsilon(norm: float, scaled: bool) -> None:
    from mars_ds.optim.correction import clip_scales

    scale = float(clip_scales(torch.tensor([norm**2], dtype=torch.float64), 1.0)[0])
    assert (scale < 1.0) == scaled
    assert scale * norm == pytest.approx(min(norm, 1.0), rel=1e-15, nan_ok=True)


@pytest.mark.parametrize(
    "kind", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight", "muon", "adamw", "lion"]
)
def test_zero_gradient_gives_no_nan_and_none_equals_zero(kind: str) -> None:
    results = []
    for grad in (None, torch.zeros(2, 3, dtype=torch.float64)):
        w, b = fresh()
        optimizer = build_optimizer([("w", w), ("b", b)], OptimizerConfig(kind=kind, lr=0.01))
        for _ in range(2):
            w.grad, b.grad = grad, gradients(1, 0.1)[1]
            optimizer.step()
        results.append((w.detach(), b.detach()))
    assert all(torch.isfinite(x).all() for x in results[0])
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
def test_zeroing_gradients_in_place_or_by_none_is_bit_identical(kind: str) -> None:
    """The reference keeps last_grad by reference and fails this: in-place zeroing turns MARS into AdamW."""
    results = []
    for set_to_none in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
        optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(kind=kind, lr=0.01))
        for _ in range(4):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("s", [0.1, 1.0])
def test_memory_efficient_form_is_unclipped_mars_m(s: float) -> None:
    efficient, _, optimizer = run("mars-m", s, **NO_CLIP)
    explicit, _, _ = run("mars-m", s, clip_threshold=1e9, **MARS_M)
    torch.testing.assert_close(efficient, explicit, rtol=0, atol=1e-14)
    matrix = optimizer.param_groups[0]["params"][0]
    assert set(optimizer.state[matrix]) == {"step", "exp_avg"}


@pytest.mark.parametrize("s", [0.1, 1.0])
def test_paper_first_step_agrees_between_the_two_forms(s: float) -> None:
    efficient, _, _ = run("mars-m", s, first_step="paper", **NO_CLIP)
    explicit, _, _ = run("mars-m", s, first_step="paper", clip_threshold=1e9, **MARS_M)
    reference, _, _ = run("mars-m", s, **NO_CLIP)
    torch.testing.assert_close(efficient, explicit, rtol=0, atol=1e-14)
    assert (efficient - reference).abs().max() > 1e-6


def momentum_after(kind: str, s: float = 0.1, **settings) -> Tensor:
    _, _, optimizer = run(kind, s, **settings)
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]


def test_gamma_interpolates_between_heavy_ball_and_nesterov() -> None:
    heavy = torch.zeros(6, dtype=torch.float64)
    nesterov = torch.zeros(6, dtype=torch.float64)
    for t in (1, 2, 3):
        g = gradients(t, 0.1)[0].flatten()
        heavy = 0.95 * heavy + 0.05 * g
        nesterov = 0.95 * nesterov + g
    torch.testing.assert_close(momentum_after("mars-m", **MARS_M, gamma=0.0), heavy, rtol=1e-14, atol=0)
    unclipped = momentum_after("mars-m", **MARS_M, gamma=0.05, clip_threshold=1e9)
    lookahead = 0.05 * (g + 0.95 * nesterov)
    torch.testing.assert_close(unclipped, lookahead, rtol=1e-13, atol=1e-16)


def test_exact_fed_with_its_own_batch_is_approx() -> None:
    w, b = fresh()
    optimizer = build_optimizer([("w", w), ("b", b)], OptimizerConfig(kind="mars-adamw", mode="exact", **MARS))
    for t in (1, 2, 3):
        w.grad, b.grad = gradients(t, 0.1)
        optimizer.capture_next_grad()
        optimizer.step()
    approx, _, _ = run("mars-adamw", 0.1, **MARS)
    assert torch.equal(w.detach(), approx)


def test_exact_at_lr_zero_has_no_correction_but_approx_has() -> None:
    """x does not move, so the gradient of this batch at last step's weights is this step's gradient."""
    settings = {"lr": 0.0, "lr_1d": 0.0, "betas": (0.95, 0.99)}
    heavy = torch.zeros(6, dtype=torch.float64)
    for t in (1, 2, 3):
        heavy = 0.95 * heavy + 0.05 * (1.475 if t == 1 else 1.0) * gradients(t, 0.1)[0].flatten()
    w, _ = fresh()
    optimizer = build_optimizer([("w", w)], OptimizerConfig(kind="mars-adamw", mode="exact", **settings))
    for t in (1, 2, 3):
        w.grad = gradients(t + 1, 0.1)[0]
        optimizer.capture_next_grad()
        w.grad = gradients(t, 0.1)[0]
        optimizer.step()
    torch.testing.assert_close(optimizer.state[w]["exp_avg"], heavy, rtol=1e-14, atol=1e-17)
    assert (momentum_after("mars-adamw", **settings) - heavy).abs().max() > 1e-4


def test_exact_refuses_a_step_without_capture() -> None:
    w, _ = fresh()
    optimizer = build_optimizer([("w", w)], OptimizerConfig(kind="mars-m", mode="exact"))
    w.grad = gradients(1, 0.1)[0]
    with pytest.raises(RuntimeError, match="capture_next_grad"):
        optimizer.step()


def test_last_grad_is_a_copy_of_the_gradient_not_of_the_corrected_one() -> None:
    w, _ = fresh()
    optimizer = build_optimizer([("w", w)], OptimizerConfig(kind="mars-m", lr=0.01))
    for t in (1, 2):
        w.grad = gradients(t, 1.0)[0]
        optimizer.step()
    last = optimizer.state[w]["last_grad"]
    assert torch.equal(last, w.grad.flatten())
    assert last.data_ptr() != w.grad.data_ptr()


def test_save_and_load_in_the_middle_of_a_run_is_bit_identical() -> None:
    whole, _, _ = run("mars-adamw", 0.1, steps=4, **MARS)
    w, b = fresh()
    first = build_optimizer([("w", w), ("b", b)], OptimizerConfig(kind="mars-adamw", **MARS))
    for t in (1, 2):
        w.grad, b.grad = gradients(t, 0.1)
        first.step()
    second = build_optimizer([("w", w), ("b", b)], OptimizerConfig(kind="mars-adamw", **MARS))
    second.load_state_dict(first.state_dict())
    for t in (3, 4):
        w.grad, b.grad = gradients(t, 0.1)
        second.step()
    assert torch.equal(w.detach(), whole)


def test_gradient_scale_and_global_clip_commute_with_averaging() -> None:
    """(sum, clip 1, threshold 1, eps) and (mean, clip 1/a, threshold 1/a, eps/a) are one trajectory."""
    a, results = 4.0, []
    for scale, threshold, eps, gradient_scale in (
        (1.0, 1.0, 1e-8, 1.0),
        (1 / a, 1 / a, 1e-8 / a, 1.0),
        (1 / a, 1.0, 1e-8, a),
    ):
        w, _ = fresh()
        config = OptimizerConfig(
            kind="mars-adamw", lr=0.01, clip_threshold=threshold, eps=eps, gradient_scale=gradient_scale
        )
        optimizer = build_optimizer([("w", w)], config)
        for t in (1, 2, 3):
            g = gradients(t, 3.0)[0]
            w.grad = g / g.norm() * scale
            optimizer.step()
        results.append(w.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-14, atol=0)
