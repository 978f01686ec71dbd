"""MARS-family optimizers on DeepSpeed ZeRO shards, and a GPT-2 pre-training stack around them."""

from typing import Any

__version__ = "0.1.0"

__all__ = ["OptimizerConfig", "__version__", "initialize"]


def __getattr__(name: str) -> Any:
    # Lazy: importing DeepSpeed takes seconds and `mars_ds.optim` must work without it.
    if name == "initialize":
        from mars_ds.zero.initialize import initialize

        return initialize
    if name == "OptimizerConfig":
        from mars_ds.optim import OptimizerConfig

        return OptimizerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
