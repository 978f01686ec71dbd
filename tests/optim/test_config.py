"""OptimizerConfig: what each kind reads, its defaults, and what is refused."""

import re

import pytest
import torch
from pydantic import ValidationError

from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.optim.grouping import plan_groups
from mars_ds.optim.newton_schulz import newton_schulz, newton_schulz_flops
from mars_ds.optim.routing import matrix_shape, role_of


@pytest.mark.parametrize(
    ("kind", "key", "value", "hint"),
    [
        ("moonlight", "gamma", 0.025, "used by mars-adamw"),
        ("mars-m", "betas", (0.9, 0.95), "betas_1d"),
        ("adamw", "momentum", 0.9, "used by mars-m"),
        ("lion", "eps", 1e-8, "not used by kind lion"),
        ("mars-adamw", "ns_steps", 5, "used by mars-shampoo"),
    ],
)
def test_a_key_that_the_kind_does_not_read_is_refused(kind: str, key: str, value: object, hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        OptimizerConfig(kind=kind, **{key: value})
    assert OptimizerConfig(kind=kind, **{key: None}).kind == kind


def test_defaults_follow_the_table() -> None:
    mars = OptimizerConfig(kind="mars-adamw", lr=6e-3).resolved()
    assert (mars.betas, mars.betas_1d, mars.weight_decay_1d, mars.lr_1d) == (
        (0.95, 0.99),
        (0.9, 0.95),
        0.1,
        6e-3,
    )
    mars_m = OptimizerConfig(kind="mars-m", weight_decay=0.01).resolved()
    assert (mars_m.weight_decay_1d, mars_m.weight_decay_embedding, mars_m.momentum) == (0.01, 0.01, 0.95)
    group = OptimizerConfig(kind="mars-adamw", lr=6e-3, lr_1d=3e-3).group_settings("vector")
    assert (group["lr_factor"], group["betas"], group["gamma"]) == (0.5, (0.9, 0.95), None)


def test_routing_by_name_and_shape() -> None:
    assert role_of("transformer.wte.weight", (50304, 768)) == "embedding"
    assert role_of("model.embed_tokens.weight", (32000, 64)) == "embedding"
    assert role_of("h.0.attn.c_attn.weight", (2304, 768)) == "matrix"
    assert role_of("ln_f.weight", (768,)) == "vector"
    assert role_of("wte.weight", (16, 4), {"*wte*": "matrix"}) == "matrix"
    assert matrix_shape((8, 3, 5, 5)) == (8, 75)


def test_a_route_that_matches_nothing_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"matches no parameter; nearest name: h\.weight"):
        build_optimizer([("h.weight", parameter)], OptimizerConfig(kind="mars-m", routes={"wpe.*": "matrix"}))


def test_only_the_buffers_of_a_rule_exist() -> None:
    w, e, v = (torch.nn.Parameter(torch.ones(s)) for s in ((2, 3), (4, 3), (3,)))
    optimizer = build_optimizer([("w", w), ("wte", e), ("v", v)], OptimizerConfig(kind="mars-m"))
    for p in (w, e, v):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state[w]) == {"step", "exp_avg", "last_grad"}
    assert set(optimizer.state[e]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[v]) == {"step", "exp_avg", "exp_avg_sq"}


def test_frozen_parameters_stay_out_and_convolutions_are_matrices() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5), torch.nn.Linear(4, 4))
    model[1].requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(kind="mars-m", lr=0.1))
    assert [g["names"] for g in optimizer.param_groups] == [["0.weight"], ["0.bias"]]
    model[0](torch.randn(1, 3, 5, 5)).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    update = (before * (1 - 0.1 * 0.1) - model[0].weight.detach()).view(8, 75) / (0.1 * 0.2 * 75**0.5)
    # One sum over outputs: the gradient has rank one, so the update has one singular value near one.
    assert 0.6 < float(torch.linalg.matrix_norm(update, 2)) < 1.2


@pytest.mark.parametrize("shape", [(64, 256), (96, 96), (256, 64)])
@pytest.mark.parametrize("form", ["standard", "nested"])
def test_flops_formula_equals_the_counted_ones(shape: tuple[int, int], form: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.randn(shape), dtype=torch.float32, form=form)
    assert counter.get_total_flops() == newton_schulz_flops(*shape, form=form)


def test_batched_newton_schulz_is_bitwise_the_single_one() -> None:
    batch = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
    single = torch.stack([newton_schulz(matrix) for matrix in batch])
    assert torch.equal(newton_schulz(batch), single)


def test_overrides_make_groups_of_their_own() -> None:
    shapes = {"h.0.fc.weight": (2, 3), "h.1.fc.weight": (2, 3), "h.0.ln.weight": (3,), "h.1.ln.bias": (3,)}
    config = OptimizerConfig(
        kind="mars-m",
        lr=1e-2,
        overrides={"h.1.*": {"lr": 5e-3, "weight_decay": 0.0}, "*.ln.*": {"betas": (0.8, 0.9)}},
    )
    groups = plan_groups(shapes, config)
    assert [(g.role, g.override, list(g.shapes)) for g in groups] == [
        ("matrix", None, ["h.0.fc.weight"]),
        ("matrix", "h.1.*", ["h.1.fc.weight"]),
        ("vector", "h.1.*", ["h.1.ln.bias"]),
        ("vector", "*.ln.*", ["h.0.ln.weight"]),
    ]
    assert [g.settings["lr_factor"] for g in groups] == [1.0, 0.5, 0.5, 1.0]
    assert [g.settings["weight_decay"] for g in groups] == [0.1, 0.0, 0.0, 0.1]
    assert groups[3].settings["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"h.2.*": {"lr": 1.0}}, "'h.2.*' matches no parameter; nearest name"),
        ({"h.0.ln*": {"gamma": 0.1}}, "sets gamma, which the adamw rule of role vector does not read"),
        ({"h.0.fc*": {"betas": (0.9, 0.9)}}, "sets betas, which the orthogonal rule of role matrix does not read"),
    ],
)
def test_an_override_that_would_be_ignored_is_refused(overrides: dict, message: str) -> None:
    shapes = {"h.0.fc.weight": (2, 3), "h.0.ln.weight": (3,)}
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_groups(shapes, OptimizerConfig(kind="mars-m", overrides=overrides))
