import hashlib
import json
import sys
from pathlib import Path

import pytest

from data_pipeline.corpus import docstrings, is_prose, write_corpus
from data_pipeline.errors import DataError

PROSE = "This sentence is part of the documentation of a function, and it is long enough to be kept. " * 3

MODULE = f'''"""Module. {PROSE}"""

class Outer:
    """Outer.

    {PROSE}
        indented
    """

    def method(self):
        """Method. {PROSE}"""

        def inner():
            """short"""

if True:
    async def later():
        """Later. {PROSE}"""

"""Not a docstring. {PROSE}"""
'''


def test_docstrings_in_source_order_with_their_names() -> None:
    found = dict(docstrings(MODULE))
    assert list(found) == ["module", "Outer", "Outer.method", "Outer.method.inner", "later"]
    assert found["Outer"].splitlines()[-1] == "    indented"
    assert found["Outer.method.inner"] == "short"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (PROSE, True),
        (PROSE[:199], False),
        ("0 1 2 3.5 | " * 40, False),
        ("é" * 300, False),
        (PROSE + "é", True),
    ],
)
def test_what_counts_as_prose(text: str, kept: bool) -> None:
    assert is_prose(text) == kept


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages; one repeats a docstring of the other, and none may be imported."""
    files = {
        "firstpkg/__init__.py": f'"""First. {PROSE}"""\nraise RuntimeError("imported")\n',
        "firstpkg/deep/code.py": MODULE,
        "firstpkg/tests/test_code.py": f'"""Test. {PROSE}"""\n',
        "firstpkg/broken.py": "def (:\n",
        "secondpkg/__init__.py": f'"""First. {PROSE}"""\n',
        "secondpkg/other.py": f'"""Second. {PROSE}"""\n',
    }
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    stdlib = folder / "stdlib"
    (stdlib / "pydoc_data").mkdir(parents=True)
    (stdlib / "pydoc_data" / "topics.py").write_text(f"topics = {{'b': 'B. {PROSE}', 'a': 'A. {PROSE}'}}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(stdlib))


def test_corpus_is_deterministic_and_says_what_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for place in ("here", "there"):
        with monkeypatch.context() as patch:
            install(tmp_path / place, patch)
            output = tmp_path / place / "out" / "corpus.jsonl"
            report = write_corpus(output, ("secondpkg", "firstpkg", "absentpkg"))
        contents.append(output.read_bytes())
        lines = [json.loads(line) for line in contents[-1].splitlines()]
        assert [line["source"] for line in lines] == [
            "firstpkg/__init__.py:module",
            "firstpkg/deep/code.py:module",
            "firstpkg/deep/code.py:Outer",
            "firstpkg/deep/code.py:Outer.method",
            "firstpkg/deep/code.py:later",
            "python/pydoc_data/topics.py:a",
            "python/pydoc_data/topics.py:b",
            "secondpkg/other.py:module",
        ]
        assert report.missing == ["absentpkg"]
        assert report.documents == 8
        assert report.text_bytes == sum(len(line["text"].encode()) for line in lines)
        sidecar = json.loads((tmp_path / place / "out" / "corpus.jsonl.sources.json").read_text())
        assert sidecar["sha256"] == hashlib.sha256(contents[-1]).hexdigest()
        assert set(sidecar["packages"]) == {"python", "firstpkg", "secondpkg"}
        assert "firstpkg" not in sys.modules
    assert contents[0] == contents[1]


def test_a_name_that_prepare_would_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends with \.jsonl"):
        write_corpus(tmp_path / "corpus.json")
