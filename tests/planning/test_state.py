"""Predicted bytes of state against the storage of live tensors, item by item, at every stage."""

from functools import cache

import pytest

from mars_ds.planning.state import state_items
from mars_ds.planning.step_layout import step_layout
from tests.planning.state_cases import STATE_CASES, Case, measure_state, model_of
from tests.ranks import run_on_ranks


@cache
def measured(world_size: int) -> list[dict[Case, dict[str, int]]]:
    return run_on_ranks(world_size, measure_state)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_item_is_predicted_to_the_byte(world_size: int) -> None:
    wrong = []
    for rank, found in enumerate(measured(world_size)):
        for case in STATE_CASES[world_size]:
            config = case.sized(world_size)
            shapes = {name: tuple(p.shape) for name, p in model_of(case, config).named_parameters()}
            items = state_items(step_layout(config, shapes, world_size), rank, case.micro_batches)
            predicted = {item.name: item.num_bytes for item in items}
            if predicted != found[case]:
                names = sorted(predicted.keys() | found[case].keys())
                differing = {n: (predicted.get(n), found[case].get(n)) for n in names}
                wrong.append((rank, case, {n: v for n, v in differing.items() if v[0] != v[1]}))
    assert not wrong, "\n".join(map(str, wrong))
