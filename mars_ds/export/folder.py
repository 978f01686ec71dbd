"""Exports a checkpoint as a folder that Hugging Face's `from_pretrained` opens, proven by its logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from data_pipeline import DataError
from data_pipeline.tokenizer import END_OF_TEXT, GPT2_EOT
from data_pipeline.tokenizer_json import tokenizer_json
from data_pipeline.vocabulary import load_gpt2_vocabulary
from mars_ds.errors import CheckpointError, ConfigError
from mars_ds.export.checkpoint import StoredGPT2, load_gpt2
from mars_ds.export.huggingface import to_huggingface
from mars_ds.export.proof import LogitProof, compare_logits
from mars_ds.model.gpt2 import GPT2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_folder(source: str | Path, target: str | Path, dtype: str = "float32") -> LogitProof:
    """Writes `config.json`, `model.safetensors`, the tokenizer and a model card; success means equal logits.

    The folder is written aside, read back with `from_pretrained`, compared in float32 with our own model on the
    checkpoint's weights (rounded to `dtype`), and only then renamed.

    Args:
        source: A checkpoint of any stage and world size, or a run folder (its newest).
        target: Must not exist.
        dtype: Of the weights in the file.

    Raises:
        ConfigError: `target` exists, or an unknown dtype.
        CheckpointError: No checkpoint, a damaged one, or the logits of what was written differ.
    """
    from transformers import AutoModelForCausalLM

    target = Path(target)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if target.exists():
        raise ConfigError(f"{target}: exists; name a new folder with --output")
    stored = load_gpt2(source)
    aside = target.with_name(f".writing_{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        rounded = {name: value.to(DTYPES[dtype]) for name, value in stored.state.items()}
        to_huggingface(rounded, stored.config).save_pretrained(aside)
        tokenizer = _write_tokenizer(aside, stored)
        (aside / "README.md").write_text(_card(stored, target.name, dtype, tokenizer), encoding="utf-8")
        ours = GPT2(stored.config, seed=0)
        ours.load_state_dict({name: value.float() for name, value in rounded.items()})
        theirs = AutoModelForCausalLM.from_pretrained(aside, torch_dtype=torch.float32)
        proof = compare_logits(theirs, ours, stored.config.vocab_size, stored.config.sequence_length)
        if not proof.equal:
            raise CheckpointError(f"{target}: not exported: {proof.line}; this is a defect, please report it")
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return proof


def _write_tokenizer(folder: Path, stored: StoredGPT2) -> str:
    """Tokenizer files where they can be made; returns a sentence about them for the card."""
    if stored.tokenizer != "gpt2":
        return (
            f"The tokenizer is `{stored.tokenizer}`; it is not in this folder: use the model file or the byte "
            "tokenizer that the data was made with."
        )
    try:
        vocabulary = load_gpt2_vocabulary()
    except DataError as error:
        return f"The tokenizer is GPT-2's; its files are not here ({error})."
    whole = json.loads(tokenizer_json(vocabulary))
    end = {"id": GPT2_EOT, "content": END_OF_TEXT, "special": True, "normalized": False}
    whole["added_tokens"] = [end | {"single_word": False, "lstrip": False, "rstrip": False}]
    whole["model"]["vocab"][END_OF_TEXT] = GPT2_EOT
    _write_json(folder / "tokenizer.json", whole)
    settings = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": stored.config.sequence_length}
    specials = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    _write_json(folder / "tokenizer_config.json", settings | specials)
    _write_json(folder / "special_tokens_map.json", specials)
    return "The tokenizer is GPT-2's byte-pair encoding; documents begin with `<|endoftext|>`."


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _card(stored: StoredGPT2, name: str, dtype: str, tokenizer: str) -> str:
    config = stored.config
    parameters = sum(value.numel() for value in stored.state.values())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

GPT-2 with {config.num_layers} layers of width {config.width}, {config.num_heads} heads, {config.sequence_length}
positions and {config.vocab_size:,} embedding rows: {parameters:,} parameters, stored as {dtype}. Trained for
{stored.step:,} steps with `{stored.optimizer}` on the data set
`{stored.data_set}`.

{tokenizer}

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{name}")

The logits of this folder were compared with those of the trained model before it was written.
"""
