"""Learning rates at named steps."""

import pytest
import torch

from mars_ds.config import OptimizerConfig, ScheduleSection
from mars_ds.optim import build_optimizer
from mars_ds.training.schedule import Schedule, set_learning_rates


def lrs(at: tuple[int, ...], **section: object) -> list[float]:
    schedule = Schedule.from_config(ScheduleSection(**section))
    return [schedule.lr(step, 1.0, 0.1) for step in at]


def test_cosine_with_warmup() -> None:
    got = lrs((0, 50, 100, 600, 1100), kind="cosine", steps=1100, warmup_steps=100)
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1])


def test_wsd_is_flat_then_linear() -> None:
    got = lrs((0, 10, 500, 800, 900, 1000), kind="wsd", steps=1000, warmup_steps=10, decay_fraction=0.2)
    assert got == pytest.approx([0.0, 1.0, 1.0, 1.0, 0.55, 0.1])


def test_constant() -> None:
    assert lrs((0, 5, 99), kind="constant", steps=100) == [1.0, 1.0, 1.0]


def test_warmup_and_decay_must_fit() -> None:
    with pytest.raises(ValueError, match="warmup_steps 90 and the decay of 20 steps exceed steps 100"):
        ScheduleSection(kind="wsd", steps=100, warmup_steps=90)


def test_vectors_keep_their_ratio_or_their_own_floor() -> None:
    config = OptimizerConfig(kind="mars-adamw", lr=6e-3, lr_1d=3e-3)
    parameters = [("w", torch.nn.Parameter(torch.ones(2, 2))), ("b", torch.nn.Parameter(torch.ones(2)))]
    for floor_1d, last in ((None, 1.5e-5), (3e-5, 3e-5)):
        section = ScheduleSection(kind="cosine", steps=100, warmup_steps=10, min_lr=3e-5, min_lr_1d=floor_1d)
        optimizer = build_optimizer(parameters, config)
        schedule = Schedule.from_config(section)
        matrix, vector = optimizer.param_groups
        set_learning_rates(optimizer, schedule, section, config, 10)
        assert (matrix["lr"], vector["lr"] * vector["lr_factor"]) == pytest.approx((6e-3, 3e-3))
        set_learning_rates(optimizer, schedule, section, config, 100)
        assert (matrix["lr"], vector["lr"] * vector["lr_factor"]) == pytest.approx((3e-5, last))
