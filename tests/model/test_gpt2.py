"""The model's initial weights, its attention, and what it does with labels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mars_ds.model import GPT2, GPT2Config

CONFIG = GPT2Config(num_layers=2, num_heads=2, width=16, sequence_length=12, vocab_size=40)


def _ids(batch: int = 3, tokens: int = 12) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))


def _gradients(config: GPT2Config) -> tuple[float, dict[str, torch.Tensor]]:
    model = GPT2(config, seed=3)
    ids = _ids()
    loss = model(ids[:, :-1], ids[:, 1:]).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_initial_weights_have_the_specified_spread() -> None:
    config = GPT2Config(num_layers=8, num_heads=4, width=256, sequence_length=64, vocab_size=2048, bias=True)
    for name, parameter in GPT2(config, seed=0).named_parameters():
        if name.endswith(".bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
            assert abs(parameter.mean().item()) < 4 * expected / math.sqrt(parameter.numel()), name


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first = GPT2(CONFIG, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = GPT2(CONFIG, seed=torch.Generator().manual_seed(7)).state_dict()
    other = GPT2(CONFIG, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_initial_weights_in_bf16_are_the_rounded_fp32_ones() -> None:
    full = GPT2(CONFIG, seed=7).state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        half = GPT2(CONFIG, seed=7).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)


def test_first_loss_is_near_ln_vocab() -> None:
    config = replace(CONFIG, vocab_size=1024)
    ids = torch.randint(0, 1024, (8, 12), generator=torch.Generator().manual_seed(0))
    loss = GPT2(config)(ids[:, :-1], ids[:, 1:]).loss
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert loss.item() == pytest.approx(math.log(1024), abs=0.05)


def test_labels_are_the_targets_of_their_own_positions() -> None:
    model, ids = GPT2(CONFIG), _ids()
    logits = model(ids[:, :-1]).logits
    assert logits.shape == (3, 11, 40)
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    output = model(ids[:, :-1], labels=ids[:, 1:])
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert output.logits is None


def test_a_position_sees_only_its_past() -> None:
    model, ids = GPT2(CONFIG), _ids()
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % CONFIG.vocab_size
    difference = (model(ids).logits - model(changed).logits).abs().amax(dim=(0, 2))
    assert difference[:6].max().item() == 0.0
    assert difference[6:].min().item() > 1e-3


def test_inverse_layer_scale_divides_the_logits_of_layer_i_by_i_plus_1() -> None:
    plain = GPT2(CONFIG, seed=5)
    scaled = GPT2(replace(CONFIG, scale_attn_by_inverse_layer_idx=True), seed=5)
    ids = _ids()
    assert not torch.allclose(plain(ids).logits, scaled(ids).logits, atol=1e-7)
    with torch.no_grad():
        for layer, block in enumerate(plain.transformer.h):
            block.attn.c_attn.weight[: CONFIG.width] /= layer + 1
    torch.testing.assert_close(plain(ids).logits, scaled(ids).logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}, {"loss_chunk_tokens": 7}],
)
def test_memory_options_do_not_change_loss_or_gradients(change: dict) -> None:
    plain_loss, plain = _gradients(CONFIG)
    loss, gradients = _gradients(replace(CONFIG, **change))
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    for name in plain:
        torch.testing.assert_close(gradients[name], plain[name], atol=1e-7, rtol=1e-5, msg=name)


def test_checkpointed_dropout_recomputes_the_same_mask() -> None:
    config = replace(CONFIG, dropout=0.3, activation_checkpointing="full")
    results = []
    for checkpointing in ("full", "none"):
        torch.manual_seed(4)
        results.append(_gradients(replace(config, activation_checkpointing=checkpointing)))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-7, rtol=1e-5, msg=name)


def test_selective_checkpointing_keeps_products_and_recomputes_the_rest() -> None:
    """Counted by what the backward pass runs again: all products for full, none for selective."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products, self.others = 0, 0

        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            name = str(operator)
            self.products += name.startswith(("aten.mm.", "aten.addmm.", "aten._scaled_dot_product"))
            self.others += name.startswith(("aten.gelu.", "aten.native_layer_norm."))
            return operator(*arguments, **(keywords or {}))

    counts = {}
    for how in ("none", "selective", "full"):
        model, ids = GPT2(replace(CONFIG, activation_checkpointing=how), seed=3), _ids()
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        with Count() as count:
            loss.backward()
        counts[how] = (count.products, count.others)
    # The backward pass has products of its own; what comes on top is recomputed.
    assert counts["selective"][0] == counts["none"][0] < counts["full"][0]
    assert counts["none"][1] == 0 < counts["selective"][1]


def test_dropout_rests_in_evaluation() -> None:
    model = GPT2(replace(CONFIG, dropout=0.5), seed=2).eval()
    assert torch.equal(model(_ids()).logits, GPT2(CONFIG, seed=2)(_ids()).logits)


def test_wrong_shapes_are_refused() -> None:
    model = GPT2(CONFIG)
    with pytest.raises(ValueError, match="13 tokens a row; the model has 12 positions"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="one target for each position"):
        model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64))


def test_compiles_as_one_graph() -> None:
    """No graph break in forward or backward, with the chunked loss and checkpointing on."""
    config = replace(CONFIG, loss_chunk_tokens=16, activation_checkpointing="full")
    model, ids = GPT2(config, seed=3), _ids()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(ids[:, :-1], ids[:, 1:]).loss
    loss.backward()
    expected, gradients = _gradients(config)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=name)
