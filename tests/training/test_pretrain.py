"""Pretraining: folders of runs, starting from a model, several processes, signals, and the whole command."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from torch import distributed as dist

import linformers_cli
from linformers import LinformerForMaskedLM, LinformerForSequenceClassification
from linformers.training import checkpoints, pretrain
from linformers.training.corpus import Corpus
from linformers.training.prepare import prepare
from linformers.training.trainer import read_metrics

from ..forks import Command, in_two
from ..modes import config, refused
from . import small

ROOT = Path(__file__).parents[2]
# Each process draws its own dropout, so only runs without it are the same in one and two processes.
SAME = {"model": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "steps": 20, "log_every": 1}


def write(recipe, folder):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    return folder / "recipe.yaml"


def other_corpus(corpus, folder, **options):
    """A part of the text of a corpus."""
    rows = [json.loads(line) for line in (corpus.parent / "text.jsonl").read_text().splitlines()]
    small.write_table(folder / "other.jsonl", rows[:150])
    prepare([str(folder / "other.jsonl")], folder / "other", validation_share=0.1, console=small.QUIET, **options)
    return folder / "other"


def test_results(finished, corpus):
    assert {"checkpoint-20", "checkpoint-24", "curve.png", "metrics.jsonl", "model", "runs"} <= {
        path.name for path in finished.iterdir()
    }
    records = small.read_metrics(finished)
    assert [record["step"] for record in records if "loss" in record] == list(range(3, 25, 3))
    assert [record["step"] for record in records if "perplexity" in record] == [8, 16, 24]
    assert all(record["tokens_per_second"] > 0 for record in records if "loss" in record)
    card = (finished / "model" / "README.md").read_text()
    assert f"{records[-1]['perplexity']:.2f}" in card
    assert f"data: {corpus}" in card
    assert LinformerForMaskedLM.from_pretrained(finished / "model").config.max_position_embeddings == 32


@pytest.mark.parametrize("spoil", [small.flip, lambda path: os.truncate(path, 999), Path.unlink])
def test_a_finished_run_whose_model_is_damaged(spoil, finished, corpus, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    weights = (out / "model" / "model.safetensors").read_bytes()
    spoil(out / "model" / "model.safetensors")
    with refused("this run is finished, but its model is damaged") as error:
        small.train(small.recipe(corpus, out))
    assert "delete that folder and repeat the command" in str(error.value)
    shutil.rmtree(out / "model")
    assert small.train(small.recipe(corpus, out)) == 0
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def test_output_in_a_file_has_no_control_characters_and_warns_of_a_long_warmup(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    own = write(small.recipe(corpus, tmp_path / "run", steps=8, warmup_steps=8), tmp_path)
    assert pretrain.pretrain(own, ["log_every=1"], console=Console(file=file), command="") == 0
    lines = file.getvalue().splitlines()
    assert sum(line.startswith("step ") for line in lines) == 9  # eight log entries and one validation
    assert "warmup_steps=8 is not below steps=8" in " ".join(lines)
    assert "\r" not in file.getvalue()
    assert "\x1b[2K" not in file.getvalue()


def test_a_run_outlives_the_reader_of_its_output(corpus, tmp_path, monkeypatch):
    """As in `linformers pretrain … | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        recipe = small.recipe(corpus, tmp_path, steps=6)
        assert pretrain.run(recipe, linformers_cli._console(), "linformers pretrain") == 0
    assert (tmp_path / "model").exists()


def test_nothing_is_written_for_a_wrong_recipe(corpus, tmp_path):
    with refused("holds no corpus"):
        small.train(small.recipe(tmp_path / "nowhere", tmp_path / "out"))
    with refused("rows of 16384 need"):
        small.train(small.recipe(corpus, tmp_path / "out", model={"max_position_embeddings": 16384}))
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    small.flip(data / "train-00000.bin")
    with refused("train-00000.bin has sha256"):
        small.train(small.recipe(data, tmp_path / "out"))
    assert not (tmp_path / "out" / "run.json").exists()


def test_folder_of_another_run(corpus, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with checkpoints.locked(out), refused("is in use by another process"):
        small.train(small.recipe(corpus, out))
    assert small.train(small.recipe(corpus, out, steps=4)) == 0
    with refused("learning_rate was 0.003 and is now 0.1"):
        small.train(small.recipe(corpus, out, steps=4, learning_rate=0.1))
    assert small.train(small.recipe(corpus, out, steps=4, workers=1, log_every=1)) == 0
    assert [record["step"] for record in read_metrics(out)] == [3, 4, 4]
    for name, options in (("corpus", {"tokenizer": str(corpus / "tokenizer")}), ("tokenizer", {"vocab_size": 290})):
        other = other_corpus(corpus, tmp_path / name, **options)
        with refused(f"sha256.{name} was"):
            small.train(small.recipe(other, out, steps=4))


# Starting from a model.


def start_of(recipe):
    """The model before the first step."""
    return pretrain.make_trainer(recipe, Corpus.open(Path(recipe.data)), pretrain.training_arguments(recipe)).model


def test_start_from_a_model(finished, corpus, tmp_path):
    model = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    own = small.recipe(corpus, tmp_path / "run", start=str(model), learning_rate=1e-6, warmup_steps=0)
    saved = LinformerForMaskedLM.from_pretrained(finished / "model").state_dict()
    for name, tensor in start_of(own).state_dict().items():
        torch.testing.assert_close(tensor.cpu(), saved[name], rtol=0, atol=0)
    assert small.train(own) == 0
    before, after = (small.read_metrics(out)[-1]["perplexity"] for out in (finished, tmp_path / "run"))
    assert after == pytest.approx(before, rel=1e-2)  # the learning rate is tiny
    start = json.loads((tmp_path / "run" / "run.json").read_text())["sha256"]["start"]
    assert f"- Started from: `{model}` (sha256 `{start}`)" in (tmp_path / "run" / "model" / "README.md").read_text()
    new = next(r["perplexity"] for r in small.read_metrics(finished) if "perplexity" in r)
    assert before < 0.9 * new
    data = other_corpus(corpus, tmp_path, tokenizer=str(finished / "model"))  # other text
    assert small.train(small.recipe(data, tmp_path / "other run", start=str(finished / "model"), steps=2)) == 0
    small.flip(model / "model.safetensors")
    with refused("model.safetensors has sha256"):
        small.train(own)
    checkpoints.verify(model, True, small.QUIET)
    with refused("sha256.start was"):
        small.train(own)


def test_start_from_a_twin(corpus, tmp_path):
    twin = small.recipe(corpus, tmp_path / "twin", steps=2, model={"projection": "identity"})
    assert small.train(twin) == 0
    saved = LinformerForMaskedLM.from_pretrained(tmp_path / "twin" / "model").state_dict()
    state = start_of(small.recipe(corpus, tmp_path / "run", start=str(tmp_path / "twin" / "model"))).state_dict()
    new = {name for name, tensor in state.items() if name not in saved or (tensor.cpu() != saved[name]).any()}
    assert len(new) == 1
    assert "projections." in new.pop()


@pytest.mark.parametrize("fields", [{"projected_length": 16}, {}, {"projection": "identity"}], ids=str)
def test_start_from_a_shorter_model(fields, finished, corpus, tmp_path):
    """Longer rows after short ones: at the same n/k, the model computes for short rows what it did before."""
    own = small.recipe(corpus, tmp_path / "run", start=str(finished / "model"), steps=2)
    own = dataclasses.replace(own, model={**own.model, "max_position_embeddings": 64, **fields})
    ids = torch.randint(5, 300, (2, 20))
    model = start_of(own)
    assert model.config.max_position_embeddings == 64
    result = model.cpu().eval()(ids).logits
    expected = LinformerForMaskedLM.from_pretrained(finished / "model").eval()(ids).logits
    assert torch.allclose(result, expected, atol=1e-5) == ("projected_length" in fields)
    assert small.train(own) == 0


def test_wrong_starts(finished, corpus, tmp_path):
    start = str(finished / "model")

    def train(**fields):
        small.train(small.recipe(corpus, tmp_path / "run", **{"start": start, **fields}))

    with refused("start='nowhere' contains no model"):
        train(start="nowhere")
    with refused(f"start={start!r} has hidden_size=16, not 32"):
        train(model={"hidden_size": 32})
    LinformerForSequenceClassification.from_pretrained(start).save_pretrained(tmp_path / "classifier")
    shutil.copy(finished / "model" / "tokenizer.json", tmp_path / "classifier")
    with refused("is a ['LinformerForSequenceClassification'], not a LinformerForMaskedLM"):
        train(start=str(tmp_path / "classifier"))
    data = other_corpus(corpus, tmp_path, vocab_size=280)
    with refused(f"start={start!r} have different tokenizers"):
        small.train(small.recipe(data, tmp_path / "run", start=start))


# Several processes.


def start(recipe, folder, *launcher, stdout=subprocess.DEVNULL):
    """A process, or several by a launcher, in a process group of its own."""
    command = [sys.executable, *launcher, "-m", "linformers", "pretrain", str(write(recipe, folder))]
    output = {"stdout": stdout, "stderr": subprocess.DEVNULL if launcher else subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **output)


def run_in_two(target, folder):
    """As torchrun does, without importing everything twice."""
    log = folder / "log"
    assert in_two(target, log) == 0, log.read_text()[-3000:]


def test_error_in_two_processes(corpus, tmp_path):
    recipe = write(small.recipe(corpus, tmp_path / "run", batch_size=3), tmp_path)
    assert in_two(Command(["pretrain", str(recipe)]), tmp_path / "log") == 2
    assert "batch_size=3 is not a multiple of 2" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    assert small.train(small.recipe(corpus, out, **SAME)) == 0
    return out


@pytest.mark.parametrize("shard", [False, True], ids=["DDP", "FSDP"])
def test_two_processes_equal_one(corpus, single, shard, tmp_path):
    recipe = small.recipe(corpus, tmp_path / "run", **SAME, shard=shard, rows_at_once=2)
    run_in_two(Command(["pretrain", str(write(recipe, tmp_path))]), tmp_path)
    assert len(small.losses(tmp_path / "run")) == 20
    assert small.losses(tmp_path / "run") == pytest.approx(small.losses(single), abs=1e-5)
    last = [read_metrics(out)[-1]["eval_loss"] for out in (tmp_path / "run", single)]
    assert last[0] == pytest.approx(last[1], abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, "FSDP"), ("FSDP", 1)], ids=str)
def test_resume_with_other_processes(corpus, single, before, after, tmp_path):
    """Ten steps by one kind of run, ten by another."""
    out = tmp_path / "run"

    def train(kind):
        recipe = small.recipe(corpus, out, **SAME, shard=kind == "FSDP", save_every=10)
        if kind == 1:
            assert small.train(recipe) == 0
        else:
            run_in_two(Command(["pretrain", str(write(recipe, tmp_path))]), tmp_path)

    train(before)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoint-20")
    assert (out / "checkpoint-10").exists()
    train(after)
    assert small.losses(out) == pytest.approx(small.losses(single), abs=1e-5)


def hold_half():
    """Called in two processes: each holds its half of the weights, and no more."""
    dist.init_process_group("gloo")
    model = LinformerForMaskedLM(config())
    whole = sum(parameter.numel() for parameter in model.parameters())
    pretrain.shard(model)
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == whole
    assert own <= 0.55 * whole, (own, whole)
    os._exit(0)  # as the command line does


def test_sharding(corpus, tmp_path):
    with refused("shard=true needs several processes"):
        small.train(small.recipe(corpus, tmp_path, shard=True))
    run_in_two(hold_half, tmp_path)


def test_signal_stops_all_processes_after_the_same_step(corpus, tmp_path):
    out, straight = tmp_path / "run", tmp_path / "straight"
    options = {**SAME, "steps": 100, "save_every": 1000, "eval_every": 1000}
    assert small.train(small.recipe(corpus, straight, **options)) == 0
    recipe = small.recipe(corpus, out, **options, rows_at_once=1)
    process = start(recipe, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    while process.poll() is None and not small.losses(out):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    (checkpoint,) = out.glob("checkpoint-*")
    assert checkpoints.step_of(checkpoint) < 100
    run_in_two(Command(["pretrain", str(write(recipe, tmp_path))]), tmp_path)
    assert small.losses(out) == pytest.approx(small.losses(straight), abs=1e-4)


def test_signal_to_a_process_group_saves(corpus, tmp_path):
    """Schedulers also send it to the processes that load data."""
    own = small.recipe(corpus, tmp_path / "run", steps=5000, workers=2, log_every=5, save_every=10_000)
    process = start(own, tmp_path)
    while process.poll() is None and len(small.read_metrics(tmp_path / "run")) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors[-2000:]
    assert checkpoints.newest_intact(tmp_path / "run", print) is not None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == "pretrain"
