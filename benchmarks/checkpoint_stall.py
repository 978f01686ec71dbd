"""How long training stands still for a checkpoint: synchronous and asynchronous saves in interleaved pairs.

    python benchmarks/checkpoint_stall.py [--pairs P] [--width D] [--layers L] [--world-size W] [--folder DIR]

Spawns W gloo processes on the CPU and trains a GPT-2 under ZeRO-1 with mars-m. A pair is one save of each kind, the
order drawn at random, each after quiet steps and followed by steps until it is committed. Stall is the time between the
end of one step and the beginning of the next, on the slowest rank. Steps during an asynchronous save are timed too:
the writing thread takes processor time, which on a machine with a GPU training does not need.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import run_on_ranks

QUIET_STEPS = 2


def measure(rank: int, world_size: int, layers: int, width: int, pairs: int, folder: str) -> dict[str, list[float]]:
    """Stalls, times to the commit and step times of this rank, in seconds."""
    import torch

    import mars_ds
    from mars_ds.checkpoint.engine_state import describe, held_slices
    from mars_ds.checkpoint.saver import Retention, Saver
    from mars_ds.model import GPT2Config
    from mars_ds.model.gpt2 import GPT2
    from mars_ds.optim import OptimizerConfig
    from mars_ds.zero.distributed import join

    join()
    torch.manual_seed(rank)
    config = GPT2Config(vocab_size=8192, sequence_length=64, num_layers=layers, num_heads=width // 64, width=width)
    engine = mars_ds.initialize(
        GPT2(config),
        OptimizerConfig(kind="mars-m", lr=1e-3),
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    )
    savers = {kind: Saver(Path(folder) / kind, Retention(1), kind == "asynchronous") for kind in KINDS}
    found: dict[str, list[float]] = {"quiet step": [], "step during a save": []}
    found |= {f"{kind} {what}": [] for kind in KINDS for what in ("stall", "commit")}
    ids = torch.randint(0, 8192, (2, 64))
    step, order = 0, random.Random(0)

    def train() -> float:
        nonlocal step
        started = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        step += 1
        return time.perf_counter() - started

    for pair in range(-1, pairs):  # the first pair warms up
        for kind in order.sample(KINDS, 2):
            quiet = [train() for _ in range(QUIET_STEPS)]
            torch.distributed.barrier()
            started = time.perf_counter()
            savers[kind].begin(step, held_slices(engine), describe(engine), started=started)
            stall = time.perf_counter() - started
            during = []
            while all_say(savers[kind].writing):
                during.append(train())
            saved = savers[kind].wait(600.0)
            assert saved is not None and saved.problem is None, saved
            if pair >= 0:
                found["quiet step"] += quiet
                found["step during a save"] += during
                found[f"{kind} stall"].append(stall)
                found[f"{kind} commit"].append(saved.seconds)
    if rank == 0:
        newest = next((Path(folder) / "asynchronous").glob("step_*"))
        found["bytes"] = [float(sum(path.stat().st_size for path in newest.iterdir()))]
    return found


KINDS = ("synchronous", "asynchronous")


def all_say(here: bool) -> bool:
    """Whether any rank is still writing."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor(int(here))
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return bool(answer)


def main() -> None:
    """Prints medians and the ratio with its spread over the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--folder", help="where checkpoints go; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ranks: list[dict[str, Any]] = run_on_ranks(
            options.world_size, measure, options.layers, options.width, options.pairs, folder
        )
    print(f"{ranks[0]['bytes'][0] / 1e6:.0f} MB a checkpoint, {options.world_size} ranks, {options.pairs} pairs")
    names = [name for name in ranks[0] if name != "bytes"]
    slowest = {name: [max(values) for values in zip(*(r[name] for r in ranks), strict=True)] for name in names}
    for name, values in slowest.items():
        if values:
            print(f"{name:22}  median {statistics.median(values):7.3f} s  {min(values):7.3f} to {max(values):7.3f}")
    ratios = [s / a for s, a in zip(slowest["synchronous stall"], slowest["asynchronous stall"], strict=True)]
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"stall, synchronous : asynchronous  median {statistics.median(ratios):.1f}  {spread}")


if __name__ == "__main__":
    main()
