"""Export and import against the real Hugging Face model: logits, bits, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mars_ds.export import from_huggingface, to_huggingface
from mars_ds.model import GPT2, GPT2Config

CONFIG = GPT2Config(num_layers=3, num_heads=4, width=32, sequence_length=16, vocab_size=67)


def _model(config: GPT2Config) -> GPT2:
    """Every parameter random, biases and gains too, and large enough that attention is far from uniform."""
    model = GPT2(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_logits_equal_hugging_faces(bias: bool, inverse: bool) -> None:
    ours = _model(replace(CONFIG, bias=bias, scale_attn_by_inverse_layer_idx=inverse))
    theirs = to_huggingface(ours.state_dict(), ours.config)
    ids = torch.randint(0, 67, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = theirs(ids).logits, ours(ids).logits
    assert actual.std() > 0.5
    assert (actual - expected).abs().max().item() < 1e-5
    # Their labels are the ids themselves (shifted inside); ours are shifted already.
    with torch.no_grad():
        their_loss = theirs(ids, labels=ids).loss.item()
        our_loss = ours(ids[:, :-1], ids[:, 1:]).loss.item()
    assert our_loss == pytest.approx(their_loss, abs=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_identical(bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also through the files on disk."""
    from transformers import GPT2LMHeadModel

    config = replace(CONFIG, bias=bias, scale_attn_by_inverse_layer_idx=True, layer_norm_eps=1e-6)
    state = {name: value.to(dtype) for name, value in _model(config).state_dict().items()}
    exported = to_huggingface(state, config)
    exported.save_pretrained(tmp_path)
    for source in (exported, GPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype)):
        read_config, read = from_huggingface(source)
        assert read_config == config
        assert list(read) == list(state)
        assert all(torch.equal(read[name], state[name]) and read[name].dtype == dtype for name in state)


def test_exported_configuration() -> None:
    config = replace(CONFIG, vocab_size=50304, scale_attn_by_inverse_layer_idx=True, dropout=0.1)
    exported = to_huggingface(GPT2(config).state_dict(), config)
    assert exported.config.vocab_size == 50304
    assert exported.config.eos_token_id == exported.config.bos_token_id == 50256
    assert exported.config.scale_attn_by_inverse_layer_idx is True
    assert exported.config.activation_function == "gelu_new"
    assert exported.config.resid_pdrop == 0.1
    assert exported.lm_head.weight is exported.transformer.wte.weight
    assert exported.transformer.h[0].mlp.c_fc.bias.abs().max().item() == 0.0
    assert not exported.training


def test_hugging_faces_own_weights_load() -> None:
    from transformers import GPT2Config as HuggingFaceConfig
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(HuggingFaceConfig(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2)).eval()
    config, state = from_huggingface(theirs)
    assert config == GPT2Config(2, 2, 16, 8, vocab_size=50, bias=True)
    ours = GPT2(config).eval()
    ours.load_state_dict(state)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max().item() < 1e-5


def test_a_fine_tuned_bias_is_not_dropped() -> None:
    exported = to_huggingface(_model(CONFIG).state_dict(), CONFIG)
    with torch.no_grad():
        exported.transformer.h[2].attn.c_attn.bias[3] = 0.5
    config, state = from_huggingface(exported)
    assert config.bias
    assert state["transformer.h.2.attn.c_attn.bias"][3].item() == 0.5


def test_a_bare_state_dict_needs_the_heads() -> None:
    model = _model(replace(CONFIG, bias=True))
    bare = dict(to_huggingface(model.state_dict(), model.config).state_dict())
    bare["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    with pytest.raises(ValueError, match="num_heads is needed"):
        from_huggingface(bare)
    config, state = from_huggingface(bare, num_heads=4)
    assert config == model.config
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_other_variants_are_refused() -> None:
    exported = to_huggingface(_model(CONFIG).state_dict(), CONFIG)
    with pytest.raises(ValueError, match="are read from the model"):
        from_huggingface(exported, num_heads=2)
    exported.config.activation_function = "relu"
    with pytest.raises(ValueError, match="activation_function is 'relu'"):
        from_huggingface(exported)
    untied = dict(to_huggingface(_model(CONFIG).state_dict(), CONFIG).state_dict())
    untied["lm_head.weight"] = untied["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="tied head"):
        from_huggingface(untied, num_heads=4)


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    state = _model(CONFIG).state_dict()
    with pytest.raises(ValueError, match=r"missing \['transformer.h.3.attn.c_attn.weight'"):
        to_huggingface(state, replace(CONFIG, num_layers=4))
    with pytest.raises(ValueError, match=r"transformer\.wte\.weight has shape"):
        to_huggingface(state, replace(CONFIG, vocab_size=68))
    state["transformer.ln_f.weight"] = state["transformer.ln_f.weight"].bfloat16()
    with pytest.raises(ValueError, match="several dtypes"):
        to_huggingface(state, CONFIG)
