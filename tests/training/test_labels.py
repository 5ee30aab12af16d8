"""Labels of each problem: told apart, read, learned, saved, predicted, scored."""

import dataclasses
import json
import re
import signal
import statistics

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoModelForSequenceClassification, pipeline

from linformers import LinformerConfig
from linformers.training import checkpoints, data, finetune, labels, predict, tasks

from ..modes import random_model, refused
from . import small
from .small import write_table as write
from .test_predict import answers, evaluate
from .test_trainer import interrupted


def table(path, values):
    return write(path, [{"text": f"Text {i}", "label": value} for i, value in enumerate(values)])


def load(path, **options):
    return tasks.load(str(path), **options)


def cycle(values, count=300):
    return [values[i % len(values)] for i in range(count)]


# Telling problems apart.

TENTHS = [i / 10 for i in range(5, 305)]


@pytest.mark.parametrize(
    ("values", "problem", "hint"),
    [
        ((1, 2, 3), "single", "for numbers, pass --problem regression"),
        ((0, 1), "single", ""),
        (("a", "b", "c"), "single", ""),
        (("a", "b", "a;b"), "single", "to split 'a;b' and others at ';', pass --problem multi"),
        ((1.0, 2.0, 3.0), "single", "for numbers, pass --problem regression"),
        (("0.5", "1.5", "n/a"), "single", ""),
        ((1.0, 2.5), "regression", "some have decimals; for classes, pass --problem single"),
        (("1", "2.5"), "regression", "some have decimals; for classes, pass --problem single"),
        (TENTHS, "regression", "some have decimals; for classes, pass --problem single"),
        ((["a"], ["b", "a"], []), "multi", ""),
        (([0], [1, 0]), "multi", ""),
    ],
    ids=str,
)
def test_what_fits_the_labels(values, problem, hint, tmp_path):
    for suffix in (".jsonl", ".parquet", ".csv")[: 2 if problem == "multi" else 3]:  # CSV has no lists
        found = load(table(tmp_path / f"a{suffix}", cycle(values)))
        assert (found.problem, found.hint) == (problem, hint)
        assert found.summary().endswith(f" ({hint})") == bool(hint)
        kept = load(table(tmp_path / f"b{suffix}", cycle(values)), problem=problem)
        assert (kept.problem, kept.hint, kept.train) == (problem, "", found.train)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (range(300), "has 300 different integers as labels, such as '0', '1', '2': pass --problem regression to"),
        (cycle(range(21)), "has 21 different integers as labels"),
        ([f"own {i}" for i in range(300)], "has 300 different labels in 300 rows, such as 'own 0', 'own 1', 'own 10'"),
        (cycle([f"own {i}" for i in range(61)]), "has 61 different labels in 300 rows, such as 'own 0', 'own 1', "),
        ([f"{i};{i + 1}" for i in range(300)], "is it the label?; to split labels at ';', pass --problem multi"),
        ([[f"own {i}"] for i in range(300)], "has 300 different labels in 300 rows"),
    ],
)
def test_values_that_are_no_classes(values, message, tmp_path):
    with refused(message):
        load(table(tmp_path / "a.jsonl", values))
    problem = "multi" if isinstance(values[0], list) else "single"
    assert load(table(tmp_path / "a.jsonl", values), problem=problem).problem == problem


def test_as_many_classes_as_their_rows_allow(tmp_path):
    assert len(load(table(tmp_path / "a.csv", cycle(range(20)))).label_names) == 20
    assert len(load(table(tmp_path / "b.csv", cycle([f"own {i}" for i in range(60)]))).label_names) == 60


@pytest.mark.parametrize(
    ("values", "problem", "message"),
    [
        (
            ("a;b", ""),
            None,
            "has '' in row 2, column 'label', which is not a label; to split labels at ';', pass --prob",
        ),
        ((1, "n/a"), "regression", "has 'n/a' in row 2, column 'label', which is not a number"),
        ((1, None), "regression", "has None in row 2, column 'label', which is not a number"),
        ((0.5, None), None, "has None in row 2, column 'label', which is not a number"),
        ((0.5, "nan"), "regression", "has 'nan' in row 2"),
        ((1, 10**400), "regression", "000 in row 2"),
        ((0.5, True), "regression", "has True in row 2"),
        ((1.5, 1.5), None, "has the single label 1.5; two or more are needed"),
        ((["a"], "b", None), None, "has None in row 3, column 'label', which is not a list of labels"),
        ((["a"], [" "]), None, "has [' '] in row 2"),
        ((1, 2), "multi", "has 1 in row 1, column 'label', which is not a list of labels"),
        (("a", "b"), "multi", "has no row with several labels: --problem multi expects lists, or labels separated by "),
        (([], []), None, "has the single label []"),
        ((["a"], ["b"]), "single", "has ['a'] in row 1, column 'label', which is not a label"),
        (("a", "b"), "both", "problem='both' is not one of 'single', 'multi', 'regression'"),
    ],
)
def test_wrong_labels(values, problem, message, tmp_path):
    with refused(message):
        load(table(tmp_path / "a.jsonl", cycle(values)), problem=problem)


