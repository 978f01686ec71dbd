"""What cannot fit is refused with the first change that would fit; what may not fit is only warned of."""

from pathlib import Path

import pytest

from mars_ds.config import load_config
from mars_ds.errors import ConfigError
from mars_ds.model.gpt2 import flops_per_token, parameter_shapes
from mars_ds.planning.batch import plan_batch
from mars_ds.planning.fitting import Available, first_change, fits, refuse_unfit
from mars_ds.planning.plan import RunPlan
from mars_ds.training.model import gpt2_config

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30


def planned(world_size: int, *overrides: str) -> RunPlan:
    config = load_config(CONFIGS / "xl_mars_m.yaml", overrides)
    shape = gpt2_config(config.model)
    batch = plan_batch(config.global_batch, config.batch.micro_batch, world_size)
    return RunPlan(config, batch, parameter_shapes(shape), flops_per_token(shape))


def room(gib: float, shared: bool = False, host: float | None = None) -> Available:
    return Available(int(gib * GIB), None if host is None else int(host * GIB), shared, "test card")


def test_a_run_that_fits_passes() -> None:
    assert refuse_unfit(planned(8), room(74)) is None


@pytest.mark.parametrize(
    "world_size, gib, overrides, change",
    [
        (8, 30, ("model.activation_checkpointing=none",), "batch.micro_batch=4"),
        (
            64,
            7.3,
            (
                "batch.global_batch_sequences=64",
                "batch.micro_batch=1",
                "model.activation_checkpointing=none",
                "zero.stage=2",
            ),
            "model.activation_checkpointing=selective",
        ),
        (8, 12, ("batch.micro_batch=1",), "zero.stage=2"),
        (8, 7, ("batch.micro_batch=1", "zero.stage=3"), "zero.offload=optimizer"),
    ],
)
def test_the_first_change_in_the_order_of_the_planner(
    world_size: int, gib: float, overrides: tuple[str, ...], change: str
) -> None:
    plan = planned(world_size, *overrides)
    assert not fits(plan, room(gib))
    assert first_change(plan, room(gib)) == change


def test_more_ranks_where_nothing_else_is_left() -> None:
    plan = planned(8, "batch.micro_batch=1", "zero.stage=3", "zero.offload=optimizer_and_parameters")
    host = plan.memory.peak(on_host=True)
    assert first_change(plan, Available(80 * GIB, host * 9 // 10, False, "test card")) == "16 ranks"


def test_changes_are_put_together_when_none_helps_alone() -> None:
    change = first_change(planned(8, "model.activation_checkpointing=none", "batch.micro_batch=16"), room(9))
    assert change is not None and change.startswith("batch.micro_batch=1, ") and "zero.stage=" in change


def test_refused_only_when_state_and_gradients_alone_are_too_much() -> None:
    with pytest.raises(ConfigError) as error:
        refuse_unfit(planned(8), room(10))
    text = str(error.value)
    assert "state and gradients alone are" in text and "10.0 GiB (10,737,418,240 bytes) of test card" in text
    assert "would fit: zero.stage=3" in text
    warning = refuse_unfit(planned(8, "model.activation_checkpointing=none"), room(30))
    assert warning is not None and warning.startswith("may not fit: rank 0, the peak is estimated at")


def test_on_a_cpu_both_memories_are_one_and_offload_is_no_way_out() -> None:
    # Pages of a bucket that are never written take no host memory.
    plan = planned(8, "zero.offload=optimizer", "zero.stage=2", "zero.reduce_bucket_elements=100_000_000")
    memory = plan.memory
    bucket = next(item.num_bytes for item in memory.items if item.name == "reduce bucket")
    assert bucket == 4 * 100_000_000
    device, host = plan.memory.peak(), plan.memory.peak(on_host=True)
    together = device + host - bucket
    assert not fits(plan, Available(together - 1, None, True, "host memory"))
    assert fits(plan, Available(together, None, True, "host memory"))
    assert fits(plan, Available(device, host, False, "card"))
    assert not fits(plan, Available(device, host - 1, False, "card"))


def test_nothing_helps() -> None:
    with pytest.raises(ConfigError, match="a smaller model"):
        refuse_unfit(planned(8), room(0.001))
