"""What hangs or breaks peers: odd shapes, empty shards, unused and frozen parameters, bad gradients, DeepSpeed's traps."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mars_ds.optim import OptimizerConfig, build_optimizer
from tests.ranks import run_on_ranks
from tests.zero import cases

STAGES = (0, 1, 2, 3)


class Odd(nn.Module):
    """Fewer elements than ranks in places: one-row, one-column and one-element matrices, a convolution, an unused
    and a frozen parameter, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.row = nn.Linear(6, 1, bias=False)
        self.column = nn.Linear(1, 6, bias=False)
        self.one = nn.Linear(1, 1)
        self.conv = nn.Conv2d(1, 3, (2, 3), bias=False)
        self.unused = nn.Linear(3, 5)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids))
        x = x + self.column(self.one(self.row(x)))
        x = x + self.conv(x.view(-1, 1, 2, 3)).sum(dim=(1, 2, 3)).unsqueeze(1)
        return nn.functional.cross_entropy(self.head(x).float(), labels)


def ids_and_labels(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (8,), generator=generator), torch.randint(0, 7, (8,), generator=generator)


def odd_config(kind: str) -> OptimizerConfig:
    matrix = {"ns_dtype": "float32"} if kind in ("mars-m", "mars-shampoo") else {}
    return OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.05, **matrix)


KINDS = ("mars-m", "mars-adamw", "mars-shampoo")


def odd_runs(rank: int, world_size: int) -> dict:
    import mars_ds

    cases.join_quietly()
    found: dict[Any, Any] = {}
    for stage in STAGES:
        for kind in KINDS:
            config = cases.Wrapper(stage, "fp32", "fp32").config(world_size) | {
                "train_micro_batch_size_per_gpu": 8 // world_size
            }
            engine = mars_ds.initialize(Odd(), odd_config(kind), config)
            micro = 8 // world_size
            for step in range(4):
                ids, labels = ids_and_labels(step)
                engine.backward(engine(ids[rank * micro :][:micro], labels[rank * micro :][:micro]))
                engine.step()
            found[stage, kind] = cases.gather_masters(engine)
    return found if rank == 0 else {}


@cache
def odd_results(world_size: int) -> dict:
    return run_on_ranks(world_size, odd_runs)[0]


@cache
def odd_reference(kind: str) -> dict[str, Tensor]:
    model = Odd()
    optimizer = build_optimizer(model.named_parameters(), odd_config(kind))
    for step in range(4):
        optimizer.zero_grad()
        model(*ids_and_labels(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 8])
def test_odd_shapes_on_more_ranks_than_matrices(world_size: int, stage: int, kind: str) -> None:
    got, want = odd_results(world_size)[stage, kind], odd_reference(kind)
    assert got.keys() == want.keys()
    assert "frozen.weight" not in want
    assert "head.weight" not in want
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def bad_gradients(rank: int, world_size: int) -> list[dict]:
    """One rank's gradient is NaN or inf: the step is skipped alike everywhere and no state changes."""
    import mars_ds
    from tests.zero.test_exact import state_copy

    cases.join_quietly()
    found = []
    offloaded = cases.Wrapper(3, "bf16", "fp32", "cpu", "cpu")
    for wrapper in [*cases.WRAPPERS, offloaded]:
        for poison in (float("nan"), float("inf")):
            engine = mars_ds.initialize(cases.Toy(), cases.optimizer_config("mars-m"), wrapper.config(world_size))
            cases.run_window(engine, rank, world_size, 0)
            counted, before = engine.skipped_steps, state_copy(engine)
            hook = engine.module.fc.weight.register_hook(lambda g, p=poison: g * p) if rank == 1 else None
            cases.run_window(engine, rank, world_size, 1)
            skipped = not engine.was_step_applied() and engine.skipped_steps == counted + 1
            if hook is not None:
                hook.remove()
            after = state_copy(engine)
            cases.run_window(engine, rank, world_size, 1)
            found.append(
                {
                    "skipped": skipped,
                    "identical": all(torch.equal(before[k], after[k]) for k in before),
                    "goes on": engine.was_step_applied()
                    and all(bool(torch.isfinite(v).all()) for v in cases.gather_masters(engine).values()),
                }
            )
    return found


def test_a_bad_gradient_on_one_rank_is_skipped_by_all_and_changes_nothing() -> None:
    for rank in run_on_ranks(2, bad_gradients):
        assert all(facts == {"skipped": True, "identical": True, "goes on": True} for facts in rank)


