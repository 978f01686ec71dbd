"""The start-up proof passes on honest runs and catches each sabotage with a message that says what and why."""

from functools import cache

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.zero import cases


def adamw_for_matrices(engine) -> None:
    """Matrices take the AdamW rule: what `zero.Init` and wrong tags did to others."""
    group = engine.mars.param_groups[0]
    adamw = engine.mars.param_groups[1]
    group.update({key: adamw[key] for key in ("rule", "eps", "eps_placement", "amsgrad", "betas")})


def matrices_routed_to_vectors(engine) -> None:
    group = engine.mars.param_groups[0]
    group["rule"] = "adamw"


def off_by_one(layout):
    """What a DeepSpeed that pads its partitions differently would do to us: every fragment one element late."""
    import dataclasses

    def moved(local):
        fragments = tuple(
            dataclasses.replace(f, offset=f.offset + 1, numel=f.numel - 1, start=f.start) if f.numel > 1 else f
            for f in local.shard.fragments
        )
        return dataclasses.replace(local, shard=dataclasses.replace(local.shard, fragments=fragments))

    return dataclasses.replace(layout, local=tuple(moved(local) for local in layout.local))


def shifted(layout):
    """Tiles every parameter, but the live weights lie one element further on."""
    import dataclasses

    def moved(local):
        sources = tuple(torch.roll(source, 1) for source in local.sources)
        return dataclasses.replace(local, sources=sources)

    return dataclasses.replace(layout, local=tuple(moved(local) for local in layout.local))


def alias_last_grad(engine) -> None:
    """last_grad is the gradient buffer itself, as in the reference."""
    optimizer = engine.mars
    honest = optimizer._correct

    def aliased(tensors, gradients, group):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if "last_grad" in optimizer.state[tensor]:
                optimizer.state[tensor]["last_grad"].copy_(gradient)
        return honest(tensors, gradients, group)

    optimizer._correct = aliased


def skip_newton_schulz(engine) -> None:
    import mars_ds.optim.mars as module

    module.orthogonalize = lambda matrices, group, norms: {n: m / m.norm() for n, m in matrices.items()}


def drop_the_clip(engine) -> None:
    engine.mars.param_groups[0]["momentum_form"] = "nesterov"


SABOTAGE = {
    "adamw rule": (adamw_for_matrices, r"the direction of .* differs from the reference|runs with rule 'adamw'"),
    "aliased last_grad": (alias_last_grad, r"differs from the reference|variance correction .* is zero"),
    "no Newton-Schulz": (skip_newton_schulz, r"differs from the reference|not orthogonalized"),
    "another momentum": (drop_the_clip, r"differs from the reference"),
}


def sabotaged(rank: int, world_size: int, names: list[str], stages: list[int]) -> dict:
    import mars_ds
    import mars_ds.optim.mars as module
    from mars_ds.zero import binding
    from mars_ds.zero.layout import LayoutError
    from mars_ds.zero.proof import ProofError

    cases.join_quietly()
    honest, honest_layout = module.orthogonalize, binding.read_layout
    found = {}
    for stage in stages:
        for wrong in (off_by_one, shifted):
            binding.read_layout = lambda *arguments, w=wrong: w(honest_layout(*arguments))
            try:
                mars_ds.initialize(
                    cases.Toy(),
                    cases.optimizer_config("mars-m"),
                    cases.Wrapper(stage, "fp32", "fp32").config(world_size),
                )
                found[wrong.__name__, stage] = "bound"
            except LayoutError as error:
                found[wrong.__name__, stage] = str(error)
        binding.read_layout = honest_layout
        for name in names:
            wrapper = cases.Wrapper(stage, "fp32", "fp32")
            # The first scheduled lr is 0: the proof must not depend on applied updates.
            engine = mars_ds.initialize(
                cases.Toy(),
                cases.optimizer_config("mars-m"),
                wrapper.config(world_size),
                lambda step: min(1.0, step / 2),
            )
            if name != "honest":
                SABOTAGE[name][0](engine)
            try:
                for step in range(2):
                    cases.run_window(engine, rank, world_size, step)
                found[name, stage] = "passed" if engine.mars_proof.done else "open"
            except ProofError as error:
                found[name, stage] = str(error)
            module.orthogonalize = honest
    return found


STAGES = [0, 1, 2, 3]


@cache
def outcomes() -> list[dict]:
    return run_on_ranks(2, sabotaged, ["honest", *SABOTAGE], STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_an_honest_run_passes(stage: int) -> None:
    assert [rank["honest", stage] for rank in outcomes()] == ["passed", "passed"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_caught_on_every_rank(name: str, stage: int) -> None:
    import re

    messages = {rank[name, stage] for rank in outcomes()}
    assert len(messages) == 1
    assert re.search(SABOTAGE[name][1], messages.pop())


@pytest.mark.parametrize("stage", STAGES)
def test_a_layout_off_by_one_is_refused_at_bind(stage: int) -> None:
    for rank in outcomes():
        assert "not exactly once each" in rank["off_by_one", stage]
        assert "are not at offset" in rank["shifted", stage]
        assert "lays its partitions out differently" in rank["shifted", stage]


def test_a_route_that_contradicts_the_kind_is_caught_before_the_first_step() -> None:
    from mars_ds.optim import build_optimizer
    from mars_ds.zero.proof import ProofError, check_structure

    optimizer = build_optimizer(cases.Toy().named_parameters(), cases.optimizer_config("mars-m"))
    check_structure(optimizer)
    optimizer.param_groups[0]["rule"] = "adamw"
    with pytest.raises(ProofError, match=r"fc.weight of shape \(41, 18\) runs with rule 'adamw', but mars-m gives it"):
        check_structure(optimizer)


def test_a_layout_that_contradicts_the_weights_is_refused_at_bind() -> None:
    from mars_ds.optim import Fragment
    from mars_ds.zero.engine_layout import LocalShard, verify
    from mars_ds.zero.layout import LayoutError, Shard

    weights = torch.arange(12.0)
    fragment = Fragment("w", (3, 4), 0, 11, 1)
    honest = LocalShard(weights, Shard(0, 12, (fragment,)), 0, (weights[1:12],))
    verify((honest,))
    with pytest.raises(LayoutError, match=r"w: elements 0\.\.11 are not at offset 1"):
        verify((LocalShard(weights, Shard(0, 12, (fragment,)), 0, (weights[:11],)),))
