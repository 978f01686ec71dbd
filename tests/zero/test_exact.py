"""Exact mode through the engine: what it captures, what it leaves alone, and what a bad next batch does."""

import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.zero import cases

WRAPPERS = [w for w in cases.WRAPPERS if w.dtype == "fp32"] + [cases.Wrapper(1, "bf16", "fp32")]


def state_copy(engine) -> dict[str, Tensor]:
    """Every tensor and scalar of the optimizer but `next_grad`, and the weights."""
    copied = {}
    for i, (tensor, state) in enumerate(engine.mars.state.items()):
        copied[f"{i}.master"] = tensor.detach().clone()
        for key, value in state.items():
            if key not in ("next_grad", "captured"):
                copied[f"{i}.{key}"] = value.clone() if isinstance(value, Tensor) else torch.tensor(value)
    for name, p in engine.module.named_parameters():
        # Under stage 3 a parameter is its local shard; whether it is gathered just now is nobody's state.
        copied[name] = getattr(p, "ds_tensor", p).detach().clone()
    return copied


def captures(rank: int, world_size: int) -> list[dict]:
    import mars_ds
    from mars_ds.zero.lookahead import lookahead

    cases.join_quietly()
    found = []
    for wrapper in WRAPPERS:
        schedule = lambda step: 1.0 / (1 + step)  # noqa: E731
        config = cases.optimizer_config("mars-m", mode="exact")
        engine = mars_ds.initialize(cases.Toy(), config, wrapper.config(world_size, 2), schedule)
        engine.mars.observer = None
        torch.manual_seed(rank)
        before, rng = state_copy(engine), torch.get_rng_state()
        counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples)
        lr = [g["lr"] for g in engine.mars.param_groups]
        with lookahead(engine):
            torch.rand(3)
            cases.run_window(engine, rank, world_size, 5, 2)
        after, rng_after = state_copy(engine), torch.get_rng_state()
        captured = {}
        for tensor, local in engine.mars_sharding.local_shards.items():
            for f in local.shard.fragments:
                if "next_grad" in engine.mars.state[tensor]:
                    captured[f.name, f.start] = f.view(engine.mars.state[tensor]["next_grad"]).clone()
        # What a plain step on that batch would have received.
        seen: dict = {}
        plain = mars_ds.initialize(cases.Toy(), cases.optimizer_config("mars-m"), wrapper.config(world_size, 2))
        plain.mars.observer = Spy(plain.mars_sharding, seen)
        cases.run_window(plain, rank, world_size, 5, 2)
        found.append(
            {
                "same": all(torch.equal(before[k], after[k]) for k in before) and before.keys() == after.keys(),
                "counters": counters
                == (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples),
                "lr": lr == [g["lr"] for g in engine.mars.param_groups],
                "rng": torch.equal(rng, rng_after),
                "captured": sorted(captured) == sorted(k for k in seen if k in captured) and len(captured) > 0,
                "equal": all(torch.equal(captured[k], seen[k]) for k in captured),
            }
        )
    return found


class Spy:
    """Takes the gradients that a step receives."""

    def __init__(self, sharding, seen: dict) -> None:
        self.sharding, self.seen = sharding, seen
        self.uncorrected: list[bool] = []

    def begin(self, group, tensors, gradients) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            for f in self.sharding.fragments(tensor):
                self.seen[f.name, f.start] = f.view(gradient).clone()

    def corrected(self, tensors, gradients) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            for f in self.sharding.fragments(tensor):
                self.uncorrected.append(torch.equal(f.view(gradient), self.seen[f.name, f.start]))

    def finish(self, group, directions) -> None:
        pass


@pytest.fixture(scope="module")
def on_two_ranks() -> list[list[dict]]:
    return run_on_ranks(2, captures)


@pytest.mark.parametrize("index", range(len(WRAPPERS)), ids=[w.id for w in WRAPPERS])
@pytest.mark.parametrize("fact", ["same", "counters", "lr", "rng", "captured", "equal"])
def test_a_capture_is_the_plain_gradient_and_moves_nothing_else(on_two_ranks, index: int, fact: str) -> None:
    assert all(rank[index][fact] for rank in on_two_ranks)


def bad_next_batch(rank: int, world_size: int) -> list[dict[str, bool]]:
    """inf in one rank's next batch: dropped on all ranks; the step that needs it uses c = g."""
    import mars_ds
    from mars_ds.zero.lookahead import lookahead

    cases.join_quietly()
    found = []
    for wrapper in (
        cases.Wrapper(1, "bf16", "fp32"),
        cases.Wrapper(2, "bf16", "bf16"),
        cases.Wrapper(3, "bf16", "fp32"),
    ):
        config = cases.optimizer_config("mars-m", mode="exact")
        engine = mars_ds.initialize(cases.Toy(), config, wrapper.config(world_size))
        engine.mars.observer = None
        with lookahead(engine):
            cases.run_window(engine, rank, world_size, 1)
        cases.run_window(engine, rank, world_size, 0)
        poison = engine.module.square.weight.register_hook(lambda g: g * float("inf")) if rank == 1 else None
        with lookahead(engine):
            cases.run_window(engine, rank, world_size, 2)
        if poison is not None:
            poison.remove()
        cases.run_window(engine, rank, world_size, 1)
        applied = engine.was_step_applied()
        with lookahead(engine):
            cases.run_window(engine, rank, world_size, 3)
        watch = engine.mars.observer = Spy(engine.mars_sharding, {})
        cases.run_window(engine, rank, world_size, 2)
        finite = all(torch.isfinite(v).all() for v in cases.gather_masters(engine).values())
        found.append(
            {
                "applied": applied,
                "c equals g": all(watch.uncorrected) and bool(watch.uncorrected),
                "finite": bool(finite),
            }
        )
    return found


def test_a_next_batch_with_inf_is_dropped_on_all_ranks() -> None:
    for rank in run_on_ranks(2, bad_next_batch):
        for facts in rank:
            assert facts == {"applied": True, "c equals g": True, "finite": True}


def forward_backward_flops(rank: int, world_size: int) -> dict[str, int]:
    """FLOPs of one step of mars-adamw, whose own arithmetic has no matrix product."""
    from torch.utils.flop_counter import FlopCounterMode

    import mars_ds
    from mars_ds.zero.lookahead import lookahead

    cases.join_quietly()
    found = {}
    for mode in ("approx", "exact"):
        config = cases.optimizer_config("mars-adamw", mode=mode)
        engine = mars_ds.initialize(cases.Toy(), config, cases.Wrapper(2, "bf16", "fp32").config(world_size, 2))
        with FlopCounterMode(display=False) as counter:
            if mode == "exact":
                with lookahead(engine):
                    cases.run_window(engine, rank, world_size, 1, 2)
            cases.run_window(engine, rank, world_size, 0, 2)
        found[mode] = counter.get_total_flops()
    return found


def test_exact_mode_costs_twice_the_forward_and_backward() -> None:
    for flops in run_on_ranks(2, forward_backward_flops):
        assert flops["approx"] > 0
        assert flops["exact"] == 2 * flops["approx"]
