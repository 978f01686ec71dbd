"""A bundle: everything that is needed to look at a step that went wrong, and to run it again.

    RUN/unhealthy/step_00000123/
      bundle.json      why, which samples, their text, the last losses, norms of each layer's output and gradient
      rank_00000.safetensors   the tokens of that rank's micro-batches, int64, (micro-batches, micro_batch, T + 1)
      config.yaml      the config
      checkpoint/      weights, optimizer state and generators, in the usual format

`python launch/replay.py BUNDLE` runs the step's micro-batches again on one process and names the first layer whose
numbers are not finite.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from data_pipeline import DataError, load_tokenizer
from mars_ds.checkpoint.api import save_checkpoint
from mars_ds.telemetry.jsonl import read_jsonl

if TYPE_CHECKING:
    from mars_ds.training.trainer import Trainer

FOLDER = "unhealthy"
BUNDLE_NAME = "bundle.json"
_DECODED_TOKENS = 64
_LAST_RECORDS = 50


def write_bundle(trainer: "Trainer", reason: str) -> Path:
    """Writes the bundle of the step that has just been done; all ranks call it together.

    Returns:
        Its folder.
    """
    folder = trainer.folder.path / FOLDER / f"step_{trainer.step:08d}"
    if trainer.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    first = trainer.loader.position - trainer.batch.global_batch
    batches = list(trainer.loader.read_step(first))
    save_file({"tokens": torch.stack(batches)}, folder / rank_file(trainer.rank))
    with layer_norms(trainer.engine.module) as norms:
        for windows in batches:
            inputs, labels = trainer.model.inputs(windows.to(trainer.device))
            trainer.engine.backward(trainer.engine(input_ids=inputs, labels=labels).loss)
    gathered: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(gathered, {"rng": torch.get_rng_state().tolist(), "layers": norms})
    if trainer.rank == 0:
        facts = {
            "reason": reason,
            "step": trainer.step,
            "world_size": trainer.world_size,
            "first_sample": first,
            "samples": _samples(trainer, first),
            "data": trainer.loader.windows.manifest_sha256,
            "last_records": _last_records(trainer.folder.log),
            "ranks": gathered,
        }
        (folder / BUNDLE_NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        (folder / "config.yaml").write_text(trainer.config.to_yaml(), encoding="utf-8")
    save_checkpoint(
        trainer.engine, folder / "checkpoint", trainer.step, {"config": trainer.config.model_dump(mode="json")}
    )
    trainer.print(f"bundle {folder}; look at it with: python launch/replay.py {folder}")
    return folder


def rank_file(rank: int) -> str:
    """Tokens of a rank."""
    return f"rank_{rank:05d}.safetensors"


@contextlib.contextmanager
def layer_norms(module: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Records the norm of every layer's output and of the gradient that arrives at it, in order of execution.

    Yields:
        A list of `{"layer", "pass": "forward" | "backward", "norm"}`, filled while the module runs. A layer is a module
        without children, or a block of a list of blocks.
    """
    records: list[dict[str, Any]] = []
    handles = []

    def record(name: str, which: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            norm = torch.linalg.vector_norm(tensor.detach().float())
            records.append({"layer": name, "pass": which, "norm": float(norm)})

    for name, layer in module.named_modules():
        if name and (not list(layer.children()) or name.rsplit(".", 1)[-1].isdigit()):
            handles.append(layer.register_forward_hook(lambda _, __, out, name=name: record(name, "forward", out)))
            handles.append(
                layer.register_full_backward_hook(lambda _, __, grad, name=name: record(name, "backward", grad))
            )
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def first_not_finite(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first layer whose output or gradient is not finite."""
    return next((r for r in records if r["norm"] != r["norm"] or r["norm"] in (float("inf"), float("-inf"))), None)


def _samples(trainer: "Trainer", first: int) -> list[dict[str, Any]]:
    """Which samples the step was made of, where they lie, and how they begin."""
    loader = trainer.loader
    decode = None
    with contextlib.suppress(DataError):
        decode = load_tokenizer(loader.windows.tokenizer_name).decode
    positions = loader.sampling.positions(first, trainer.batch.global_batch)
    tokens = loader.windows.read_at(positions)
    return [
        {
            "sample": first + offset,
            "position": int(position),
            "text": decode(row[:_DECODED_TOKENS]) if decode else None,
        }
        for offset, (position, row) in enumerate(zip(positions, tokens, strict=True))
    ]


def _last_records(log: Path) -> list[dict[str, Any]]:
    try:
        return list(read_jsonl(log))[-_LAST_RECORDS:]
    except (OSError, ValueError):
        return []
