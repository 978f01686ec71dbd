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
    offload_optimizer: str = "none"
    offload_parameters: str = "none"

    @property
    def id(self) -> str:
        offload = {("none", "none"): "", ("cpu", "none"): "-offload", ("cpu", "cpu"): "-offload_all"}
        suffix = offload[self.offload_optimizer, self.offload_parameters]
        return f"stage{self.stage}-{self.dtype}-acc_{self.accumulation}{suffix}"

    def config(self, world_size: int, accumulation_steps: int = 1) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": False, "reduce_bucket_size": 10**6}
        if self.stage == 3:
            # Several sub-groups, and some parameters that stay gathered.
            zero |= {"sub_group_size": 1500, "stage3_param_persistence_threshold": 20}
        if self.offload_optimizer != "none":
            zero["offload_optimizer"] = {"device": self.offload_optimizer, "pin_memory": False}
        if self.offload_parameters != "none":
            zero["offload_param"] = {"device": self.offload_parameters, "pin_memory": False}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size // accumulation_steps,
            "gradient_accumulation_steps": accumulation_steps,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_optimization": zero,
            "data_types": {"grad_accum_dtype": self.accumulation},
            "communication_data_type": self.accumulation,
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
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
    Wrapper(3, "fp32", "fp32"),
    Wrapper(3, "bf16", "fp32"),
]
LR = {"mars-lion": 1e-3, "adamw": 1e-2, "mars-adamw": 1e-2, "lion": 1e-3}
KINDS = ("mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "moonlight", "adamw", "muon", "lion")


def optimizer_config(kind: str, ns_dtype: str = "float32", mode: str | None = None) -> OptimizerConfig:
    matrix = {"ns_dtype": ns_dtype} if kind in ("mars-shampoo", "mars-m", "moonlight", "muon") else {}
    return OptimizerConfig(kind=kind, lr=LR.get(kind, 1e-2), weight_decay=0.05, mode=mode, **matrix)


def single_device(
    kind: str, ns_dtype: str = "float32", mode: str | None = None, steps: int = STEPS, dtype: str = "fp32"
) -> dict[str, Tensor]:
    """Steps of the global batch in one process, with torch's own clip and fp32 masters.

    In bf16 the weights of the forward pass, its activations and gradients are bf16, as under DeepSpeed.
    """
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = Toy().to(half)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = build_optimizer(masters.items(), optimizer_config(kind, ns_dtype, mode))

    def clipped_gradient(step: int) -> None:
        model.zero_grad()
        model(*batch(step)).backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)

    for step in range(steps):
        if mode == "exact":
            clipped_gradient(step + 1)
            optimizer.capture_next_grad()
        clipped_gradient(step)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return {name: p.detach().clone() for name, p in masters.items()}


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


def run_window(engine: Any, rank: int, world_size: int, step: int, accumulation_steps: int = 1) -> None:
    """This rank's slice of one global batch, through forward, backward and engine step."""
    micro = GLOBAL_BATCH // world_size // accumulation_steps
    ids, labels = batch(step)
    for i in range(accumulation_steps):
        at = (rank * accumulation_steps + i) * micro
        loss = engine(ids[at : at + micro], labels[at : at + micro])
        engine.backward(loss)
        engine.step()


def through_engine(
    rank: int,
    world_size: int,
    wrapper: Wrapper,
    kind: str,
    ns_dtype: str = "float32",
    accumulation_steps: int = 1,
    mode: str | None = None,
    steps: int = STEPS,
) -> dict[str, Tensor]:
    """Steps of the global batch, each rank on its slice."""
    import mars_ds
    from mars_ds.zero.lookahead import lookahead

    engine = mars_ds.initialize(
        Toy(), optimizer_config(kind, ns_dtype, mode), wrapper.config(world_size, accumulation_steps)
    )
    for step in range(steps):
        if mode == "exact":
            with lookahead(engine):
                run_window(engine, rank, world_size, step + 1, accumulation_steps)
        run_window(engine, rank, world_size, step, accumulation_steps)
    assert engine.mars_proof.done or steps < 2
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


def join_quietly() -> None:
    """DeepSpeed in this process group, without its log and without the second that it spends on measuring memory."""
    import logging

    import deepspeed.runtime.bf16_optimizer as bf16_optimizer

    from mars_ds.zero.distributed import join

    logging.disable(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda *arguments, **options: None
    join()


def kinds_at(world_size: int) -> tuple[str, ...]:
    """The baselines share their rules with the family: on four ranks, the slowest spawn, the family stands for them."""
    return KINDS if world_size < 4 else tuple(kind for kind in KINDS if kind.startswith("mars"))


def all_cases(rank: int, world_size: int) -> dict[tuple, dict[str, Tensor]]:
    """Every case on this world size; rank 0's view (all ranks see the same masters)."""
    join_quietly()
    results: dict[tuple, dict[str, Tensor]] = {}
    for wrapper in WRAPPERS:
        for kind in kinds_at(world_size):
            if wrapper.dtype == "fp32" and wrapper.stage < 3:
                results["inject", wrapper, kind] = with_injection(rank, world_size, wrapper, kind)
            results["engine", wrapper, kind, "float32"] = through_engine(rank, world_size, wrapper, kind, "float32")
        if wrapper.dtype == "fp32":
            for kind in ("mars-m", "mars-shampoo"):
                results["engine", wrapper, kind, "bfloat16"] = through_engine(
                    rank, world_size, wrapper, kind, "bfloat16"
                )
    return results if rank == 0 else {}
