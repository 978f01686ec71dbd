"""What orthogonalization costs under ZeRO: ours beside DeepSpeed's own Muon, counted in one harness.

    python benchmarks/zero_costs.py [--world-size W] [--layers L] [--width D]

Spawns W gloo processes on the CPU, trains a toy GPT in bf16 for three steps under every ZeRO stage, and counts the
third: every collective (at the `c10d` operators) and every matrix product of Newton-Schulz (FlopCounterMode). Bytes and
calls are given beyond those of torch's AdamW under the same stage in as many param groups, so that the reduction of
gradients and the gathering of weights do not count. The peer runs with `gradient_clipping` 0 (it would clip the
orthogonalized update) and `ns_method` standard (the same polynomial in the same precision as ours). Prints the tables
of docs/costs.md.
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
LABELS = {"ours": "mars-m", "aligned": "mars-m, aligned", "deepspeed": "DeepSpeed's Muon"}


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

    @property
    def optimizers(self) -> list[str]:
        """Who is measured; the order of parameters matters only where partitions are flat."""
        return [name for name in LABELS if name != "aligned" or self.stage in (1, 2)]

    def baseline(self, optimizer: str) -> str:
        """The AdamW that an optimizer is compared with: ours has three param groups, the peer two."""
        return "adamw, 2 groups" if optimizer == "deepspeed" else "adamw, 3 groups"


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
    """An engine with ours, the peer, or AdamW."""
    import deepspeed

    import mars_ds
    from mars_ds.optim import OptimizerConfig

    config = deepspeed_config(setting, optimizer)
    if optimizer in ("ours", "aligned"):
        order = "aligned" if optimizer == "aligned" else "natural"
        return mars_ds.initialize(model, OptimizerConfig(kind="mars-m", lr=1e-3), config, parameter_order=order)
    if optimizer == "deepspeed":
        return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
    # Weights are gathered group by group, so the comparison needs as many groups.
    roles: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        role = "vector" if p.ndim < 2 else "embedding" if "embed" in name else "matrix"
        roles.setdefault(role if optimizer == "adamw, 3 groups" or role == "matrix" else "rest", []).append(p)
    adamw = torch.optim.AdamW([{"params": members} for members in roles.values()], lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=adamw, config=config)[0]


def newton_schulz_counter(optimizer: str, engine: Any) -> Callable[[], int]:
    """Starts to count the FLOPs of this rank's Newton-Schulz; the result reads the sum."""
    if optimizer in ("ours", "aligned"):
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
    if optimizer in ("ours", "aligned"):
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
        if optimizer in LABELS:
            read_flops = newton_schulz_counter(optimizer, engine)
        with counter:
            run_window(engine, windows)
    momentum = momentum_elements(optimizer, engine) if optimizer in LABELS else 0
    return Outcome(counter.costs, read_flops(), momentum)


def run_window(engine: Any, windows: list[Tensor]) -> None:
    """Forward, backward and step of one accumulation window."""
    for ids in windows:
        engine.backward(engine(ids[:, :-1], ids[:, 1:]))
        engine.step()


Outcomes = dict[tuple[str, Setting], Outcome]


def measure_all(rank: int, world_size: int, layers: int, width: int) -> Outcomes:
    """Every row, on this rank."""
    import logging

    import deepspeed

    from mars_ds.zero.distributed import join

    # Collectives in shared memory would be built with a compiler, and are not what is counted.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    join()
    outcomes: Outcomes = {}
    for setting in SETTINGS:
        for optimizer in dict.fromkeys([*setting.optimizers, *map(setting.baseline, setting.optimizers)]):
            try:
                outcome = measure(rank, world_size, optimizer, setting, layers, width)
            except Exception as error:
                # Construction fails on every rank alike; later the others would wait in a collective for ever.
                outcome = Outcome(Costs(), error=f"{type(error).__name__}: {error}".splitlines()[0])
            outcomes[optimizer, setting] = outcome
    return outcomes


@dataclass(frozen=True)
class Figures:
    """One row of the table.

    Attributes:
        flops: Newton-Schulz FLOPs of all ranks over those of one process.
        busiest: FLOPs of the busiest rank over an even share of one process's.
        momentum: Elements of momentum stored over all ranks, padding included, over elements of matrices.
        bytes_received: Mean bytes that a rank receives per element of the matrices, beyond AdamW's.
        collectives: Calls beyond AdamW's.
    """

    flops: float
    busiest: float
    momentum: float
    bytes_received: float
    collectives: int

    @property
    def cells(self) -> str:
        """In Markdown."""
        return (
            f"{self.flops:.3f} | {self.busiest:.2f} | {self.momentum:.3f} | {self.bytes_received:.2f} | "
            f"{self.collectives:+d}"
        )


def figures(results: list[Outcomes], optimizer: str, setting: Setting, shapes: list[tuple[int, int]]) -> Figures | str:
    """The row of one optimizer, or the error that it or its AdamW stopped with."""
    found = [outcomes[optimizer, setting] for outcomes in results]
    adamw = [outcomes[setting.baseline(optimizer), setting] for outcomes in results]
    error = next((outcome.error for outcome in [*found, *adamw] if outcome.error), "")
    if error:
        return error
    needed = sum(newton_schulz_flops(*shape) for shape in shapes)
    elements, ranks = sum(rows * columns for rows, columns in shapes), len(found)
    received = sum(o.costs.total_received_bytes for o in found) - sum(a.costs.total_received_bytes for a in adamw)
    return Figures(
        flops=sum(o.flops for o in found) / needed,
        busiest=max(o.flops for o in found) * ranks / needed,
        momentum=sum(o.momentum for o in found) / elements,
        bytes_received=received / ranks / elements,
        collectives=found[0].costs.calls.total() - adamw[0].costs.calls.total(),
    )


def print_table(results: list[Outcomes], shapes: list[tuple[int, int]]) -> None:
    """Prints every row, and below it how the peer compares with ours."""
    print(
        "| stage | micro-batches | optimizer | FLOPs, all ranks / one process | busiest / even share | "
        "momentum stored / needed | bytes per element | collectives |"
    )
    print("|---" * 8 + "|")
    ratios = []
    for setting in SETTINGS:
        rows = {name: figures(results, name, setting, shapes) for name in setting.optimizers}
        for name, row in rows.items():
            cells = row.cells if isinstance(row, Figures) else f"{row} | | | |"
            print(f"| {setting.label} | {setting.micro_batches} | {LABELS[name]} | {cells} |")
        ours, peer = rows.get("aligned", rows["ours"]), rows["deepspeed"]
        if isinstance(ours, Figures) and isinstance(peer, Figures):
            ratios.append(
                f"stage {setting.label}, micro-batches {setting.micro_batches}: {ratio(peer.flops, ours.flops)} the "
                f"FLOPs, {ratio(peer.busiest, ours.busiest)} on the busiest rank, "
                f"{ratio(peer.bytes_received, ours.bytes_received)} the bytes"
            )
    print("\nDeepSpeed's Muon over ours (aligned where there is a choice):", *ratios, sep="\n")


def ratio(peer: float, ours: float) -> str:
    """As `2.00x`; where either is nothing, the two numbers."""
    return f"{peer / ours:.2f}x" if min(peer, ours) >= 0.01 else f"{peer:.2f} against {ours:.2f} of"


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
    print_table(results, shapes)


if __name__ == "__main__":
    main()
