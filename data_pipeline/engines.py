"""Engines: fast ways to the ids of the reference tokenizer, used only where they are shown to give the same ids.

The reference is a `Tokenizer` (tiktoken for GPT-2). A fast engine must pass `self_test` on this host before it is
used; during the build the reference encodes a sample again (see `audit`), so every part was looked at twice.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.tokenizer import Gpt2Tokenizer, Tokenizer
from data_pipeline.tokenizer_json import tokenizer_json
from data_pipeline.vocabulary import R50K_FILE

AUTO = "auto"
REFERENCE = "tiktoken"
# The ids of `self_test_documents` by tiktoken 0.14; a test computes it again.
SELF_TEST_SHA256 = "fa41cfb15ce761255f102de365309ae240bdcb29fd263c3bc9e85d892d833b27"
# Fast engines remember words without a bound; a new object starts afresh.
_RENEW_AFTER_BYTES = 4 << 30


class Encoded(NamedTuple):
    """Ids of a batch of documents.

    Attributes:
        ids: of all documents, joined, uint32, shape ``(tokens,)``.
        offsets: document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``; int64, shape ``(documents + 1,)``.
    """

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    def document(self, index: int) -> NDArray[np.uint32]:
        """The ids of one document."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Engine(Protocol):
    """What the build needs of an engine.

    Attributes:
        name: ``gigatoken``, ``fastokens`` or the reference's.
        version: of the package, for the provenance.
    """

    name: str
    version: str

    def encode(self, documents: Sequence[bytes]) -> Encoded:
        """Ids of ordinary text, valid UTF-8; no special token is recognised."""
        ...


class ReferenceEngine:
    """Any `Tokenizer`, one document at a time: the readable twin of the fast engines."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap ``tokenizer``."""
        package = {"gpt2": REFERENCE, "bytes": "numpy"}.get(tokenizer.name, "sentencepiece")
        self.name = package if package != "numpy" else "bytes"
        self.version = importlib.metadata.version(package)
        self._tokenizer = tokenizer

    def encode(self, documents: Sequence[bytes]) -> Encoded:
        """See `Engine.encode`."""
        encoded = [self._tokenizer.encode(utf8.decode()) for utf8 in documents]
        offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(ids) for ids in encoded], out=offsets[1:])
        return Encoded(np.concatenate(encoded) if encoded else np.empty(0, np.uint32), offsets)


class GigatokenEngine:
    """GPT-2 by gigatoken; docs/data.md has its speed."""

    name = "gigatoken"

    def __init__(self, tokenizer: Gpt2Tokenizer) -> None:
        """Load the vocabulary of ``tokenizer``; raises ImportError where the package is missing."""
        self.version = importlib.metadata.version(self.name)
        self._ranks_file = _ranks_file(tokenizer)
        self._renew()

    def _renew(self) -> None:
        import gigatoken

        # Without special tokens their text is ordinary; with them it would become a real end of text.
        self._engine: Any = gigatoken.Tokenizer.from_tiktoken(self._ranks_file, pretokenizer="gpt2", special_tokens={})
        self._seen_bytes = 0

    def encode(self, documents: Sequence[bytes]) -> Encoded:
        """See `Engine.encode`."""
        if self._seen_bytes > _RENEW_AFTER_BYTES:
            self._renew()
        self._seen_bytes += sum(map(len, documents))
        layout = self._engine.encode_batch(list(documents), parallel=False).layout
        return Encoded(np.asarray(layout.content.data), np.asarray(layout.offsets.data))


class FastokensEngine:
    """GPT-2 by fastokens; docs/data.md has its speed."""

    name = "fastokens"

    def __init__(self, tokenizer: Gpt2Tokenizer) -> None:
        """Load the vocabulary of ``tokenizer``; raises ImportError where the package is missing."""
        # One thread per worker process: its pool reads this when it starts.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        import fastokens

        self.version = importlib.metadata.version(self.name)
        # Its loader of tiktoken files takes U+180E for a blank; as byte-level BPE it gives tiktoken's ids.
        self._engine: Any = fastokens.Tokenizer.from_json_str(tokenizer_json(tokenizer.vocabulary))

    def encode(self, documents: Sequence[bytes]) -> Encoded:
        """See `Engine.encode`."""
        ids, offsets = self._engine.encode_batch_flat([utf8.decode() for utf8 in documents])
        return Encoded(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64))


FAST_ENGINES: dict[str, type[GigatokenEngine] | type[FastokensEngine]] = {
    GigatokenEngine.name: GigatokenEngine,
    FastokensEngine.name: FastokensEngine,
}


