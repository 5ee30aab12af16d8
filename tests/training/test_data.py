"""Text and tables on disk: every type reads the same, and errors name the file."""

import gzip
import lzma

import pyarrow
import pyarrow.parquet
import pytest

from linformers.training import data
from linformers.training.data import documents, file_type, find_files, open_text, rows, titled_documents

from ..modes import refused
from .small import write_table

TEXTS = ["First.\nTwo lines, one comma.", 'A "quoted" word and a\ttab', "Ünï¢ödé 漢字 🙂"]


def write(path, texts=TEXTS):
    """A table of texts, or a text, of the type that the name says."""
    if file_type(path) in (".jsonl", ".csv", ".tsv", ".parquet"):
        return write_table(path, [{"id": number, "text": text} for number, text in enumerate(texts)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(texts[0].encode()))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.xz"])
def test_tables_read_the_same(name, tmp_path):
    path = write(tmp_path / name)
    assert list(documents(path)) == TEXTS
    assert [str(row["id"]) for row in rows(path, ["id", "text"])] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.txt.xz"])
def test_text_file_is_one_document(name, tmp_path):
    text = "one\r\ntwo\n\nthree"  # line ends stay
    assert list(documents(write(tmp_path / name, [text]))) == [text]


def test_large_text_is_split_at_blank_lines(tmp_path):
    text = "\n\n".join("word " * 100 for _ in range(5000))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(documents(tmp_path / "a.txt"))
    assert len(pieces) == 3
    assert "".join(pieces) == text
    assert all(piece.startswith("\n") for piece in pieces[1:])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_byte_order_mark_is_not_text(name, tmp_path):
    path = write(tmp_path / name)
    expected = list(documents(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(documents(path)) == expected


def test_empty_documents_are_skipped_and_lone_surrogates_replaced(tmp_path):
    assert list(documents(write(tmp_path / "a.jsonl", ["a", "", None, " \n", "b"]))) == ["a", "b"]
    (tmp_path / "a.txt").write_text(" \n")
    assert list(documents(tmp_path / "a.txt")) == []
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d a character"}\n')
    assert list(documents(tmp_path / "a.jsonl")) == ["half ? a character"]


def test_folders_are_searched_in_order(tmp_path):
    for name in ["b.txt", "a.csv", "deep/er/c.jsonl.gz", "image.png", "deep/notes.docx"]:
        write(tmp_path / name)
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]
    assert found == ["a.csv", "b.txt", "deep/er/c.jsonl.gz"]
    assert find_files([tmp_path / "b.txt", tmp_path / "a.csv"]) == [tmp_path / "b.txt", tmp_path / "a.csv"]
    assert find_files(str(tmp_path / "b.txt")) == find_files(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    assert file_type(tmp_path / "deep/er/c.JSONL.gz") == ".jsonl"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text"', "line 2 is damaged: it is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is damaged: it is not a JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', "no column 'text'; its columns are 'body'"),
        ("a.csv", b"title,body\na,b\n", "no column 'text'; its columns are 'title', 'body'"),
        ("a.txt.gz", gzip.compress(b"some text" * 1000, mtime=0)[:-20], "damaged"),
        ("a.txt.gz", b"plain text", "damaged"),
        ("a.txt.xz", b"plain text", "damaged"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 9)[:-30], "damaged"),
        ("a.jsonl", b'{"text": "a"}\n' + b'{"a":' * 70 + b"1" + b"}" * 70, "line 2 is damaged: its lists and objects"),
        ("a.jsonl", b'{"text": ["a"]}\n', "line 1: 'text' is of type list, not text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 1}\n', "line 3: 'text' is of type int, not text"),
        ("a.jsonl", b'{"text": true}\n', "line 1: 'text' is of type bool, not text"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "line 1 is not UTF-8"),
        ("a.csv", b"id,text\n1,a\n2,caf\xe9\n", "line 3 is not UTF-8"),
        ("a.txt", b"a\ncaf\xe9\n", "line 2 is not UTF-8"),
        ("a.txt", b"some text\n" * 9 + b"\x00", "NUL"),
        ("a.md.gz", gzip.compress("some text".encode("utf-16-le"), mtime=0), "NUL"),
        ("a.parquet", b"plain text", "damaged"),
    ],
)
def test_damaged_file_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path / name)) as error:
        list(documents(tmp_path / name))
    assert message in str(error.value)


