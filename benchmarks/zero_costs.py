"""What orthogonalization costs under ZeRO: ours beside DeepSpeed's own Muon, counted in one harness.

    python benchmarks/zero_costs.py [--world-size W] [--layers L] [--width D]

Spawns W gloo processes on the CPU, trains a toy GPT in bf16 for three steps under every ZeRO stage, and counts the third:
every collective (at the `c10d` operators) and every matrix product of Newton-Schulz (FlopCounterMode). Bytes and calls
are given beyond those of torch's AdamW under the same stage in the same param groups, so that the reduction of gradients
and the gathering of weights do not count. The peer runs with `gradient_clipping` 0 (it would clip the orthogonalized update) and
`ns_method` standard (the same polynomial in the same precision as ours). Prints the table of docs/costs.md.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from mars_ds.optim.newton_schulz import newton_schulz_flops
from tests.ranks import run_on_ranks
from tests.zero.counting import CollectiveCounter, Costs, CountedStep

VOCAB, LENGTH, COUNTED_STEP = 128, 16, 2
OPTIMIZERS = ("ours", "deepspeed")
LABELS = {"ours": "mars-m, ours", "deepspeed": "Muon, DeepSpeed"}


class ToyGPT(nn.Module):
    """Pre-norm decoder with a fused qkv matrix and tied embeddings, which both optimizers leave to AdamW."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, width)
        self.embed_positions = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(ids) + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embed_tokens.weight.T
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """Attention and a four times wider MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.projection(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    stage: int
    offload: bool
    micro_batches: int

    @property
    def label(self) -> str:
        return f"{self.stage}{', CPU offload' if self.offload else ''}"


SETTINGS = [
    Setting(stage, offload, micro_batches)
    for stage, offload in ((0, False), (1, False), (2, False), (2, True), (3, False), (3, True))
    for micro_batches in (1, 4)
]


@dataclass
class Outcome:
    """What one rank counted, or the error that the optimizer stopped with."""

    costs: Costs
    flops: int = 0
    momentum: int = 0
    error: str = ""


def deepspeed_config(setting: Setting, optimizer: str) -> dict[str, Any]:
    """The same for every optimizer, but for what DeepSpeed's Muon insists on."""
    zero: dict[str, Any] = {"stage": setting.stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    if setting.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer == "deepspeed":
        # Stage 3 refuses Muon with reduce_scatter.
        zero["reduce_scatter"] = setting.stage != 3
        settings = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "ns_method": "standard", "torch_adam": True}
        config["optimizer"] = {"type": "Muon", "params": settings}
    return config


def build(optimizer: str, setting: Setting, model: nn.Module) -> Any:
    """An engine with ours, the peer, or `adamw as` one of them."""
    import deepspeed

    import mars_ds
    from mars_ds.optim import OptimizerConfig

    config = deepspeed_config(setting, optimizer)
    if optimizer == "ours":
        return mars_ds.initialize(model, OptimizerConfig(kind="mars-m", lr=1e-3), config)
    if optimizer == "deepspeed":
        return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    # A collective a group gathers the weights, so the groups must be as many: ours are three, the peer's two.
    roles: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        role = "vector" if p.ndim < 2 else "embedding" if "embed" in name else "matrix"
        roles.setdefault(role if optimizer == "adamw as ours" or role == "matrix" else "rest", []).append(p)
    adamw = torch.optim.AdamW([{"params": members} for members in roles.values()], lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=adamw, config=config)[0]


def newton_schulz_counter(optimizer: str, engine: Any) -> Callable[[], int]:
    """Starts to count the FLOPs of this rank's Newton-Schulz; the result reads the sum."""
    if optimizer == "ours":
        step = CountedStep(engine.mars)
        return lambda: step.costs.flops
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    # Most callers import it at each use; muon_optimizer has bound it already.
    if not isinstance(original_muon.muon_update, CountedStep):
        muon_optimizer.muon_update = CountedStep(original_muon, "muon_update")
    update = original_muon.muon_update
    update.reset()
    return lambda: update.costs.flops


def momentum_elements(optimizer: str, engine: Any) -> int:
    """Elements of momentum of matrices that this rank stores, padding included."""
    if optimizer == "ours":
        mars, shards = engine.mars, engine.mars_sharding.local_shards
        matrices = [t for t, s in shards.items() if mars.param_groups[s.group_index]["role"] == "matrix"]
        return sum(mars.state[t]["exp_avg"].numel() for t in matrices)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sum(s["momentum_buffer"].numel() for s in inner.state.values() if "momentum_buffer" in s)


