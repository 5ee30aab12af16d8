"""Fine-tuning: selection apart from reporting, exact resume, results over seeds; prediction and evaluation after it."""

import io
import json
import shutil
import signal

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import pipeline

from linformers.training import finetune, predict, tasks

from . import small
from .test_resume import SignalAt

SETTINGS = finetune.Settings(seeds=2, epochs=3, batch_size=8, learning_rate=3e-3)


def sentence(random, kind):
    """Words of which each kind of sentence has its own."""
    return " ".join(random.choice(small.WORDS[6 * kind : 6 * kind + 6], size=12))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    for name, rows in (("train", 160), ("test", 40)):
        with (folder / f"{name}.csv").open("w") as file:
            file.write("sentence,kind\n")
            for row in range(rows):
                kind = ("dogs", "trees")[row % 2]
                file.write(f"{sentence(random, row % 2)},{kind}\n")
    return folder


@pytest.fixture(scope="module")
def task(files):
    own = tasks.custom_task(
        files / "train.csv", test=files / "test.csv", text_columns=["sentence"], label_column="kind"
    )
    return tasks.load(own)


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    assert small.train(small.recipe(corpus, out)) == 0
    return out / "model"


@pytest.fixture(scope="module")
def finished(task, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("finetuned")
    assert finetune.run(task, model, out, SETTINGS, small.QUIET, "linformers finetune") == 0
    return out


def test_results(finished, task):
    results = json.loads((finished / "results.json").read_text())
    assert [seed["seed"] for seed in results["seeds"]] == [0, 1]
    accuracies = [seed["accuracy"] for seed in results["seeds"]]
    assert results["accuracy"] == pytest.approx([np.mean(accuracies), np.std(accuracies, ddof=1)])
    assert min(accuracies) > 0.9  # it is an easy task
    assert results["rows"] == len(task.test) == 40
    assert results["reported_on"] == "test.csv"
    for seed in (0, 1):  # what training alone needs is gone
        assert (finished / f"seed-{seed}" / "best" / "model.safetensors").exists()
        assert not any((finished / f"seed-{seed}").glob("*checkpoint-*"))


def test_best_model_is_saved_with_its_labels(finished, task):
    classify = pipeline("text-classification", model=str(finished / "model"))
    answers = classify(task.test.texts)
    right = [
        answer["label"] == task.label_names[label] for answer, label in zip(answers, task.test.labels, strict=True)
    ]
    seeds = json.loads((finished / "results.json").read_text())["seeds"]
    best = max(seeds, key=lambda seed: seed["validation_accuracy"])
    assert np.mean(right) == pytest.approx(best["accuracy"])
    text = (finished / "model" / "README.md").read_text()
    accuracies = [seed["accuracy"] for seed in seeds]
    assert "| | mean ± standard deviation over seeds |" in text
    assert f"| accuracy | {np.mean(accuracies):.4f} ± {np.std(accuracies, ddof=1):.4f} |" in text


def test_model_is_selected_on_validation_alone(task, model, tmp_path, monkeypatch):
    """The test set is looked at once, after training, whatever it holds."""
    seen = []
    original = finetune.ExactTrainer.evaluate

    def evaluate(self, dataset=None, **kwargs):
        seen.append("test" if dataset is not None else "validation")
        return original(self, dataset, **kwargs) if dataset is not None else original(self, **kwargs)

    monkeypatch.setattr(finetune.ExactTrainer, "evaluate", evaluate)
    settings = finetune.Settings(seeds=1, epochs=2, batch_size=8)
    assert finetune.run(task, model, tmp_path, settings, small.QUIET, "") == 0
    assert [name for name in seen if name == "test"] == ["test"]
    assert seen[-1] == "test"


@pytest.mark.parametrize(("accuracies", "epoch"), [((1, 1, 1), 3), ((0.5, 1, 0.5), 2), ((0.5, 1, 1), 3)])
def test_of_equal_models_the_later_is_selected(task, model, tmp_path, monkeypatch, accuracies, epoch):
    """A few rows may all be right by chance, before anything has been learnt."""
    left = iter((*accuracies, 0))  # the last one is the test's
    monkeypatch.setattr(finetune, "_metrics", lambda prediction: {"accuracy": next(left), "f1": 0})
    settings = finetune.Settings(seeds=1, epochs=3, batch_size=16)
    assert finetune.run(task, model, tmp_path, settings, small.QUIET, "") == 0
    result = json.loads((tmp_path / "seed-0" / "result.json").read_text())
    assert result["step"] == epoch * settings.steps_per_epoch(len(task.train))
    assert result["validation_accuracy"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler hides from users
def test_compiled_fine_tuning_is_the_same(task, model, tmp_path, monkeypatch):
    """One graph for all lengths: embeddings, projections and two layers in training, and again in evaluation.

    Without the last stage, of inductor, which pretraining is tested with.
    """
    compile_part = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, dynamic, options: compile_part(self, dynamic=dynamic, backend="aot_eager"),
    )
    exact = tmp_path / "without dropout"
    shutil.copytree(model, exact)
    fields = json.loads((exact / "config.json").read_text())
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (exact / "config.json").write_text(json.dumps(fields))
    losses = []
    for choice in ("no", "yes"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # As many rows as k would be taken for one number, and both layers compiled once more for other batches.
        settings = finetune.Settings(seeds=1, epochs=1, batch_size=10, precision="float32", compile=choice)
        assert finetune.run(task, exact, tmp_path / choice, settings, small.QUIET, "") == 0
        records = small.read_metrics(tmp_path / choice / "seed-0")
        losses.append([record["loss"] for record in records if "loss" in record])
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("step", [30, 56], ids=["within", "last"])
def test_interrupted_seed_goes_on(finished, task, model, tmp_path, monkeypatch, step):
    original = finetune.ExactTrainer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        assert self.args.max_steps == 57
        self.add_callback(SignalAt(step))

    with monkeypatch.context() as patch:
        patch.setattr(finetune.ExactTrainer, "__init__", init)
        assert finetune.run(task, model, tmp_path, SETTINGS, small.QUIET, "") == 128 + signal.SIGTERM
    assert not (tmp_path / "seed-1").exists()
    assert finetune.run(task, model, tmp_path, SETTINGS, small.QUIET, "") == 0
    for name in ("seed-0/result.json", "seed-1/result.json", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


def test_finished_seeds_are_not_run_again(finished, task, model, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    monkeypatch.setattr(finetune, "run_seed", lambda seed, *args: pytest.fail(f"seed {seed}"))
    assert finetune.run(task, model, out, SETTINGS, small.QUIET, "") == 0
    with pytest.raises(ValueError, match=r"holds a run with learning_rate=0.003, not 0.1; choose another"):
        finetune.run(task, model, out, finetune.Settings(seeds=2, batch_size=8, learning_rate=0.1), small.QUIET, "")


def test_seed_without_its_weights_is_run_again(finished, task, model, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    expected = json.loads((out / "seed-1" / "result.json").read_text())
    shutil.rmtree(out / "seed-1" / "best")
    assert finetune.run(task, model, out, SETTINGS, small.QUIET, "") == 0
    assert (out / "seed-1" / "best" / "model.safetensors").exists()
    assert json.loads((out / "seed-1" / "result.json").read_text()) == expected


def test_one_seed_has_no_deviation(task, model, tmp_path, capsys):
    settings = finetune.Settings(seeds=1, epochs=1, batch_size=8)
    assert finetune.run(task, model, tmp_path, settings, Console(width=200), "") == 0
    accuracy, deviation = json.loads((tmp_path / "results.json").read_text())["accuracy"]
    assert deviation is None
    said, card = capsys.readouterr().out, (tmp_path / "model" / "README.md").read_text()
    assert f"│ accuracy │ {100 * accuracy:.2f} │ {100 * accuracy:.2f} │" in " ".join(said.split())
    assert f"| | one seed |\n|---|---|\n| accuracy | {accuracy:.4f} |\n" in card
    assert "±" not in said + card


def test_evaluate(finished, model, task, corpus):
    results = json.loads((finished / "results.json").read_text())
    best = max(results["seeds"], key=lambda seed: seed["validation_accuracy"])
    assert predict.score(finished / "model", task, small.QUIET)["accuracy"] == pytest.approx(best["accuracy"])
    expected = small.read_metrics(model.parent)[-1]["perplexity"]
    assert predict.perplexity(model, corpus, small.QUIET, rows=8)["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_predict(finished, model, task):
    out = io.StringIO()
    assert predict.predict_lines(finished / "model", [f"{text}\n" for text in task.test.texts], out, batch_size=7) == 40
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["text"] for row in rows] == task.test.texts
    assert {row["label"] for row in rows} == {"dogs", "trees"}
    out = io.StringIO()
    predict.predict_lines(model, ["the quick <mask> fox"], out, best=3)
    (row,) = (json.loads(line) for line in out.getvalue().splitlines())
    assert len(row["guesses"]) == 3
    assert 1 > row["guesses"][0]["score"] >= row["guesses"][1]["score"] > 0
    assert [predict._word(token) for token in (" fox", "fox", "\n", " ")] == ["fox", "fox", "\n", " "]


def test_long_lines_are_cut_and_blank_ones_have_no_label(finished):
    out = io.StringIO()
    assert predict.predict_lines(finished / "model", ["the dog " * 200, " "], out) == 2
    cut, blank = (json.loads(line) for line in out.getvalue().splitlines())
    assert "label" in cut
    assert blank == {"text": " ", "error": "the line is blank"}


def test_what_cannot_be(finished, model, task, corpus):
    def refused(message):
        return pytest.raises(ValueError, match=message)

    classifier, out = finished / "model", io.StringIO()
    with refused("line 1 has 0 times '<mask>', expected once"):
        predict.predict_lines(model, ["no mask"], out)
    with refused("line 2 has 0 tabs, expected one between two texts"):
        predict.predict_lines(classifier, ["a\tb", "a b"], out, pairs=True)
    with refused("pairs has no effect on model=.* which fills in masks"):
        predict.predict_lines(model, [], out, pairs=True)
    with refused("predicts no words: perplexity needs a masked-language model"):
        predict.perplexity(classifier, corpus, small.QUIET)
    with refused("is no classifier: fine-tune it first"):
        predict.score(model, task, small.QUIET)
    with refused("holds no model: expected a folder that pretrain or finetune wrote"):
        predict.predict_lines(corpus, [], out)
    with refused("max_length=99 exceeds the n=32 of the model; resize it with model.resize_length first"):
        finetune.load_tokenizer(model, 99)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "seeds=0 must be a positive integer"),
        ({"learning_rate": 0}, "learning_rate=0 must be a positive number"),
        ({"precision": "fp8"}, "precision='fp8' is not one of 'auto', 'bf16', 'float32'"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        finetune.Settings(**fields)