def traps(rank: int, world_size: int) -> dict:
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    import mars_ds

    cases.join_quietly()
    found: dict[str, Any] = {}
    # Stage 0 in bf16 steps once while it initializes.
    engine = mars_ds.initialize(
        cases.Toy(), cases.optimizer_config("adamw"), cases.Wrapper(0, "bf16", "bf16").config(world_size)
    )
    start = {n: p.detach().to(torch.bfloat16).float() for n, p in cases.Toy().named_parameters()}
    found["no phantom step"] = all(torch.equal(v, start[n]) for n, v in cases.gather_masters(engine).items())
    found["counters at zero"] = {s["step"] for s in engine.mars.state.values()}
    # States of every group exist before the first step, so that DeepSpeed links them all.
    engine = mars_ds.initialize(
        cases.Toy(), cases.optimizer_config("mars-m"), cases.Wrapper(2, "bf16", "bf16").config(world_size)
    )
    for step in range(2):
        cases.run_window(engine, rank, world_size, step)
    shapes = {}
    for name, p in engine.module.named_parameters():
        value = safe_get_full_optimizer_state(p, "exp_avg")
        shapes[name] = tuple(value.shape) == tuple(p.shape)
    found["safe_get_full_optimizer_state"] = all(shapes.values())
    # Stage 3: one update per optimizer step whatever the number of sub-groups and micro-batches.
    engine = mars_ds.initialize(
        cases.Toy(), cases.optimizer_config("mars-m"), cases.Wrapper(3, "bf16", "fp32").config(world_size, 3)
    )
    for step in range(2):
        cases.run_window(engine, rank, world_size, step, 3)
    found["sub-groups"] = len(engine.optimizer.fp16_groups)
    found["one update a step"] = {s["step"] for s in engine.mars.state.values()}
    # zero.Init: parameters are partitioned, and empty, before the optimizer sees them.
    reference = cases.through_engine(rank, world_size, cases.Wrapper(3, "bf16", "fp32"), "mars-m", steps=3)
    config = cases.Wrapper(3, "bf16", "fp32").config(world_size)
    with deepspeed.zero.Init(
        config_dict_or_path=config | {"train_batch_size": cases.GLOBAL_BATCH}, dtype=torch.float32
    ):
        model = nn.Module.__new__(cases.Toy)
        nn.Module.__init__(model)
        for name, module in (
            ("wte", nn.Embedding(cases.VOCAB, cases.WIDTH)),
            ("fc", nn.Linear(cases.WIDTH, 41)),
            ("ln", nn.LayerNorm(41)),
            ("proj", nn.Linear(41, cases.WIDTH, bias=False)),
            ("square", nn.Linear(cases.WIDTH, cases.WIDTH, bias=False)),
            ("gate", nn.Linear(cases.WIDTH, 1, bias=False)),
        ):
            setattr(model, name, module)
    values = dict(cases.Toy().named_parameters())
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
            if rank == 0:
                p.data.copy_(values[name].data)
    engine = mars_ds.initialize(model, cases.optimizer_config("mars-m"), config)
    found["rules under zero.Init"] = [(g["role"], len(g["names"])) for g in engine.mars.param_groups]
    for step in range(3):
        cases.run_window(engine, rank, world_size, step)
    got = cases.gather_masters(engine)
    found["zero.Init equals no zero.Init"] = all(torch.equal(got[n], v) for n, v in reference.items())
    return found


@cache
def trap_results() -> list[dict]:
    return run_on_ranks(2, traps)


@pytest.mark.parametrize(
    ("trap", "want"),
    [
        ("no phantom step", True),
        ("counters at zero", {0}),
        ("safe_get_full_optimizer_state", True),
        ("sub-groups", 2),
        ("one update a step", {2}),
        ("rules under zero.Init", [("matrix", 4), ("embedding", 1), ("vector", 3)]),
        ("zero.Init equals no zero.Init", True),
    ],
)
def test_a_trap_of_deepspeed(trap: str, want: Any) -> None:
    for rank in trap_results():
        if trap == "sub-groups":
            assert rank[trap] >= want
        else:
            assert rank[trap] == want


def test_explicit_keys_are_asked_for() -> None:
    import mars_ds

    with pytest.raises(ValueError, match="gradient_clipping must be written out"):
        mars_ds.initialize(cases.Toy(), cases.optimizer_config("mars-m"), {"train_micro_batch_size_per_gpu": 1})