def measure(rank: int, world_size: int, optimizer: str, setting: Setting, layers: int, width: int) -> Outcome:
    """Counts one step."""
    torch.manual_seed(0)
    # Newton-Schulz of the peer is compiled otherwise; products are the same.
    torch._dynamo.config.disable = True
    engine = build(optimizer, setting, ToyGPT(layers, width))
    generator = torch.Generator().manual_seed(rank)
    read_flops: Callable[[], int] = int
    counter = CollectiveCounter()
    for step in range(COUNTED_STEP + 1):
        windows = [torch.randint(0, VOCAB, (1, LENGTH + 1), generator=generator) for _ in range(setting.micro_batches)]
        if step < COUNTED_STEP:
            run_window(engine, windows)
            continue
        if optimizer in OPTIMIZERS:
            read_flops = newton_schulz_counter(optimizer, engine)
        with counter:
            run_window(engine, windows)
    momentum = momentum_elements(optimizer, engine) if optimizer in OPTIMIZERS else 0
    return Outcome(counter.costs, read_flops(), momentum)


def run_window(engine: Any, windows: list[Tensor]) -> None:
    """Forward, backward and step of one accumulation window."""
    for ids in windows:
        engine.backward(engine(ids[:, :-1], ids[:, 1:]))
        engine.step()


def measure_all(rank: int, world_size: int, layers: int, width: int) -> dict[tuple[str, Setting], Outcome]:
    """Every row, on this rank."""
    import logging

    from mars_ds.zero.distributed import join

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    join()
    outcomes = {}
    for setting in SETTINGS:
        for optimizer in [*OPTIMIZERS, *(f"adamw as {name}" for name in OPTIMIZERS)]:
            try:
                outcome = measure(rank, world_size, optimizer, setting, layers, width)
            except Exception as error:
                # Construction fails on every rank alike; later the others would wait in a collective for ever.
                outcome = Outcome(Costs(), error=f"{type(error).__name__}: {error}".splitlines()[0])
            outcomes[optimizer, setting] = outcome
    return outcomes


def row(results: list[dict[tuple[str, Setting], Outcome]], optimizer: str, setting: Setting, shapes: list) -> str:
    """One line of the table."""
    ours = [found[optimizer, setting] for found in results]
    adamw = [found[f"adamw as {optimizer}", setting] for found in results]
    start = f"| {setting.label} | {setting.micro_batches} | {LABELS[optimizer]} |"
    error = next((o.error for o in [*ours, *adamw] if o.error), "")
    if error:
        return f"{start} {error} | | | | |"
    needed_flops = sum(newton_schulz_flops(*shape) for shape in shapes)
    elements = sum(rows * columns for rows, columns in shapes)
    flops, momentum = [o.flops for o in ours], sum(o.momentum for o in ours)
    received = [
        o.costs.total_received_bytes - a.costs.total_received_bytes for o, a in zip(ours, adamw, strict=True)
    ]
    calls = ours[0].costs.calls.total() - adamw[0].costs.calls.total()
    return (
        f"{start} {sum(flops) / needed_flops:.3f} | {max(flops) * len(flops) / needed_flops:.2f} | "
        f"{momentum / elements:.3f} | {sum(received) / len(received) / elements:.2f} | {calls:+d} |"
    )


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--layers", type=int, default=3, help="layers (default 3)")
    parser.add_argument("--width", type=int, default=64, help="width (default 64)")
    arguments = parser.parse_args()
    results = run_on_ranks(arguments.world_size, measure_all, arguments.layers, arguments.width)
    d = arguments.width
    shapes = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * arguments.layers
    print(f"{arguments.world_size} ranks, {len(shapes)} matrices, {sum(r * c for r, c in shapes):,} elements\n")
    print(
        "| stage | micro-batches | optimizer | Newton-Schulz, all ranks / one process | busiest / even share of one "
        "process | momentum stored / needed | bytes received a rank and matrix element, beyond AdamW | collectives "
        "beyond AdamW |"
    )
    print("|---" * 8 + "|")
    for setting in SETTINGS:
        for optimizer in OPTIMIZERS:
            print(row(results, optimizer, setting, shapes))


if __name__ == "__main__":
    main()
