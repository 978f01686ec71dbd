"""What a step costs, counted inside `Mars.step()` of real engines: work, bytes, collectives, memory.

One spawn per world size measures every case; each test looks at one number of each.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_ds.optim import OptimizerConfig, build_optimizer
from mars_ds.optim.newton_schulz import newton_schulz_flops
from mars_ds.optim.routing import matrix_shape
from mars_ds.optim.state import required_buffers
from tests.ranks import run_on_ranks
from tests.zero import cases
from tests.zero.counting import Costs, CountedStep, counted

WORLDS = (2, 3, 4)
# Micro-batches that divide a rank's part of the global batch.
ACCUMULATION = {2: 3, 3: 2, 4: 3}


class Aligned(nn.Module):
    """Twelve equal matrices, which no cut of a flat partition touches on 2, 3 or 4 ranks, and one gain."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(cases.VOCAB, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(12))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) * self.gain
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy((x @ self.wte.weight.T).float(), labels)


MODELS = {"toy": cases.Toy, "aligned": Aligned}


@dataclass(frozen=True)
class Case:
    """One engine whose third step is counted."""

    wrapper: cases.Wrapper
    kind: str = "mars-m"
    model: str = "toy"
    accumulate: bool = False

    @property
    def id(self) -> str:
        return f"{self.wrapper.id}-{self.kind}-{self.model}{'-accumulate' if self.accumulate else ''}"


W = cases.Wrapper
CASES = [
    Case(W(0, "fp32", "fp32")),
    Case(W(0, "bf16", "bf16")),
    Case(W(1, "fp32", "fp32")),
    Case(W(1, "bf16", "fp32")),
    Case(W(2, "fp32", "fp32")),
    Case(W(2, "fp32", "fp32"), accumulate=True),
    Case(W(3, "fp32", "fp32")),
    Case(W(3, "fp32", "fp32"), accumulate=True),
    Case(W(1, "fp32", "fp32", "cpu")),
    Case(W(2, "fp32", "fp32", "cpu")),
    Case(W(3, "fp32", "fp32", "cpu")),
    Case(W(3, "fp32", "fp32", "cpu", "cpu")),
    Case(W(2, "fp32", "fp32"), model="aligned"),
    Case(W(0, "fp32", "fp32"), "mars-shampoo"),
    Case(W(2, "fp32", "fp32"), "mars-shampoo"),
    Case(W(3, "fp32", "fp32"), "mars-shampoo"),
    Case(W(1, "fp32", "fp32"), "muon"),
    Case(W(3, "fp32", "fp32"), "moonlight"),
    Case(W(1, "fp32", "fp32"), "mars-adamw"),
    Case(W(3, "fp32", "fp32"), "lion"),
]
MATRIX_CASES = [c for c in CASES if c.kind not in ("mars-adamw", "mars-lion", "lion")]


@dataclass(frozen=True)
class Measured:
    """What one rank saw in the third step.

    Attributes:
        total: Costs of all `step()` calls of the step.
        call_roles: Role of the param group of each call.
        rules: Role -> rule.
        stored: (buffer, role) -> elements of it on this rank, padding excluded.
        buffers: Role -> every buffer that exists for it.
        needed: Role -> the buffers that its rule reads.
        elements: Role -> elements of its parameters.
        predicted_flops: By the plans, of each rank.
        predicted_bytes: By the plans, sent by each rank.
        away: Elements of orthogonalized matrices that do not lie at their owner.
        straddling: The same over the matrices that lie on more than one rank.
        matrices: True shapes of the orthogonalized matrices.
        straddlers: How many of them lie on more than one rank.
    """

    total: Costs
    call_roles: list[str]
    rules: dict[str, str]
    stored: dict[tuple[str, str], int]
    buffers: dict[str, set[str]]
    needed: dict[str, set[str]]
    elements: dict[str, int]
    predicted_flops: list[int]
    predicted_bytes: list[int]
    away: int
    straddling: int
    matrices: list[tuple[int, ...]]
    straddlers: int


