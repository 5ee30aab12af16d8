"""Fine-tuning: selection apart from reporting, exact resume, results over seeds, folders of other runs."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import pipeline

from linformers import LinformerConfig, files
from linformers.training import checkpoints, finetune, tasks

from ..modes import refused
from . import small
from .test_trainer import interrupted

SETTINGS = finetune.Settings(seeds=2, epochs=3, batch_size=8, learning_rate=3e-3)
ONE = finetune.Settings(seeds=1, epochs=1, batch_size=8, max_length=16)


def run(task, model, out, settings=SETTINGS, console=small.QUIET):
    return finetune.run(task, model, out, settings, console, "linformers finetune")


def table(path, rows, labels=("cat", "dog")):
    names = [labels[i % len(labels)] for i in range(rows)]
    small.write_table(path, [{"text": f"{name} {i} sits", "label": name} for i, name in enumerate(names)])
    return tasks.load(str(path))


def test_results(tuned, task):
    results = json.loads((tuned / "results.json").read_text())
    start = json.loads((tuned / "run.json").read_text())["hash"]["weights"]
    assert f"(sha256 `{start}`)" in (tuned / "model" / "README.md").read_text()
    seeds = results["seeds"]
    assert [seed["seed"] for seed in seeds] == [0, 1]
    accuracies = [seed["accuracy"] for seed in seeds]
    assert min(accuracies) > 0.9  # it is an easy task
    mean, deviation = np.mean(accuracies), np.std(accuracies, ddof=1)
    assert results["accuracy"] == pytest.approx([mean, deviation])
    assert f"accuracy: {mean:.4f} ± {deviation:.4f}" in (tuned / "model" / "README.md").read_text()
    assert (results["rows"], results["reported_on"], results["f1_of"]) == (40, "test.csv", "'trees'")
    for seed in (0, 1):
        assert (tuned / f"seed-{seed}" / "best" / "model.safetensors").exists()
        assert not any((tuned / f"seed-{seed}").glob("*checkpoint-*"))
    classify = pipeline("text-classification", model=str(tuned / "model"))  # the best model, with its labels
    answers = classify([example.text for example in task.test])
    right = [answer["label"] == task.label_names[own.label] for answer, own in zip(answers, task.test, strict=True)]
    assert np.mean(right) == pytest.approx(max(seeds, key=lambda seed: seed["validation_accuracy"])["accuracy"])


@pytest.mark.parametrize(("accuracies", "epoch"), [((1, 1, 1), 3), ((0.5, 1, 0.5), 2), ((0.5, 1, 1), 3)])
def test_the_last_of_the_best_models_on_validation_is_selected(task, model, tmp_path, monkeypatch, accuracies, epoch):
    """The test set is evaluated once, after training."""
    left, seen = iter((*accuracies, 0)), []

    def scores(problem, logits, labels):
        seen.append(labels.tolist())
        return {"accuracy": next(left), "f1": 0}

    monkeypatch.setattr(finetune, "scores_of", scores)
    assert run(task, model, tmp_path, finetune.Settings(seeds=1, epochs=3, batch_size=16)) == 0
    validation, test = (sorted(example.label for example in part) for part in (task.validation, task.test))
    assert list(map(sorted, seen)) == [validation] * 3 + [test]
    result = json.loads((tmp_path / "seed-0" / "best" / "result.json").read_text())
    assert result["step"] == epoch * (len(task.train) // 16)
    assert result["validation_accuracy"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler hides from users
def test_compiled_fine_tuning_is_the_same(task, model, tmp_path, monkeypatch):
    """One graph for all lengths: embeddings, projections and two layers, in training and in evaluation.

    Without inductor, which pretraining is tested with.
    """
    compile_part = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, dynamic, options: compile_part(self, dynamic=dynamic, backend="aot_eager"),
    )
    exact = Path(shutil.copytree(model, tmp_path / "without dropout"))
    fields = json.loads((exact / "config.json").read_text())
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (exact / "config.json").write_text(json.dumps(fields))
    files.write_manifest(exact)
    losses = []
    for choice in ("no", "yes"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # With as many rows as k, both would be taken for the same number, and layers be compiled again.
        settings = finetune.Settings(seeds=1, epochs=1, batch_size=10, precision="float32", compile=choice)
        assert run(task, exact, tmp_path / choice, settings) == 0
        losses.append(small.losses(tmp_path / choice / "seed-0"))
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("step", [30, 56], ids=["within", "last"])
def test_interrupted_seed_resumes(tuned, task, model, tmp_path, step):
    assert 3 * (len(task.train) // 8) == 57
    with interrupted(step):
        assert run(task, model, tmp_path) == 128 + signal.SIGTERM
    assert not (tmp_path / "seed-1").exists()
    assert run(task, model, tmp_path) == 0
    for name in ("seed-0/best/result.json", "seed-1/best/result.json", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tuned / name).read_bytes()


def test_the_card_of_a_finished_model_may_be_edited(tuned, task, model, tmp_path):
    out = Path(shutil.copytree(tuned, tmp_path / "copy"))
    card, config = out / "model" / "README.md", out / "model" / "config.json"
    card.write_text("My notes.")
    config.write_text(config.read_text().replace('"dogs"', '"hounds"'))
    checkpoints.verify(out / "model", True, small.QUIET)
    assert run(task, model, out) == 0
    assert (card.read_text(), "hounds" in config.read_text()) == ("My notes.", True)
    (out / "results.json").unlink()
    assert run(task, model, out) == 0
    assert "Fine-tuned from" in card.read_text()


def test_a_wrong_model_leaves_no_trace(task, model, tmp_path):
    spoiled = Path(shutil.copytree(model, tmp_path / "model"))
    os.truncate(spoiled / "model.safetensors", 100)
    with refused("model.safetensors is damaged or truncated"):
        run(task, spoiled, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_finished_seeds_are_not_run_again_unless_their_weights_are_lost(tuned, task, model, tmp_path, monkeypatch):
    out = Path(shutil.copytree(tuned, tmp_path / "copy"))
    expected = json.loads((out / "seed-1" / "best" / "result.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(finetune.FineTuning, "train", lambda self, seed, folder: pytest.fail(f"seed {seed}"))
        assert run(task, model, out) == 0
    shutil.rmtree(out / "seed-1" / "best")
    assert run(task, model, out) == 0
    assert (out / "seed-1" / "best" / "model.safetensors").exists()
    assert json.loads((out / "seed-1" / "best" / "result.json").read_text()) == expected
    for name in ("model.safetensors", "result.json"):
        small.flip(out / "seed-1" / "best" / name)
        with refused(f"the best weights are damaged: {out / 'seed-1' / 'best' / name} has sha256"):
            run(task, model, out)
        small.flip(out / "seed-1" / "best" / name)


def test_the_model_is_loaded_once(tuned, task, model, tmp_path, monkeypatch):
    out, loaded, load = Path(shutil.copytree(tuned, tmp_path / "copy")), [], checkpoints.load_whole
    shutil.rmtree(out / "seed-1" / "best")
    shutil.rmtree(out / "model")
    monkeypatch.setattr(checkpoints, "load_whole", lambda *rest: loaded.append(rest) or load(*rest))
    assert run(task, model, out) == 0
    assert len(loaded) == 1


def test_texts_longer_than_the_model(task, model, tmp_path):
    assert run(task, model, tmp_path, dataclasses.replace(ONE, max_length=50)) == 0
    assert LinformerConfig.from_pretrained(tmp_path / "model").max_position_embeddings == 50
    assert finetune.load_tokenizer(tmp_path / "model").model_max_length == 50


def test_folders_of_other_runs(tuned, task, model, corpus, tmp_path):
    out = Path(shutil.copytree(tuned, tmp_path / "copy"))
    with refused("learning_rate was 0.003 and is now 0.1"):
        run(task, model, out, finetune.Settings(seeds=2, batch_size=8, learning_rate=0.1))
    with refused("hash.data was"):
        run(table(tmp_path / "a.csv", 140), model, out)
    with refused("holds 2 seeds, more than seeds=1"):
        run(task, model, out, finetune.Settings(seeds=1, epochs=3, batch_size=8, learning_rate=3e-3))
    with refused("holds a run of linformers pretrain"):
        run(task, model, model.parent)
    with refused("holds a run of linformers finetune"):
        small.train(small.recipe(corpus, out))


def test_fine_tuned_model_with_other_labels_and_another_maximum_length(tuned, model, tmp_path):
    task = table(tmp_path / "b.csv", 90, labels=("x", "y", "z"))
    start = Path(shutil.copytree(tuned / "model", tmp_path / "start"))
    with refused("max_length=2 leaves no room"):
        run(task, start, tmp_path / "out", finetune.Settings(max_length=2))
    assert run(task, start, tmp_path / "out", ONE) == 0  # a failed attempt does not claim a folder
    assert LinformerConfig.from_pretrained(tmp_path / "out" / "model").num_labels == 3
    assert finetune.load_tokenizer(tmp_path / "out" / "model").model_max_length == 16
    assert finetune.load_tokenizer(model).model_max_length == 32
    small.flip(start / "model.safetensors")
    with refused("model.safetensors has sha256"):
        run(task, start, tmp_path / "out", ONE)
    checkpoints.verify(start, True, small.QUIET)
    with refused("hash.weights was"):
        run(task, start, tmp_path / "out", ONE)


@pytest.mark.parametrize(("epochs", "few"), [(1, True), (25, False)])
@pytest.mark.parametrize(("rate", "low"), [(5e-5, True), (1e-3, False)])
def test_warning_of_few_steps(epochs, few, rate, low, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune.FineTuning, "train", lambda *rest: 1)  # nothing is trained
    task = table(tmp_path / "a.csv", 40)
    settings = finetune.Settings(epochs=epochs, batch_size=len(task.train) // 4, learning_rate=rate)
    assert run(task, model, tmp_path / "out", settings, Console(width=200)) == 1
    shown = capsys.readouterr().out
    assert ("Only 4 steps" in shown) == few
    assert ("--learning-rate 0.001" in shown) == (few and low)


@pytest.mark.parametrize(
    ("name", "value"), [("seeds", 0), ("learning_rate", 0), ("precision", "fp8"), ("max_length", -1)]
)
def test_wrong_settings(name, value, model, tmp_path):
    with refused(f"{name}={value!r} "):
        finetune.finetune("sst2", tmp_path, model=model, console=small.QUIET, command="", **{name: value})


def test_the_default_learning_rate_fits_the_model(task, model, tmp_path):
    rates = [finetune.default_rate(size) for size in (16, 256, 384, 768, 1024, 10**6)]
    assert rates[:2] == [1e-3, 1e-3]
    assert rates[3] == 5e-5
    assert rates == sorted(rates, reverse=True)
    assert min(rates) > 5e-6
    settings = finetune.Settings(seeds=1, epochs=1, batch_size=8)
    assert run(task, model, tmp_path, settings) == 0
    assert json.loads((tmp_path / "run.json").read_text())["learning_rate"] == 1e-3


def test_texts_that_are_cut_are_counted(model, tmp_path, capsys):
    data = table(tmp_path / "a.csv", 100)
    for length, cut in ((5, 100), (16, 0)):
        settings = finetune.Settings(seeds=1, epochs=1, batch_size=8, max_length=length)
        runs = finetune.FineTuning(data, model, tmp_path, dataclasses.replace(settings, learning_rate=1e-3), Console())
        runs.print_sizes()
        said = (
            "texts longer than 5 tokens, which are cut: 100 of 100; with a larger --max-length"
            in capsys.readouterr().out
        )
        assert said == bool(cut)
