"""GPT-2's vocabulary as the ``tokenizer.json`` of Hugging Face's tokenizers, which fastokens reads."""

import json

from data_pipeline.vocabulary import Vocabulary, byte_of_character


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """The vocabulary as a ``tokenizer.json`` of byte-level BPE, without special tokens.

    The merges are not in the rank file and need not be: a token's last merge joins the two pieces that its bytes
    fall into when only tokens of lower rank exist.
    """
    characters = {byte: character for character, byte in byte_of_character().items()}
    spelled = {token: "".join(characters[byte] for byte in token) for token in vocabulary.ranks}
    merges = []
    for token, rank in sorted(vocabulary.ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(token, rank, vocabulary.ranks)
            merges.append([spelled[left], spelled[right]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {spelled[token]: rank for token, rank in vocabulary.ranks.items()},
                "merges": merges,
            },
        }
    )


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    pieces = [token[at : at + 1] for at in range(len(token))]
    while len(pieces) > 2:
        joined = [ranks.get(pieces[at] + pieces[at + 1], rank) for at in range(len(pieces) - 1)]
        best = min(range(len(joined)), key=joined.__getitem__)
        assert joined[best] < rank, token
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces[0], pieces[1]
