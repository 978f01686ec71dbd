"""Runs the step of a bundle again, on one process, without DeepSpeed: what `launch/replay.py` calls."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from mars_ds.checkpoint.reader import CheckpointReader, newest_checkpoint
from mars_ds.config import load_config
from mars_ds.errors import ConfigError
from mars_ds.training.bundle import BUNDLE_NAME, first_not_finite, layer_norms, rank_file
from mars_ds.training.model import build_model


def replay(bundle: Path, rank: int | None = None) -> Iterator[str]:
    """Lines about each rank's micro-batches: their loss, and the first layer that is not finite, now and then.

    The weights are the fp32 masters of the bundle's checkpoint: those *after* the last update that was applied, which
    is the state that the skipped steps saw.

    Args:
        bundle: Folder that `write_bundle` made.
        rank: One rank only.

    Raises:
        ConfigError: There is no bundle.
        CheckpointError: Its checkpoint is damaged.
    """
    if not (bundle / BUNDLE_NAME).is_file():
        raise ConfigError(f"{bundle}: no {BUNDLE_NAME}; expected a folder like RUN/unhealthy/step_00000123")
    facts = json.loads((bundle / BUNDLE_NAME).read_text(encoding="utf-8"))
    config = load_config(bundle / "config.yaml")
    reader = CheckpointReader(newest_checkpoint(bundle / "checkpoint") or bundle / "checkpoint", verify=True)
    model = build_model(config)
    model.module.load_state_dict(reader.model_state(), strict=False)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.precision.dtype]
    model.module.to(dtype)
    yield f"step {facts['step']} of {facts['world_size']} ranks: {facts['reason']}"
    for number in range(facts["world_size"]) if rank is None else [rank]:
        tokens = load_file(bundle / rank_file(number))["tokens"]
        with layer_norms(model.module) as norms:
            losses = []
            for windows in tokens:
                inputs, labels = model.inputs(windows)
                loss = model.module(input_ids=inputs, labels=labels).loss
                loss.backward()
                losses.append(float(loss.detach()))
        then, now = first_not_finite(facts["ranks"][number]["layers"]), first_not_finite(norms)
        yield f"rank {number}: losses {', '.join(f'{loss:.6g}' for loss in losses)}"
        yield f"  first layer that is not finite: then {_words(then)}; now {_words(now)}"
        gradients = ((name, p.grad) for name, p in model.module.named_parameters() if p.grad is not None)
        largest = sorted(((float(g.float().norm()), name) for name, g in gradients), reverse=True)[:5]
        yield "  largest gradients: " + ", ".join(f"{name} {norm:.4g}" for norm, name in largest)
        model.module.zero_grad()
    first = facts["samples"][0]
    yield f"samples {facts['first_sample']:,} and on; the first begins: {first['text']!r}"


def _words(record: dict[str, object] | None) -> str:
    return "none" if record is None else f"{record['layer']} ({record['pass']})"
