"""The seventeen trajectories of the official optimizers, reproduced by `Mars` and by its reference twin."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mars_ds.optim import OptimizerConfig, build_optimizer, reference

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))
NAMES = {"matrix": "h.{}.weight", "embedding": "wte.{}.weight", "vector": "ln.{}.weight"}


class Trajectory:
    """One recorded trajectory: initial parameters, gradients, lrs and the parameters after each step."""

    def __init__(self, path: Path) -> None:
        self.arrays = np.load(path)
        self.meta = json.loads(str(self.arrays["meta"]))
        self.names = [NAMES[kind].format(i) for i, kind in enumerate(self.meta["kinds"])]

    def tensor(self, key: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[key].copy())

    def parameters(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(self.tensor(f"param_{i}_step0")) for i in range(len(self.names))]

    def config(self) -> OptimizerConfig:
        hp, kind = dict(self.meta["hp"]), self.meta["optimizer"]
        if kind == "mars-m-noclip":
            kind, hp["correction_clip"] = "mars-m", "none"
        if kind in ("moonlight", "adamw"):
            hp.pop("gamma", None)
        else:
            hp["mode"] = self.meta["mode"]
        if kind in ("mars-m", "moonlight", "mars-shampoo"):
            hp["ns_dtype"] = self.meta["ns_dtype"]
        return OptimizerConfig(kind=kind, **hp)

    def assert_close(self, got: torch.Tensor, index: int, step: int, lr: float) -> None:
        want = self.tensor(f"param_{index}_step{step}")
        if self.meta["ns_dtype"] == "bfloat16" and self.meta["kinds"][index] != "vector":
            # Update scale of the larger of the two conventions, per step taken so far.
            scale = max(0.2 * max(want.shape) ** 0.5, (want.shape[0] / want.shape[1]) ** 0.5)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-2 * lr * scale)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_mars_follows_the_official_trajectory(path: Path) -> None:
    case = Trajectory(path)
    parameters = case.parameters()
    optimizer = build_optimizer(zip(case.names, parameters, strict=True), case.config())
    for step, lr in enumerate(case.meta["lrs"], start=1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        if case.meta["mode"] == "exact":
            for i, p in enumerate(parameters):
                p.grad = case.tensor(f"next_batch_grad_{i}_step{step}")
            optimizer.capture_next_grad()
        for i, p in enumerate(parameters):
            p.grad = case.tensor(f"grad_{i}_step{step}")
        optimizer.step()
        for i, p in enumerate(parameters):
            case.assert_close(p.detach(), i, step, lr)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_reference_follows_the_official_trajectory(path: Path) -> None:
    case = Trajectory(path)
    config = case.config().resolved()
    for i, kind in enumerate(case.meta["kinds"]):
        settings = config.group_settings(kind)
        value, state = case.tensor(f"param_{i}_step0"), {}
        for step, lr in enumerate(case.meta["lrs"], start=1):
            settings["lr"] = lr
            if settings["exact"]:
                state["next_grad"] = case.tensor(f"next_batch_grad_{i}_step{step}")
            value = reference.apply(value, case.tensor(f"grad_{i}_step{step}"), state, settings)
            case.assert_close(value, i, step, lr)


def test_all_seventeen_are_here() -> None:
    assert len(GOLDEN) == 17
