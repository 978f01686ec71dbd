"""The plan card for shipped and tiny configs, from shapes alone."""

from pathlib import Path

from mars_ds.config import load_config
from mars_ds.model.gpt2 import parameter_shapes
from mars_ds.optim.grouping import plan_groups
from mars_ds.planning.batch import plan_batch
from mars_ds.planning.card import newton_schulz_plans, plan_card
from mars_ds.planning.plan import RunPlan
from mars_ds.training.model import gpt2_config

CONFIGS = Path(__file__).parents[2] / "configs"


def test_xl_on_64_ranks_cuts_32_matrices() -> None:
    config = load_config(CONFIGS / "xl_mars_m.yaml")
    shapes = parameter_shapes(gpt2_config(config.model))
    (plan,) = newton_schulz_plans(config, shapes, 64)
    assert len(plan.matrices) == 192
    assert sum(m.moves for m in plan.matrices) == 32
    # bf16 both ways: the 492 MB of the cost model, and 55.1 TFLOP of Newton-Schulz a step.
    assert plan.exchanged_elements() * 2 == 491_520_000
    assert round(sum(plan.flops) / 1e12, 1) == 55.1
    assert [plan.exchanged_elements() for plan in newton_schulz_plans(config, shapes, 8)] == [0]


def test_the_card_says_what_the_run_is(config_file: Path) -> None:
    config = load_config(config_file)
    shapes = parameter_shapes(gpt2_config(config.model))
    text = plan_card(RunPlan(config, plan_batch(12, 2, 3), shapes, 1000, num_windows=240))
    for part in (
        "12 sequences = 2 micro-batch x 2 accumulation x 3 ranks",
        "= 384 tokens",
        "12 steps, 4.6k tokens, 0.60 epochs of the data; cosine",
        "8 matrices, each on one owner",
        "ZeRO stage 1 over 3 ranks",
    ):
        assert part in text
    assert [(group.role, len(group.shapes)) for group in plan_groups(shapes, config.optimizer)] == [
        ("matrix", 8),
        ("embedding", 2),
        ("vector", 5),
    ]
