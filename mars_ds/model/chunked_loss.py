"""Cross-entropy of a language-model head without ever holding the logits of all tokens.

The plain loss keeps (tokens x vocabulary) logits in the weights' dtype, a copy in fp32 and their gradient: at
50,304 ids and 16,384 tokens that is 1.6 GB + 3.3 GB + 3.3 GB. Here the head is walked in chunks of tokens;
each chunk's logits are turned into their share of the loss and of both gradients at once, and then forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss: PyTorch's and Hugging Face's convention."""


def reference_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T`, all logits at once: the oracle of `chunked_cross_entropy`.

    Args:
        hidden: (tokens, width), floating point.
        weight: (vocab, width), the dtype of `hidden`.
        labels: (tokens,), int64; target id of each row, or `IGNORE_INDEX`.

    Returns:
        0-dim loss in nats per counted token; fp32 (fp64 for fp64 inputs). When every label is ignored it is 0
        and so are the gradients: a batch without targets must not turn the averaged gradient into NaN.
    """
    logits = F.linear(hidden, weight)
    total = F.cross_entropy(
        logits.to(_statistics_dtype(logits.dtype)), labels, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / _num_counted(labels)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """`reference_cross_entropy` with O(chunk_tokens x vocab) memory beside the two gradients.

    Logits and products are in the dtype of the inputs (under autocast, in autocast's dtype), the softmax in
    fp32, and the gradient of `weight` is summed over chunks in fp32. Gradients are computed in the forward,
    only when they are wanted, and scaled in the backward; a second derivative is refused.

    Args:
        hidden: (tokens, width), floating point.
        weight: (vocab, width), the dtype of `hidden`.
        labels: (tokens,), int64; target id of each row, or `IGNORE_INDEX`.
        chunk_tokens: Rows whose logits exist at one time, at least 1.

    Returns:
        0-dim loss, exactly as the reference defines it (0 when every label is ignored).

    Raises:
        ValueError: `chunk_tokens` below 1, or shapes that do not fit together.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            "expected hidden (tokens, width), weight (vocab, width), labels (tokens,); got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        # A custom Function hides its inputs from autocast; cast where autograd can still see it.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    apply: Callable[..., Tensor] = _ChunkedCrossEntropy.apply
    return apply(hidden, weight, labels, chunk_tokens, with_gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and unscaled gradients in one walk over the chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, with_gradients: bool
    ) -> Tensor:
        statistics_dtype = _statistics_dtype(hidden.dtype)
        total = torch.zeros((), dtype=statistics_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros_like(weight, dtype=statistics_dtype) if with_gradients else None

        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            counted = labels[rows] != IGNORE_INDEX
            targets = labels[rows].masked_fill(~counted, 0).unsqueeze(1)
            logits = F.linear(hidden[rows], weight).to(statistics_dtype)
            log_normalizer = torch.logsumexp(logits, dim=1, keepdim=True)
            losses = (log_normalizer - logits.gather(1, targets)).squeeze(1)
            total += losses.masked_fill(~counted, 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = logits.sub_(log_normalizer).exp_()
                grad_logits.scatter_add_(1, targets, torch.full_like(log_normalizer, -1.0))
                grad_logits = grad_logits.masked_fill_(~counted.unsqueeze(1), 0.0).to(hidden.dtype)
                grad_hidden[rows] = grad_logits @ weight
                grad_weight += grad_logits.T @ hidden[rows]

        num_counted = _num_counted(labels)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, num_counted)
        return total / num_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight, num_counted = ctx.saved_tensors
        # Divided by the count only here, together with an fp16 loss scale: 1 / tokens alone would underflow.
        scale = grad_output / num_counted
        return (
            (grad_hidden * scale).to(grad_hidden.dtype),
            (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _num_counted(labels: Tensor) -> Tensor:
    """Labels that count, as a 0-dim tensor on the device (no host sync), and at least 1 as a divisor."""
    return (labels != IGNORE_INDEX).sum().clamp(min=1)
