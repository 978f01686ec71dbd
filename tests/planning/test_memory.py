"""Estimates of what exists for a moment: activations against what autograd saves, and the peak's phases."""

from math import prod
from pathlib import Path

import pytest
import torch

from mars_ds.config import RunConfig, load_config
from mars_ds.model.gpt2 import parameter_shapes
from mars_ds.optim.state import required_buffers
from mars_ds.planning.memory import activation_bytes, checkpoint_bytes, memory_plan, saved_by_block, with_other
from mars_ds.planning.state import Item
from mars_ds.planning.step_layout import step_layout
from mars_ds.training.model import build_model, gpt2_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 3])
def test_what_autograd_keeps_of_the_blocks(config_file: Path, dtype: str, layers: int) -> None:
    config = load_config(config_file, ["model.width=64", "model.num_heads=4", f"precision.dtype={dtype}"])
    saved = [_saved_bytes(with_other(config, "model", num_layers=count)) for count in (layers, layers + 1)]
    assert saved[1] - saved[0] == pytest.approx(saved_by_block(config, 4), rel=0.02)


def _saved_bytes(config: RunConfig) -> int:
    model = build_model(config).module.to(getattr(torch, config.precision.dtype))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 320, (4, 33))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
    assert loss.requires_grad
    return sum(kept.values())


def test_the_peak_is_what_is_always_there_and_the_larger_phase() -> None:
    from mars_ds.planning.memory import MemoryPlan

    items = (
        Item("state", 100),
        Item("activations", 50, False, ("backward",), exact=False),
        Item("update", 70, False, ("step",), exact=False),
        Item("copy", 7, True),
    )
    plan = MemoryPlan(items, 0, True)
    assert (plan.peak(), plan.peak(at_least=True), plan.peak(on_host=True)) == (170, 100, 7)


def test_checkpointing_stages_and_micro_batches_lower_the_peak() -> None:
    config = load_config(CONFIGS / "xl_mars_m.yaml")
    shapes = parameter_shapes(gpt2_config(config.model))

    def peak(stage: int, micro_batch: int, checkpointing: str) -> int:
        changed = with_other(with_other(config, "zero", stage=stage), "model", activation_checkpointing=checkpointing)
        return memory_plan(step_layout(changed, shapes, 8), micro_batch, 64 // micro_batch).peak()

    by_stage = [peak(stage, 8, "full") for stage in (1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    kinds = [peak(1, 8, kind) for kind in ("none", "selective", "full")]
    assert kinds == sorted(kinds, reverse=True)
    activations = [
        dict(activation_bytes(with_other(config, "model", activation_checkpointing=kind), 8))["activations"]
        for kind in ("none", "selective", "full")
    ]
    # 32 bytes a token and unit of width in each of 48 blocks.
    assert [round(size / 1e9, 1) for size in activations] == [20.4, 14.5, 1.9]
    assert peak(1, 4, "none") < kinds[0]


def test_a_checkpoint_holds_each_element_once() -> None:
    config = load_config(CONFIGS / "small_mars_m.yaml")
    shapes = parameter_shapes(gpt2_config(config.model))
    sizes = set()
    for stage, world_size in ((0, 2), (1, 1), (1, 7), (3, 5)):
        changed = with_other(config, "zero", stage=stage)
        sizes.add(checkpoint_bytes(step_layout(changed, shapes, world_size)))
    plan = step_layout(config, shapes, 1)
    expected = sum(
        prod(shape) * (4 + sum(d.itemsize for d in required_buffers(group.settings, torch.float32).values()))
        for group in plan.groups
        for shape in group.shapes.values()
    )
    assert sizes == {expected}
