"""GPT-2 weights to and from Hugging Face `transformers`, without a change of a single bit.

The two differ in three ways: Hugging Face stores the linear weights of GPT-2 as (in, out), always has biases,
and names the tied head. Vocabulary padding stays: `vocab_size` of the exported configuration counts the
padded rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mars_ds.model.config import GPT2Config, parameter_shapes

if TYPE_CHECKING:
    from transformers import GPT2Config as HuggingFaceConfig
    from transformers import GPT2LMHeadModel

END_OF_TEXT_ID = 50256
"""GPT-2's document separator, named in the exported configuration when the vocabulary has it."""

_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_HEAD = "lm_head.weight"
_EMBEDDING = "transformer.wte.weight"
# Causal masks that older checkpoints carry as buffers: constants, not weights.
_MASKS = (".attn.bias", ".attn.masked_bias")


def to_huggingface(state_dict: Mapping[str, Tensor], config: GPT2Config) -> GPT2LMHeadModel:
    """A `GPT2LMHeadModel` that computes what `GPT2(config)` with these weights computes.

    Biases that ours does not have become zeros. The exported configuration remembers in `linear_bias` whether
    they were there, so that `from_huggingface` gives back what was exported.

    Args:
        state_dict: Parameters by our names; all of one floating dtype, which the result keeps.
        config: The configuration that they belong to.

    Returns:
        The model, on the CPU, in evaluation mode, head tied.

    Raises:
        ValueError: A parameter is missing, unknown, of another shape, or of a second dtype.
    """
    from transformers import GPT2LMHeadModel

    _check_parameters(state_dict, config)
    dtype = state_dict[_EMBEDDING].dtype
    exported: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        exported[name] = value.detach().T.contiguous() if name.endswith(_TRANSPOSED) else value.detach()
        if not config.bias and not name.endswith(("wte.weight", "wpe.weight")):
            exported[name.removesuffix("weight") + "bias"] = torch.zeros(value.shape[0], dtype=dtype)
    exported[_HEAD] = exported[_EMBEDDING]

    model = GPT2LMHeadModel(_huggingface_config(config)).to(dtype)
    model.load_state_dict(exported)
    model.tie_weights()
    return model.eval()


def from_huggingface(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    *,
    num_heads: int | None = None,
    scale_attn_by_inverse_layer_idx: bool | None = None,
) -> tuple[GPT2Config, dict[str, Tensor]]:
    """Our configuration and parameters of a Hugging Face GPT-2, as copies on the CPU.

    Args:
        model_or_state_dict: A `GPT2LMHeadModel`, or its state dict (with or without head and mask buffers).
        num_heads: Needed with a bare state dict, whose shapes do not tell it; refused with a model, which
            knows.
        scale_attn_by_inverse_layer_idx: Likewise for a state dict; None there means off, as in OpenAI's
            GPT-2.

    Returns:
        The configuration (biases off only when the export said so and they are all still zero) and the state
        dict, in the order of `parameter_shapes`.

    Raises:
        ValueError: An option that the source does not take, or a variant that our GPT-2 does not compute.
    """
    if isinstance(model_or_state_dict, nn.Module):
        if num_heads is not None or scale_attn_by_inverse_layer_idx is not None:
            raise ValueError("num_heads and scale_attn_by_inverse_layer_idx are read from the model; leave them out")
        source: Any = model_or_state_dict.config
        _refuse_other_variants(source)
        weights = dict(model_or_state_dict.state_dict())
        heads, inverse = int(source.n_head), bool(source.scale_attn_by_inverse_layer_idx)
        declared_bias, eps = bool(getattr(source, "linear_bias", True)), float(source.layer_norm_epsilon)
    else:
        if num_heads is None:
            raise ValueError("num_heads is needed with a bare state dict: its shapes do not tell it")
        weights = dict(model_or_state_dict)
        heads, inverse = num_heads, bool(scale_attn_by_inverse_layer_idx)
        declared_bias, eps = True, 1e-5

    weights = {name: value for name, value in weights.items() if not name.endswith(_MASKS)}
    if _EMBEDDING not in weights:
        raise ValueError(f"not a Hugging Face GPT-2: {_EMBEDDING} is missing")
    head = weights.pop(_HEAD, weights[_EMBEDDING])
    if not torch.equal(head, weights[_EMBEDDING]):
        raise ValueError(f"{_HEAD} differs from {_EMBEDDING}: our GPT-2 has a tied head")

    ours: dict[str, Tensor] = {}
    for name, value in weights.items():
        value = value.detach().cpu()
        ours[name] = (
            value.T.clone(memory_format=torch.contiguous_format) if name.endswith(_TRANSPOSED) else value.clone()
        )
    bias = declared_bias or any(bool(value.any()) for name, value in ours.items() if name.endswith(".bias"))
    if not bias:
        ours = {name: value for name, value in ours.items() if not name.endswith(".bias")}

    config = GPT2Config(
        num_layers=1 + max(int(name.split(".")[2]) for name in ours if name.startswith("transformer.h.")),
        num_heads=heads,
        width=ours[_EMBEDDING].shape[1],
        sequence_length=ours["transformer.wpe.weight"].shape[0],
        vocab_size=ours[_EMBEDDING].shape[0],
        bias=bias,
        scale_attn_by_inverse_layer_idx=inverse,
        layer_norm_eps=eps,
    )
    _check_parameters(ours, config)
    return config, {name: ours[name] for name in parameter_shapes(config)}


def _huggingface_config(config: GPT2Config) -> HuggingFaceConfig:
    from transformers import GPT2Config as HuggingFaceConfig

    end_of_text = END_OF_TEXT_ID if config.vocab_size > END_OF_TEXT_ID else None
    return HuggingFaceConfig(
        vocab_size=config.vocab_size,
        n_positions=config.sequence_length,
        n_embd=config.width,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        activation_function="gelu_new",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        layer_norm_epsilon=config.layer_norm_eps,
        scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        linear_bias=config.bias,
    )


def _refuse_other_variants(source: Any) -> None:
    """Raises ValueError for a Hugging Face configuration that computes something our GPT-2 does not."""
    if source.model_type != "gpt2":
        raise ValueError(f"model_type is {source.model_type!r}; only gpt2 can be read")
    expected = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * source.n_embd),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for name, values in expected.items():
        if getattr(source, name) not in values:
            raise ValueError(f"{name} is {getattr(source, name)!r}; our GPT-2 computes {values[-1]!r} only")


def _check_parameters(state_dict: Mapping[str, Tensor], config: GPT2Config) -> None:
    """Raises ValueError unless the state dict holds exactly the parameters of `config`, in one dtype."""
    shapes = parameter_shapes(config)
    missing, unknown = shapes.keys() - state_dict.keys(), state_dict.keys() - shapes.keys()
    if missing or unknown:
        raise ValueError(
            f"parameters do not fit the configuration: missing {sorted(missing)}, unknown {sorted(unknown)}"
        )
    for name, shape in shapes.items():
        if tuple(state_dict[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state_dict[name].shape)}, the configuration says {shape}")
    dtypes = {value.dtype for value in state_dict.values()}
    if len(dtypes) > 1:
        raise ValueError(f"parameters are of several dtypes: {sorted(map(str, dtypes))}; convert them to one")
