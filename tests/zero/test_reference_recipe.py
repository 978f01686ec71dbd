"""Reproduction settings equal the published recipe, written out here in plain torch.

The recipe: eight ranks, the gradient of each summed over its micro-batches (the loss is not divided by their number)
and averaged over ranks, one global clip to 1.0, the optimizer's rule, a warm-up that begins at 0. Ours averages over
everything, on one, two or three ranks under each ZeRO stage, and restores the sum with `gradient_scale`.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mars_ds.optim import OptimizerConfig
from tests.ranks import run_on_ranks
from tests.zero import cases

VOCAB, WIDTH, LENGTH = 29, 12, 5
VIRTUAL_RANKS, ACCUMULATION = 8, 3
# 48 sequences: two a micro-batch in the recipe; they divide by one, two and three ranks.
GLOBAL_BATCH = 48
OUR_ACCUMULATION = 2
STEPS, WARMUP = 7, 3
LR, LR_1D, GAMMA, EPS = 6e-3, 3e-3, 0.025, 1e-8
WORLDS = (1, 2, 3)
STAGES = (0, 1, 2, 3)


class TinyGPT(nn.Module):
    """Tied embeddings, positions, one attention and one MLP block, gains without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, p in self.named_parameters():
                # Uneven, so that one gradient is most of the global norm and the per-tensor clip binds.
                size = 0.3 if name in ("wte.weight", "wpe.weight", "c_fc.weight") else 0.15
                p.copy_(torch.randn(p.shape, generator=generator) * size + (1.0 if p.ndim == 1 else 0.0))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.mlp_proj(nn.functional.gelu(self.c_fc(self.ln_2(x))))
        # Scaled so that summed gradients are longer than 1 in every step, and mean ones shorter.
        return 0.48 * nn.functional.cross_entropy((x @ self.wte.weight.T).flatten(0, 1), labels.flatten())


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences of a skewed distribution, so that there is something to learn."""
    generator = torch.Generator().manual_seed(400 + step)
    ids = (torch.rand(GLOBAL_BATCH, LENGTH + 1, generator=generator) ** 3 * VOCAB).long()
    return ids[:, :-1], ids[:, 1:]


def learning_rate(step: int) -> float:
    """Factor of the peak; the first step has lr 0, as in the published scripts."""
    return min(1.0, step / WARMUP)


Rule = Callable[[str, Tensor, Tensor, dict[str, Any], float], None]


def published(rule: Rule) -> tuple[dict[str, Tensor], int, int]:
    """The recipe in one process.

    Returns:
        Weights by name, how many global clips were binding, and how many per-tensor ones.
    """
    model = TinyGPT()
    states: dict[str, dict[str, Any]] = {name: {"step": 0} for name, _ in model.named_parameters()}
    micro, binding = GLOBAL_BATCH // (VIRTUAL_RANKS * ACCUMULATION), 0
    for step in range(STEPS):
        ids, labels = global_batch(step)
        mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for rank in range(VIRTUAL_RANKS):
            model.zero_grad()
            for i in range(ACCUMULATION):
                at = (rank * ACCUMULATION + i) * micro
                model(ids[at : at + micro], labels[at : at + micro]).backward()
            for name, p in model.named_parameters():
                mean[name] += p.grad / VIRTUAL_RANKS
        for name, p in model.named_parameters():
            p.grad = mean[name]
        binding += int(nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                rule(name, p, p.grad, states[name], learning_rate(step))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, binding, sum(state.get("clipped", 0) for state in states.values())


def corrected(g: Tensor, state: dict[str, Any], beta: float) -> Tensor:
    """c = g + k (g - last), last being zero at first; scaled to norm 1 where it is longer."""
    c = g + GAMMA * beta / (1 - beta) * (g - state.get("last", torch.zeros_like(g)))
    state["last"] = g.clone()
    norm = c.norm()
    state["clipped"] = state.get("clipped", 0) + int(norm > 1)
    return c / norm if norm > 1 else c


def moments(c: Tensor, state: dict[str, Any], betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Advances both moments and the step count."""
    state["step"] += 1
    state["m"] = betas[0] * state.get("m", torch.zeros_like(c)) + (1 - betas[0]) * c
    state["v"] = betas[1] * state.get("v", torch.zeros_like(c)) + (1 - betas[1]) * c * c
    return state["m"], state["v"]


def mars_adamw(name: str, p: Tensor, g: Tensor, state: dict[str, Any], factor: float) -> None:
    """MARS-AdamW: two dimensions are corrected, embeddings without decay; gains are plain AdamW with decay 0.1."""
    if p.ndim == 2:
        betas, lr, decay = (0.95, 0.99), LR * factor, 0.0 if name in ("wte.weight", "wpe.weight") else 0.01
        m, v = moments(corrected(g, state, betas[0]), state, betas)
    else:
        # The ratio of the two rates is fixed when the optimizer is made, so gains follow the schedule.
        betas, lr, decay = (0.9, 0.95), LR * factor * (LR_1D / LR), 0.1
        m, v = moments(g, state, betas)
    root = (v / (1 - betas[1] ** state["step"])).sqrt() + EPS
    p -= lr * (decay * p + m / (1 - betas[0] ** state["step"]) / root)