def load_engine(name: str, tokenizer: Tokenizer) -> Engine:
    """The engine of that name, without a self-test: for processes of a host where it has passed.

    Raises:
        DataError: there is no such engine, it is not installed, or it does not know this tokenizer.
    """
    if name in (REFERENCE, ReferenceEngine(tokenizer).name):
        return ReferenceEngine(tokenizer)
    if name not in FAST_ENGINES:
        raise DataError(f"unknown engine {name!r}; expected {AUTO}, {', '.join(FAST_ENGINES)} or {REFERENCE}")
    if not isinstance(tokenizer, Gpt2Tokenizer):
        raise DataError(f"--engine {name} is for the GPT-2 vocabulary; for {tokenizer.name} leave --engine out")
    try:
        return FAST_ENGINES[name](tokenizer)
    except ImportError as error:
        raise DataError(f"--engine {name} is not installed here; `pip install {name}`, or --engine {AUTO}") from error


def installed_engines(tokenizer: Tokenizer) -> list[Engine]:
    """The fast engines that are installed and know the tokenizer, the fastest first."""
    if not isinstance(tokenizer, Gpt2Tokenizer):
        return []
    return [load_engine(name, tokenizer) for name in FAST_ENGINES if importlib.util.find_spec(name)]


def choose_engine(name: str, tokenizer: Tokenizer) -> tuple[Engine, list[str]]:
    """The engine for a build on this host.

    Args:
        name: ``auto`` for the fastest installed one that passes `self_test`, else a name that must pass it.
        tokenizer: the reference.

    Returns:
        The engine, and lines about those that did not pass.

    Raises:
        DataError: the named engine is unknown, not installed, or gives other ids than the reference.
    """
    if name != AUTO:
        engine = load_engine(name, tokenizer)
        if engine.name in FAST_ENGINES and (problem := self_test(engine)):
            raise DataError(f"--engine {name}: {problem}; --engine {AUTO} takes one that passes")
        return engine, []
    refused: list[str] = []
    for engine in installed_engines(tokenizer):
        problem = self_test(engine)
        if problem is None:
            return engine, refused
        refused.append(f"engine {engine.name} {engine.version} is not used: {problem}")
    return ReferenceEngine(tokenizer), refused


def self_test(engine: Engine) -> str | None:
    """Hold a GPT-2 engine against the recorded ids of the reference; None, or what is wrong with it."""
    try:
        encoded = engine.encode(self_test_documents())
    except Exception as error:
        return f"its self-test failed with {error!r}"
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"its self-test failed with {error!r}"  # a panic in native code is no Exception
    return None if _digest(encoded) == SELF_TEST_SHA256 else "its self-test gives other ids than tiktoken on this host"


@cache
def self_test_documents() -> tuple[bytes, ...]:
    """About 12 MB that engines are known to get wrong, the same on every machine.

    Every code point in a word, after a blank, doubled and before a digit; mixes of blanks of all kinds,
    contractions, combining marks and emoji; runs; text of special tokens.
    """
    code_points = np.concatenate([np.arange(0xD800), np.arange(0xE000, 0x110000)]).astype("<u4")
    columns = np.full((len(code_points), 6), ord("x"), dtype="<u4")
    columns[:, 1] = columns[:, 3] = columns[:, 4] = code_points
    columns[:, 2], columns[:, 5] = ord(" "), ord("7")
    documents = [columns[at : at + 4_096].tobytes().decode("utf-32-le") for at in range(0, len(columns), 4_096)]
    blanks = " |  |\n|\r\n|\t|\x0b|\x0c|\x1c|\x85|\xa0|\u180e|\u2003|\u2028|\u3000"
    quotes = "'s|'t|'re|'ve|'m|'ll|'d|'S|'sym'|'dist'|\u2019s|don't|''|\"'"
    marks = "e\u0301|\u0301|\u200d|\U0001f468\u200d\U0001f469|\U0001f1e9\U0001f1ea|\ufe0f|\ufffd|\x00|--|==|."
    words = "word|Wörter|слово|言葉|단어|كلمة|0|123|٣|²|½"
    pieces = [*"|".join((blanks, quotes, marks, words)).split("|"), "<|endoftext|>", "<|"]
    generator = np.random.Generator(np.random.Philox(key=20_240_520))
    for length in generator.integers(1, 40, size=8_000):
        documents.append("".join(pieces[choice] for choice in generator.integers(len(pieces), size=length)))
    runs = ("a", "A", "0", "=", "-", " ", "\n", "\n ", "'", "é", "字", "ab", "\U0001f600")
    documents += [run * length for run in runs for length in (2, 3, 63, 64, 65, 1_000, 4_097)]
    documents += ["", "<|endoftext|>", "<|endoftext|><|endoftext|> x", " <|endoftext|>\n"]
    return tuple(document.encode() for document in documents)


def _digest(encoded: Encoded) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(encoded.ids, dtype="<u4").tobytes())
    digest.update(np.ascontiguousarray(encoded.offsets, dtype="<i8").tobytes())
    return digest.hexdigest()


def _ranks_file(tokenizer: Gpt2Tokenizer) -> Path:
    """``r50k_base.tiktoken`` in a directory that lives as long as this process."""
    directory = _scratch_directory()
    path = Path(directory.name) / R50K_FILE
    if not path.exists():
        path.write_bytes(tokenizer.vocabulary.tiktoken_file)
    return path


@cache
def _scratch_directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="data_pipeline-")
