"""The same reduced gradients give the same bits for every world size and every cut.

No engine: the shards are fed directly, padding is NaN, and one spawn of eight ranks runs every case on process
groups of its first 1 to 8 ranks.

Where a bit could still differ: the clip of a corrected gradient and the norm of MARS-Shampoo are sums of fp64 partial
sums, one per rank, so the order of additions follows the cut. The sum is then off in its 53rd bit, and only the fp32
rounding of the scale is used: it flips when the true value lies within about 1e-16 of the midpoint of two fp32
numbers, once in 1e8 tensors. No case here meets it; one that did would be off by one unit in the last place of an
fp32 scale. Batches of equal shapes hold other matrices on other ranks; products of this CPU do not depend on the batch,
those of a GPU may.
"""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.zero.layout import ShardLayout, flat_layout, replicated_layout, sharded_layout
from tests.ranks import run_on_ranks
from tests.zero.shards import ShardedMars, cut_layout, shard_mars

WORLD = 8
STEPS = 3

# Odd sizes, equal shapes that share a batch, one row, one column, one element, a convolution, tiny vectors.
MIXED = {
    "wte.weight": (11, 6),
    "tall": (40, 7),
    "square.0": (16, 16),
    "square.1": (16, 16),
    "square.2": (16, 16),
    "wide": (5, 33),
    "row": (1, 9),
    "column": (13, 1),
    "conv": (4, 3, 3, 2),
    "element": (1, 1),
    "bias": (5,),
    "gain": (1,),
}
# Fewer matrices than ranks, and fewer elements of a vector than ranks.
FEW = {"only": (3, 5), "bias": (2,)}
# Every position of one cut through two matrices of 35 and 24 elements.
SMALL = {"first": (7, 5), "second": (3, 8), "bias": (5,)}
POSITIONS = 7 * 5 + 3 * 8
MODELS = {"mixed": MIXED, "few": FEW, "small": SMALL}

CONFIGS: dict[str, dict[str, Any]] = {
    "mars-adamw": {"kind": "mars-adamw"},
    "mars-adamw, amsgrad, optimize_1d": {"kind": "mars-adamw", "amsgrad": True, "optimize_1d": True},
    "mars-adamw, exact": {"kind": "mars-adamw", "mode": "exact"},
    "mars-lion": {"kind": "mars-lion"},
    "mars-shampoo, fp32": {"kind": "mars-shampoo", "ns_dtype": "float32"},
    "mars-shampoo, bf16": {"kind": "mars-shampoo"},
    "mars-m, fp32": {"kind": "mars-m", "ns_dtype": "float32", "lr_1d": 3e-3, "gradient_scale": 3.0},
    "mars-m, bf16": {"kind": "mars-m"},
    "mars-m, exact": {"kind": "mars-m", "mode": "exact"},
    "mars-m, gram": {"kind": "mars-m", "ns_dtype": "float32", "ns_form": "gram"},
    "mars-m, no clip": {"kind": "mars-m", "correction_clip": "none"},
    "mars-m, last_grad in bf16": {"kind": "mars-m", "last_grad_dtype": "bfloat16"},
    "moonlight, fp32": {"kind": "moonlight", "ns_dtype": "float32"},
    "muon, bf16": {"kind": "muon"},
    "adamw": {"kind": "adamw"},
    "lion": {"kind": "lion"},
}
# One of each way through the pipeline, for the smaller models.
SWEPT = ("mars-m, bf16", "mars-m, fp32", "mars-shampoo, fp32", "mars-adamw")

Layouts = dict[str, Callable[[Any], ShardLayout]]


def layouts(world_size: int) -> Layouts:
    """Stage 0, stages 1 and 2, stage 3 in one and in several sub-groups, and a cut anywhere."""
    return {
        "replicated": partial(replicated_layout, world_size=world_size),
        "flat": partial(flat_layout, world_size=world_size),
        "sharded": partial(sharded_layout, world_size=world_size),
        "sub-groups": partial(sharded_layout, world_size=world_size, sub_group_elements=300 // world_size),
        "random cuts": partial(random_cuts, world_size=world_size),
    }


def random_cuts(groups: Any, world_size: int) -> ShardLayout:
    """Cuts anywhere; two of them coincide, so from three ranks on one holds nothing at all."""
    chooser = random.Random(world_size)
    cuts = []
    for group in groups:
        total = sum(torch.Size(shape).numel() for _, shape in group)
        inner = [chooser.randint(0, total) for _ in range(world_size - 1)]
        if len(inner) > 1:
            inner[0] = inner[1]
        cuts.append(sorted(inner))
    return cut_layout(groups, cuts)


def config_of(label: str) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.05, **CONFIGS[label]})


def weights(model: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in MODELS[model].items()}


