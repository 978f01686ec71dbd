import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.errors import DataError
from data_pipeline.rows import Row, read_rows
from data_pipeline.sources import find_sources

WriteJsonl = Callable[[str, Sequence[Any]], Path]


def rows_of(path: Path, text_column: str = "text") -> list[Row]:
    return [row for source in find_sources([str(path)], text_column) for row in read_rows(source, text_column)]


def texts_and_problems(path: Path) -> list[tuple[int, str | None, str | None]]:
    return [(row.number, row.text, row.problem) for row in rows_of(path)]


def test_all_formats_give_the_same_rows(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    documents = ["first", "sécond\n", "third 🙂"]
    plain = write_jsonl("plain.jsonl", documents)
    lines = plain.read_bytes()
    # Two members each, as parallel compressors write them.
    halves = (lines[:30], lines[30:])
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(lines))
    zst = b"".join(pa.compress(half, "zstd", asbytes=True) for half in halves)
    (tmp_path / "c.jsonl.zst").write_bytes(zst)
    pq.write_table(pa.table({"id": [1, 2, 3], "text": documents}), tmp_path / "d.parquet", row_group_size=2)
    dictionary = pa.table({"text": pa.array(documents).dictionary_encode()})
    pq.write_table(dictionary, tmp_path / "e.parquet")
    pq.write_table(pa.table({"text": pa.array(documents, pa.large_string())}), tmp_path / "f.parquet")
    names = ["plain.jsonl", "a.jsonl.gz", "b.json.gz", "c.jsonl.zst", "d.parquet", "e.parquet", "f.parquet"]
    for name in names:
        assert [row.text for row in rows_of(tmp_path / name)] == documents, name
        assert [row.number for row in rows_of(tmp_path / name)] == [0, 1, 2], name


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_bytes(b"one\r\n\ntwo\n")
    assert [row.text for row in rows_of(tmp_path / "play.txt")] == ["one\r\n\ntwo\n"]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert texts_and_problems(tmp_path / "latin.txt") == [(0, None, "invalid UTF-8")]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts_and_problems(tmp_path / "empty.txt") == [(0, "", None)]


