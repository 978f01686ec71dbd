"""The language model that the product trains: GPT-2, and the loss that fits beside it in memory."""

from mars_ds.model.chunked_loss import IGNORE_INDEX, chunked_cross_entropy, reference_cross_entropy
from mars_ds.model.config import GPT2Config, flops_per_token, num_parameters, parameter_shapes
from mars_ds.model.gpt2 import GPT2, GPT2Output

__all__ = [
    "GPT2",
    "IGNORE_INDEX",
    "GPT2Config",
    "GPT2Output",
    "chunked_cross_entropy",
    "flops_per_token",
    "num_parameters",
    "parameter_shapes",
    "reference_cross_entropy",
]
