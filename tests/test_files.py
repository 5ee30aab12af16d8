"""JSON from files: whatever is in them, reading ends in an object or one sentence. Manifests: damage is found."""

import os
from random import Random

import pytest
from transformers import AutoModel, AutoTokenizer

import linformers
from linformers import LinformerForMaskedLM, files

from . import modes
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


# Manifests.


@pytest.fixture(params=["10GB", "5KB"], ids=["whole", "sharded"])
def saved(request, tmp_path):
    """A model of about 20 kilobytes."""
    LinformerForMaskedLM(modes.config()).save_pretrained(tmp_path, max_shard_size=request.param)
    return tmp_path


def load(folder):
    return LinformerForMaskedLM.from_pretrained(folder)


def test_a_changed_bit_is_found(saved):
    random = Random(0)
    listed = sorted(files.read_manifest(saved))
    assert listed == sorted(path.name for path in saved.iterdir() if path.name != "manifest.json")
    for name in [*listed * 5, *["manifest.json"] * 40]:
        content = (saved / name).read_bytes()
        wrong = bytearray(content)
        wrong[random.randrange(len(wrong))] ^= 1 << random.randrange(8)
        (saved / name).write_bytes(wrong)
        with refused(str(saved)):
            load(saved)
        (saved / name).write_bytes(content)
    load(saved)


def test_a_change_is_accepted_by_the_command_in_the_error(saved):
    (saved / "config.json").write_text((saved / "config.json").read_text().replace("0.0,", "0.1,"))
    for model_class in (LinformerForMaskedLM, AutoModel):
        with refused("config.json has sha256 ") as error:
            model_class.from_pretrained(saved)
    *_, command = str(error.value).split("run: ")
    assert command == f"linformers verify {saved} --accept"
    files.write_manifest(saved)
    assert load(saved).config.hidden_dropout_prob == 0.1


def test_what_a_manifest_covers(saved):
    tokenizer = AutoTokenizer.from_pretrained(linformers.pretrained())
    (saved / "README.md").write_text("Mine.")
    tokenizer.save_pretrained(saved)  # is not listed, and need not be
    files.check_files(saved, files.TOKENIZER_FILES)
    files.write_manifest(saved)
    (saved / "README.md").write_text("Yours.")
    (saved / "tokenizer.json").write_text("{}")
    with refused("tokenizer.json has 2 bytes"):
        files.check_files(saved, files.TOKENIZER_FILES)
    load(saved).save_pretrained(saved, max_shard_size="8KB")  # other shards, and the same tokenizer
    load(saved)
    assert files.damage(saved).startswith(f"{saved / 'tokenizer.json'} has 2 bytes")
    tokenizer.save_pretrained(saved)
    assert files.damage(saved) is None
    (saved / "model-00009-of-00009.safetensors").touch()
    with refused("model-00009-of-00009.safetensors is not listed in manifest.json"):
        load(saved)
    (saved / "manifest.json").unlink()  # as in a folder from elsewhere
    load(saved)


def test_only_the_first_process_lists_the_files(tmp_path):
    LinformerForMaskedLM(modes.config()).save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "manifest.json").exists()
