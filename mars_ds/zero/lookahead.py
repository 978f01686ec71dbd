"""Exact mode under DeepSpeed: the gradient of the next batch at today's weights.

It passes the same accumulation, reduction, clipping and partitioning as any other, because it is an ordinary
engine step; only the optimizer copies the shards' gradients into `next_grad` instead of updating, and what the
step counted is put back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mars_ds.zero.initialize import optimizer_of

# What one engine step moves beside the weights.
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_global_grad_norm", "_step_applied")


@contextmanager
def lookahead(engine: Any) -> Iterator[None]:
    """Context around forward, backward and `engine.step()` of the next batch's whole accumulation window.

    Parameters, optimizer state but `next_grad`, learning rates, counters, the lr scheduler and the random
    generators are as before when it ends. With dropout, seed the generators by batch, so that both evaluations of
    a batch draw the same masks (`mars_ds.training` does). A next batch with a non-finite gradient is dropped: the
    step that needs it uses c = g.

    Args:
        engine: Made by `mars_ds.initialize` with `mode: exact`.

    Raises:
        RuntimeError: The optimizer is not in exact mode, or the window was not completed.
    """
    optimizer = optimizer_of(engine)
    if not any(group["exact"] for group in optimizer.param_groups):
        raise RuntimeError("lookahead needs optimizer.mode: exact")
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    cpu_rng = torch.get_rng_state()
    device_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    optimizer.capturing = True
    try:
        yield
        if engine.global_steps != counters["global_steps"] + 1:
            raise RuntimeError("lookahead: the window must hold gradient_accumulation_steps micro-batches and steps")
        if not engine.was_step_applied():
            optimizer.drop_capture()
    finally:
        optimizer.capturing = False
        engine.lr_scheduler = scheduler
        for name, value in counters.items():
            setattr(engine, name, value)
        torch.set_rng_state(cpu_rng)
        if device_rng is not None:
            torch.cuda.set_rng_state(device_rng)
