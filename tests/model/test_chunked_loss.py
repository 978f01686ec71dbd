"""The chunked loss against its plain twin: values, gradients, ignored labels, half precision, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mars_ds.model.chunked_loss import IGNORE_INDEX, chunked_cross_entropy, reference_cross_entropy

TOKENS, WIDTH, VOCAB = 37, 16, 101


def _inputs(dtype: torch.dtype, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.randperm(TOKENS, generator=generator)[:ignored]] = IGNORE_INDEX
    return hidden, weight, labels


def _run(loss: Tensor, hidden: Tensor, weight: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.autograd.grad(loss * factor, (hidden, weight))
    return loss.detach(), grads[0], grads[1]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("ignored", [0, 9])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_equals_the_reference(dtype: torch.dtype, tolerance: float, ignored: int, chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs(dtype, ignored)
    expected = _run(reference_cross_entropy(hidden, weight, labels), hidden, weight, factor=3.0)
    chunked = _run(chunked_cross_entropy(hidden, weight, labels, chunk_tokens), hidden, weight, factor=3.0)
    for ours, reference in zip(chunked, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ignored", [0, 9])
def test_reference_is_torch_cross_entropy(ignored: int) -> None:
    hidden, weight, labels = _inputs(torch.float64, ignored)
    plain = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100)
    torch.testing.assert_close(reference_cross_entropy(hidden, weight, labels), plain, atol=1e-14, rtol=0)


@pytest.mark.parametrize("chunked", [False, True])
def test_without_targets_loss_and_gradients_are_zero(chunked: bool) -> None:
    hidden, weight, labels = _inputs(torch.float32, ignored=TOKENS)
    loss = (
        chunked_cross_entropy(hidden, weight, labels, 8) if chunked else reference_cross_entropy(hidden, weight, labels)
    )
    for value in _run(loss, hidden, weight):
        assert torch.equal(value, torch.zeros_like(value))


def test_bf16_weights() -> None:
    """The loss is fp32; gradients are no further from fp64's than twice what the plain loss's are."""
    hidden, weight, labels = _inputs(torch.bfloat16, ignored=5)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = _run(reference_cross_entropy(*exact_inputs, labels), *exact_inputs)
    plain = _run(reference_cross_entropy(hidden, weight, labels), hidden, weight)
    chunked = _run(chunked_cross_entropy(hidden, weight, labels, 8), hidden, weight)
    assert [value.dtype for value in chunked] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert abs(chunked[0] - plain[0]).item() < 1e-5
    for ours, theirs, truth in zip(chunked[1:], plain[1:], exact[1:], strict=True):
        assert (ours - truth).norm() <= 2 * (theirs - truth).norm()
        assert (ours - truth).norm() < 0.01 * truth.norm()


def test_fp16_gradients_do_not_underflow_under_a_loss_scale() -> None:
    hidden, weight, labels = _inputs(torch.float16)
    grads = _run(chunked_cross_entropy(hidden, weight, labels, 8), hidden, weight, factor=1024.0)[1:]
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = _run(reference_cross_entropy(*exact_inputs, labels), *exact_inputs)[1:]
    for ours, truth in zip(grads, exact, strict=True):
        assert (ours.double() / 1024 - truth).norm() < 2e-3 * truth.norm()


def test_autocast_decides_the_dtype_and_gradients_return_in_fp32() -> None:
    hidden, weight, labels = _inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = reference_cross_entropy(hidden, weight, labels)
        chunked = chunked_cross_entropy(hidden, weight, labels, 8)
    assert abs(plain - chunked).item() < 1e-5
    for ours, theirs in zip(_run(chunked, hidden, weight)[1:], _run(plain, hidden, weight)[1:], strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    hidden, weight, labels = _inputs(torch.float32)

    class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.numel = max(self.numel, result.numel())
            return result

    with _Largest() as plain:
        reference_cross_entropy(hidden, weight, labels).backward()
    with _Largest() as chunked:
        chunked_cross_entropy(hidden, weight, labels, 4).backward()
    assert plain.numel == TOKENS * VOCAB
    assert chunked.numel == VOCAB * WIDTH


def test_no_gradient_is_computed_when_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = _inputs(torch.float32)
    expected = reference_cross_entropy(hidden, weight, labels).item()

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("a gradient buffer was allocated")

    monkeypatch.setattr(torch, "empty_like", refuse)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, labels, 8)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_mistakes_are_refused() -> None:
    hidden, weight, labels = _inputs(torch.float32)
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        chunked_cross_entropy(hidden, weight, labels, 0)
    with pytest.raises(ValueError, match=r"expected hidden \(tokens, width\)"):
        chunked_cross_entropy(hidden, weight, labels[:-1], 8)