def mars_m(name: str, p: Tensor, g: Tensor, state: dict[str, Any], factor: float) -> None:
    """MARS-M: matrices are orthogonalized; embeddings and gains are AdamW with the same lr and decay."""
    lr, decay, beta = LR * factor, 0.01, 0.95
    if p.ndim < 2 or name in ("wte.weight", "wpe.weight"):
        m, v = moments(g, state, (0.9, 0.95))
        scale = math.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.9 ** state["step"])
        p.mul_(1 - lr * decay).sub_(lr * scale * m / (v.sqrt() + EPS))
        return
    state["m"] = beta * state.get("m", torch.zeros_like(p)) + (1 - beta) * corrected(g, state, beta)
    x = state["m"].T if p.shape[0] > p.shape[1] else state["m"]
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if p.shape[0] > p.shape[1] else x
    p.mul_(1 - lr * decay).sub_(lr * 0.2 * math.sqrt(max(p.shape)) * x)


RULES: dict[str, Rule] = {"mars-adamw": mars_adamw, "mars-m": mars_m}


def our_config(kind: str, gradient_scale: float = ACCUMULATION) -> OptimizerConfig:
    """Reproduction settings; Newton-Schulz in fp32, whose result does not hang on the last bit of a gradient."""
    particular: dict[str, Any] = {"ns_dtype": "float32"}
    if kind == "mars-adamw":
        particular = {"weight_decay_embedding": 0.0, "weight_decay_1d": 0.1, "lr_1d": LR_1D, "betas": (0.95, 0.99)}
    return OptimizerConfig(
        kind=kind,
        lr=LR,
        weight_decay=0.01,
        gamma=GAMMA,
        eps=EPS,
        first_step="reference",
        gradient_scale=gradient_scale,
        **particular,
    )


def ours(rank: int, world_size: int, config: OptimizerConfig, stage: int) -> dict[str, Tensor]:
    """The same steps through an engine, with the gradient averaged over ranks and micro-batches."""
    import mars_ds

    deepspeed_config = cases.Wrapper(stage, "fp32", "fp32").config(world_size)
    micro = GLOBAL_BATCH // world_size // OUR_ACCUMULATION
    deepspeed_config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": OUR_ACCUMULATION}
    assert deepspeed_config["gradient_clipping"] == 1.0
    engine = mars_ds.initialize(TinyGPT(), config, deepspeed_config, learning_rate)
    for step in range(STEPS):
        ids, labels = global_batch(step)
        for i in range(OUR_ACCUMULATION):
            at = (rank * OUR_ACCUMULATION + i) * micro
            engine.backward(engine(ids[at : at + micro], labels[at : at + micro]))
            engine.step()
    assert engine.mars_proof.done
    return cases.gather_masters(engine)


def all_runs(rank: int, world_size: int) -> dict[tuple, dict[str, Tensor]]:
    cases.join_quietly()
    runs = {
        (kind, stage, float(ACCUMULATION)): ours(rank, world_size, our_config(kind), stage)
        for kind in RULES
        for stage in STAGES
    }
    for kind in RULES:
        runs[kind, 1, 1.0] = ours(rank, world_size, our_config(kind, 1.0), 1)
    return runs


@cache
def results(world_size: int) -> dict[tuple, dict[str, Tensor]]:
    return run_on_ranks(world_size, all_runs)[0]


@cache
def expected(kind: str) -> tuple[dict[str, Tensor], int, int]:
    return published(RULES[kind])


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_reproduction_settings_equal_the_published_recipe(world_size: int, stage: int, kind: str) -> None:
    want, _, _ = expected(kind)
    got = results(world_size)[kind, stage, float(ACCUMULATION)]
    assert set(got) == set(want)
    for name, value in want.items():
        assert float((got[name] - value).norm() / value.norm()) <= 1e-4, name


@pytest.mark.parametrize("kind", RULES)
def test_the_scale_of_the_gradient_matters(kind: str) -> None:
    """Both clips bind in the recipe, and without `gradient_scale` the run is another one."""
    want, global_clips, tensor_clips = expected(kind)
    assert global_clips == STEPS
    assert tensor_clips >= 1
    got = results(1)[kind, 1, 1.0]
    start = {name: p.detach() for name, p in TinyGPT().named_parameters()}
    distances = [float((got[n] - v).norm() / (v - start[n]).norm()) for n, v in want.items()]
    assert max(distances) > 1e-2, distances
