"""Layouts, owners and exchange plans as plain values, for any world size."""

import dataclasses
from math import prod

import pytest
import torch

from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.zero.layout import Fragment, LayoutError, Shard, ShardLayout, flat_layout, replicated_layout
from mars_ds.zero.placement import plan_exchange

SHAPES = [("a", (7, 5)), ("b", (3, 11)), ("c", (40, 2)), ("d", (1, 9)), ("e", (6, 6))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 64, 300])
def test_flat_layout_tiles_every_parameter(world_size: int) -> None:
    layout = flat_layout([SHAPES, [("v", (13,))]], world_size)
    layout.check_tiling(dict(SHAPES) | {"v": (13,)})
    assert {shard.numel for rank in layout.shards for shard in rank if shard.call == 0} == {
        -(-193 // (2 * world_size)) * 2
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1}, "not exactly once"),
        ({"numel": 34}, "not exactly once"),
        ({"offset": -1}, "overlaps or leaves"),
        ({"shape": (5, 7)}, "not a known parameter"),
    ],
)
def test_a_wrong_fragment_is_found(change: dict, message: str) -> None:
    good = Fragment("a", (7, 5), 0, 35, 0)
    layout = ShardLayout(((Shard(0, 36, (dataclasses.replace(good, **change),)),),))
    with pytest.raises(LayoutError, match=message):
        layout.check_tiling({"a": (7, 5)})


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16, 200])
@pytest.mark.parametrize("replicated", [False, True])
def test_each_matrix_has_one_owner_that_holds_a_piece(world_size: int, replicated: bool) -> None:
    make = replicated_layout if replicated else flat_layout
    layout = make([SHAPES], world_size)
    plan = plan_exchange(layout, 0, [name for name, _ in SHAPES])
    assert [m.name for m in plan.matrices] == [name for name, _ in SHAPES]
    assert sum(plan.flops) == sum(newton_schulz_flops(*shape) for _, shape in SHAPES)
    for matrix in plan.matrices:
        assert matrix.owner in {piece.rank for piece in matrix.pieces}
    elements = sum(prod(shape) for _, shape in SHAPES)
    if replicated:
        assert plan.exchanged_elements() == elements * (world_size - 1)
    else:
        moved = sum(p.numel for m in plan.matrices for p in m.pieces if p.rank != m.owner)
        assert plan.exchanged_elements() == 2 * moved


def longest_first(layout: ShardLayout) -> int:
    loads = [0] * layout.world_size
    holders = layout.holders(0)
    for name, held in sorted(holders.items(), key=lambda i: -newton_schulz_flops(*i[1][0][1].shape)):
        owner = min((rank for rank, _ in held), key=lambda rank: loads[rank])
        loads[owner] += newton_schulz_flops(*dict(GPT2)[name])
    return max(loads)


GPT2 = [
    (f"h.{i}.{name}", shape)
    for i in range(6)
    for name, shape in (("qkv", (48, 16)), ("o", (16, 16)), ("fc", (64, 16)), ("proj", (16, 64)))
]


@pytest.mark.parametrize("world_size", range(1, 33))
def test_never_worse_than_longest_first(world_size: int) -> None:
    layout = flat_layout([GPT2], world_size)
    plan = plan_exchange(layout, 0, [name for name, _ in GPT2])
    assert max(plan.flops) <= longest_first(layout)


def test_nothing_moves_when_layers_divide_the_ranks() -> None:
    for world_size in (1, 2, 3, 6):
        plan = plan_exchange(flat_layout([GPT2], world_size), 0, [name for name, _ in GPT2])
        assert (plan.exchanged_elements(), plan.needs_exchange) == (0, False)
        assert plan.imbalance() == pytest.approx(1.0)


def test_the_digest_depends_on_owners_and_cuts() -> None:
    names = [name for name, _ in SHAPES]
    digests = {plan_exchange(flat_layout([SHAPES], w), 0, names).digest() for w in (1, 2, 3)}
    assert len(digests) == 3


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight"])
def test_a_cut_tensor_is_updated_as_a_whole_one(kind: str) -> None:
    """One flat buffer that holds all parameters with padding equals separate tensors, bit for bit."""
    from mars_ds.optim.sharding import WholeTensors

    config = OptimizerConfig(kind=kind, lr=0.01)
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}
    whole = {name: torch.nn.Parameter(v.clone()) for name, v in values.items()}
    separate = build_optimizer(whole.items(), config)
    together = build_optimizer([(n, torch.nn.Parameter(v.clone())) for n, v in values.items()], config)
    shard = flat_layout([SHAPES], 1, alignment=16).shards[0][0]
    flat = torch.full((shard.numel,), torch.nan)
    for f in shard.fragments:
        f.view(flat).copy_(values[f.name].flatten())

    class OneFlat(WholeTensors):
        def fragments(self, tensor):
            return shard.fragments

        def gather_matrices(self, tensors, pieces):
            return {n: p.view(dict(SHAPES)[n]) for n, p in pieces.items()}

    together.param_groups[0]["params"] = [flat]
    together.bind(OneFlat({}))
    for step in range(3):
        gradient = torch.full((shard.numel,), torch.nan)
        for f in shard.fragments:
            g = torch.randn(f.shape, generator=generator) * (1.0 if step % 2 else 0.01)
            whole[f.name].grad = g
            f.view(gradient).copy_(g.flatten())
        flat.grad = gradient
        separate.step()
        together.step()
    for f in shard.fragments:
        assert torch.equal(f.view(flat).view(f.shape), whole[f.name].detach()), f.name
