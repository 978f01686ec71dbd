"""Orders of a flat group: nothing straddles where whole partitions can be filled, and never worse than natural."""

import random
from math import prod

import pytest

from mars_ds.model.config import GPT2Config, parameter_shapes
from mars_ds.optim.routing import role_of
from mars_ds.zero.layout import flat_layout
from mars_ds.zero.ordering import aligned_order, order_score
from mars_ds.zero.packing import balanced, best_fill, pack
from mars_ds.zero.placement import plan_exchange

Shapes = list[tuple[str, tuple[int, ...]]]

XL: Shapes = [
    (name, shape)
    for name, shape in parameter_shapes(
        GPT2Config(num_layers=48, num_heads=25, width=1600, sequence_length=1024)
    ).items()
    if role_of(name, shape) == "matrix"
]


def ordered(shapes: Shapes, world_size: int) -> Shapes:
    order = aligned_order(shapes, world_size)
    assert sorted(order) == sorted(name for name, _ in shapes)
    by_name = dict(shapes)
    return [(name, by_name[name]) for name in order]


@pytest.mark.parametrize("world_size", [8, 24, 48, 64])
def test_xl_needs_no_exchange_and_is_perfectly_balanced(world_size: int) -> None:
    plan = plan_exchange(flat_layout([ordered(XL, world_size)], world_size), 0, [name for name, _ in XL])
    assert (plan.exchanged_elements(), plan.needs_exchange, plan.imbalance()) == (0, False, 1.0)


def test_xl_on_64_ranks_has_two_kinds_of_partition() -> None:
    layout = flat_layout([ordered(XL, 64)], 64)
    kinds = [tuple(sorted(f.name.split(".", 3)[3] for f in rank[0].fragments)) for rank in layout.shards]
    three = ("attn.c_attn.weight",) * 3
    one_each = ("attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    assert (kinds.count(three), len(kinds)) == (16, 64)
    assert sum(prod(f.shape) for f in layout.shards[0][0].fragments) == 9 * 1600 * 1600
    assert kinds.count(one_each) <= 48


@pytest.mark.parametrize("world_size", [*range(1, 41), 72, 80, 96, 100, 128, 256, 1024, 4096])
def test_never_worse_than_natural_order(world_size: int) -> None:
    assert order_score(ordered(XL, world_size), world_size) <= order_score(XL, world_size)


def test_known_gains_where_a_perfect_order_does_not_exist() -> None:
    for world_size, natural, aligned in ((96, 48, 24), (128, 96, 64), (256, 160, 144)):
        plans = [
            plan_exchange(flat_layout([shapes], world_size), 0, [name for name, _ in XL])
            for shapes in (XL, ordered(XL, world_size))
        ]
        assert [plan.straddlers() for plan in plans] == [natural, aligned]


def test_random_groups_keep_every_matrix_and_are_never_worse() -> None:
    rng = random.Random(5)
    for _ in range(60):
        sizes = [1, 4, 6, 9, 16, 32][: rng.randint(2, 6)]
        shapes = [(f"m{i}", (rng.choice(sizes), rng.choice(sizes))) for i in range(rng.randint(0, 40))]
        world_size = rng.randint(1, 50)
        assert order_score(ordered(shapes, world_size), world_size) <= order_score(shapes, world_size)


def test_best_fill_finds_perfect_fills_that_greedy_misses() -> None:
    assert best_fill(9, [4, 3, 1], [9, 9, 0]) == [0, 3, 0]
    assert best_fill(9, [4, 3, 1], [9, 9, 9]) == [2, 0, 1]
    assert best_fill(2, [4, 3], [1, 1]) == [0, 0]
    assert best_fill(10, [6, 5], [1, 1]) == [1, 0]
    assert sum(best_fill(10**9, list(range(1, 2000)), [1] * 1999)) > 0


def test_packing_reaches_the_lower_bound() -> None:
    # 48 bins of (18, 18, 6) and 16 of (14, 14, 14): longest-first ends at 46.
    sizes = [18, 18, 14, 6] * 48
    bins = balanced(sizes, 64, above=46)
    assert bins is not None
    loads = [0] * 64
    for size, number in zip(sizes, bins, strict=True):
        loads[number] += size
    assert set(loads) == {42}
    assert pack([5, 5, 5], 2, 5) is None
    assert balanced([5, 5, 5], 2, above=10) is None
