"""Builds the model of a config: our GPT-2, or what a factory of the user's returns."""

import difflib
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mars_ds.config import ModelSection, RunConfig
from mars_ds.errors import ConfigError
from mars_ds.model.gpt2 import GPT2, GPT2Config, flops_per_token

IGNORED_LABEL = -100


@dataclass(frozen=True)
class TrainableModel:
    """A causal model with what the trainer needs to know of it.

    Attributes:
        module: Called as `module(input_ids=..., labels=...)`, returns an object with `.loss`.
        vocab_size: Rows of the embedding, or None when a factory's model does not tell.
        max_positions: Longest sequence, or None when unlimited or unknown.
        shifts_labels: True in the Hugging Face convention: labels equal the inputs and are shifted inside.
        flops_per_token: Forward and backward of one token.
    """

    module: nn.Module
    vocab_size: int | None
    max_positions: int | None
    shifts_labels: bool
    flops_per_token: int

    def inputs(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Splits (n, T + 1) windows into inputs and labels (n, T) in this model's convention."""
        inputs = windows[:, :-1]
        return inputs, inputs.clone() if self.shifts_labels else windows[:, 1:].clone()

    def targets_per_window(self, sequence_length: int) -> int:
        """Tokens of a window that carry a loss."""
        return sequence_length - 1 if self.shifts_labels else sequence_length


def gpt2_config(section: ModelSection) -> GPT2Config:
    """The GPT-2 of a config's model section."""
    return GPT2Config(
        num_layers=section.num_layers,
        num_heads=section.num_heads,
        width=section.width,
        sequence_length=section.sequence_length,
        vocab_size=section.vocab_size,
        bias=section.bias,
        dropout=section.dropout,
        scale_attn_by_inverse_layer_idx=section.scale_attn_by_inverse_layer_idx,
        activation_checkpointing=section.activation_checkpointing,
        loss_chunk_tokens=section.loss_chunk_tokens,
    )


def check_can_compile(config: RunConfig) -> None:
    """Refuses `model.compile` where the compiler that torch would call is missing.

    Raises:
        ConfigError: With the package to install.
    """
    if config.model.compile and not torch.cuda.is_available() and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "model.compile: torch.compile on a CPU needs a C++ compiler (apt-get install g++); nearest: false"
        )


def build_model(config: RunConfig, device: str | None = None) -> TrainableModel:
    """Builds the model with weights that depend on `run.seed` alone.

    Args:
        config: The run.
        device: "meta" to plan without memory; None for ordinary tensors.

    Raises:
        ConfigError: The factory cannot be imported or fails, or the sequence is longer than its positions.
    """
    section = config.model
    if section.factory is not None:
        return _from_factory(config, device)
    shape = gpt2_config(section)
    with torch.device(device) if device else torch.device("cpu"):
        module = GPT2(shape, seed=config.run.seed)
    return TrainableModel(module, shape.vocab_size, shape.sequence_length, False, flops_per_token(shape))


def _from_factory(config: RunConfig, device: str | None) -> TrainableModel:
    factory = load_factory(config.model.factory or "")
    torch.manual_seed(config.run.seed)
    try:
        with torch.device(device) if device else torch.device("cpu"):
            module = factory(**config.model.factory_arguments)
    except Exception as error:
        raise ConfigError(
            f"model.factory_arguments: {config.model.factory} fails with them: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.factory: {config.model.factory} returned {type(module).__name__}, not a module")
    find_embedding = getattr(module, "get_input_embeddings", None)
    embedding = find_embedding() if callable(find_embedding) else None
    vocab_size = getattr(embedding, "num_embeddings", None)
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    length = config.model.sequence_length
    if positions is not None and length > positions:
        raise ConfigError(
            f"model.sequence_length {length} is above the model's {positions} positions; nearest: {positions}"
        )
    parameters = sum(p.numel() for p in module.parameters())
    return TrainableModel(module, vocab_size, positions, True, 6 * parameters)


def load_factory(spec: str) -> Callable[..., Any]:
    """Imports `package.module:function`.

    Raises:
        ConfigError: What part of the name does not exist, and the nearest function.
    """
    module_name, colon, function = spec.partition(":")
    if not colon:
        raise ConfigError(f"model.factory: {spec!r} is not of the form package.module:function")
    # The launchers put the script's folder on the path, not the one the user stands in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"model.factory: {module_name} cannot be imported: {error}") from error
    if not callable(getattr(module, function, None)):
        close = difflib.get_close_matches(function, [n for n in dir(module) if callable(getattr(module, n))], n=1)
        hint = f"; nearest: {module_name}:{close[0]}" if close else ""
        raise ConfigError(f"model.factory: {module_name} has no function {function}{hint}")
    found: Callable[..., Any] = getattr(module, function)
    return found