def test_labels_of_other_files(tmp_path):
    train = table(tmp_path / "train.jsonl", cycle((["a"], ["b", "a"])))
    with refused("test.jsonl has the label 'c', which is not one of 'a', 'b'"):
        load(train, test=table(tmp_path / "test.jsonl", [["a", "c"]]))
    train = table(tmp_path / "train.csv", cycle((0.5, 1.5)))
    with refused("test.csv has 'high' in row 1, column 'label', which is not a number"):
        load(train, test=table(tmp_path / "test.csv", ["high"]))
    with refused("problem has no effect on task='sst2'"):
        tasks.load("sst2", tmp_path, problem="single")


def test_lists_are_the_same_in_every_format(tmp_path):
    """Lists in JSONL and Parquet, semicolons in CSV; an empty cell is an empty list."""
    lists = cycle((["b"], ["c", "a", "c"], []))
    found = [load(table(tmp_path / f"a{suffix}", lists)) for suffix in (".jsonl", ".parquet")]
    joined = [" ; ".join(own) for own in lists]
    found.append(load(table(tmp_path / "a.csv", joined), problem="multi"))
    assert found[0].label_names == ["a", "b", "c"]
    assert {example.label for example in found[0].train} == {(1,), (0, 2), ()}
    assert found[0].train == found[1].train == found[2].train
    assert found[0].targets([(1,), (0, 2), ()]).tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert "3 labels, 1.0 a text on average" in found[0].summary()
    numbers = load(table(tmp_path / "b.jsonl", cycle(([10, 9], [9, 1]))))
    assert numbers.label_names == ["1", "9", "10"]


# Scores.


@pytest.mark.parametrize(
    ("predictions", "expected", "num_labels", "accuracy", "f1"),
    [
        # Class 1: 2 hits, 3 predicted, 4 true: 2·2/(3 + 4).
        ([1, 1, 1, 0, 0], [1, 1, 0, 1, 1], 2, 0.4, 4 / 7),
        ([0, 0], [0, 0], 2, 1.0, 0.0),
        # Classes 0, 1 and 2: 2/2, 2·1/(2 + 1), 0; class 3 does not occur.
        ([0, 1, 1], [0, 1, 2], 4, 2 / 3, (1 + 2 / 3 + 0) / 3),
        # A class that is predicted but never true counts as 0.
        ([0, 3], [0, 0], 4, 0.5, (2 / 3 + 0) / 2),
        ([1, 1], [1, 1], 3, 1.0, 1.0),
    ],
)
def test_scores_of_classes(predictions, expected, num_labels, accuracy, f1):
    scores = labels.scores_of("single", np.eye(num_labels)[predictions], np.array(expected))
    assert scores == {"accuracy": pytest.approx(accuracy, abs=1e-15), "f1": pytest.approx(f1, abs=1e-15)}


def test_scores_of_several_labels():
    logits = np.array([[2, -1, -1], [2, 1, -1], [-1, -1, -1], [0, -1, 3]])
    true = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1]])
    # 3 hits, 4 predicted, 4 true; the first and third row are right. A logit of 0 is not above 0.5.
    assert labels.scores_of("multi", logits, true) == {"micro_f1": 2 * 3 / (4 + 4), "exact_match": 0.5}
    assert labels.scores_of("multi", logits - 9, 0 * true) == {"micro_f1": 1, "exact_match": 1}


def test_scores_of_numbers():
    values, true = np.array([[1.0], [2.0], [6.0]]), np.array([1.0, 3.0, 5.0])
    assert labels.scores_of("regression", values, true) == pytest.approx({"mae": 2 / 3, "r2": 1 - 2 / 8})
    for mean, r2 in ((1.0, 1), (2.0, 0)):
        assert labels.scores_of("regression", np.ones((2, 1)), np.full(2, mean))["r2"] == r2


