"""Damaged checkpoints are found by their hash and named; a full disk leaves the previous one as it was."""

import errno
import io
import json
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch

from linformers.training import checkpointing, inference, trainer

from . import small


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert small.train(small.recipe(corpus, out)) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A run as if it had been killed after its last checkpoint, that of step 24, and before it was finished."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model")
    return out


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    return f"{path} has {len(content) - 100} bytes, expected {len(content)}"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path} has {len(content)} bytes as expected, but its hash is "


def remove(path):
    size = path.stat().st_size
    path.unlink()
    return f"{path} is missing, expected {size} bytes"


@pytest.mark.parametrize("spoil", [truncate, flip, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "training.json"])
def test_damaged_checkpoint_is_named_and_the_one_before_used(run, name, spoil):
    assert [checkpointing.step_of(folder) for folder in checkpointing.checkpoints(run)] == [24, 20]
    expected = spoil(run / "checkpoint-24" / name)
    messages = []
    assert checkpointing.newest_whole(run, messages.append) == run / "checkpoint-20"
    (message,) = messages
    assert message.startswith(f"checkpoint of step 24 is damaged and left out: {expected}")


def test_whole_checkpoints_are_not_reported(run):
    messages = []
    assert checkpointing.newest_whole(run, messages.append) == run / "checkpoint-24"
    assert messages == []


def test_checkpoints_are_models(finished):
    answers = []
    for name in ("model", "checkpoint-24"):
        out = io.StringIO()
        inference.predict(finished / name, ["the quick <mask> jumps"], out)
        answers.append(json.loads(out.getvalue()))
    assert answers[0] == answers[1]
    assert len(answers[0]["guesses"]) == 5


def test_an_unfinished_run_is_no_model_and_its_newest_checkpoint_is_named(run):
    os.utime(run / "checkpoint-20", (0, 0))
    with pytest.raises(
        ValueError, match="run that is not finished: run its command again, or name its checkpoint"
    ) as no:
        inference.predict(run, [], io.StringIO())
    assert str(no.value).endswith("checkpoint-24'")


def test_run_goes_on_from_the_one_before(corpus, finished, run):
    flip(run / "checkpoint-24" / "model.safetensors")
    assert small.train(small.recipe(corpus, run)) == 0
    small.assert_same_run(run, finished)
    assert checkpointing.damage(run / "checkpoint-24") is None


def test_damage_without_a_manifest(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    assert checkpointing.damage(tmp_path / "checkpoint-3").endswith("checkpoint-3 has no manifest.json")
    (tmp_path / "checkpoint-3" / "manifest.json").write_text("{")
    assert checkpointing.damage(tmp_path / "checkpoint-3").endswith("manifest.json is not JSON")
    (tmp_path / "checkpoint-3" / "weights").write_text("abc")
    for wrong in ("[]", '{"weights": 3}', '{"weights": {"bytds": 3}}'):
        (tmp_path / "checkpoint-3" / "manifest.json").write_text(wrong)
        assert checkpointing.damage(tmp_path / "checkpoint-3").endswith("manifest.json is no list of files")


def test_full_disk(corpus, tmp_path, monkeypatch):
    original = trainer.save_file

    def save_file(tensors, path, **kwargs):
        if "checkpoint-10" in str(path) and path.name == trainer.OPTIMIZER:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path, **kwargs)

    monkeypatch.setattr(trainer, "save_file", save_file)
    message = (
        "checkpoint-10 could not be written ([Errno 28] No space left on device); the checkpoint of step 5 is still"
    )
    with pytest.raises(OSError, match=re.escape(message)):
        small.train(small.recipe(corpus, tmp_path))
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-5"]
    assert checkpointing.damage(tmp_path / "checkpoint-5") is None


def test_leftovers_of_a_kill_are_removed(corpus, tmp_path):
    (tmp_path / ".checkpoint-5.unfinished").mkdir()
    (tmp_path / ".checkpoint-5.unfinished" / "model.safetensors").write_bytes(b"half")
    assert small.train(small.recipe(corpus, tmp_path, steps=6)) == 0
    assert not list(tmp_path.glob(".*unfinished*"))


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 10, 4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpointing.remove_old(tmp_path, keep=2, protected=tmp_path / "checkpoint-2")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-8", "checkpoint-2"}


def test_random_states_come_back():
    random.gauss()
    np.random.standard_normal()
    state = checkpointing.random_state()

    def draw():
        return random.random(), random.gauss(), np.random.random(), np.random.standard_normal(), torch.rand(3).tolist()

    first = draw()
    assert draw() != first
    checkpointing.load_random_state(state)
    assert draw() == first


def test_folder_appears_whole_or_not_at_all(tmp_path):
    def fill(folder):
        (folder / "a").write_text("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpointing.write_whole(tmp_path / "checkpoint-1", fill)
    assert list(tmp_path.iterdir()) == []
