"""Sampling: deterministic, inside the real vocabulary, past the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from mars_ds.export import generate, to_huggingface
from mars_ds.model import GPT2, GPT2Config


class ByteTokenizer:
    """Ids 0-255 are bytes (as latin-1), 256 is end-of-text."""

    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


CONFIG = GPT2Config(num_layers=2, num_heads=2, width=32, sequence_length=8, vocab_size=320)


def counting_model() -> GPT2LMHeadModel:
    """Predicts the id after the last one, most strongly; padding ids would win if they were not banned."""
    model = to_huggingface(GPT2(CONFIG, seed=1).state_dict(), CONFIG)

    def count(module: nn.Module, arguments: tuple, keywords: dict, output: Any) -> Any:
        ids = keywords["input_ids"]
        model.longest_input = max(model.longest_input, ids.shape[1] + keywords["position_ids"].min().item())
        output.logits = nn.functional.one_hot((ids + 1) % 257, 320).float() * 20
        output.logits[..., 257:] = 1000.0
        return output

    model.longest_input = 0
    model.register_forward_hook(count, with_kwargs=True)
    return model


def test_padding_ids_are_never_drawn_and_long_texts_go_on() -> None:
    model = counting_model()
    model.train()
    assert generate(model, ByteTokenizer(), "abc", max_new_tokens=23, temperature=0.0) == "abcdefghijklmnopqrstuvwxyz"
    assert generate(model, ByteTokenizer(), "abc", max_new_tokens=8, top_k=1, seed=3) == "abcdefghijk"
    assert generate(model, ByteTokenizer(), "abcdefghijkl", max_new_tokens=2, temperature=0.0) == "abcdefghijklmn"
    assert model.longest_input <= 8
    assert model.training


def test_end_of_text_stops_and_starts() -> None:
    model, tokenizer = counting_model(), ByteTokenizer()
    assert generate(model, tokenizer, "\xfd", max_new_tokens=9, temperature=0.0, stop_id=256) == "\xfd\xfe\xff"
    assert generate(model, tokenizer, "", max_new_tokens=2, temperature=0.0, stop_id=256) == "\x00\x01"


def test_same_seed_same_text() -> None:
    model = to_huggingface(GPT2(CONFIG, seed=1).state_dict(), CONFIG)
    tokenizer = ByteTokenizer()
    state = torch.get_rng_state()
    texts = [generate(model, tokenizer, "hello", 12, 0.8, 20, seed=5, stop_id=256) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert texts[0] == texts[1]
    assert texts[0].startswith("hello") and len(texts[0]) == 17
    assert generate(model, tokenizer, "hello", 12, 0.8, 20, seed=6, stop_id=256) != texts[0]


def test_mistakes_are_refused() -> None:
    model, tokenizer = counting_model(), ByteTokenizer()
    with pytest.raises(ValueError, match="no tokens"):
        generate(model, tokenizer, "")
    with pytest.raises(ValueError, match="temperature >= 0"):
        generate(model, tokenizer, "a", temperature=-1.0)
    with pytest.raises(ValueError, match="top_k >= 1"):
        generate(model, tokenizer, "a", top_k=0)