def gradients(model: str, step: int) -> dict[str, Tensor]:
    """Norms on both sides of 1, the clip binding on some tensors of the odd steps; one gradient is zero."""
    generator = torch.Generator().manual_seed(50 + step)
    found = {}
    for name, shape in MODELS[model].items():
        size = 0.3 if step % 2 else 1e-3
        found[name] = torch.randn(shape, generator=generator) * (0.0 if (name, step) == ("square.1", 0) else size)
    return found


@cache
def one_device(label: str, model: str, steps: int = STEPS) -> dict[str, dict[str, Tensor]]:
    """Name -> flat weight and state buffers after `steps`, on whole tensors."""
    parameters = {name: nn.Parameter(v.clone()) for name, v in weights(model).items()}
    optimizer = build_optimizer(parameters.items(), config_of(label))
    for step in range(steps):
        if config_of(label).mode == "exact":
            for name, g in gradients(model, step + 1).items():
                parameters[name].grad = g
            optimizer.capture_next_grad()
        for name, g in gradients(model, step).items():
            parameters[name].grad = g
        optimizer.step()
    return {
        name: {"weight": p.detach().view(-1)} | {k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        for name, p in parameters.items()
    }


def differences(sharded: ShardedMars, label: str, model: str, steps: int = STEPS) -> list[str]:
    """Runs the steps on the shards; one line per fragment whose bits differ from one device."""
    for step in range(steps):
        if config_of(label).mode == "exact":
            sharded.set_gradients(gradients(model, step + 1))
            sharded.capture()
        sharded.set_gradients(gradients(model, step))
        sharded.step()
    lines = []
    reference = one_device(label, model, steps)
    for fragment, buffer, got in sharded.pieces():
        want = reference[fragment.name][buffer][fragment.start : fragment.stop]
        if not torch.equal(got, want):
            wrong = int((got != want).sum())
            lines.append(
                f"{fragment.name}[{fragment.start}:{fragment.stop}] {buffer}: {wrong} elements differ, "
                f"by {float((got - want).abs().max()):.3g}"
            )
    return lines


def every_layout(rank: int, world_size: int) -> dict[tuple, list[str]]:
    """Case -> differences on this rank."""
    found: dict[tuple, list[str]] = {}
    for size in range(1, world_size + 1):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for kind, make_layout in layouts(size).items():
            for model, label in [("mixed", label) for label in CONFIGS] + [("few", label) for label in SWEPT]:
                sharded = shard_mars(config_of(label), weights(model), make_layout, group)
                found[size, kind, model, label] = differences(sharded, label, model)
    return found


def every_cut(rank: int, world_size: int) -> dict[tuple, list[str]]:
    """Pairs of ranks share the positions of the cut."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    found = {}
    for position in range(rank // 2, POSITIONS + 1, len(pairs)):

        def make_layout(groups: Any, position: int = position) -> ShardLayout:
            sizes = [sum(torch.Size(shape).numel() for _, shape in group) for group in groups]
            return cut_layout(groups, [[min(position, size)] for size in sizes])

        for label in SWEPT:
            sharded = shard_mars(config_of(label), weights("small"), make_layout, pairs[rank // 2])
            found[position, label] = differences(sharded, label, "small", 2)
    return found


def everything(rank: int, world_size: int) -> tuple[dict[tuple, list[str]], dict[tuple, list[str]]]:
    return every_layout(rank, world_size), every_cut(rank, world_size)


@cache
def results() -> list[Any]:
    return run_on_ranks(WORLD, everything)


@pytest.mark.parametrize("label", CONFIGS)
@pytest.mark.parametrize("kind", layouts(2))
@pytest.mark.parametrize("world_size", range(1, WORLD + 1))
def test_every_world_size_gives_the_same_bits(world_size: int, kind: str, label: str) -> None:
    for rank, (by_layout, _) in enumerate(results()[:world_size]):
        for model in ("mixed", "few") if label in SWEPT else ("mixed",):
            assert by_layout[world_size, kind, model, label] == [], (rank, model)


@pytest.mark.parametrize("label", SWEPT)
def test_every_cut_gives_the_same_bits(label: str) -> None:
    seen = {}
    for rank, (_, by_cut) in enumerate(results()):
        for (position, swept), lines in by_cut.items():
            if swept == label:
                assert lines == [], (rank, position)
                seen[position] = True
    assert sorted(seen) == list(range(POSITIONS + 1))


def test_the_cases_bind_the_clip_and_move_every_weight() -> None:
    """Without these the equalities above could hold for an optimizer that does nothing."""
    clipped = one_device("mars-m, bf16", "mixed")
    unclipped = one_device("mars-m, no clip", "mixed")
    assert not torch.equal(clipped["square.0"]["exp_avg"], unclipped["square.0"]["exp_avg"])
    start = weights("mixed")
    for label in CONFIGS:
        for name, buffers in one_device(label, "mixed").items():
            assert not torch.equal(buffers["weight"], start[name].view(-1)), (label, name)
