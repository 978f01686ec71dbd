"""The optimizer family on tensors. Knows no DeepSpeed and no process group."""

from mars_ds.optim.config import OptimizerConfig
from mars_ds.optim.mars import Mars, build_optimizer
from mars_ds.optim.sharding import Fragment

__all__ = ["Fragment", "Mars", "OptimizerConfig", "build_optimizer"]
