"""Every kind under every wrapper on 1 to 4 ranks equals one process.

One spawn per world size runs all cases; each test looks at one of them.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.zero import cases

WORLDS = (1, 2, 3, 4)
WORLDS_AND_KINDS = [(world_size, kind) for world_size in WORLDS for kind in cases.kinds_at(world_size)]
FP32 = [w for w in cases.WRAPPERS if w.dtype == "fp32"]
INJECTED = [w for w in FP32 if w.stage < 3]
BF16 = [w for w in cases.WRAPPERS if w.dtype == "bf16"]
ELEMENTWISE = ("adamw", "lion", "mars-lion")


@cache
def results(world_size: int) -> dict[tuple, dict[str, Tensor]]:
    return run_on_ranks(world_size, cases.all_cases)[0]


@cache
def one_process(kind: str, ns_dtype: str, dtype: str = "fp32") -> dict[str, Tensor]:
    return cases.single_device(kind, ns_dtype, dtype=dtype)


@cache
def one_process_injected(kind: str) -> dict[str, Tensor]:
    return cases.injected_single_device(kind)


def initial() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in cases.Toy().named_parameters()}


def distance(got: Tensor, want: Tensor, scale: Tensor) -> float:
    return float((got - want).norm() / scale.norm())


@pytest.mark.parametrize("wrapper", INJECTED, ids=lambda w: w.id)
@pytest.mark.parametrize(("world_size", "kind"), WORLDS_AND_KINDS)
def test_identical_reduced_gradients(world_size: int, wrapper: cases.Wrapper, kind: str) -> None:
    """Bitwise for rules without a norm; the rest differ by the order of fp64 sums and GEMM rows."""
    got, want = results(world_size)["inject", wrapper, kind], one_process_injected(kind)
    for name, value in want.items():
        if kind in ELEMENTWISE:
            assert torch.equal(got[name], value), name
        else:
            assert distance(got[name], value, value) <= 1e-6, name


@pytest.mark.parametrize("wrapper", FP32, ids=lambda w: w.id)
@pytest.mark.parametrize(("world_size", "kind"), WORLDS_AND_KINDS)
def test_ten_steps_through_the_engine_in_fp32(world_size: int, wrapper: cases.Wrapper, kind: str) -> None:
    got, want = results(world_size)["engine", wrapper, kind, "float32"], one_process(kind, "float32")
    for name, value in want.items():
        if kind in ("mars-lion", "lion") and value.ndim == 2:
            wrong_signs = ((got[name] - value).abs() > cases.LR[kind]).sum().item()
            assert wrong_signs <= 1e-3 * cases.STEPS * value.numel(), name
        else:
            assert distance(got[name], value, value) <= 1e-4, name


@pytest.mark.parametrize("kind", ["mars-m", "mars-shampoo"])
@pytest.mark.parametrize("wrapper", FP32, ids=lambda w: w.id)
@pytest.mark.parametrize("world_size", WORLDS)
def test_ten_steps_with_bf16_newton_schulz(world_size: int, wrapper: cases.Wrapper, kind: str) -> None:
    got, want = results(world_size)["engine", wrapper, kind, "bfloat16"], one_process(kind, "bfloat16")
    start = initial()
    for name, value in want.items():
        assert distance(got[name], value, value - start[name]) <= 2e-2, name


@pytest.mark.parametrize("wrapper", BF16, ids=lambda w: w.id)
@pytest.mark.parametrize(("world_size", "kind"), WORLDS_AND_KINDS)
def test_ten_steps_in_bf16(world_size: int, wrapper: cases.Wrapper, kind: str) -> None:
    """bf16 gradients of parts of a batch round at 2^-9: the path differs by a few percent, not in its rule."""
    got, want = results(world_size)["engine", wrapper, kind, "float32"], one_process(kind, "float32", "bf16")
    start = initial()
    # A sign flips on a gradient near zero, so sign rules are the farthest; unrelated signs would be at 1.4.
    limit = 0.4 if kind in ("mars-lion", "lion") else 0.1
    for name, value in want.items():
        assert distance(got[name], value, value - start[name]) <= limit, name


@pytest.mark.parametrize("accumulation", ["bf16", "fp32"])
@pytest.mark.parametrize(("world_size", "kind"), WORLDS_AND_KINDS)
def test_bf16_wrappers_with_one_accumulation_dtype_agree(world_size: int, accumulation: str, kind: str) -> None:
    """Stages that reduce in the same dtype see the same gradients up to rounding.

    The last bit of an fp32 sum can flip the bf16 rounding of a weight; a mean over three, or a bf16 sum in another
    order, flips many, and Newton-Schulz and the sign amplify them.
    """
    same = [w for w in BF16 if w.accumulation == accumulation]
    views = [results(world_size)["engine", w, kind, "float32"] for w in same]
    start = initial()
    limit = 0.5 if kind in ("mars-lion", "lion") else 2e-2 if accumulation == "fp32" and world_size != 3 else 0.1
    for name, value in views[0].items():
        for other in views[1:]:
            assert distance(other[name], value, value - start[name]) <= limit, name


def test_the_cases_can_tell_rules_apart() -> None:
    """A rule that fell back to AdamW or lost its correction would be far outside every tolerance above."""
    start = initial()
    for a, b in (("mars-m", "moonlight"), ("mars-m", "adamw"), ("mars-adamw", "adamw"), ("mars-shampoo", "muon")):
        first, second = one_process(a, "float32"), one_process(b, "float32")
        assert distance(first["fc.weight"], second["fc.weight"], first["fc.weight"] - start["fc.weight"]) > 0.05, (a, b)


def accumulate(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    cases.join_quietly()
    wrappers = [w for w in cases.WRAPPERS if w.dtype == "fp32"]
    return [cases.through_engine(rank, world_size, w, "mars-m", "float32", 3) for w in wrappers]


def test_accumulation_is_one_update_of_the_mean_gradient() -> None:
    want = one_process("mars-m", "float32")
    for view in run_on_ranks(2, accumulate)[0]:
        for name, value in want.items():
            assert distance(view[name], value, value) <= 1e-4, name
