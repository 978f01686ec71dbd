"""GPT-2 as the MARS papers train it: learned positions, pre-LN, tanh-GELU, head tied to the embedding."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mars_ds.model.chunked_loss import chunked_cross_entropy, reference_cross_entropy
from mars_ds.model.config import GPT2Config, flops_per_token, num_parameters, parameter_shapes

__all__ = ["GPT2", "GPT2Config", "GPT2Output", "flops_per_token", "num_parameters", "parameter_shapes"]

INIT_STD = 0.02


class GPT2Output(NamedTuple):
    """What a forward pass gives.

    Args:
        loss: 0-dim fp32, mean cross-entropy in nats over the counted positions; None without labels.
        logits: (batch, tokens, vocab) in the compute dtype; None when a loss was asked for, because keeping
            them would hold the largest tensor of the step alive.
    """

    loss: Tensor | None
    logits: Tensor | None


class GPT2(nn.Module):
    """A GPT-2 language model whose labels are ALREADY SHIFTED.

    `labels[:, t]` is the target OF position t, i.e. the id of token t + 1: for windows w of T + 1 tokens,
    call `model(w[:, :-1], labels=w[:, 1:])`. Nothing is shifted inside. Hugging Face models are the opposite:
    they take `labels = input_ids` and shift inside.

    Weights are drawn in fp32 from a CPU generator in the order of `named_parameters` and then copied, so that
    they depend on the seed alone: not on the device, the dtype, or PyTorch's global random state. On the meta
    device nothing is drawn.

    Args:
        config: Shapes and options.
        seed: A seed, or a CPU generator to draw from.
    """

    def __init__(self, config: GPT2Config, seed: int | torch.Generator = 0) -> None:
        super().__init__()
        self.config = config
        self.transformer = _Transformer(config)
        generator = seed if isinstance(seed, torch.Generator) else torch.Generator("cpu").manual_seed(seed)
        self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draws all weights: N(0, 0.02), every c_proj N(0, 0.02 / sqrt(2 layers)), biases 0, gains 1.

        Args:
            generator: A CPU generator; it is advanced.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith("c_proj.weight") else INIT_STD
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn.normal_(0.0, std, generator=generator))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPT2Output:
        """The loss when labels are given, the logits otherwise.

        Args:
            input_ids: (batch, tokens), int64, each in [0, vocab_size); not checked here.
            labels: (batch, tokens), int64: the target OF each position, ALREADY SHIFTED (see the class). -100
                takes a position out of the mean; when all are out, the loss is 0.

        Raises:
            ValueError: More tokens than positions, or labels whose shape is not that of the ids.
        """
        if input_ids.shape[1] > self.config.sequence_length:
            raise ValueError(
                f"input_ids has {input_ids.shape[1]} tokens a row; the model has "
                f"{self.config.sequence_length} positions"
            )
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}: "
                "one target for each position, already shifted"
            )
        hidden = self.transformer(input_ids)
        weight = self.transformer.wte.weight
        if labels is None:
            return GPT2Output(loss=None, logits=F.linear(hidden, weight))
        rows, targets = hidden.flatten(0, 1), labels.flatten()
        if self.config.loss_chunk_tokens:
            loss = chunked_cross_entropy(rows, weight, targets, self.config.loss_chunk_tokens)
        else:
            loss = reference_cross_entropy(rows, weight, targets)
        return GPT2Output(loss=loss, logits=None)


class _Transformer(nn.Module):
    """Ids (batch, tokens) to normalized hidden states (batch, tokens, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = _Embedding(config.vocab_size, config.width)
        self.wpe = _Embedding(config.sequence_length, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(_Block(config, layer) for layer in range(config.num_layers))
        self.ln_f = _layer_norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            if self.config.activation_checkpointing != "none" and torch.is_grad_enabled():
                hidden = self._checkpointed(block, hidden)
            else:
                hidden = block(hidden)
        normalized: Tensor = self.ln_f(hidden)
        return normalized

    def _checkpointed(self, block: nn.Module, hidden: Tensor) -> Tensor:
        selective = self.config.activation_checkpointing == "selective"
        options: dict[str, Any] = {"context_fn": _keep_products} if selective else {}
        # Without dropout a recomputed block draws nothing, and saving the random state costs a sync.
        preserve = self.config.dropout > 0.0
        output: Tensor = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=preserve, **options)
        return output


# Outputs worth keeping: recomputing them is nearly all that recomputing a block costs.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_products() -> Any:
    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        keep = operator in _PRODUCTS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class _Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = _layer_norm(config)
        self.attn = _Attention(config, layer)
        self.ln_2 = _layer_norm(config)
        self.mlp = _MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        attended: Tensor = hidden + self.attn(self.ln_1(hidden))
        transformed: Tensor = attended + self.mlp(self.ln_2(attended))
        return transformed


class _Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scale = 1.0 / math.sqrt(config.head_width)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.dropout = config.dropout
        self.c_attn = _Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = _Linear(config.width, config.width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.c_attn(hidden).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
        )
        projected: Tensor = self.drop(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = _Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = _Linear(4 * config.width, config.width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.drop(self.c_proj(F.gelu(self.c_fc(hidden), approximate="tanh")))
        return projected


class _Linear(nn.Linear):
    """Left uninitialised: `GPT2.initialize` draws every weight once, from one generator."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """Left uninitialised, for the same reason."""

    def reset_parameters(self) -> None:
        pass


def _layer_norm(config: GPT2Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, eps=config.layer_norm_eps, bias=config.bias)