def test_odd_json_lines_each_have_an_outcome(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl(
        "odd.jsonl",
        [
            b'\xef\xbb\xbf{"text": "after a byte order mark"}',
            {"text": None},
            {"text": 5},
            {"id": 1},
            b"{broken",
            b"",
            b'{"text": "caf\xe9"}',
            b"[1, 2]",
            b'{"text": "lone \\ud800 and pair \\ud83d\\ude42"}',
            b"[" * 100_000,
            {"text": ""},
        ],
    )
    assert texts_and_problems(path) == [
        (0, "after a byte order mark", None),
        (1, None, None),
        (2, None, "the text is not a string"),
        (3, None, "no key 'text'"),
        (4, None, "invalid JSON"),
        (6, None, "invalid UTF-8"),
        (7, None, "not a JSON object"),
        (8, "lone \ufffd and pair 🙂", None),
        (9, None, "invalid JSON"),
        (10, "", None),
    ]


def test_odd_parquet_rows(tmp_path: Path) -> None:
    binary = pa.array([b"good", None, b"caf\xe9", b"", b"also good"], pa.binary())
    strings = pa.StringArray.from_buffers(5, *binary.buffers()[1:], binary.buffers()[0])
    pq.write_table(pa.table({"text": strings}), tmp_path / "odd.parquet")
    assert texts_and_problems(tmp_path / "odd.parquet") == [
        (0, "good", None),
        (1, None, None),
        (2, None, "invalid UTF-8"),
        (3, "", None),
        (4, "also good", None),
    ]


def test_sources_are_sorted_named_and_found_once(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    for name in ("corpus/b.jsonl", "corpus/deep/a.jsonl", "corpus/.hidden/x.jsonl", "corpus/A.jsonl"):
        write_jsonl(name, [name])
    (tmp_path / "corpus/notes.md").write_text("not a source")
    corpus = tmp_path / "corpus"
    names = ["A.jsonl", "b.jsonl", "deep/a.jsonl"]
    assert [source.name for source in find_sources([str(corpus)], "text")] == names
    assert [source.name for source in find_sources([f"{corpus}/**/*.jsonl"], "text")] == names
    twice = find_sources([str(corpus / "b.jsonl"), str(corpus / "b.jsonl"), f"{corpus}/b*"], "text")
    assert [source.name for source in twice] == ["b.jsonl"]
    # The order of the command line does not matter.
    there = find_sources([str(corpus / "b.jsonl"), str(corpus / "A.jsonl")], "text")
    back = find_sources([str(corpus / "A.jsonl"), str(corpus / "b.jsonl")], "text")
    assert there == back
    both = [str(corpus), str(corpus / "deep" / "a.jsonl")]
    assert find_sources(both, "text") == find_sources(both[::-1], "text")


def test_a_link_keeps_its_own_name(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    # The Hugging Face cache links names to blobs that have no suffix.
    blob = write_jsonl("0123abcd", ["text"])
    (tmp_path / "linked.jsonl").symlink_to(blob)
    assert [source.name for source in find_sources([str(tmp_path / "linked.jsonl")], "text")] == ["linked.jsonl"]


def damaged_files(folder: Path) -> dict[str, tuple[Path, str]]:
    good = folder / "good.parquet"
    pq.write_table(pa.table({"content": ["a"] * 50, "score": [1] * 50}), good)
    data = good.read_bytes()
    html = b"<html>502 Bad Gateway</html>"
    contents = {
        "truncated.parquet": (data[:-100], "a truncated parquet file"),
        "damaged.parquet": (data[:-208] + bytes(200) + data[-8:], "a damaged parquet file"),
        "empty.parquet": (b"", "an empty file"),
        "html.parquet": (html, "an HTML page"),
        "lfs.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        "json.parquet": (b'{"text": "a"}\n', "looks like JSON"),
        "column.parquet": (data, "no column 'text'; it has content, score"),
        "empty.jsonl": (b"", "an empty file"),
        "html.jsonl": (html, "an HTML page"),
        "parquet.jsonl": (data, "a damaged parquet file"),
        "array.jsonl": (b'["a"]\n', "one JSON object a line"),
        "html.jsonl.gz": (html, "an HTML page"),
        "html.jsonl.zst": (html, "an HTML page"),
        "unknown.csv": (b"text\na\n", "unknown kind of file"),
    }
    result = {}
    for name, (content, expected) in contents.items():
        (folder / name).write_bytes(content)
        result[name] = (folder / name, expected)
    return result


def test_files_that_are_not_what_they_should_be_are_named(tmp_path: Path) -> None:
    for name, (path, expected) in damaged_files(tmp_path).items():
        with pytest.raises(DataError) as caught:
            find_sources([str(path)], "text")
        assert name in str(caught.value)
        assert expected in str(caught.value)


def test_a_column_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), path)
    with pytest.raises(DataError, match="holds int64, not text; text columns are: body"):
        find_sources([str(path)], "text")
    assert [row.text for row in rows_of(path, "body")] == ["a", "b"]


def test_nothing_found_is_refused(tmp_path: Path) -> None:
    for spec in ("absent.jsonl", ".", "*.parquet"):
        with pytest.raises(DataError, match=r"no such file|holds none|matches none"):
            find_sources([str(tmp_path / spec)], "text")


def test_json_lines_without_the_key_name_the_keys(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl("other.jsonl", [{"content": "a", "id": 1}] * 3)
    with pytest.raises(DataError, match=r"other.jsonl: line 1 has no key 'text'; it has content, id"):
        rows_of(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_truncated_stream_is_an_error_and_not_a_short_file(
    tmp_path: Path, write_jsonl: WriteJsonl, suffix: str
) -> None:
    data = write_jsonl("plain.jsonl", [f"{number} {number**50}" for number in range(2_000)]).read_bytes()
    packed = gzip.compress(data) if suffix == "gz" else pa.compress(data, "zstd", asbytes=True)
    path = tmp_path / f"cut.jsonl.{suffix}"
    path.write_bytes(packed[:-500])
    with pytest.raises(DataError, match=r"cut.jsonl.*truncated or damaged"):
        rows_of(path)


def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    pq.write_table(
        pa.table({"text": [f"document {number}" for number in range(5_000)]}),
        path,
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"pages.parquet: cannot be read beyond row"):
        rows_of(path)


def test_a_line_too_long_to_hold_is_set_aside(write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.rows._MAX_LINE_BYTES", 100)
    path = write_jsonl("long.jsonl", ["a", "b" * 250, "c"])
    assert texts_and_problems(path) == [
        (0, "a", None),
        (1, None, "line longer than 100 bytes"),
        (2, "c", None),
    ]


def test_a_text_file_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.sources.MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "big.txt").write_text("more than ten bytes")
    with pytest.raises(DataError, match=r"big.txt: a .txt file is one document.*jsonl"):
        find_sources([str(tmp_path / "big.txt")], "text")


def test_a_file_that_changes_during_the_build_is_noticed(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl("a.jsonl", ["a"])
    source = find_sources([str(path)], "text")[0]
    source.assert_unchanged()
    path.write_text('{"text": "longer"}\n')
    with pytest.raises(DataError, match="changed while it was read"):
        source.assert_unchanged()


def test_a_text_file_as_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"\n\nFirst line,\r\nsecond line.\n \t\nCaf\xc3\xa9\n\n\nbad \xff byte\n\nLast, unterminated")
    (source,) = find_sources([str(path)], "text", "paragraph")
    rows = list(read_rows(source, "text"))
    assert [(row.number, row.text, row.problem) for row in rows] == [
        (0, "First line,\r\nsecond line.", None),
        (1, "Caf\u00e9", None),
        (2, None, "invalid UTF-8"),
        (3, "Last, unterminated", None),
    ]
    assert rows[-1].position == path.stat().st_size