def config_of(kind: str) -> OptimizerConfig:
    """Newton-Schulz as published, in bf16."""
    return OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.05)


def measure(rank: int, world_size: int, case: Case) -> Measured:
    import mars_ds

    accumulation = ACCUMULATION[world_size] if case.accumulate else 1
    torch.manual_seed(0)
    engine = mars_ds.initialize(
        MODELS[case.model](), config_of(case.kind), case.wrapper.config(world_size, accumulation)
    )
    # The start-up proof gathers samples in the first two steps.
    for step in range(2):
        cases.run_window(engine, rank, world_size, step, accumulation)
    assert engine.mars_proof.done
    counter = CountedStep(engine.mars)
    cases.run_window(engine, rank, world_size, 2, accumulation)
    return inspect(engine, counter.costs)


def inspect(engine: Any, total: Costs) -> Measured:
    sharding, optimizer = engine.mars_sharding, engine.mars
    stored: dict[tuple[str, str], int] = {}
    buffers: dict[str, set[str]] = {}
    for tensor, local in sharding.local_shards.items():
        role = optimizer.param_groups[local.group_index]["role"]
        held = sum(f.numel for f in local.shard.fragments)
        for name, value in optimizer.state[tensor].items():
            if isinstance(value, Tensor):
                assert value.numel() == local.shard.numel, (name, "a buffer is as long as its shard")
                buffers.setdefault(role, set()).add(name)
                stored[name, role] = stored.get((name, role), 0) + held
    plans = sorted(sharding.plans.items())
    away = straddling = 0
    for call, plan in plans:
        owners = {m.name: m.owner for m in plan.matrices}
        for name, held in sharding.layout.holders(call).items():
            if name in owners and not sharding.layout.replicated:
                elsewhere = sum(f.numel for rank, f in held if rank != owners[name])
                away += elsewhere
                straddling += elsewhere if len({rank for rank, _ in held}) > 1 else 0
    groups = optimizer.param_groups
    role_of_name = {name: g["role"] for g in groups for name in g["names"]}
    return Measured(
        total=total,
        call_roles=[role_of_name[next(iter(sharding.layout.holders(call)))] for call in sharding.layout.calls()],
        rules={g["role"]: g["rule"] for g in groups},
        stored=stored,
        buffers=buffers,
        needed={g["role"]: set(required_buffers(g, torch.float32)) for g in groups},
        elements={g["role"]: sum(prod(shape) for shape in g["shapes"]) for g in groups},
        predicted_flops=[sum(p.flops[r] for _, p in plans) for r in range(dist.get_world_size())],
        predicted_bytes=[sum(p.sent_bytes()[r] for _, p in plans) for r in range(dist.get_world_size())],
        away=away,
        straddling=straddling,
        matrices=[tuple(s) for g in groups if g["rule"] == "orthogonal" for s in g["shapes"]],
        straddlers=sum(p.straddlers() for _, p in plans),
    )


def measure_all(rank: int, world_size: int) -> list[Measured]:
    cases.join_quietly()
    return [measure(rank, world_size, case) for case in CASES]


@cache
def results(world_size: int) -> dict[Case, list[Measured]]:
    """Case -> what each rank measured."""
    by_rank = run_on_ranks(world_size, measure_all)
    return {case: [measured[i] for measured in by_rank] for i, case in enumerate(CASES)}


def each(cases_: list[Case]) -> Any:
    """Parametrizes by world size and case."""

    def decorate(function: Any) -> Any:
        function = pytest.mark.parametrize("case", cases_, ids=lambda c: c.id)(function)
        return pytest.mark.parametrize("world_size", WORLDS)(function)

    return decorate