@pytest.mark.parametrize("problem", labels.PROBLEMS)
def test_nan_logits_are_refused(problem):
    with refused("1 of 2 rows have NaN"):
        labels.scores_of(problem, np.array([[np.nan], [1.0]]), np.array([0, 1]))


# Training.

SETTINGS = finetune.Settings(seeds=2, epochs=4, batch_size=8, learning_rate=1e-2)
SCALE, MEAN = 1000.0, 50000.5


LABELS = (["dogs"], ["dogs", "trees"], ["trees"])


def rows(problem, count, seed):
    """Texts with words about dogs, about trees, or both, where the label may be the number of the latter."""
    random, found = np.random.default_rng(seed), []
    for i in range(count):
        trees = int(random.integers(9)) if problem == "regression" else 4 * (i % 3)
        words = [*random.choice(small.WORDS[2:6], 8 - trees), *random.choice(small.WORDS[8:12], trees)]
        label = MEAN + SCALE * trees if problem == "regression" else LABELS[i % 3]
        found.append({"text": " ".join(random.permutation(words)), "label": label})
    return found


@pytest.fixture(scope="module", params=["multi", "regression"])
def problem(request):
    return request.param


@pytest.fixture(scope="module")
def files(problem, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for seed, (name, count) in enumerate({"train": 480, "validation": 60, "test": 60}.items()):
        write(folder / f"{name}.jsonl", rows(problem, count, seed))
    return folder


@pytest.fixture(scope="module")
def task(files):
    return load(files / "train.jsonl", validation=files / "validation.jsonl", test=files / "test.jsonl")


@pytest.fixture(scope="module")
def trained(task, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    console = Console(file=(out / "output.txt").open("w"), width=200)
    assert finetune.run(task, model, out, SETTINGS, console, "linformers finetune") == 0
    console.file.close()
    return out


def test_training_reaches_far_better_scores_than_chance(problem, trained, task, files):
    results = json.loads((trained / "results.json").read_text())
    assert (results["problem"], len(results["seeds"])) == (problem, 2)
    found = evaluate(trained / "model", task=str(files / "test.jsonl"))
    if problem == "regression":
        test = [row["label"] for row in rows(problem, 60, 2)]
        by_chance = np.abs(np.array(test) - statistics.median(test)).mean()
        assert (found["mae"] < by_chance / 2, found["r2"] > 0.7) == (True, True)
    else:  # all labels everywhere: 0.8 and 1/3
        assert (found["micro_f1"] > 0.9, found["exact_match"] > 0.75) == (True, True)
    first, second = labels.PROBLEMS[problem].scores
    choose = min if problem == "regression" else max
    best = choose(results["seeds"], key=lambda seed: seed[f"validation_{first}"])
    assert {name: found[name] for name in (first, second)} == {
        name: pytest.approx(best[name], rel=1e-4) for name in (first, second)
    }
    assert (found["rows"], "f1_of" in found) == (60, False)
    shown, card = (trained / "output.txt").read_text(), (trained / "model" / "README.md").read_text()
    assert task.summary() in shown
    assert re.search(rf"step \d+  {first.replace('_', ' ')} [\d.]+", shown)
    for name in (first, second):
        title = labels.SCORES[name]
        mean = float(re.search(rf"{title}(?: in %)?: ([\d.]+) ± [\d.]+ \(seeds: [\d.]+, [\d.]+\)", shown)[1])
        percent = 1 if problem == "regression" else 100
        assert mean == pytest.approx(percent * results[name][0], rel=1e-3)
        assert f"- {title}: " in card


def test_answers(problem, trained, files, tmp_path):
    """As in a pipeline; JSONL, CSV and Parquet hold the same."""
    texts = [row["text"] for row in rows(problem, 60, 2)]
    found = answers(trained / "model", texts)
    config = LinformerConfig.from_pretrained(trained / "model")
    assert config.problem_type == labels.PROBLEMS[problem].problem_type
    expected = pipeline("text-classification", model=str(trained / "model"), top_k=None)(texts)
    for row, scores in zip(found, expected, strict=True):
        if problem == "regression":
            assert scores == [{"label": "label", "score": pytest.approx(row["value"], rel=1e-5)}]
        else:
            chosen = [{**own, "score": pytest.approx(own["score"], abs=1e-5)} for own in scores if own["score"] > 0.5]
            assert row["labels"] == chosen
    name = "value" if problem == "regression" else "labels"
    for suffix in (".jsonl", ".csv", ".parquet"):
        out = tmp_path / f"out{suffix}"
        predict.predict(trained / "model", files / "test.jsonl", out, console=small.QUIET)
        for row, own in zip(data.table_rows(out, ["text"]), found, strict=True):
            value = row[f"predicted_{name}"]
            value = json.loads(value) if suffix == ".csv" else value
            parts = (
                zip(value, own[name], strict=True) if name == "labels" else [({"score": value}, {"score": own[name]})]
            )
            for part, other in parts:
                assert part == {**other, "score": pytest.approx(other["score"], rel=1e-5)}
    blank = write(tmp_path / "blank.csv", [{"text": " "}, {"text": " "}])
    predict.predict(trained / "model", blank, tmp_path / "blank.jsonl.csv", console=small.QUIET)
    assert (tmp_path / "blank.jsonl.csv").read_text().splitlines()[0] == f"text,{name},error"


def test_interrupted_seed_resumes(problem, trained, task, model, tmp_path):
    """Its checkpoints answer in the units of the labels."""
    settings = dataclasses.replace(SETTINGS, seeds=1)
    with interrupted(200):
        assert finetune.run(task, model, tmp_path, settings, small.QUIET, "") == 128 + signal.SIGTERM
    newest = checkpoints.list_checkpoints(tmp_path / "seed-0")[0]
    found = answers(newest, [row["text"] for row in rows(problem, 60, 2)])
    if problem == "regression":
        values = [row["value"] for row in found]
        true = [row["label"] for row in rows(problem, 60, 2)]
        assert np.corrcoef(values, true)[0, 1] > 0.6
        assert np.mean(values) == pytest.approx(np.mean(true), abs=SCALE)
    else:
        assert {label["label"] for row in found for label in row["labels"]} == {"dogs", "trees"}
    assert finetune.run(task, model, tmp_path, settings, small.QUIET, "") == 0
    for name in ("result.json", "model.safetensors"):
        own, expected = (out / "seed-0" / "best" / name for out in (tmp_path, trained))
        assert own.read_bytes() == expected.read_bytes()


def test_the_size_of_numbers_does_not_matter(model, tmp_path):
    """Other units, at the same learning rate: the same model, except for the last layer."""
    found = []
    for name, mean, scale in (("a", 0.0, 1.0), ("b", -(2.0**20), 2.0**10), ("c", 0.0, 2.0**-20)):
        own = [{**row, "label": mean + scale * (row["label"] - MEAN) / SCALE} for row in rows("regression", 240, 0)]
        task = load(write(tmp_path / f"{name}.jsonl", own), problem="regression")
        settings = finetune.Settings(seeds=1, epochs=2, batch_size=8, learning_rate=3e-3)
        assert finetune.run(task, model, tmp_path / name, settings, small.QUIET, "") == 0
        results = json.loads((tmp_path / name / "results.json").read_text())
        found.append((results["mae"][0] / scale, results["r2"][0]))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[2] == pytest.approx(found[0], rel=1e-3)


def test_another_problem_in_the_same_folder(trained, task, model, problem, files, tmp_path):
    with refused("hash.data was"):
        other = load(table(tmp_path / "a.csv", cycle(("a", "b"))))
        finetune.run(other, model, trained, SETTINGS, small.QUIET, "")


def test_the_next_task_may_have_another_problem(trained, model, tmp_path):
    other = load(table(tmp_path / "a.csv", cycle(("a", "b"))))
    settings = finetune.Settings(seeds=1, epochs=1)
    assert finetune.run(other, trained / "model", tmp_path / "out", settings, small.QUIET, "") == 0
    assert LinformerConfig.from_pretrained(tmp_path / "out/model").problem_type == "single_label_classification"


def test_wrong_tables_of_evaluate(trained, problem, tmp_path):
    for values, message in {
        "regression": [("high", "which is not a number")],
        "multi": [(["cats"], "has the label 'cats', which is not one of 'dogs', 'trees'"), (3, "not a list of labels")],
    }[problem]:
        with refused(message):
            evaluate(trained / "model", task=str(table(tmp_path / "a.jsonl", [values])))
    values = {"regression": ["1", "2"], "multi": ["dogs;trees", ""]}[problem]  # of CSV, as in training
    assert evaluate(trained / "model", task=str(table(tmp_path / "a.csv", values)))["rows"] == 2


def test_several_numbers_for_a_text_are_refused(model, tmp_path):
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, problem_type="regression")
    with refused("gives 2 numbers for each text, expected one"):
        labels.problem_of(network.config, "mine")
    assert labels.problem_of(random_model().config, "mine") == "single"
