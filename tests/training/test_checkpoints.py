"""Atomic folders, damaged checkpoints, locks, random states; a full disk and a kill lose nothing that was saved."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linformers.errors import UserError
from linformers.training import checkpoints, trainer

from ..forks import CONTEXT
from . import small


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert small.train(small.recipe(corpus, out)) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A run that was killed after its last checkpoint, of step 24, and before saving its model."""
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
    return f"{path} has sha256 "


def remove(path):
    size = path.stat().st_size
    path.unlink()
    return f"{path} is missing, expected {size} bytes"


@pytest.mark.parametrize("spoil", [truncate, flip, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_damaged_checkpoint_is_named_and_skipped(run, name, spoil):
    assert [checkpoints.step_of(folder) for folder in checkpoints.list_checkpoints(run)] == [24, 20]
    expected = spoil(run / "checkpoint-24" / name)
    messages = []
    assert checkpoints.newest_intact(run, messages.append) == run / "checkpoint-20"
    (message,) = messages
    assert "step 24" in message
    assert expected in message


def test_intact_checkpoints_are_not_reported(run):
    assert checkpoints.newest_intact(run, pytest.fail) == run / "checkpoint-24"


def test_run_resumes_from_the_checkpoint_before(corpus, finished, run):
    flip(run / "checkpoint-24" / "model.safetensors")
    assert small.train(small.recipe(corpus, run)) == 0
    small.assert_same_run(run, finished)
    assert checkpoints.damage(run / "checkpoint-24") is None


def test_damage_of_the_manifest(tmp_path):
    assert checkpoints.damage(tmp_path).endswith("manifest.json is missing")
    (tmp_path / "weights").write_text("abc")
    for wrong in ("{", "[]", '{"weights": 3}', '{"weights": {"bytds": 3}}'):
        (tmp_path / "manifest.json").write_text(wrong)
        assert checkpoints.damage(tmp_path).endswith("manifest.json is not a list of files")


def test_full_disk(corpus, tmp_path, monkeypatch):
    original = trainer.save_file

    def save_file(tensors, path, **kwargs):
        if "checkpoint-10" in str(path) and path.name == trainer.OPTIMIZER:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path, **kwargs)

    monkeypatch.setattr(trainer, "save_file", save_file)
    with pytest.raises(UserError, match=r"checkpoint-10 could not be written .*No space left.* step 5"):
        small.train(small.recipe(corpus, tmp_path))
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-5"]
    assert checkpoints.damage(tmp_path / "checkpoint-5") is None


def test_remains_of_a_kill_are_removed(corpus, tmp_path):
    (tmp_path / ".checkpoint-5.unfinished").mkdir()
    (tmp_path / ".checkpoint-5.unfinished" / "model.safetensors").write_bytes(b"half")
    assert small.train(small.recipe(corpus, tmp_path, steps=6)) == 0
    assert not list(tmp_path.glob(".*unfinished*"))


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 10, 4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoints.remove_old(tmp_path, keep=2, protected=tmp_path / "checkpoint-2")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-8", "checkpoint-2"}


def test_random_state_is_restored():
    state = json.loads(json.dumps(checkpoints.random_state()))
    first = torch.rand(3)
    assert not torch.equal(torch.rand(3), first)
    checkpoints.load_random_state(state)
    assert torch.equal(torch.rand(3), first)


def test_folder_appears_complete_or_not_at_all(tmp_path):
    def fill(folder):
        (folder / "a").write_text("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_folder(tmp_path / "checkpoint-1", fill)
    assert list(tmp_path.iterdir()) == []


def lock(folder):
    with checkpoints.locked(folder):
        pass


def test_locked_folder(tmp_path):
    with checkpoints.locked(tmp_path):
        with pytest.raises(UserError, match=f"out='{tmp_path}' is in use"):
            lock(tmp_path)
        process = CONTEXT.Process(target=lock, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == 1
    lock(tmp_path)


def test_folder_of_another_run(tmp_path):
    assert checkpoints.claim(tmp_path, "pretrain", {"seed": 1}) == {"kind": "pretrain", "seed": 1}
    assert checkpoints.claim(tmp_path, "pretrain", {"seed": 2})["seed"] == 2  # nothing was trained yet
    (tmp_path / "checkpoint-1").mkdir()
    assert checkpoints.claim(tmp_path, "pretrain", {"seed": 3})["seed"] == 2
    with pytest.raises(UserError, match="holds a run of linformers pretrain"):
        checkpoints.claim(tmp_path, "finetune", {})
    for content in ("", "{}", "[]"):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UserError, match=r"run.json is damaged"):
            checkpoints.claim(tmp_path, "pretrain", {})
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match="unknown origin"):
        checkpoints.claim(tmp_path, "pretrain", {})


def kill(**options):
    """Run the harness of `kills.py`."""
    command = [sys.executable, "-m", "tests.training.kills", *(f"--{name}={value}" for name, value in options.items())]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["kills"] >= options["kills"]
    assert counts["inside a save"] >= options["inside"]


def test_a_few_kills():
    kill(kills=6, inside=3)


@pytest.mark.long
def test_fifty_kills():
    kill(kills=50, inside=15, seed=1)