@cache
def one_process_flops(kind: str, model: str) -> int:
    """Counted in a step of one device on whole tensors."""
    torch.manual_seed(0)
    module = MODELS[model]()
    optimizer = build_optimizer(module.named_parameters(), config_of(kind))
    module(*cases.batch(0)).backward()
    return counted(optimizer.step)[1].flops


@each(MATRIX_CASES)
def test_newton_schulz_runs_once_in_all(world_size: int, case: Case) -> None:
    ranks = results(world_size)[case]
    form = "nested" if case.kind == "mars-shampoo" else "standard"
    needed = sum(newton_schulz_flops(*matrix_shape(shape), form=form) for shape in ranks[0].matrices)
    flops = [measured.total.flops for measured in ranks]
    assert sum(flops) == needed == one_process_flops(case.kind, case.model)
    assert flops == ranks[0].predicted_flops


@each(CASES)
def test_state_is_stored_once_and_only_what_the_rule_reads(world_size: int, case: Case) -> None:
    ranks = results(world_size)[case]
    copies = world_size if case.wrapper.stage == 0 else 1
    for role, needed in ranks[0].needed.items():
        for measured in ranks:
            # A rank may hold no sub-group of a role at stage 3.
            assert measured.buffers.get(role, needed) == needed
        for buffer in needed:
            stored = sum(measured.stored.get((buffer, role), 0) for measured in ranks)
            assert stored == copies * ranks[0].elements[role], (buffer, role)


@each(MATRIX_CASES)
def test_bytes_on_the_wire(world_size: int, case: Case) -> None:
    ranks = results(world_size)[case]
    sent = [measured.total.sent_bytes for measured in ranks]
    received = [measured.total.received_bytes["all_to_all_single"] for measured in ranks]
    assert sum(sent) == sum(received)
    assert sent == ranks[0].predicted_bytes
    elements = sum(prod(shape) for shape in ranks[0].matrices)
    if case.wrapper.stage == 0:
        # Nothing goes in; each update goes to every other rank, in bf16.
        assert sum(sent) == 2 * elements * (world_size - 1)
    elif case.wrapper.stage == 3:
        assert sum(sent) == 4 * ranks[0].away
        # What an owner holds of its matrix is the even share, so this is 4 N (W - 1) / W up to the padding of parts.
        assert sum(sent) <= 4 * (elements - elements // world_size + len(ranks[0].matrices) * world_size)
    else:
        assert sum(sent) <= 4 * ranks[0].straddling
    assert (ranks[0].straddlers == 0) == (case.wrapper.stage == 0 or case.model == "aligned")
    assert set().union(*(measured.total.dtypes for measured in ranks)) <= {"bfloat16"}


@each(CASES)
def test_collectives_per_call_and_group(world_size: int, case: Case) -> None:
    """One all-reduce where a clip or a norm before the cast needs it, two all-to-alls."""
    for measured in results(world_size)[case]:
        expected: Counter[str] = Counter()
        for role in measured.call_roles:
            expected.update(expected_calls(case, role, measured.rules[role], measured.straddlers))
        assert measured.total.calls == expected


def expected_calls(case: Case, role: str, rule: str, straddlers: int) -> dict[str, int]:
    """Collectives of one param group in one call, whatever the number of parameters."""
    if case.wrapper.stage == 0:
        # Every rank has all it needs; only updates travel.
        return {"all_to_all_single": int(rule == "orthogonal")}
    clipped = case.kind.startswith("mars") and role in (
        ("matrix",) if case.kind == "mars-m" else ("matrix", "embedding")
    )
    norms = rule == "orthogonal" and case.kind == "mars-shampoo"
    return {"all_reduce": int(clipped or norms), "all_to_all_single": 2 * (rule == "orthogonal" and straddlers > 0)}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_cost_nothing_more(world_size: int, stage: int) -> None:
    once, accumulated = (Case(W(stage, "fp32", "fp32"), accumulate=accumulate) for accumulate in (False, True))
    found = results(world_size)
    for rank in range(world_size):
        assert found[once][rank].total == found[accumulated][rank].total
