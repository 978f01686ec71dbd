"""The corpus "installed-documentation": prose that is on every machine that runs this project.

Docstrings of the standard library and of installed packages, found by parsing source files (nothing is
imported), and Python's own help topics. It is real text of a few megabytes for first runs without a
network, not a benchmark: it depends on the versions installed, which the file beside it records.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import string
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.durable import canonical_json, write_atomic
from data_pipeline.errors import DataError

CORPUS_NAME = "installed-documentation"
PACKAGES = (
    "datasets",
    "deepspeed",
    "fsspec",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "mpmath",
    "networkx",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "pytest",
    "sympy",
    "torch",
    "transformers",
)
MIN_CHARACTERS = 200
# Share of a text that must be ASCII letters and blanks: below it stand tables, code and numbers.
MIN_PROSE_SHARE = 0.75
MIN_ASCII_SHARE = 0.99

_LETTERS_AND_BLANKS = string.ascii_letters.encode() + b" \n"
# "models" is where transformers repeats one documentation page for some four hundred models.
_SKIPPED_DIRECTORIES = {
    "__pycache__",
    "_vendor",
    "dist-packages",
    "models",
    "site-packages",
    "test",
    "testing",
    "tests",
}


@dataclass(frozen=True)
class CorpusReport:
    """What went into a corpus.

    Attributes:
        documents: number of documents.
        text_bytes: UTF-8 bytes of their text.
        packages: version of each package that was found, ``python`` for the standard library.
        missing: packages that are not installed.
    """

    documents: int
    text_bytes: int
    packages: dict[str, str]
    missing: list[str]


def write_corpus(output: str | Path, packages: tuple[str, ...] = PACKAGES) -> CorpusReport:
    """Write the corpus as JSON lines ``{"source": "package/module.py:qualname", "text": ...}``.

    Beside it goes ``OUTPUT.sources.json``: package versions, counts and the file's SHA-256.

    Args:
        output: a ``.jsonl`` file; replaced where it exists.
        packages: import names; those that are not installed are skipped and reported.

    Raises:
        DataError: ``output`` is not called ``.jsonl``.
    """
    output = Path(output)
    if output.suffix != ".jsonl":
        raise DataError(f"{output}: expected a name that ends with .jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    versions = {"python": platform.python_version()}
    missing = []
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            missing.append(package)
            continue
        roots[package] = Path(next(iter(spec.submodule_search_locations)))
        versions[package] = _version(package)

    documents = text_bytes = 0
    seen: set[bytes] = set()
    aside = output.with_name(f"{output.name}.tmp")
    digest = hashlib.sha256()
    with open(aside, "wb") as file:
        for source, text in _all_texts(roots):
            data = text.encode()
            key = hashlib.sha256(data).digest()
            if key in seen or not is_prose(text):
                continue
            seen.add(key)
            line = json.dumps({"source": source, "text": text}).encode() + b"\n"
            file.write(line)
            digest.update(line)
            documents += 1
            text_bytes += len(data)
    aside.replace(output)
    report = CorpusReport(documents, text_bytes, versions, missing)
    sidecar = {
        "corpus": CORPUS_NAME,
        "documents": documents,
        "text_bytes": text_bytes,
        "sha256": digest.hexdigest(),
        "packages": versions,
    }
    write_atomic(output.with_name(f"{output.name}.sources.json"), canonical_json(sidecar))
    return report


def is_prose(text: str) -> bool:
    """Whether a text is long enough and mostly ASCII letters and blanks."""
    if len(text) < MIN_CHARACTERS:
        return False
    ascii_bytes = text.encode("ascii", "ignore")
    letters = len(ascii_bytes) - len(ascii_bytes.translate(None, _LETTERS_AND_BLANKS))
    return len(ascii_bytes) >= MIN_ASCII_SHARE * len(text) and letters >= MIN_PROSE_SHARE * len(text)


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Qualified name and cleaned docstring of every module, class and function, in source order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's escape sequences
        tree = ast.parse(source)
    yield from _docstrings_below(tree, "")


def _docstrings_below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield name or "module", inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_below(child, f"{name}.{child.name}" if name else child.name)
        elif isinstance(child, ast.stmt):
            yield from _docstrings_below(child, name)


def _all_texts(roots: dict[str, Path]) -> Iterator[tuple[str, str]]:
    for package in sorted(roots):
        root = roots[package]
        files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
        for name, path in sorted(files):
            if _SKIPPED_DIRECTORIES.intersection(name.split("/")):
                continue
            try:
                source = path.read_text(encoding="utf-8")
                if package == "python" and name == "pydoc_data/topics.py":
                    found = list(_topics(source))
                else:
                    found = list(docstrings(source))
            except (SyntaxError, ValueError, RecursionError):
                continue  # templates and files of other encodings
            for qualname, text in found:
                yield f"{package}/{name}:{qualname}", text


def _topics(source: str) -> Iterator[tuple[str, str]]:
    """Python's help topics: the one dictionary that ``pydoc_data/topics.py`` assigns."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            yield from sorted(ast.literal_eval(statement.value).items())


def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.version(sorted(names)[0]) if names else "unknown"
