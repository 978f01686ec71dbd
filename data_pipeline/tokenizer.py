"""Tokenizers: text to ids and back.

Every tokenizer encodes *ordinary* text: the characters ``<|endoftext|>`` inside a document are
characters, never the end-of-text id. The build puts that id in front of each document itself.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.text import well_formed
from data_pipeline.vocabulary import load_gpt2_vocabulary

# The pre-tokenizer of GPT-2 in tiktoken's possessive spelling (tiktoken_ext.openai_public).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Unicode's White_Space, which is what the pattern's \s is; Python's holds four control characters more.
_LONG_BLANKS = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{1000,}")
GPT2_EOT = 50_256
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the build and the tools need of a tokenizer.

    Attributes:
        name: recorded in the manifest.
        vocab_size: number of ids, end-of-text included.
        eot_id: the end-of-text id that starts each document.
        vocabulary_sha256: identity of the vocabulary, recorded in the manifest.
    """

    name: str
    vocab_size: int
    eot_id: int
    vocabulary_sha256: str

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of ordinary text, shape ``(tokens,)``; lone surrogates count as U+FFFD."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids; invalid UTF-8 becomes U+FFFD and end-of-text is spelled ``<|endoftext|>``."""
        ...


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding by tiktoken, built from a verified vocabulary without a network."""

    name = "gpt2"
    vocab_size = 50_257
    eot_id = GPT2_EOT

    def __init__(self, location: Path | None = None) -> None:
        """Load the vocabulary; ``location`` is as in `load_gpt2_vocabulary`."""
        import tiktoken  # here, because readers of finished data sets need no tokenizer engine

        vocabulary = load_gpt2_vocabulary(location)
        self.vocabulary_sha256 = vocabulary.sha256
        self.vocabulary = vocabulary
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=vocabulary.ranks,
            special_tokens={END_OF_TEXT: GPT2_EOT},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Equal to tiktoken's ``encode_ordinary``, without the Python list."""
        text = well_formed(text)
        try:
            return self._encode(text)
        except ValueError:  # tiktoken's pattern runs out of stack in a long run of blanks before something else
            return np.concatenate([self._encode(piece) for piece in _cut_in_blanks(text)])

    def _encode(self, text: str) -> NDArray[np.uint32]:
        # No special token is allowed, none is refused: that is ordinary encoding.
        return np.asarray(self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=()), np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """See `Tokenizer.decode`."""
        return self._encoding.decode([int(token) for token in ids])


def _cut_in_blanks(text: str) -> Iterator[str]:
    """Pieces whose ids, joined, are those of ``text``: cut where the pattern cuts anyway.

    Of blanks before something else the pattern takes all but the last as one token to be; at the end of a piece it
    takes the same ones without having to step back.
    """
    start = 0
    for run in _LONG_BLANKS.finditer(text):
        if run.end() < len(text):
            yield text[start : run.start()]
            start = run.end() - 1
            yield text[run.start() : start]
    yield text[start:]


class BytesTokenizer:
    """One id per UTF-8 byte, 256 for end-of-text. For tests and byte-level models."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256
    vocabulary_sha256 = hashlib.sha256(b"utf-8 bytes 0-255, end-of-text 256").hexdigest()

    def encode(self, text: str) -> NDArray[np.uint32]:
        """See `Tokenizer.encode`."""
        return np.frombuffer(well_formed(text).encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """See `Tokenizer.decode`."""
        end = END_OF_TEXT.encode()
        data = b"".join(end if token == self.eot_id else bytes([token]) for token in map(int, ids))
        return data.decode("utf-8", "replace")


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file; its end-of-sentence id serves as end-of-text."""

    def __init__(self, path: Path) -> None:
        """Load the model.

        Raises:
            DataError: the file is missing or no model, defines no end of sentence, or changes text.
        """
        import sentencepiece

        if not path.is_file():
            raise DataError(f"{path}: no such SentencePiece model")
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a SentencePiece model ({error})") from error
        self.name = f"sentencepiece:{path.name}"
        self.vocab_size = int(self._processor.get_piece_size())
        self.eot_id = int(self._processor.eos_id())
        self.vocabulary_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if self.eot_id < 0:
            raise DataError(f"{path}: the model has no end-of-sentence id; train it with --eos_id=2")
        probe = "a  b\n\n  c"
        if self._processor.decode(self._processor.encode(probe)) != probe:
            # The default normaliser turns newlines and double blanks into one blank: text would be lost.
            raise DataError(
                f"{path}: the model changes whitespace, so the text could not be recovered. Train it with "
                "--normalization_rule_name=identity --remove_extra_whitespaces=false --byte_fallback=true"
            )

    def encode(self, text: str) -> NDArray[np.uint32]:
        """See `Tokenizer.encode`."""
        return np.asarray(self._processor.encode(well_formed(text)), dtype=np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """See `Tokenizer.decode`."""
        documents: list[list[int]] = [[]]
        for token in map(int, ids):
            if token == self.eot_id:
                documents.append([])
            else:
                documents[-1].append(token)
        return END_OF_TEXT.join(self._processor.decode(document) for document in documents)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    Args:
        spec: ``gpt2``, ``gpt2:PATH`` (a vocabulary file or directory), ``bytes``, or ``PATH.model``
            (SentencePiece).

    Raises:
        DataError: the spec is unknown, or its vocabulary is missing or damaged.
    """
    kind, _, location = spec.partition(":")
    if kind == "gpt2":
        return Gpt2Tokenizer(Path(location) if location else None)
    if spec == "bytes":
        return BytesTokenizer()
    if spec.endswith(".model"):
        return SentencePieceTokenizer(Path(spec))
    raise DataError(f"unknown tokenizer {spec!r}; expected gpt2, gpt2:PATH, bytes or a SentencePiece PATH.model")
