"""JSON from files: whatever is in them, reading ends in an object or one sentence."""

import os

import pytest

from linformers import files

from .modes import refused


def nested(depth):
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, {"b": null}], "ü": "漢"}', encoding="utf-8")
    assert files.read_json(tmp_path / "a.json") == {"a": [1, {"b": None}], "ü": "漢"}
    assert files.parse_json(nested(files.MAX_DEPTH), "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((own, "is damaged: it is not JSON") for own in (b"", b"{", b'{"a": "\xff"}', b'{"a": ' + b"9" * 5000 + b"}")),
        *((own, "is damaged: it is not a JSON object") for own in (b"[1]", b"null", b'"a"', b"NaN")),
        (nested(files.MAX_DEPTH + 1).encode(), "nested more than 64 deep"),
        (b"[" * 10**6, "nested more than 64 deep"),
    ],
)
def test_other_content_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with refused(message) as error:
        files.read_json(tmp_path / "a.json")
    assert str(error.value).startswith(str(tmp_path / "a.json"))


def test_a_large_file_is_refused(tmp_path):
    (tmp_path / "a.json").touch()
    os.truncate(tmp_path / "a.json", files.MAX_BYTES + 1)
    with refused("a.json has more than the 67,108,864 bytes"):
        files.read_json(tmp_path / "a.json")


def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe"):
        with refused(f"{path} is missing or not a file"):
            files.read_json(path)
