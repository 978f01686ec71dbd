"""What runs on the ranks in the engine tests: one toy model under many optimizers and wrappers."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mars_ds.optim import OptimizerConfig, build_optimizer

STEPS = 10
GLOBAL_BATCH = 12  # divides by 1, 2, 3 and 4 ranks
VOCAB, WIDTH = 37, 18


class Toy(nn.Module):
    """Odd sizes, a tied embedding, a one-row matrix, norms and biases: cuts fall in the middle of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.fc = nn.Linear(WIDTH, 41)
        self.ln = nn.LayerNorm(41)
        self.proj = nn.Linear(41, WIDTH, bias=False)
        self.square = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (1.0 if p.ndim == 1 else 0.0))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids)
        x = x + self.proj(torch.tanh(self.ln(self.fc(x))))
        x = x + self.square(x) * torch.sigmoid(self.gate(x))
        return nn.functional.cross_entropy((x @ self.wte.weight.T).float(), labels)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randint(0, VOCAB, (GLOBAL_BATCH,), generator=generator) for _ in range(2))  # type: ignore[return-value]


@dataclass(frozen=True)
class Wrapper:
    """One way in which DeepSpeed holds the optimizer."""

    stage: int
    dtype: str
    accumulation: str

    @property
    def id(self) -> str:
        return f"stage{self.stage}-{self.dtype}-acc_{self.accumulation}"

    def config(self, world_size: int, accumulation_steps: int = 1) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size // accumulation_steps,
            "gradient_accumulation_steps": accumulation_steps,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": self.stage, "overlap_comm": False, "reduce_bucket_size": 10**6},
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.stage:
            config["data_types"] = {"grad_accum_dtype": self.accumulation}
            config["communication_data_type"] = self.accumulation
        return config


WRAPPERS = [
    Wrapper(0, "fp32", "fp32"),
    Wrapper(0, "bf16", "bf16"),
    Wrapper(1, "fp32", "fp32"),
    Wrapper(1, "bf16", "bf16"),
    Wrapper(1, "bf16", "fp32"),
    Wrapper(2, "fp32", "fp32"),
    Wrapper(2, "bf16", "bf16"),
    Wrapper(2, "bf16", "fp32"),
]
LR = {"mars-lion": 1e-3, "adamw": 1e-2, "mars-adamw": 1e-2, "lion": 1e-3}
KINDS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight", "adamw", "muon", "lion")


def optimizer_config(kind: str, ns_dtype: str = "float32") -> OptimizerConfig:
    matrix = {"ns_dtype": ns_dtype} if kind in ("mars-shampoo", "mars-m", "moonlight", "muon") else {}
    return OptimizerConfig(kind=kind, lr=LR.get(kind, 1e-2), weight_decay=0.05, **matrix)


def single_device(kind: str, ns_dtype: str = "float32") -> dict[str, Tensor]:
    """Ten fp32 steps of the global batch in one process, with torch's own clip."""
    model = Toy()
    optimizer = build_optimizer(model.named_parameters(), optimizer_config(kind, ns_dtype))
    for step in range(STEPS):
        model(*batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def injected_gradients(step: int) -> dict[str, Tensor]:
    """Full gradients by name, some of norm above 1 so that the per-tensor clip binds."""
    generator = torch.Generator().manual_seed(900 + step)
    return {
        name: torch.randn(p.shape, generator=generator) * (0.3 if step % 2 else 0.01)
        for name, p in Toy().named_parameters()
    }


def injected_single_device(kind: str) -> dict[str, Tensor]:
    model = Toy()
    optimizer = build_optimizer(model.named_parameters(), optimizer_config(kind))
    for step in range(STEPS):
        gradients = injected_gradients(step)
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gather_masters(engine: Any) -> dict[str, Tensor]:
    """Whole fp32 masters by name, put together from the fragments of all ranks."""
    import torch.distributed as dist

    sharding = engine.mars_sharding
    pieces = [
        (f.name, f.shape, f.start, f.view(tensor.detach().view(-1)).float().clone())
        for tensor, local in sharding.local_shards.items()
        for f in local.shard.fragments
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    whole: dict[str, Tensor] = {}
    for rank_pieces in gathered:
        for name, shape, start, values in rank_pieces:
            flat = whole.setdefault(name, torch.full((prod(shape),), torch.nan))
            flat[start : start + values.numel()] = values
    shapes = {n: s for g in engine.mars.param_groups for n, s in zip(g["names"], g["shapes"], strict=True)}
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}


def through_engine(
    rank: int, world_size: int, wrapper: Wrapper, kind: str, ns_dtype: str, accumulation_steps: int = 1
) -> dict[str, Tensor]:
    """Ten steps of the global batch, each rank on its slice."""
    import mars_ds

    engine = mars_ds.initialize(Toy(), optimizer_config(kind, ns_dtype), wrapper.config(world_size, accumulation_steps))
    micro = GLOBAL_BATCH // world_size // accumulation_steps
    for step in range(STEPS):
        ids, labels = batch(step)
        for i in range(accumulation_steps):
            at = (rank * accumulation_steps + i) * micro
            loss = engine(ids[at : at + micro], labels[at : at + micro])
            engine.backward(loss)
            engine.step()
    return gather_masters(engine)


def with_injection(rank: int, world_size: int, wrapper: Wrapper, kind: str) -> dict[str, Tensor]:
    """Ten steps on identical reduced gradients written straight into the shards."""
    import mars_ds

    engine = mars_ds.initialize(Toy(), optimizer_config(kind), wrapper.config(world_size))
    for step in range(STEPS):
        gradients = injected_gradients(step)
        for tensor, local in engine.mars_sharding.local_shards.items():
            flat = torch.zeros(local.shard.numel)
            for f in local.shard.fragments:
                f.view(flat).copy_(gradients[f.name].flatten()[f.start : f.stop])
            tensor.grad = flat.view_as(tensor)
        engine.mars.step()
    return gather_masters(engine)


def all_cases(rank: int, world_size: int) -> dict[tuple, dict[str, Tensor]]:
    """Every case on this world size; rank 0's view (all ranks see the same masters)."""
    import logging

    from mars_ds.zero.distributed import join

    logging.disable(logging.WARNING)
    join()
    results: dict[tuple, dict[str, Tensor]] = {}
    for wrapper in WRAPPERS:
        for kind in KINDS:
            if wrapper.dtype == "fp32":
                results["inject", wrapper, kind] = with_injection(rank, world_size, wrapper, kind)
            results["engine", wrapper, kind, "float32"] = through_engine(rank, world_size, wrapper, kind, "float32")
        if wrapper.dtype == "fp32":
            for kind in ("mars-m", "mars-shampoo"):
                results["engine", wrapper, kind, "bfloat16"] = through_engine(
                    rank, world_size, wrapper, kind, "bfloat16"
                )
    return results if rank == 0 else {}
