"""Predicted bytes by collective against those counted on live engines."""

from functools import cache

import pytest

from mars_ds.planning.collectives import step_traffic
from mars_ds.planning.step_layout import step_layout
from tests.planning.state_cases import COLLECTIVE_CASES, Case, measure_collectives, model_of
from tests.ranks import run_on_ranks
from tests.zero.counting import Costs

# Sums beside the plan: norms and overflow (8 bytes each) and one number a parameter for the per-tensor clip.
SMALL_SUMS_BYTES = 1000


@cache
def measured(world_size: int) -> list[dict[Case, Costs]]:
    return run_on_ranks(world_size, measure_collectives)


@pytest.mark.parametrize("world_size", [3])
def test_bytes_by_collective(world_size: int) -> None:
    wrong = []
    for rank, found in enumerate(measured(world_size)):
        for case in COLLECTIVE_CASES:
            config = case.sized(world_size)
            shapes = {name: tuple(p.shape) for name, p in model_of(case, config).named_parameters()}
            traffic = step_traffic(step_layout(config, shapes, world_size), case.micro_batches, rank)
            planned = dict.fromkeys(found[case].received_bytes, 0)
            for item in traffic:
                planned[item.collective] = planned.get(item.collective, 0) + item.received_bytes
            for name, count in found[case].received_bytes.items():
                # The count rounds each call down; ours are exact.
                slack = 0 if name == "all_to_all_single" else 8 * found[case].calls[name]
                allowed = SMALL_SUMS_BYTES if name == "all_reduce" else slack
                if not -slack <= count - planned[name] <= allowed:
                    wrong.append((rank, case, name, planned[name], count))
            wrong += [
                (rank, case, name, size, 0) for name, size in planned.items() if size and not found[case].calls[name]
            ]
    assert not wrong, "\n".join(map(str, wrong))
