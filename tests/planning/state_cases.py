"""What runs on the ranks in `test_state.py` and `test_collectives.py`: live engines, measured item by item."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from mars_ds.config import RunConfig
from mars_ds.planning.batch import plan_batch
from tests.zero import cases
from tests.zero.counting import CollectiveCounter, Costs

LENGTH, VOCAB, BUCKET = 8, 61, 10_000


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        micro_batches: Accumulation steps.
        persistence: Elements up to which stage 3 keeps a parameter gathered; None leaves DeepSpeed's default.
        reuse_distance: Stage 3: elements within which gathered weights are kept; None leaves DeepSpeed's default.
    """

    stage: int
    dtype: str = "bfloat16"
    accumulation: str = "float32"
    offload: str = "none"
    kind: str = "mars-m"
    micro_batches: int = 1
    persistence: int | None = None
    reuse_distance: int | None = None
    order: str = "natural"
    toy: bool = False

    def config(self) -> RunConfig:
        """The run of this case, 12 sequences a step over any number of ranks that divides them."""
        stage_3 = {
            "stage3_param_persistence_threshold": self.persistence,
            "stage3_max_reuse_distance": self.reuse_distance,
            "stage3_max_live_parameters": self.reuse_distance,
        }
        zero = {key: value for key, value in stage_3.items() if value is not None and self.stage == 3}
        matrix = {"ns_dtype": "float32"} if self.kind == "moonlight" else {}
        mode = {"mode": "exact"} if self.kind.endswith("-exact") else {}
        return RunConfig.model_validate(
            {
                "run": {"name": "case"},
                "model": {"num_layers": 2, "num_heads": 3, "width": 15, "sequence_length": LENGTH, "vocab_size": VOCAB},
                "data": {"path": "none"},
                "batch": {"global_batch_sequences": 12, "micro_batch": 1},
                "optimizer": {"kind": self.kind.removesuffix("-exact"), "lr": 1e-3, **matrix, **mode},
                "schedule": {"steps": 10},
                "precision": {"dtype": self.dtype, "accumulation_dtype": self.accumulation},
                "zero": {
                    "stage": self.stage,
                    "offload": self.offload,
                    "sub_group_elements": 3000,
                    "reduce_bucket_elements": BUCKET,
                    "parameter_order": self.order,
                },
                "deepspeed": {"zero_optimization": zero} if zero else {},
            }
        )

    def sized(self, world_size: int) -> RunConfig:
        """The config whose micro-batch gives this case's accumulation."""
        config = self.config()
        batch = config.batch.model_copy(update={"micro_batch": 12 // world_size // self.micro_batches})
        return config.model_copy(update={"batch": batch})


W = ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")
PLAIN = [Case(s, *w) for s, w in product((0, 1, 2, 3), W) if (s, *w) != (0, "bfloat16", "float32")]
OFFLOADED = [Case(s, *w, "optimizer") for s, w in product((1, 2, 3), W)] + [
    Case(3, *w, "optimizer_and_parameters") for w in W
]
ACCUMULATED = [replace(case, micro_batches=2) for case in (*PLAIN, *OFFLOADED) if case.stage > 0]
OTHERS = [
    *(Case(1, kind=kind) for kind in ("mars-adamw-exact", "mars-lion", "moonlight", "adamw")),
    Case(0, "float32", kind="mars-adamw"),
    Case(3, kind="mars-adamw-exact", persistence=20),
    Case(2, order="aligned"),
    *(Case(stage, toy=True) for stage in (1, 2, 3)),
]
# Every wrapper everywhere; with accumulation on 3 ranks, other optimizers and models on 2.
STATE_CASES = {
    1: [case for case in (*PLAIN, *OFFLOADED) if case.dtype == case.accumulation or case.offload == "none"],
    2: [*PLAIN, *OTHERS],
    3: [*PLAIN, *OFFLOADED, *ACCUMULATED],
}


def model_of(case: Case, config: RunConfig) -> nn.Module:
    """The model of a case."""
    from mars_ds.training.model import build_model

    return cases.Toy() if case.toy else build_model(config).module


def engine_of(case: Case, world_size: int) -> Any:
    """The engine of a case, as the trainer makes it."""
    import mars_ds
    from mars_ds.training.engine_config import deepspeed_config

    config = case.sized(world_size)
    batch = plan_batch(12, config.batch.micro_batch, world_size)
    return mars_ds.initialize(
        model_of(case, config),
        config.optimizer,
        deepspeed_config(config, batch),
        parameter_order=config.zero.parameter_order,
    )


def run_window(case: Case, engine: Any, rank: int, world_size: int, last_step: bool = True) -> None:
    """One step's micro-batches; without `last_step` it ends when the last backward does."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    for index in range(case.micro_batches):
        if case.toy:
            loss = engine(*(torch.randint(0, cases.VOCAB, (4,), generator=generator) for _ in range(2)))
        else:
            ids = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=generator)
            loss = engine(input_ids=ids[:, :-1], labels=ids[:, 1:].clone()).loss
        engine.backward(loss)
        if last_step or index < case.micro_batches - 1:
            engine.step()


def measure_state(rank: int, world_size: int) -> dict[Case, dict[str, int]]:
    """The live state of every case when the last backward of the second step has ended."""
    import warnings

    from mars_ds.training.live_state import live_state
    from mars_ds.zero.lookahead import lookahead

    warnings.simplefilter("ignore")
    cases.join_quietly()
    found = {}
    for case in STATE_CASES[world_size]:
        engine = engine_of(case, world_size)
        if case.kind.endswith("-exact"):
            with lookahead(engine):
                run_window(case, engine, rank, world_size)
        run_window(case, engine, rank, world_size)
        run_window(case, engine, rank, world_size, last_step=False)
        found[case] = live_state(engine)
    return found


COLLECTIVE_CASES = [
    *(case for case in PLAIN if case.accumulation == "float32"),
    *(Case(stage, "bfloat16", "bfloat16", micro_batches=2) for stage in (0, 1, 2, 3)),
    Case(1, micro_batches=2),
    Case(3, persistence=20, micro_batches=2),
    Case(3, persistence=20, micro_batches=2, reuse_distance=0),
    Case(2, offload="optimizer"),
    Case(3, offload="optimizer"),
    Case(1, kind="adamw"),
]


def measure_collectives(rank: int, world_size: int) -> dict[Case, Costs]:
    """What this rank's third step of every case moves."""
    import warnings

    warnings.simplefilter("ignore")
    cases.join_quietly()
    found = {}
    for case in COLLECTIVE_CASES:
        engine = engine_of(case, world_size)
        for _ in range(2):
            run_window(case, engine, rank, world_size)
        counter = CollectiveCounter()
        with counter:
            run_window(case, engine, rank, world_size)
        found[case] = counter.costs
    return found
