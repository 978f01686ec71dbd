"""Layouts, owners and exchange plans as plain values, for any world size."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from math import prod

import pytest
import torch

from mars_ds.model.config import GPT2Config, parameter_shapes
from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.optim.routing import role_of
from mars_ds.zero.layout import (
    Fragment,
    LayoutError,
    Shard,
    ShardLayout,
    flat_layout,
    replicated_layout,
    sharded_layout,
    state_elements,
)
from mars_ds.zero.placement import CallWork, plan_exchange, plan_step

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


XL = [
    (name, shape)
    for name, shape in parameter_shapes(
        GPT2Config(num_layers=48, num_heads=25, width=1600, sequence_length=1024)
    ).items()
    if role_of(name, shape) == "matrix"
]
XL_NAMES = [name for name, _ in XL]
XL_ELEMENTS = 48 * 12 * 1600 * 1600


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 64, 300])
def test_sharded_layout_tiles_every_parameter(world_size: int) -> None:
    groups = [SHAPES, [("v", (13,))]]
    layout = sharded_layout(groups, world_size)
    layout.check_tiling(dict(SHAPES) | {"v": (13,)})
    assert layout.sharded and layout.calls() == (0, 1)
    assert {rank[0].numel for rank in layout.shards} == {sum(-(-prod(s) // world_size) for _, s in SHAPES)}
    assert sum(state_elements(layout, ["v"])) == 13
    assert state_elements(layout, ["v"]) == [
        max(0, min(-(-13 // world_size), 13 - r * -(-13 // world_size))) for r in range(world_size)
    ]


def test_sub_groups_are_closed_by_the_parameter_that_reaches_the_size() -> None:
    # Parts of one rank of two: 18, 17, 40, 5, 18.
    for elements, want in (
        (None, [["a", "b", "c", "d", "e"]]),
        (98, [["a", "b", "c", "d", "e"]]),
        (97, [["a", "b", "c", "d", "e"]]),
        (35, [["a", "b"], ["c"], ["d", "e"]]),
        (36, [["a", "b", "c"], ["d", "e"]]),
        (1, [["a"], ["b"], ["c"], ["d"], ["e"]]),
    ):
        layout = sharded_layout([SHAPES, [("v", (13,))]], 2, elements)
        layout.check_tiling(dict(SHAPES) | {"v": (13,)})
        assert [list(layout.holders(call)) for call in layout.calls()] == [*want, ["v"]]


def random_case(rng: random.Random) -> tuple[list[tuple[str, tuple[int, int]]], int]:
    sizes = [1, 4, 8, 16, 32, 48, 64][: rng.randint(2, 7)]
    shapes = [(f"m{i}", (rng.choice(sizes), rng.choice(sizes))) for i in range(rng.randint(1, 40))]
    return shapes, rng.randint(1, 40)


@pytest.mark.parametrize("make", [replicated_layout, flat_layout, sharded_layout])
def test_plans_of_random_groups(make: Callable[..., ShardLayout]) -> None:
    """Work is done once, never worse than longest-first, and the costs are those of the messages."""
    rng = random.Random(11)
    for _ in range(80):
        shapes, world_size = random_case(rng)
        layout = make([shapes], world_size)
        plan = plan_exchange(layout, 0, [name for name, _ in shapes])
        costs = {name: newton_schulz_flops(*shape) for name, shape in shapes}
        assert sum(plan.flops) == sum(costs.values())
        loads = [0] * world_size
        for name in sorted(costs, key=lambda name: -costs[name]):
            held = [rank for rank, _ in layout.holders(0)[name]]
            candidates = held if make is flat_layout else range(world_size)
            loads[min(candidates, key=lambda rank: loads[rank])] += costs[name]
        assert max(plan.flops) <= max(loads)
        sent = [0] * world_size
        for message in plan.inbound() + plan.outbound():
            assert message.source != message.destination
            sent[message.source] += message.piece.numel
        assert plan.sent_elements() == sent
        assert plan.exchanged_elements() == sum(sent) == plan.lower_bound_elements()
        assert (plan.exchanged_bytes(4), max(plan.sent_bytes(2))) == (4 * sum(sent), 2 * max(sent))
        for rank in range(world_size):
            for all_messages, own in ((plan.inbound(), plan.inbound(rank)), (plan.outbound(), plan.outbound(rank))):
                assert own == [m for m in all_messages if rank in (m.source, m.destination)]


def brute_force(layout: ShardLayout, shapes: list[tuple[str, tuple[int, int]]]) -> tuple[int, int]:
    """Lowest (busiest FLOPs, elements moved one way) over all owners among holders."""
    holders = layout.holders(0)
    best = None
    for owners in itertools.product(*[holders[name] for name, _ in shapes]):
        loads, moved = [0] * layout.world_size, 0
        for (_, shape), (rank, fragment) in zip(shapes, owners, strict=True):
            loads[rank] += newton_schulz_flops(*shape)
            moved += prod(shape) - fragment.numel
        best = min(best or (max(loads), moved), (max(loads), moved))
    assert best is not None
    return best


def test_owners_among_holders_are_the_best_of_all() -> None:
    rng = random.Random(3)
    for _ in range(60):
        shapes = [(f"m{i}", (rng.choice([2, 4, 8]), rng.choice([4, 8, 16]))) for i in range(rng.randint(1, 7))]
        layout = flat_layout([shapes], rng.randint(1, 6))
        plan = plan_exchange(layout, 0, [name for name, _ in shapes])
        busiest, moved = brute_force(layout, shapes)
        assert max(plan.flops) == busiest
        assert plan.exchanged_elements() >= 2 * moved


@pytest.mark.parametrize("world_size", [8, 24, 64])
@pytest.mark.parametrize("make", [replicated_layout, sharded_layout])
def test_xl_is_perfectly_balanced_where_any_rank_may_own(make: Callable[..., ShardLayout], world_size: int) -> None:
    plan = plan_exchange(make([XL], world_size), 0, XL_NAMES)
    assert plan.imbalance() == 1.0
    if make is sharded_layout:
        assert plan.exchanged_elements() == 2 * XL_ELEMENTS * (world_size - 1) // world_size
    else:
        assert plan.exchanged_elements() == XL_ELEMENTS * (world_size - 1)


def test_xl_in_natural_order() -> None:
    for world_size, straddlers, imbalance, megabytes in (
        (8, 0, 1.0, 0),
        (64, 32, 1.19, 491.5),
        (256, 160, 1.714, 2293.8),
    ):
        plan = plan_exchange(flat_layout([XL], world_size), 0, XL_NAMES)
        assert plan.straddlers() == straddlers
        assert plan.imbalance() == pytest.approx(imbalance, abs=1e-3)
        assert plan.exchanged_bytes() / 1e6 == pytest.approx(megabytes, abs=0.1)


def test_xl_on_4096_ranks() -> None:
    largest = max(newton_schulz_flops(*shape) for _, shape in XL)
    for make, exchanged in (
        (replicated_layout, XL_ELEMENTS * 4095),
        (flat_layout, None),
        (sharded_layout, 2 * XL_ELEMENTS * 4095 // 4096),
    ):
        plan = plan_exchange(make([XL], 4096), 0, XL_NAMES)
        assert max(plan.flops) == largest
        assert len({m.owner for m in plan.matrices}) == 192
        assert plan.exchanged_elements() == plan.lower_bound_elements()
        if exchanged is not None:
            assert plan.exchanged_elements() == exchanged


def test_sub_groups_are_balanced_over_the_whole_step() -> None:
    for world_size in (5, 8, 64):
        one = plan_exchange(sharded_layout([XL], world_size), 0, XL_NAMES)
        layout = sharded_layout([XL], world_size, sub_group_elements=XL_ELEMENTS // world_size // 20)
        plans = plan_step(layout, {call: CallWork(XL_NAMES) for call in layout.calls()})
        assert len(plans) > 10
        assert [m.name for plan in plans.values() for m in plan.matrices] == XL_NAMES
        total = [sum(loads) for loads in zip(*(plan.flops for plan in plans.values()), strict=True)]
        assert max(total) == max(one.flops)
        # One call after the other with the loads carried over: less even, since it cannot look ahead.
        carried = [0] * world_size
        for call in layout.calls():
            plan = plan_exchange(layout, call, XL_NAMES, loads=carried)
            carried = [a + b for a, b in zip(carried, plan.flops, strict=True)]
        assert sum(carried) == sum(total)
        assert max(total) <= max(carried) <= 1.3 * max(total)


def test_a_rank_without_a_piece_owns_only_at_stage_3_and_only_for_balance() -> None:
    tiny = [(f"t{i}", (1, 2)) for i in range(4)]
    plan = plan_exchange(sharded_layout([tiny], 4), 0, [name for name, _ in tiny])
    assert plan.flops == (newton_schulz_flops(1, 2),) * 4
    alone = plan_exchange(sharded_layout([tiny[:1]], 4), 0, ["t0"])
    assert alone.matrices[0].owner == 0
    assert alone.exchanged_elements() == 2


def test_a_plan_in_words() -> None:
    words = plan_exchange(flat_layout([XL], 64), 0, XL_NAMES).describe()
    assert words == (
        "192 matrices, each on one owner: 5.51e+13 FLOPs a step in all, busiest rank 1.19x the even share\n"
        "32 cut between ranks: 491.5 MB sent a step, 15.4 MB by the busiest rank"
    )
    assert "nothing moves" in plan_exchange(flat_layout([XL], 8), 0, XL_NAMES).describe()
    assert "every rank holds all" in plan_exchange(replicated_layout([XL], 8), 0, XL_NAMES).describe()
    assert plan_exchange(flat_layout([[]], 2), 0, []).imbalance() == 1.0
