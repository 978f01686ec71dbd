"""The batch equation and what it says when it does not come out."""

import pytest

from mars_ds.errors import ConfigError
from mars_ds.planning.batch import plan_batch


@pytest.mark.parametrize("world_size", [1, 8, 16, 32, 64])
def test_accumulation_follows(world_size: int) -> None:
    plan = plan_batch(512, 8, world_size)
    assert plan.accumulation_steps == 64 // world_size
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    assert plan.equation() == f"512 sequences = 8 micro-batch x {64 // world_size} accumulation x {ranks}"


def test_a_batch_that_does_not_divide_teaches() -> None:
    with pytest.raises(ConfigError) as error:
        plan_batch(480, 7, 8)
    text = str(error.value)
    assert "480 = micro_batch 7 x accumulation x 8 ranks" in text
    assert "nearest global batch: 448 or 504" in text
    assert "batch.micro_batch: 5 or 6" in text
    with pytest.raises(ConfigError, match="7 ranks do not divide 480, so no micro_batch does"):
        plan_batch(480, 8, 7)
