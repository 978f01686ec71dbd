#!/usr/bin/env python
"""Where a training step's time goes, and our loop beside a bare DeepSpeed loop: `python benchmarks/train_step.py`.

Both loops train the same model with the same engine configuration on the same windows. They take turns in short
stretches, in random order; the ratio is the median over the pairs, with a bootstrap interval of 95 %. The bare loop has
its windows in memory and does nothing but forward, backward and step.

Under a launcher (`torchrun --nproc-per-node 2 benchmarks/train_step.py`) the ranks do it together.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from mars_ds.config import RunConfig, load_config
from mars_ds.planning.batch import plan_batch
from mars_ds.training.callbacks import StepResult
from mars_ds.training.run_folder import open_run_folder
from mars_ds.training.trainer import Trainer
from mars_ds.zero.distributed import join, shut_down
from tests.corpora import byte_dataset

STAGES = ("data", "forward", "backward", "reduce", "optimizer", "other")


def make_config(folder: Path, dataset: Path, width: int, layers: int, stage: int, micro_batch: int) -> RunConfig:
    """A run that logs, looks after its health and writes heartbeats as any other, and saves and evaluates nothing."""
    file = folder / "config.yaml"
    file.write_text(
        f"""
run: {{name: bench, output_dir: {folder}}}
model: {{num_layers: {layers}, num_heads: 4, width: {width}, sequence_length: 256, vocab_size: 320}}
data: {{path: {dataset}}}
batch: {{global_batch_sequences: {micro_batch * dist.get_world_size()}, micro_batch: {micro_batch}}}
optimizer: {{kind: mars-m, lr: 1e-2}}
schedule: {{kind: cosine, steps: 1000000, warmup_steps: 10}}
precision: {{dtype: bfloat16}}
zero: {{stage: {stage}}}
checkpoint: {{interval_steps: 0}}
evaluation: {{interval_steps: 0}}
""",
        encoding="utf-8",
    )
    return load_config(file)


class OurLoop:
    """Steps of `Trainer` with all of its callbacks, one stretch at a time."""

    def __init__(self, config: RunConfig) -> None:
        batch = plan_batch(config.global_batch, config.batch.micro_batch, dist.get_world_size())
        self.trainer = Trainer(config, batch, open_run_folder(config), lambda text: None)
        for callback in self.trainer.callbacks:
            callback.start(self.trainer)

    def steps(self, count: int) -> None:
        """As `Trainer.train` does them."""
        trainer = self.trainer
        for _ in range(count):
            trainer.stop.poll()
            for callback in trainer.callbacks:
                callback.before_step(trainer)
            result: StepResult = trainer._train_step()
            for callback in trainer.callbacks:
                callback.after_step(trainer, result)


class BareLoop:
    """What a user of DeepSpeed writes in five lines, on an engine of the same kind."""

    def __init__(self, config: RunConfig) -> None:
        batch = plan_batch(config.global_batch, config.batch.micro_batch, dist.get_world_size())
        made = Trainer(config, batch, open_run_folder(config), lambda text: None)
        self.engine, self.model = made.engine, made.model
        self.windows = [next(iter(made.loader.next_step())) for _ in range(16)]
        made.loader.close()
        made.heartbeat.close()
        self._next = 0

    def steps(self, count: int) -> None:
        """Forward, backward, step."""
        for _ in range(count):
            inputs, labels = self.model.inputs(self.windows[self._next % len(self.windows)])
            self._next += 1
            loss = self.engine(input_ids=inputs, labels=labels).loss
            self.engine.backward(loss)
            self.engine.step()


def timed(loop: Any, count: int) -> float:
    """Seconds of a stretch, from a common start to the last rank's end."""
    dist.barrier()
    started = time.perf_counter()
    loop.steps(count)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started


def bootstrap(values: list[float], draws: int = 2_000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def shares(loop: OurLoop, count: int) -> dict[str, float]:
    """Seconds of each stage over `count` steps, by timers around the calls (the device is waited for at each)."""
    spent = dict.fromkeys(STAGES, 0.0)
    engine, trainer = loop.trainer.engine, loop.trainer
    reduced = [0.0]

    def wait() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timing(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            before, reduced_before = wait(), reduced[0]
            try:
                return function(*arguments, **keywords)
            finally:
                spent[stage] += wait() - before - (reduced[0] - reduced_before)

        return call

    def reducing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            before = wait()
            try:
                return function(*arguments, **keywords)
            finally:
                reduced[0] += wait() - before

        return call

    collectives = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast")
    before = {name: getattr(dist, name) for name in collectives}
    names = ("forward", "backward", "step")
    methods = {name: getattr(engine, name) for name in names}
    read = trainer.loader.next_step
    try:
        for name in collectives:
            setattr(dist, name, reducing(before[name]))
        engine.forward = timing("forward", methods["forward"])
        engine.backward = timing("backward", methods["backward"])
        engine.step = timing("optimizer", methods["step"])
        trainer.loader.next_step = lambda: iter(timing("data", lambda: list(read()))())
        started = wait()
        loop.steps(count)
        total = wait() - started
    finally:
        for name in collectives:
            setattr(dist, name, before[name])
        for name in names:
            delattr(engine, name)
        trainer.loader.next_step = read
    spent["reduce"] = reduced[0]
    spent["other"] = total - sum(spent.values())
    return spent


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="default: 128")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage, default: 1")
    parser.add_argument("--micro-batch", type=int, default=8, help="default: 8")
    parser.add_argument("--pairs", type=int, default=30, help="default: 30")
    parser.add_argument("--steps", type=int, default=8, help="of a stretch, default: 8")
    options = parser.parse_args()
    join()
    printed = print if dist.get_rank() == 0 else (lambda text: None)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    root = Path(folder[0])
    if dist.get_rank() == 0:
        byte_dataset(root)
    dist.barrier()
    shape = (options.width, options.layers, options.stage, options.micro_batch)
    config = make_config(root, root / "bytes", *shape)
    ours, bare = OurLoop(config), BareLoop(config)
    for loop in (ours, bare):
        timed(loop, 25)  # the first 20 steps are logged one by one
    generator = random.Random(0)
    ratios = []
    for _ in range(options.pairs):
        first, second = (ours, bare) if generator.random() < 0.5 else (bare, ours)
        seconds = {id(first): timed(first, options.steps), id(second): timed(second, options.steps)}
        ratios.append(seconds[id(bare)] / seconds[id(ours)])
    low, high = bootstrap(ratios)
    printed(
        f"{dist.get_world_size()} ranks, stage {options.stage}, width {options.width}, {options.layers} layers, "
        f"micro-batch {options.micro_batch}: throughput of our loop / bare DeepSpeed loop, median of {options.pairs} "
        f"pairs of {options.steps} steps: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
    )
    spent = shares(ours, 3 * options.steps)
    total = sum(spent.values())
    printed("share of a step: " + ", ".join(f"{stage} {100 * spent[stage] / total:.1f} %" for stage in STAGES))
    dist.barrier()
    shut_down()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
