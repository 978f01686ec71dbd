"""Pure facts of a model: names, shapes, counts and FLOPs, held against the real module."""

from __future__ import annotations

import pytest
import torch

from mars_ds.model import GPT2, GPT2Config, flops_per_token, num_parameters, parameter_shapes

SIZES = {
    "small": (12, 12, 768, 124_373_760),
    "medium": (24, 16, 1024, 354_599_936),
    "large": (36, 20, 1280, 773_582_080),
    "xl": (48, 25, 1600, 1_556_840_000),
}


@pytest.mark.parametrize("size", SIZES)
def test_published_parameter_counts(size: str) -> None:
    layers, heads, width, expected = SIZES[size]
    config = GPT2Config(num_layers=layers, num_heads=heads, width=width, sequence_length=1024)
    assert num_parameters(config) == expected
    with torch.device("meta"):
        model = GPT2(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("bias", [False, True])
def test_shapes_are_those_of_the_module_in_its_order(bias: bool) -> None:
    config = GPT2Config(num_layers=3, num_heads=2, width=8, sequence_length=5, vocab_size=11, bias=bias)
    with torch.device("meta"):
        model = GPT2(config)
    real = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert list(parameter_shapes(config).items()) == real
    assert list(model.state_dict()) == [name for name, _ in real]


def test_names_and_orientation() -> None:
    shapes = parameter_shapes(GPT2Config(2, 2, 8, 5, vocab_size=11))
    assert len(shapes) == 2 + 6 * 2 + 1
    assert shapes["transformer.h.1.attn.c_attn.weight"] == (24, 8)
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (8, 32)
    assert not any("lm_head" in name or name.endswith(".bias") for name in shapes)


def test_flops_per_token_at_the_published_sizes() -> None:
    small = GPT2Config(num_layers=12, num_heads=12, width=768, sequence_length=1024)
    assert flops_per_token(small) == 6 * 124_373_760 + 12 * 12 * 1024 * 768 == 859_488_768
    xl = GPT2Config(num_layers=48, num_heads=25, width=1600, sequence_length=1024)
    assert flops_per_token(xl) == 10_284_758_400


def test_a_user_mistake_is_named() -> None:
    with pytest.raises(ValueError, match=r"num_heads must divide.*nearest number of heads that works is 4"):
        GPT2Config(num_layers=1, num_heads=5, width=16, sequence_length=4)
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        GPT2Config(num_layers=0, num_heads=1, width=16, sequence_length=4)
    with pytest.raises(ValueError, match="dropout"):
        GPT2Config(num_layers=1, num_heads=1, width=16, sequence_length=4, dropout=1.0)
    with pytest.raises(ValueError, match="loss_chunk_tokens"):
        GPT2Config(num_layers=1, num_heads=1, width=16, sequence_length=4, loss_chunk_tokens=-1)
