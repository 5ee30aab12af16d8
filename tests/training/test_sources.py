"""Text and tables on disk: every kind reads the same, and what is wrong with a file is said in one sentence."""

import csv
import gzip
import json
import lzma
import random

import pyarrow
import pyarrow.parquet
import pytest

from linformers.training.sources import column_names, documents, find_files, kind, open_text, rows

TEXTS = ["First.\nTwo lines, one comma.", 'A "quoted" word and a\ttab', "Ünï¢ödé 漢字 🙂"]


def write(path, texts=TEXTS):
    """A table of texts in the kind that the name says."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path)
        return path
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if name.endswith(".jsonl"):
            file.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
        elif name.endswith((".csv", ".tsv")):
            table = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            table.writerows([["id", "text"], *enumerate(texts)])
        else:
            file.write(texts[0])
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.xz"])
def test_tables_read_the_same(name, tmp_path):
    path = write(tmp_path / name)
    assert list(documents(path)) == TEXTS
    assert column_names(path) == ["id", "text"]
    assert [str(row["id"]) for row in rows(path, ["id", "text"])] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.txt.xz"])
def test_a_text_file_is_one_document(name, tmp_path):
    assert list(documents(write(tmp_path / name))) == TEXTS[:1]


def test_line_ends_stay(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\nthree")
    assert list(documents(tmp_path / "a.txt")) == ["one\r\ntwo\n\nthree"]


def test_a_large_text_is_cut_at_blank_lines(tmp_path):
    text = "\n\n".join("word " * 100 for _ in range(5000))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(documents(tmp_path / "a.txt"))
    assert len(pieces) == 3
    assert "".join(pieces) == text
    assert all(piece.startswith("\n") for piece in pieces[1:])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_text(name, tmp_path):
    path = write(tmp_path / name)
    expected = list(documents(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(documents(path)) == expected


def test_empty_documents_are_left_out(tmp_path):
    assert list(documents(write(tmp_path / "a.jsonl", ["a", "", None, " \n", "b"]))) == ["a", "b"]
    (tmp_path / "a.txt").write_text(" \n")
    assert list(documents(tmp_path / "a.txt")) == []


def test_folders_are_searched_in_order(tmp_path):
    for name in ["b.txt", "a.csv", "deep/er/c.jsonl.gz", "image.png", "deep/notes.docx"]:
        write(tmp_path / name)
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]
    assert found == ["a.csv", "b.txt", "deep/er/c.jsonl.gz"]
    assert find_files([tmp_path / "b.txt", tmp_path / "a.csv"]) == [tmp_path / "b.txt", tmp_path / "a.csv"]
    assert find_files(str(tmp_path / "b.txt")) == find_files(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    assert kind(tmp_path / "deep/er/c.JSONL.gz") == ".jsonl"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv.gz", "a.txt.xz", "a.parquet"])
def test_reading_tells_how_far_it_is(name, tmp_path):
    letters = random.Random(0)
    path = write(tmp_path / name, ["".join(letters.choices("abcdefghij \n", k=2000)) * 100 for _ in range(40)])
    heard = []
    assert list(documents(path, on_read=heard.append))
    assert heard == sorted(heard)
    assert heard[-1] == path.stat().st_size
    assert heard[0] < path.stat().st_size or path.stat().st_size < 2**16


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"', "line 2, is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1, is no JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', "has no column 'text'; its columns are 'body'"),
        ("a.csv", b"title,body\na,b\n", "has no column 'text'; its columns are 'title', 'body'"),
        (
            "a.txt.gz",
            gzip.compress(b"some text" * 1000, mtime=0)[:-20],
            "a.txt.gz is damaged or not what its name says",
        ),
        ("a.txt.gz", b"plain text", "a.txt.gz is damaged or not what its name says: Not a gzipped file"),
        ("a.txt.xz", b"plain text", "a.txt.xz is damaged or not what its name says"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 9)[:-30], "a.jsonl.xz is damaged or not what its name says"),
        ("a.txt", b"some text\n" * 9 + b"\x00\x8f", "a.txt is no text in UTF-8: it has NUL bytes"),
        (
            "a.md.gz",
            gzip.compress("some text".encode("utf-16"), mtime=0),
            "a.md.gz is no text in UTF-8: it has NUL bytes",
        ),
        ("a.parquet", b"plain text", "a.parquet is damaged or not what its name says"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_a_damaged_file_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="^" + str(tmp_path / name)) as error:
        list(documents(tmp_path / name))
    assert message in str(error.value)


def test_a_missing_column_of_parquet(tmp_path):
    with pytest.raises(ValueError, match="has no column 'body'; its columns are 'id', 'text'"):
        list(documents(write(tmp_path / "a.parquet"), "body"))


def test_sources_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="has no file of a known kind"):
        find_files([tmp_path])
    with pytest.raises(ValueError, match="does not exist"):
        find_files([tmp_path / "none.txt"])
    (tmp_path / "a.docx").write_text("a")
    with pytest.raises(ValueError, match=r"a\.docx is of no known kind"):
        find_files([tmp_path / "a.docx"])


def test_columns_of_a_table_that_begins_with_blank_lines_or_is_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n\n{"x": 1}\n')
    assert column_names(tmp_path / "a.jsonl") == ["x"]
    (tmp_path / "a.jsonl").write_text("")
    assert column_names(tmp_path / "a.jsonl") == []


def test_files_are_closed_where_reading_stops(tmp_path):
    path = write(tmp_path / "a.jsonl.gz")
    with open_text(path) as file:
        assert file.readline()
    assert file.closed
    reading = documents(path)
    next(reading)
    reading.close()  # an open file would warn, and a warning fails the test
