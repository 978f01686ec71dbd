"""Every combination that the support table calls supported runs and equals the single-device reference."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mars_ds.optim import OptimizerConfig
from mars_ds.zero.support import Combination, UnsupportedError, check_supported, combinations, refusal, support_table
from tests.ranks import run_on_ranks
from tests.zero import cases

STEPS = 3
SUPPORTED = [c for c in combinations() if refusal(c) is None]


def wrapper_of(c: Combination) -> cases.Wrapper:
    return cases.Wrapper(c.stage, c.dtype, c.accumulation, c.offload_optimizer, c.offload_parameters)


def cell_id(c: Combination) -> str:
    return f"{c.kind}-{c.mode}-{wrapper_of(c).id}"


def all_cells(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    cases.join_quietly()
    found = [
        cases.through_engine(
            rank, world_size, wrapper_of(c), c.kind, mode=c.mode if "mars" in c.kind else None, steps=STEPS
        )
        for c in SUPPORTED
    ]
    return found if rank == 0 else []


@cache
def on_two_ranks() -> list[dict[str, Tensor]]:
    return run_on_ranks(2, all_cells)[0]


@cache
def one_process(kind: str, mode: str, dtype: str) -> dict[str, Tensor]:
    return cases.single_device(kind, mode=mode if "mars" in kind else None, steps=STEPS, dtype=dtype)


@pytest.mark.parametrize("index", range(len(SUPPORTED)), ids=[cell_id(c) for c in SUPPORTED])
def test_a_supported_cell(index: int) -> None:
    cell, got = SUPPORTED[index], on_two_ranks()[index]
    want = one_process(cell.kind, cell.mode, cell.dtype)
    start = {name: p.detach() for name, p in cases.Toy().named_parameters()}
    if cell.kind in ("mars-lion", "lion"):
        wrong = sum(((got[n] - v).abs() > cases.LR[cell.kind]).sum().item() for n, v in want.items())
        signs = STEPS * sum(v.numel() for v in want.values())
        assert wrong <= {"fp32": 1e-3, "bf16": 2e-2}[cell.dtype] * signs
        return
    for name, value in want.items():
        difference = float((got[name] - value).norm() / (value - start[name]).norm())
        # A sum of bf16 gradients of half a batch rounds differently from the gradient of the whole batch, and
        # Newton-Schulz amplifies what is small in a gradient.
        limit = {"fp32": 1e-4, "bf16": 0.06 if "adamw" in cell.kind else 0.2}[cell.dtype]
        assert difference <= limit, (name, difference)


def test_offload_equals_no_offload_in_fp32() -> None:
    by_cell = {SUPPORTED[i]: view for i, view in enumerate(on_two_ranks())}
    compared = 0
    for cell, view in by_cell.items():
        if cell.dtype == "fp32" and cell.offload_optimizer == "cpu":
            plain = by_cell[Combination(cell.kind, cell.mode, cell.stage, "fp32", "fp32")]
            for name, value in view.items():
                torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
            compared += 1
    assert compared == 4 * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": {"enabled": True}}, "nearest: precision.dtype: bfloat16"),
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "nearest: zero.stage: 1"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nearest: zero.offload: optimizer"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "nearest: zero.stage: 3"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "its maps are wrong"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "below 1 it steps an Adam"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}, "it steps CPUAdam"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "an optimizer of its own"),
        ({"tensor_parallel": {"autotp_size": 2}}, "a shard of a matrix is not the matrix"),
        ({"optimizer": {"type": "Muon"}}, "given by its own section"),
        ({"scheduler": {"type": "WarmupLR"}}, "overwrite every group's lr"),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_with_the_nearest_that_does(change: dict, message: str) -> None:
    config = {"zero_optimization": {"stage": 2}} | change
    with pytest.raises(UnsupportedError, match=message):
        check_supported(OptimizerConfig(kind="mars-m").resolved(), config)


def test_the_documented_table_is_the_one_of_the_code() -> None:
    document = (Path(__file__).parents[2] / "docs" / "zero.md").read_text(encoding="utf-8")
    assert support_table() in document
