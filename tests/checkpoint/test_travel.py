"""State travels: any stage and world size to any other, offload on and off, every element equal by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.zero import cases

BUFFERS = ("exp_avg", "exp_avg_sq", "last_grad", "next_grad")
# (world size, wrapper): 2 -> 4 -> 1 -> 3 ranks, stage 1 -> 3 -> 2 -> 3 with and without offload -> 0
ROUTE = [
    (2, cases.Wrapper(1, "fp32", "fp32")),
    (4, cases.Wrapper(3, "fp32", "fp32")),
    (1, cases.Wrapper(2, "fp32", "fp32", "cpu")),
    (3, cases.Wrapper(3, "fp32", "fp32", "cpu", "cpu")),
    (2, cases.Wrapper(0, "fp32", "fp32")),
]
SETTINGS = [("mars-m", "exact"), ("mars-adamw", "approx")]


def whole_state(engine: Any) -> dict[str, Any]:
    """Every buffer of every parameter put together by name, and its step."""
    import torch.distributed as dist

    pieces = []
    for tensor, local in engine.mars_sharding.local_shards.items():
        state = engine.mars.state[tensor]
        for f in local.shard.fragments:
            held = {"master": f.view(tensor.detach().view(-1)).cpu().clone(), "step": state["step"]}
            held |= {b: f.view(state[b]).cpu().clone() for b in BUFFERS if b in state}
            pieces.append((f.name, f.shape, f.start, held))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    whole: dict[str, Any] = {}
    for name, shape, start, held in (p for part in gathered for p in part):
        for key, value in held.items():
            if key == "step":
                whole[f"{name}.step"] = value
                continue
            flat = whole.setdefault(f"{name}.{key}", torch.full((torch.Size(shape).numel(),), torch.nan))
            flat[start : start + value.numel()] = value
    return whole


def leg(rank: int, world_size: int, wrapper: cases.Wrapper, root: str, leg_index: int) -> dict[str, Any]:
    """Loads what the last leg saved, takes two steps, and saves; for each setting."""
    import mars_ds
    from mars_ds.checkpoint.api import load_checkpoint, save_checkpoint
    from mars_ds.zero.lookahead import lookahead

    cases.join_quietly()
    found: dict[str, Any] = {}
    for kind, mode in SETTINGS:
        config = cases.optimizer_config(kind, mode=mode)
        engine = mars_ds.initialize(cases.Toy(), config, wrapper.config(world_size))
        folder = f"{root}/{kind}"
        if leg_index:
            reader = load_checkpoint(engine, folder)
            assert reader.step == 2 * leg_index
            found[kind, "loaded"] = whole_state(engine)
        for step in range(2 * leg_index, 2 * leg_index + 2):
            if mode == "exact":
                with lookahead(engine):
                    cases.run_window(engine, rank, world_size, step + 1)
            cases.run_window(engine, rank, world_size, step)
        save_checkpoint(engine, folder, 2 * leg_index + 2)
        found[kind, "saved"] = whole_state(engine)
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("travel")
    return [run_on_ranks(w, leg, wrapper, str(root), i)[0] for i, (w, wrapper) in enumerate(ROUTE)]


@pytest.mark.parametrize("kind", [kind for kind, _ in SETTINGS])
@pytest.mark.parametrize("index", range(1, len(ROUTE)))
def test_every_element_arrives(legs: list[dict[str, Any]], index: int, kind: str) -> None:
    sent, got = legs[index - 1][kind, "saved"], legs[index][kind, "loaded"]
    assert got.keys() == sent.keys()
    for key, value in sent.items():
        if isinstance(value, Tensor):
            assert torch.equal(got[key], value), key
            assert torch.isfinite(value).all(), key
        else:
            assert got[key] == value, key
    assert "fc.weight.last_grad" in sent
    assert ("fc.weight.next_grad" in sent) == (kind == "mars-m")


@pytest.mark.parametrize(("kind", "mode"), SETTINGS)
def test_the_travelled_run_equals_one_process(legs: list[dict[str, Any]], kind: str, mode: str) -> None:
    want = cases.single_device(kind, mode=mode, steps=2 * len(ROUTE))
    for name, value in want.items():
        got = legs[-1][kind, "saved"][f"{name}.master"].view_as(value)
        assert float((got - value).norm() / value.norm()) <= 1e-4, name


def same_world(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """DeepSpeed's own save and load, and ours, at the same world size: the next steps are bit-identical."""
    import mars_ds
    from mars_ds.checkpoint.api import load_checkpoint, save_checkpoint

    cases.join_quietly()
    found = {}
    for wrapper in (
        cases.Wrapper(1, "bf16", "fp32"),
        cases.Wrapper(2, "bf16", "bf16"),
        cases.Wrapper(3, "bf16", "fp32"),
    ):
        config = cases.optimizer_config("mars-m")
        first = mars_ds.initialize(cases.Toy(), config, wrapper.config(world_size))
        # Settings of a later group that differ from those of group 0.
        first.mars.param_groups[-1].update(lr=3e-3, weight_decay=0.07)
        first.mars.observer = None
        for step in range(3):
            cases.run_window(first, rank, world_size, step)
        first.save_checkpoint(f"{folder}/deepspeed/{wrapper.id}")
        save_checkpoint(first, f"{folder}/ours/{wrapper.id}", 3)
        saved = whole_state(first)
        for step in range(3, 6):
            cases.run_window(first, rank, world_size, step)
        want = whole_state(first)
        for road in ("deepspeed", "ours"):
            second = mars_ds.initialize(cases.Toy(), config, wrapper.config(world_size))
            if road == "ours":
                load_checkpoint(second, f"{folder}/ours/{wrapper.id}")
            else:
                second.load_checkpoint(f"{folder}/deepspeed/{wrapper.id}")
            loaded = whole_state(second)
            settings = [(g["lr"], g["weight_decay"]) for g in second.mars.param_groups]
            assert settings == [(1e-2, 0.05), (1e-2, 0.05), (3e-3, 0.07)], (road, settings)
            for step in range(3, 6):
                cases.run_window(second, rank, world_size, step)
            got = whole_state(second)
            found[f"{road} {wrapper.id}"] = equal(loaded, saved) and equal(got, want)
    return found