def test_sources_that_cannot_be_read(tmp_path):
    with refused("no column 'body'; its columns are 'id', 'text'"):
        list(documents(write(tmp_path / "table" / "a.parquet"), "body"))
    for name in ("missing.txt", "missing.jsonl.gz", "missing.parquet"):
        with refused(name):
            list(documents(tmp_path / name))
    (tmp_path / "a.docx").write_text("a")
    (tmp_path / "empty").mkdir()
    for name, message in (("none.txt", "does not exist"), ("a.docx", "supported file"), ("empty", "supported file")):
        with refused(message):
            find_files([tmp_path / name])


def test_files_are_closed_when_reading_stops(tmp_path):
    path = write(tmp_path / "a.jsonl.gz")
    with open_text(path) as file:
        assert file.readline()
    assert file.closed
    reading = documents(path)
    next(reading)
    reading.close()  # an open file would warn, and a warning fails the test


def test_damage_is_told_and_repaired_or_left_out(tmp_path):
    lines = [b'{"text": "caf\xe9"}', b'{"text": [1]}', b'{"text": null}', b'{"text": "a\xef\xbf\xbd"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "a.txt").write_bytes(b"a\ncaf\xe9 caf\xe9\n\xc3\xa9")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a", b"b"]}), tmp_path / "a.parquet")
    told = []
    found = [list(documents(tmp_path / name, damaged=told.append)) for name in ("a.jsonl", "a.txt", "a.parquet")]
    assert found == [["caf\ufffd", "a\ufffd"], ["a\ncaf\ufffd caf\ufffd\né"], []]
    places = ["a.jsonl, line 1 is", "a.jsonl, line 2:", "a.txt, line 2 is", "a.parquet, row 1:", "a.parquet, row 2:"]
    assert all(place in damage for place, damage in zip(places, told, strict=True))
    with refused("a.jsonl, line 1 is not UTF-8"):
        list(rows(tmp_path / "a.jsonl", ["text"]))


def parquet(text, path, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": text, "other": [1] * len(text)}), path, **options)


def test_bombs(tmp_path):
    """Files of a few kilobytes that expand to gigabytes; here, to a little more than what is allowed."""
    big = "a" * data.MAX_ROW
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write(f'{{"text": "a"}}\n{{"text": "{big}"}}')
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("text,more\na,b\n" + f'"{big[::16]}\n",' * 16)
    for name, line in (("a.jsonl.xz", 2), ("a.csv.gz", 18)):
        assert (tmp_path / name).stat().st_size < 50_000
        with refused(f"{name}, line {line}: a row has more than 16,777,216 characters"):
            list(documents(tmp_path / name))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**29}]
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"a", filters=filters))
    with refused("a.txt.xz is damaged or not what its name says: Memory usage limit exceeded"):
        list(documents(tmp_path / "a.txt.xz"))
    parquet([big + "a"], tmp_path / "a.parquet", compression="zstd")
    with refused("a.parquet would expand "):
        list(documents(tmp_path / "a.parquet"))
    assert len(list(rows(tmp_path / "a.parquet", ["other"]))) == 1  # the other column is not decoded
    parquet([big + "a"], tmp_path / "plain.parquet", compression="none", use_dictionary=False)
    assert sum(map(len, documents(tmp_path / "plain.parquet"))) == data.MAX_ROW + 1


def test_damaged_pages_of_a_parquet_file(tmp_path):
    parquet(["some text", "more"], tmp_path / "a.parquet", compression="none", use_dictionary=False)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"some text", b"caf\xe9 text"))
    with refused("a.parquet is damaged or not what its name says"):
        list(documents(tmp_path / "a.parquet"))


def test_a_large_text_of_a_table_is_split(tmp_path):
    text = "\n\n".join("word " * 100 for _ in range(5000))
    pieces = list(documents(write(tmp_path / "a.jsonl", [text, "after"])))
    assert len(pieces) == 4
    assert "".join(pieces) == f"{text}after"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_titles(name, tmp_path):
    write_table(tmp_path / name, [{"title": title, "text": f"text {title}"} for title in ("one", " ", "two ")])
    assert list(titled_documents(tmp_path / name)) == [("one", "text one"), (None, "text  "), ("two", "text two ")]
    assert list(titled_documents(write(tmp_path / f"b-{name}"))) == [(None, text) for text in TEXTS]


def test_the_first_piece_of_a_large_text_has_its_title(tmp_path):
    text = "\n\n".join("word " * 100 for _ in range(5000))
    titles = [title for title, _ in titled_documents(write_table(tmp_path / "a.jsonl", [{"title": "a", "text": text}]))]
    assert titles == ["a", None, None]
