import gzip
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.errors import DataError
from data_pipeline.rows import Row, read_rows
from data_pipeline.sources import find_sources, hash_sources

WriteJsonl = Callable[[str, Sequence[Any]], Path]


def rows_of(path: Path, text_column: str = "text", text_documents: str = "file") -> list[Row]:
    sources, pieces = hash_sources(find_sources([str(path)], text_column, text_documents), text_column, threads=1)
    pairs = [(source, piece) for source, each in zip(sources, pieces, strict=True) for piece in each]
    return [row for source, piece in pairs for row in read_rows(source, piece, text_column)]


def text_of(row: Row) -> str | None:
    return None if row.utf8 is None else row.utf8.decode()


def texts_and_problems(path: Path, text_documents: str = "file") -> list[tuple[int, str | None, str | None]]:
    return [(row.number, text_of(row), row.problem) for row in rows_of(path, text_documents=text_documents)]


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
        assert [text_of(row) for row in rows_of(tmp_path / name)] == documents, name
        assert [row.number for row in rows_of(tmp_path / name)] == [0, 1, 2], name


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_bytes(b"one\r\n\ntwo\n")
    assert [text_of(row) for row in rows_of(tmp_path / "play.txt")] == ["one\r\n\ntwo\n"]
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
    assert [text_of(row) for row in rows_of(path, "body")] == ["a", "b"]


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
    path = write_jsonl("a.jsonl", ["aaaa"] * 9)
    (source,), ((piece,),) = hash_sources(find_sources([str(path)], "text"), "text", threads=1)
    assert len(list(read_rows(source, piece, "text"))) == 9
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[12] ^= 1  # same size and, after this, same time
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"changed since the plan was made \(block 0"):
        list(read_rows(source, piece, "text"))
    path.write_text('{"text": "longer"}\n' * 20)
    with pytest.raises(DataError, match="changed since the plan was made"):
        list(read_rows(source, piece, "text"))


def test_a_text_file_as_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"\n\nFirst line,\r\nsecond line.\n \t\nCaf\xc3\xa9\n\n\nbad \xff byte\n\nLast, unterminated")
    assert texts_and_problems(path, "paragraph") == [
        (0, "First line,\r\nsecond line.", None),
        (1, "Caf\u00e9", None),
        (2, None, "invalid UTF-8"),
        (3, "Last, unterminated", None),
    ]


def test_a_paragraph_too_long_to_hold_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.rows.MAX_DOCUMENT_BYTES", 10)
    path = tmp_path / "book.txt"
    path.write_bytes(b"short\n\n" + b"x" * 35 + b"\nmore\n\nafter")
    assert texts_and_problems(path, "paragraph") == [
        (0, "short", None),
        (1, None, "paragraph longer than 10 bytes"),
        (2, "after", None),
    ]


@pytest.mark.parametrize("piece_bytes", [1, 100, 1_000, 10_000_000])
def test_a_file_of_lines_is_cut_at_lines_and_keeps_its_row_numbers(
    write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    documents = [f"{number}\u00e9" * (number % 50 + 1) for number in range(400)]
    rows: list[Any] = [*documents[:200], b"", b"{broken", *documents[200:]]
    path = write_jsonl("a.jsonl", rows)
    monkeypatch.setattr("data_pipeline.sources.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("data_pipeline.blocks.BLOCK_BYTES", 333)
    (_,), (pieces,) = hash_sources(find_sources([str(path)], "text"), "text", threads=1)
    assert pieces[0].start == 0
    assert pieces[-1].stop == path.stat().st_size
    assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
    if piece_bytes == 100:
        assert len(pieces) > 100
    expected = [(number + 2 * (number >= 200), text, None) for number, text in enumerate(documents)]
    expected.insert(200, (201, None, "invalid JSON"))
    assert texts_and_problems(path) == expected


def test_row_groups_are_pieces(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(25)]
    pq.write_table(pa.table({"text": documents, "id": list(range(25))}), tmp_path / "a.parquet", row_group_size=10)
    (_,), (pieces,) = hash_sources(find_sources([str(tmp_path)], "text"), "text", threads=1)
    assert [(piece.start, piece.stop, piece.first_row) for piece in pieces] == [(0, 1, 0), (1, 2, 10), (2, 3, 20)]
    assert texts_and_problems(tmp_path) == [(number, text, None) for number, text in enumerate(documents)]


def test_folders_of_datasets(tmp_path: Path) -> None:
    texts = ["one", None, "", "four <|endoftext|>"]
    datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "text": texts}).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    rows = rows_of(tmp_path / "saved")
    assert [(row.number, text_of(row)) for row in rows] == [(0, "one"), (1, None), (0, ""), (1, "four <|endoftext|>")]
    with (
        pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file,
        pa.ipc.new_file(file, pa.schema({"text": pa.string()})) as writer,
    ):
        writer.write_table(pa.table({"text": texts}))
    assert [text_of(row) for row in rows_of(tmp_path / "file.arrow")] == texts
    with pytest.raises(DataError, match=r"no column 'body'; it has id, text"):
        find_sources([str(tmp_path / "saved")], "body")
    (tmp_path / "file.arrow").write_bytes(b"<html>")
    with pytest.raises(DataError, match="expected an Arrow file, but it looks like an HTML page"):
        find_sources([str(tmp_path / "file.arrow")], "text")
