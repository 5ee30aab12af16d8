"""Atomic folders, damaged checkpoints, locks, random states; a full disk and a kill lose nothing that was saved."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from linformers import files
from linformers.training import checkpoints, trainer

from ..forks import CONTEXT
from ..modes import refused
from . import interrupts, small


@pytest.fixture
def run(finished, tmp_path):
    """A run that was killed after its last checkpoint, of step 24, and before saving its model."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model")
    return out


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path} has {path.stat().st_size} bytes, expected {path.stat().st_size + 100}"


def flip(path):
    small.flip(path)
    return f"{path} has sha256 "


def remove(path):
    path.unlink()
    return f"{path} is missing"


@pytest.mark.parametrize("spoil", [truncate, flip, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_damaged_checkpoint_is_named_and_skipped(run, name, spoil):
    assert [checkpoints.step_of(folder) for folder in checkpoints.list_checkpoints(run)] == [24, 20]
    assert checkpoints.newest_intact(run, pytest.fail) == run / "checkpoint-24"
    expected, messages = spoil(run / "checkpoint-24" / name), []
    assert checkpoints.newest_intact(run, messages.append) == run / "checkpoint-20"
    (message,) = messages
    assert "step 24" in message
    assert expected in message


def test_run_resumes_from_the_checkpoint_before(corpus, finished, run):
    flip(run / "checkpoint-24" / "model.safetensors")
    assert small.train(small.recipe(corpus, run)) == 0
    small.assert_same_run(run, finished)
    assert files.damage(run / "checkpoint-24") is None


@pytest.mark.parametrize("name", ["trainer_state.json", "training.json"])
def test_a_checkpoint_with_nested_json_is_refused(name, corpus, run):
    (run / "checkpoint-24" / name).write_text('{"a":' * 10**5)
    files.write_manifest(run / "checkpoint-24")
    with refused(f"{name} is damaged: its lists and objects are nested more than 64 deep"):
        small.train(small.recipe(corpus, run))


def test_damage_of_the_manifest(tmp_path):
    assert "manifest.json is missing" in files.damage(tmp_path)
    for wrong in ("{", "[]", "{}", '{"weights": 3}', '{"weights": {"bytds": 3}}'):
        (tmp_path / "manifest.json").write_text(wrong)
        assert "manifest.json is damaged: it is not" in files.damage(tmp_path)


def test_verify_names_what_is_damaged_until_it_is_accepted(run, corpus, capsys):
    folder = run / "checkpoint-24"
    checkpoints.verify(folder, False, Console())
    assert {line.rsplit("/", 1)[1] for line in capsys.readouterr().out.splitlines()} == {
        f"{path.name} is intact" for path in folder.iterdir() if path.name != "manifest.json"
    }
    flip(folder / "training.json")
    (folder / "optimizer.safetensors").unlink()
    with refused(f"folder='{folder}' is damaged; restore it or, if it was changed on purpose, run: linformers verify"):
        checkpoints.verify(folder, False, Console())
    shown = capsys.readouterr().out
    assert shown.count("is intact") == len(list(folder.iterdir())) - 2
    assert f"{folder / 'training.json'} has sha256" in shown
    assert f"{folder / 'optimizer.safetensors'} is missing" in shown
    checkpoints.verify(folder, True, small.QUIET)
    assert files.damage(folder) is None
    (folder / "manifest.json").unlink()
    with refused("has no manifest.json; to write one, run"):
        checkpoints.verify(folder, False, small.QUIET)
    with refused("is the folder of an unfinished run"):
        checkpoints.verify(run, True, small.QUIET)
    with refused("is a corpus, which cannot be changed: run linformers prepare again"):
        checkpoints.verify(corpus, True, small.QUIET)
    with refused("holds no model, checkpoint, tokenizer or corpus"):
        checkpoints.verify(corpus.parent, True, small.QUIET)


def test_verify_a_corpus_and_a_tokenizer(corpus, tmp_path, capsys):
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    for folder in (copy, copy / "tokenizer"):
        checkpoints.verify(folder, False, Console(width=500))
        assert "is intact" in capsys.readouterr().out
    flip(copy / "train-00000.bin")
    with refused("train-00000.bin has sha256"):
        checkpoints.verify(copy, False, small.QUIET)


def test_accepting_says_what_changed_and_refuses_what_no_model_works_without(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished / "checkpoint-24", tmp_path / "copy"))
    (folder / "training.json").write_text("{}")
    (folder / "optimizer.safetensors").unlink()
    checkpoints.verify(folder, True, Console(width=500))
    shown = capsys.readouterr().out
    assert f"{folder / 'training.json'} was changed: accepted" in shown
    assert f"{folder / 'optimizer.safetensors'} is gone: forgotten" in shown
    assert f"{folder / 'config.json'} is intact" in shown
    for name in ("config.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with refused(f"{folder / name} is missing, and the model does not work without it: restore it"):
            checkpoints.verify(folder, True, small.QUIET)
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").write_bytes(b"")
    with refused("model.safetensors is damaged or truncated"):
        checkpoints.verify(folder, True, small.QUIET)
    for name in ("manifest.json", "model.safetensors"):
        (folder / name).unlink()
    with refused("has a config.json but no safetensors"):
        checkpoints.verify(folder, True, small.QUIET)


def test_full_disk(corpus, tmp_path, monkeypatch):
    original = trainer.save_file

    def save_file(tensors, path, **kwargs):
        if "checkpoint-10" in str(path) and path.name == trainer.OPTIMIZER:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path, **kwargs)

    monkeypatch.setattr(trainer, "save_file", save_file)
    with refused("checkpoint-10 could not be written") as error:
        small.train(small.recipe(corpus, tmp_path))
    assert "No space left" in str(error.value)
    assert "step 5" in str(error.value)
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-5"]
    assert files.damage(tmp_path / "checkpoint-5") is None


def test_only_the_newest_are_kept(tmp_path):
    (tmp_path / ".checkpoint-5.unfinished").mkdir()  # what a kill left behind
    (tmp_path / ".checkpoint-5.unfinished" / "model.safetensors").write_bytes(b"half")
    for step in (2, 10, 4, 8, "8-copy"):
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoints.remove_old(tmp_path, keep=2, protected=tmp_path / "checkpoint-2")
    assert {path.name.removeprefix("checkpoint-") for path in tmp_path.iterdir()} == {"10", "8", "2", "8-copy"}


def test_the_next_run_removes_what_kills_left(corpus, run):
    """A kill may come inside the last save, after which nothing is saved anymore."""
    for name in (".best.removed.unfinished", ".checkpoint-20.removed.unfinished", ".model.unfinished"):
        (run / "seed-0" / name).mkdir(parents=True)
        (run / name).mkdir()
        (run / name / "model.safetensors").write_bytes(b"half")
    (run / ".metrics.jsonl.unfinished").write_bytes(b"half")
    (run / ".mine").write_bytes(b"")
    assert small.train(small.recipe(corpus, run)) == 0
    assert {path.name for path in run.rglob(".*")} == {".lock", ".mine"}


@pytest.mark.parametrize("content", [b"half of a li", b"\xff\xfe", b"3", b"foreign\n[]\n"])
def test_foreign_lines_in_the_metrics_do_not_stop_a_run(corpus, run, content):
    """They are those of its checkpoint."""
    before = small.read_metrics(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(content)
    if b"\n" in content:
        with refused("metrics.jsonl has 'foreign' in line 12, which is not a log entry"):
            small.read_metrics(run)
    else:
        assert small.read_metrics(run) == before
    assert small.train(small.recipe(corpus, run)) == 0
    assert f"24 steps: {before[-1]['perplexity']:.2f}\n" in (run / "model" / "README.md").read_text()


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
        files.write_folder(tmp_path / "checkpoint-1", fill)
    assert list(tmp_path.iterdir()) == []


def lock(folder):
    with checkpoints.locked(folder):
        pass


def test_locked_folder(tmp_path):
    with checkpoints.locked(tmp_path):
        with refused(f"out='{tmp_path}' is in use"):
            lock(tmp_path)
        process = CONTEXT.Process(target=lock, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == 1
    lock(tmp_path)


def test_folder_of_another_run(tmp_path):
    def claim(kind="pretrain", **settings):
        checkpoints.claim(tmp_path, kind, settings, free=["log"])
        return json.loads((tmp_path / "run.json").read_text())

    assert claim(model={"k": 1}) == {"kind": "pretrain", "model": {"k": 1}}
    assert claim(model={"k": 2}, log=1)["model"] == {"k": 2}  # nothing was trained yet
    (tmp_path / "checkpoint-1").mkdir()
    assert claim(model={"k": 2}, log=5)["log"] == 1
    with refused("model.k was 2 and is now 3; seed was None and is now 1;"):
        claim(model={"k": 3}, seed=1)
    with refused("holds a run of linformers pretrain"):
        claim("finetune")
    for content in (b"", b"{}", b"[]", b"3", b"null", b"\xff\x00", b'{"model": {"k": 1}}', b'{"a":' * 10**5):
        (tmp_path / "run.json").write_bytes(content)
        with refused("run.json is damaged"):
            claim()
    (tmp_path / "run.json").write_text('{"kind": "pretrain"}')  # without the recipe
    with refused("model.k was None and is now 1;"):
        claim(model={"k": 1})
    (tmp_path / "run.json").unlink()
    with refused("unknown origin"):
        claim()


@pytest.mark.parametrize(
    ("kind", "kills", "inside"),
    [
        ("pretrain", 6, 3),
        ("finetune", 4, 1),
        pytest.param("pretrain", 200, 50, marks=pytest.mark.long),
        pytest.param("finetune", 60, 15, marks=pytest.mark.long),
    ],
)
def test_kills(kind, kills, inside):
    """Each kind of run loses nothing, leaves nothing behind and ends as without a kill."""
    command = [sys.executable, "-m", "tests.training.kills", kind, str(kills), str(inside)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts["kills"] >= kills
    assert counts["inside a save"] >= inside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "names"), [(3, ["pretrain"]), pytest.param(100, None, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_signals_at_random_moments(signals, names):
    counts = interrupts.main(signals, names)
    assert counts["signals"] == signals
