"""Sampling: deterministic, inside the real vocabulary, past the context, from both kinds of model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mars_ds.export import generate, to_huggingface
from mars_ds.model import GPT2, GPT2Config


class ByteTokenizer:
    """Ids 0-255 are bytes (as latin-1), 256 is end-of-text."""

    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


class NextByte(nn.Module):
    """Predicts the id after the last one, most strongly; padding ids would win if they were not banned."""

    def __init__(self, vocab_size: int = 320) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))
        self.config = SimpleNamespace(n_positions=4)
        self.vocab_size = vocab_size
        self.longest_input = 0

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        self.longest_input = max(self.longest_input, input_ids.shape[1])
        logits = nn.functional.one_hot((input_ids + 1) % 257, self.vocab_size).float() * 20
        logits[..., 257:] = 1000.0
        return SimpleNamespace(logits=logits)


def test_padding_ids_are_never_drawn_and_the_window_slides() -> None:
    model = NextByte()
    assert generate(model, ByteTokenizer(), "abc", max_new_tokens=8, temperature=0.0) == "abcdefghijk"
    assert generate(model, ByteTokenizer(), "abc", max_new_tokens=8, top_k=1, seed=3) == "abcdefghijk"
    assert model.longest_input == 4
    assert model.training


def test_end_of_text_stops_and_starts() -> None:
    tokenizer = ByteTokenizer()
    assert generate(NextByte(), tokenizer, "\xfd", max_new_tokens=9, temperature=0.0, stop_id=256) == "\xfd\xfe\xff"
    assert generate(NextByte(), tokenizer, "", max_new_tokens=2, temperature=0.0, stop_id=256) == "\x00\x01"


def test_same_seed_same_text_from_ours_and_from_hugging_face() -> None:
    config = GPT2Config(num_layers=2, num_heads=2, width=32, sequence_length=8, vocab_size=320)
    ours = GPT2(config, seed=1)
    theirs = to_huggingface(ours.state_dict(), config)
    tokenizer = ByteTokenizer()
    texts = [generate(model, tokenizer, "hello", 12, 0.8, 20, seed=5, stop_id=256) for model in (ours, theirs, theirs)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("hello") and len(texts[0]) == 17
    assert generate(theirs, tokenizer, "hello", 12, 0.8, 20, seed=6, stop_id=256) != texts[0]


def test_mistakes_are_refused() -> None:
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match="no tokens"):
        generate(NextByte(), tokenizer, "")
    with pytest.raises(ValueError, match="temperature >= 0"):
        generate(NextByte(), tokenizer, "a", temperature=-1.0)
    with pytest.raises(ValueError, match="top_k >= 1"):
        generate(NextByte(), tokenizer, "a", top_k=0)
