"""The shape of a GPT-2 and what follows from it alone: parameters and FLOPs, with nothing allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GPT2Config:
    """Everything that decides a GPT-2's parameters and its forward pass.

    Args:
        num_layers: Number of transformer blocks.
        num_heads: Attention heads of a block; must divide `width`.
        width: Size of the residual stream, in elements.
        sequence_length: Number of learned positions, in tokens: the longest input accepted.
        vocab_size: Rows of the embedding, padding ids included. 50,304 is GPT-2's 50,257 rounded up to a
            multiple of 128; the 47 padding ids stay in the softmax.
        bias: Whether linear layers and layer norms have biases.
        dropout: Probability, on embeddings, attention weights and residual branches.
        scale_attn_by_inverse_layer_idx: Divide the attention logits of block i (from 0) by i + 1 as well. The
            published MARS runs have it on, OpenAI's GPT-2 has it off.
        activation_checkpointing: full keeps only each block's input and recomputes the rest in the backward; selective
            keeps the outputs of matrix products and attention too.
        loss_chunk_tokens: Tokens whose logits exist at one time while the loss is computed; 0 is the plain
            loss on all logits at once.
        layer_norm_eps: Added to the variance in every layer norm.

    Raises:
        ValueError: A size is not positive, heads do not divide the width, or dropout is outside [0, 1).
    """

    num_layers: int
    num_heads: int
    width: int
    sequence_length: int
    vocab_size: int = 50304
    bias: bool = False
    dropout: float = 0.0
    scale_attn_by_inverse_layer_idx: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int = 0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "width", "sequence_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.num_heads:
            nearest = min(
                (heads for heads in range(1, self.width + 1) if self.width % heads == 0),
                key=lambda heads: abs(heads - self.num_heads),
            )
            raise ValueError(
                f"model.num_heads must divide model.width: {self.width} is not a multiple of "
                f"{self.num_heads}; the nearest number of heads that works is {nearest}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")
        if self.loss_chunk_tokens < 0:
            raise ValueError(
                f"model.loss_chunk_tokens must be 0 (plain loss) or a number of tokens, got {self.loss_chunk_tokens}"
            )

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.width // self.num_heads


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, in the order of `GPT2(config).named_parameters()`.

    Linear weights are (out, in). The head is the token embedding and has no name of its own.
    """
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {}

    def add(module: str, *shape: int) -> None:
        shapes[f"transformer.{module}.weight"] = shape
        if config.bias:
            shapes[f"transformer.{module}.bias"] = shape[:1]

    shapes["transformer.wte.weight"] = (config.vocab_size, width)
    shapes["transformer.wpe.weight"] = (config.sequence_length, width)
    for layer in range(config.num_layers):
        add(f"h.{layer}.ln_1", width)
        add(f"h.{layer}.attn.c_attn", 3 * width, width)
        add(f"h.{layer}.attn.c_proj", width, width)
        add(f"h.{layer}.ln_2", width)
        add(f"h.{layer}.mlp.c_fc", 4 * width, width)
        add(f"h.{layer}.mlp.c_proj", width, 4 * width)
    add("ln_f", width)
    return shapes


def num_parameters(config: GPT2Config) -> int:
    """Number of distinct parameters: the tied embedding counts once, positions and padded ids count."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: GPT2Config) -> int:
    """Floating-point operations of one token's forward and backward: 6 N + 12 L T d.

    N is `num_parameters` (every parameter, the tied embedding once), L the layers, T the sequence length and
    d the width. 6 N is a multiply-add per weight forward and two backward; 12 L T d is the two T x T
    attention products, counted in full and not halved for causality. This is the convention of PaLM (appendix
    B), nanoGPT and llm.c; recomputation under activation checkpointing is not counted (model FLOPs, not
    hardware FLOPs).
    """
    attention = 12 * config.num_layers * config.sequence_length * config.width
    return 6 * num_parameters(config) + attention