def flags(rank: int, world_size: int, folder: str) -> list[set[bool]]:
    """Exact mode saved between two steps: whether the coming step starts with c = g travels too."""
    import mars_ds
    from mars_ds.checkpoint.api import load_checkpoint, save_checkpoint

    cases.join_quietly()
    config = cases.optimizer_config("mars-m", mode="exact")
    found = []
    for value in (True, False):
        first = mars_ds.initialize(cases.Toy(), config, cases.Wrapper(1, "fp32", "fp32").config(world_size))
        for state in first.mars.state.values():
            if "next_grad" in state:
                state["restart"] = value
        save_checkpoint(first, f"{folder}/{value}", 1)
        second = mars_ds.initialize(cases.Toy(), config, cases.Wrapper(3, "fp32", "fp32").config(world_size))
        load_checkpoint(second, f"{folder}/{value}")
        held = {
            second.mars.state[tensor]["restart"]
            for tensor, local in second.mars_sharding.local_shards.items()
            if "next_grad" in second.mars.state[tensor] and local.shard.fragments
        }
        found.append(held)
    return found


def test_flags_of_exact_mode_travel(tmp_path: Path) -> None:
    for rank in run_on_ranks(2, flags, str(tmp_path)):
        assert rank == [{True}, {False}]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a
    )


def test_same_world_size_is_bit_identical_by_either_road(tmp_path: Path) -> None:
    for rank in run_on_ranks(2, same_world, str(tmp_path)):
        assert len(rank) == 6
        assert all(rank.values()), rank
