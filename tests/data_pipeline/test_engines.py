"""Engines: identical ids or none."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import engines
from data_pipeline.audit import repeated_stretches, sample_of
from data_pipeline.build import Execution, prepare
from data_pipeline.engines import (
    FAST_ENGINES,
    SELF_TEST_SHA256,
    Encoded,
    GigatokenEngine,
    ReferenceEngine,
    choose_engine,
    load_engine,
    self_test,
    self_test_documents,
)
from data_pipeline.errors import DataError
from data_pipeline.plan import BuildOptions
from data_pipeline.tokenizer import BytesTokenizer, Gpt2Tokenizer
from data_pipeline.verify import verify
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.test_build import WriteJsonl, content

TOKENIZER = Gpt2Tokenizer()
FAST = [load_engine(name, TOKENIZER) for name in FAST_ENGINES]
OPTIONS = BuildOptions(val_fraction=0.1, part_tokens=10_000)


def encode(*texts: str) -> Encoded:
    return ReferenceEngine(TOKENIZER).encode([text.encode() for text in texts])


def test_the_recorded_hash_is_that_of_the_reference() -> None:
    assert engines._digest(ReferenceEngine(TOKENIZER).encode(self_test_documents())) == SELF_TEST_SHA256
    joined = b"".join(self_test_documents()).decode()
    assert set(map(chr, range(0xD800))) | set(map(chr, range(0xE000, 0x110000))) <= set(joined)


@pytest.mark.parametrize("engine", FAST, ids=lambda engine: engine.name)
def test_installed_engines_pass_their_self_test(engine: engines.Engine) -> None:
    assert self_test(engine) is None


@pytest.mark.parametrize("engine", FAST, ids=lambda engine: engine.name)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_engines_give_the_ids_of_the_reference(engine: engines.Engine, texts: list[str]) -> None:
    ours, expected = engine.encode([text.encode() for text in texts]), encode(*texts)
    assert ours.ids.dtype == np.uint32
    assert ours.ids.tolist() == expected.ids.tolist()
    assert ours.offsets.tolist() == expected.offsets.tolist()


@pytest.mark.parametrize("engine", [*FAST, ReferenceEngine(TOKENIZER)], ids=lambda engine: engine.name)
def test_special_tokens_are_text_and_empty_batches_are_empty(engine: engines.Engine) -> None:
    encoded = engine.encode([b"", b"a<|endoftext|>b", b""])
    assert 50_256 not in encoded.ids
    assert encoded.offsets[:2].tolist() == [0, 0]
    assert TOKENIZER.decode(encoded.document(1)) == "a<|endoftext|>b"
    assert engine.encode([]).offsets.tolist() == [0]


def test_auto_takes_the_fastest_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("auto", TOKENIZER)[0].name == "gigatoken"

    def broken(self: GigatokenEngine, documents: Sequence[bytes]) -> Encoded:
        ids, offsets = encode(*(utf8.decode() for utf8 in documents))
        return Encoded(ids[::-1], offsets)

    monkeypatch.setattr(GigatokenEngine, "encode", broken)
    engine, refused = choose_engine("auto", TOKENIZER)
    assert engine.name == "fastokens"
    assert refused == ["engine gigatoken 0.10.0 is not used: its self-test gives other ids than tiktoken on this host"]
    with pytest.raises(DataError, match="--engine gigatoken: its self-test gives other ids"):
        choose_engine("gigatoken", TOKENIZER)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert choose_engine("auto", TOKENIZER)[0].name == "tiktoken"
    assert choose_engine("auto", BytesTokenizer())[0].name == "bytes"


def test_engines_that_cannot_serve_are_refused() -> None:
    with pytest.raises(DataError, match="unknown engine 'quick'; expected auto, gigatoken, fastokens or tiktoken"):
        load_engine("quick", TOKENIZER)
    with pytest.raises(DataError, match="--engine gigatoken is for the GPT-2 vocabulary; for bytes leave"):
        load_engine("gigatoken", BytesTokenizer())


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: WriteJsonl) -> Path:
    return write_jsonl("corpus.jsonl", [*make_documents(150), "zero-width \u200d joiner", "a" * 3_000, "<|endoftext|>"])


def build(corpus: Path, output: Path, **execution: Any) -> str:
    return prepare(
        [str(corpus)], output, options=OPTIONS, workers=1, execution=Execution(**execution), log=io.StringIO()
    ).manifest_sha256


def test_every_engine_makes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    identities = {build(corpus, tmp_path / name, engine=name) for name in ("tiktoken", "gigatoken", "fastokens")}
    assert len(identities) == 1
    assert content(tmp_path / "tiktoken") == content(tmp_path / "gigatoken") == content(tmp_path / "fastokens")
    for name in ("gigatoken", "fastokens"):
        lines = (tmp_path / name / "provenance.jsonl").read_text().splitlines()
        (provenance,) = map(json.loads, lines)
        assert provenance["engine"].startswith(name)
        assert 3 <= provenance["documents_audited"] < 20  # the first, the run, the special token, some by hash


def test_full_verification_encodes_all_twice(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out", verify="full")
    (provenance,) = map(json.loads, (tmp_path / "out" / "provenance.jsonl").read_text().splitlines())
    assert provenance["documents_audited"] == 153
    assert {provenance["engine"].split()[0], provenance["second_engine"].split()[0]} == {"gigatoken", "fastokens"}


@pytest.mark.parametrize("verify_all", [False, True])
def test_an_engine_that_is_wrong_about_one_document_stops_the_build(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_all: bool
) -> None:
    victim = ("a" * 3_000 if not verify_all else make_documents(150)[77]).encode()
    right = GigatokenEngine.encode

    def subtly_wrong(self: GigatokenEngine, documents: Sequence[bytes]) -> Encoded:
        ids, offsets = right(self, documents)
        if victim in documents:
            ids = ids.copy()
            ids[offsets[documents.index(victim)]] ^= 1
        return Encoded(ids, offsets)

    monkeypatch.setattr(GigatokenEngine, "encode", subtly_wrong)
    with pytest.raises(
        DataError, match=r"corpus.jsonl, row \d+: gigatoken gives other ids than the reference"
    ) as error:
        build(corpus, tmp_path / "out", verify="full" if verify_all else "sample")
    kept = tmp_path / "out" / ".build" / "mismatch.txt"
    assert str(kept) in str(error.value)
    assert kept.read_bytes() == victim
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert build(corpus, tmp_path / "out", engine="tiktoken") == build(corpus, tmp_path / "again", engine="fastokens")


def test_an_engine_that_panics_costs_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GigatokenEngine.encode

    class PanicException(BaseException):
        pass

    def fragile(self: GigatokenEngine, documents: Sequence[bytes]) -> Encoded:
        if any(b"joiner" in utf8 for utf8 in documents) and len(documents) < 200:
            raise PanicException
        return right(self, documents)

    monkeypatch.setattr(GigatokenEngine, "encode", fragile)
    assert build(corpus, tmp_path / "out") == build(corpus, tmp_path / "expected", engine="tiktoken")
    (provenance,) = map(json.loads, (tmp_path / "out" / "provenance.jsonl").read_text().splitlines())
    assert provenance["documents_by_reference_after_an_engine_failure"] == 153


def test_ids_outside_the_vocabulary_stop_the_build(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GigatokenEngine.encode

    def too_large(self: GigatokenEngine, documents: Sequence[bytes]) -> Encoded:
        ids, offsets = right(self, documents)
        ids = ids.copy()
        if len(documents) == 153:
            ids[7] = 65_536 + 11  # as uint16 it would be 11
        return Encoded(ids, offsets)

    monkeypatch.setattr(GigatokenEngine, "encode", too_large)
    with pytest.raises(DataError, match=r"corpus.jsonl, row 0: gigatoken gives other ids"):
        build(corpus, tmp_path / "out")


def test_the_sample_holds_what_is_unusual() -> None:
    documents = [b"plain"] * 20
    documents[3] = b"x" * (1 << 20)
    documents[5] = b"before <|endoftext|> after"
    documents[8] = b"text " + b"=" * 256 + b" text"
    documents[11] = ("é" * 200).encode()
    documents[13] = ("\U0001f600" * 100).encode()
    hashes = [1] * 20
    hashes[16] = 512 * 77
    assert sample_of(documents, hashes) == [0, 3, 5, 8, 11, 13, 16]
    assert sample_of([], []) == []


@given(st.integers(0, 300), st.integers(300, 600), st.sampled_from(["a", "é", "字", "\U0001f600", "ab", "\n"]))
def test_long_runs_are_found_wherever_they_stand(before: int, length: int, unit: str) -> None:
    text = ".,;:" * (before // 4) + "!" + unit * length + "?"
    assert len(repeated_stretches(text.encode())) > 0


def test_verify_finds_a_document_with_the_ids_of_another_text(corpus: Path, tmp_path: Path) -> None:
    """Whoever rewrites a part and all of its hashes is still found: the ids must be those of a text."""
    build(corpus, tmp_path / "out")
    assert verify(tmp_path / "out", deep=True)[1] == []
    from data_pipeline import verify as module

    part = next(part for part in verify(tmp_path / "out")[0].parts if part.split == "train")
    path = tmp_path / "out" / part.file
    data = np.fromfile(path, "<u2")
    at = 512 + 1  # the first token of the first document
    letter_by_letter = [token for character in "the window" for token in TOKENIZER.encode(character).tolist()]
    data[at : at + len(letter_by_letter)] = letter_by_letter
    data.tofile(path)
    problems = list(module._check_ids(tmp_path / "out", part, TOKENIZER, FAST[0]))
    assert problems == [f"{path}: document 0: its text encodes to other ids"]


def test_verify_holds_sources_against_the_manifest(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    assert verify(tmp_path / "out", sources=[str(corpus)])[1] == []
    data = bytearray(corpus.read_bytes())
    data[100] ^= 1
    corpus.write_bytes(data)
    (problem,) = verify(tmp_path / "out", sources=[str(corpus)])[1]
    assert problem.startswith(f"{corpus}: SHA-256 is ")
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    (problem,) = verify(tmp_path / "out", sources=[str(tmp_path / "other.jsonl")])[1]
    assert problem == f"corpus.jsonl: a source of the data set, not among {tmp_path / 'other.jsonl'}"
