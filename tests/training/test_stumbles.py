"""What people stumbled over: other data in a folder in use, signals to whole groups, recipes of odd shapes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from linformers.training import checkpoints, finetune, predict, pretrain, recipe, tasks
from linformers.training.corpus import Corpus

from . import small

ROOT = Path(__file__).parents[2]


def refused(message):
    return pytest.raises(ValueError, match=re.escape(message))


def table(path, rows, labels=("cat", "dog")):
    lines = [f"{labels[i % len(labels)]} {i} sits,{labels[i % len(labels)]}" for i in range(rows)]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    assert small.train(small.recipe(corpus, out, steps=4)) == 0
    return out


@pytest.fixture(scope="module")
def tuned(pretrained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    task = tasks.load(tasks.custom_task(table(folder / "a.csv", 120)))
    assert finetune.run(task, pretrained / "model", folder / "out", SETTINGS, small.QUIET, "") == 0
    return folder


SETTINGS = finetune.Settings(seeds=1, epochs=2, batch_size=8, max_length=16)


def test_signal_to_a_whole_group_saves(corpus, tmp_path):
    """As `timeout` and schedulers send it: the processes that read ahead get it too."""
    path = tmp_path / "recipe.yaml"
    own = small.recipe(corpus, tmp_path / "run", steps=5000, workers=2, log_every=5, save_every=10_000)
    path.write_text(yaml.safe_dump(own.to_dict()))
    process = subprocess.Popen(
        [sys.executable, "-m", "linformers", "pretrain", str(path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while process.poll() is None and len(small.read_metrics(tmp_path / "run")) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors[-2000:]
    assert checkpoints.newest_intact(tmp_path / "run", print) is not None


def test_folder_in_use(corpus, tmp_path):
    with checkpoints.locked(tmp_path), refused("is in use by another process"):
        small.train(small.recipe(corpus, tmp_path))
    assert small.train(small.recipe(corpus, tmp_path, steps=2)) == 0


def test_other_corpus_of_the_same_tokenizer(corpus, tmp_path):
    from linformers.training.prepare import prepare

    text = tmp_path / "other.jsonl"
    lines = (corpus.parent / "text.jsonl").read_text().splitlines()[:150]
    text.write_text("\n".join(lines) + "\n")
    options = {"tokenizer": str(corpus / "tokenizer"), "validation_share": 0.1, "workers": 1}
    prepare([str(text)], tmp_path / "other", **options, console=small.QUIET)
    assert small.train(small.recipe(corpus, tmp_path / "run", steps=4)) == 0
    with refused("is another corpus than that of the run in out="):
        small.train(small.recipe(tmp_path / "other", tmp_path / "run", steps=4))


def test_other_data_in_the_folder_of_a_task(tuned, pretrained):
    other = tasks.load(tasks.custom_task(table(tuned / "a.csv", 140)))
    with refused("holds a run with other data; choose another folder"):
        finetune.run(other, pretrained / "model", tuned / "out", SETTINGS, small.QUIET, "")
    table(tuned / "a.csv", 120)


def test_folder_of_another_command(tuned, pretrained, corpus, tmp_path):
    task = tasks.load(tasks.custom_task(table(tuned / "a.csv", 120)))
    with refused("holds a run of linformers pretrain; choose another folder"):
        finetune.run(task, pretrained / "model", pretrained, SETTINGS, small.QUIET, "")
    with refused("holds a run of linformers finetune; choose another folder"):
        small.train(small.recipe(corpus, tuned / "out"))
    shutil.copytree(pretrained / "model", tmp_path / "model")
    with refused("holds a model that no run has left there; choose another folder"):
        finetune.run(task, pretrained / "model", tmp_path, SETTINGS, small.QUIET, "")


def test_other_weights_under_the_name_of_a_model(tuned, pretrained, corpus, tmp_path):
    """What was fine-tuned from the weights that were there before is not taken for a result of those."""
    task = tasks.load(tasks.custom_task(table(tuned / "a.csv", 120)))
    model, out = tmp_path / "pretrained" / "model", tmp_path / "out"
    shutil.copytree(pretrained / "model", model)
    assert finetune.run(task, model, out, SETTINGS, small.QUIET, "") == 0
    shutil.rmtree(model.parent)
    assert small.train(small.recipe(corpus, model.parent, steps=4, seed=1)) == 0
    with refused("holds a run with other weights; choose another folder"):
        finetune.run(task, model, out, SETTINGS, small.QUIET, "")


def test_fewer_seeds_than_there_are(tuned, pretrained, tmp_path):
    task = tasks.load(tasks.custom_task(table(tuned / "a.csv", 120)))
    shutil.copytree(tuned / "out", tmp_path / "out")
    shutil.copytree(tmp_path / "out" / "seed-0", tmp_path / "out" / "seed-1")
    with refused("holds 2 seeds, more than seeds=1; choose another"):
        finetune.run(task, pretrained / "model", tmp_path / "out", SETTINGS, small.QUIET, "")


def test_failed_attempt_does_not_claim_a_folder(pretrained, tmp_path):
    task = tasks.load(tasks.custom_task(table(tmp_path / "a.csv", 60)))
    with refused("max_length=2 leaves no room"):
        finetune.run(task, pretrained / "model", tmp_path / "out", finetune.Settings(max_length=2), small.QUIET, "")
    assert finetune.run(task, pretrained / "model", tmp_path / "out", SETTINGS, small.QUIET, "") == 0


def test_damaged_best_weights_are_not_saved_as_the_model(tuned, pretrained, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(tuned / "out", out)
    weights = out / "seed-0" / "best" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    task = tasks.load(tasks.custom_task(table(tuned / "a.csv", 120)))
    with refused("the best weights are damaged: "):
        finetune.run(task, pretrained / "model", out, SETTINGS, small.QUIET, "")


def test_length_goes_with_the_model(tuned, pretrained):
    assert finetune.load_tokenizer(tuned / "out" / "model").model_max_length == 16
    assert finetune.load_tokenizer(pretrained / "model").model_max_length == 32


def test_tuned_model_is_tuned_again_with_other_labels(tuned, tmp_path):
    task = tasks.load(tasks.custom_task(table(tmp_path / "b.csv", 90, labels=("x", "y", "z"))))
    model = tuned / "out" / "model"
    assert finetune.run(task, model, tmp_path / "out", SETTINGS, small.QUIET, "") == 0
    assert finetune.LinformerConfig.from_pretrained(tmp_path / "out" / "model").num_labels == 3


def test_whole_file_is_scored(tuned):
    rows = tasks.labelled_file(table(tuned / "c.csv", 50), ["text"], "label", ["cat", "dog"])
    result = predict.score(tuned / "out" / "model", rows, small.QUIET)
    assert (result["rows"], result["f1_of"]) == (50, "'dog'")
    assert result["note"].startswith("all rows of the file")
    with pytest.raises(ValueError, match="bird"):
        tasks.labelled_file(table(tuned / "d.csv", 9, labels=("bird",)), ["text"], "label", ["cat", "dog"])


@pytest.mark.parametrize(("text", "value"), [("yes", "yes"), ("no", "no"), ("auto", "auto")])
def test_yes_and_no(tmp_path, text, value):
    (tmp_path / "r.yaml").write_text("data: d\nout: o\nsteps: 1\n")
    assert recipe.read(tmp_path / "r.yaml", [f"compile={text}"]).compile == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: r.yaml\n", "has base='r.yaml', expected the name of another recipe"),
        ("base: 5\n", "has base=5, expected the name of another recipe"),
        ("1: 2\n", "'1' is not a key of a recipe"),
        ("data: d\nout: o\nsteps: 1\nmodel: 5\n", "model=5 must be fields of LinformerConfig"),
    ],
)
def test_odd_recipes(tmp_path, content, message):
    (tmp_path / "r.yaml").write_text(content)
    with refused(message):
        recipe.read(tmp_path / "r.yaml")


def test_a_model_of_no_fields(tmp_path):
    (tmp_path / "base.yaml").write_text("data: d\nout: o\nsteps: 1\nmodel:\n")
    (tmp_path / "r.yaml").write_text("base: base.yaml\nmodel:\n  hidden_size: 24\n")
    assert recipe.read(tmp_path / "r.yaml").model == {"hidden_size": 24}
    with refused("model=3 must be fields of LinformerConfig"):
        recipe.read(tmp_path / "r.yaml", ["model=3", "model.hidden_size=16"])


def test_damaged_notes(pretrained, corpus, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(pretrained, out)
    for content in ("", "{}", "[]"):
        (out / "run.json").write_text(content)
        with refused("run.json is damaged: it does not say what this folder was used for"):
            small.train(small.recipe(corpus, out, steps=4))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "manifest.json").write_text("[]")
    assert checkpoints.damage(tmp_path / "checkpoint-3").endswith("manifest.json is no list of files")


def test_numbers_of_predict_and_evaluate(pretrained, corpus):
    with refused("best=100000 exceeds the 300 words of the vocabulary"):
        predict.predict_lines(pretrained / "model", [], io.StringIO(), best=100_000)
    with refused("rows=0 must be a positive integer"):
        predict.perplexity(pretrained / "model", corpus, small.QUIET, rows=0)
    for share in (0, 2):
        with refused(f"mask_share={share} must be above 0 and below 1"):
            predict.perplexity(pretrained / "model", corpus, small.QUIET, mask_share=share)
    shares = [predict.perplexity(pretrained / "model", corpus, small.QUIET, mask_share=s) for s in (0.15, 0.5)]
    assert shares[1]["masked_tokens"] > 2 * shares[0]["masked_tokens"]


def test_a_wrong_line_costs_no_answers(pretrained):
    far = "the dog " * 50 + "<mask>"
    lines = ["a <mask>", "", "no mask", "the <mask>", far, "", "a dog <mask>", "<mask> <mask>"]
    unmasked, beyond, twice = (
        "has 0 times '<mask>', expected once",
        "has its '<mask>' beyond the 32 tokens that are read; shorten it",
        "has 2 times '<mask>', expected once",
    )
    expected = [None, "the line is blank", unmasked, None, beyond, "the line is blank", None, twice]
    for size in (1, 3, 32):
        out = io.StringIO()
        with refused(f"line 3 {unmasked}; 2 more of 8 lines have an error, too"):
            predict.predict_lines(pretrained / "model", lines, out, batch_size=size)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [row["text"] for row in rows] == lines
        assert [row.get("error") for row in rows] == expected
        assert all(("guesses" in row) != ("error" in row) for row in rows)
    with refused(f"line 1 {beyond}"):
        predict.predict_lines(pretrained / "model", [far, "a <mask>"], io.StringIO())
    assert predict.predict_lines(pretrained / "model", ["a <mask>\n", " \n"], io.StringIO()) == 2


def test_weights_that_were_cut_short(pretrained, tmp_path):
    own = Path(shutil.copytree(pretrained / "model", tmp_path / "model"))
    weights = own / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with refused("model.safetensors is damaged or cut short: "):
        predict.predict_lines(own, ["a <mask>"], sys.stdout)


@pytest.mark.parametrize(("epochs", "few"), [(1, True), (25, False)])
@pytest.mark.parametrize(("rate", "low"), [(5e-5, True), (1e-3, False)])
def test_few_steps_are_told(epochs, few, rate, low, pretrained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "run_seed", lambda *rest: 1)  # nothing is trained
    task = tasks.load(tasks.custom_task(table(tmp_path / "a.csv", 40)))
    settings = finetune.Settings(epochs=epochs, batch_size=len(task.train) // 4, learning_rate=rate)
    assert finetune.run(task, pretrained / "model", tmp_path / "out", settings, Console(width=200), "") == 1
    message = "4 steps are few to learn from: there are more with more --epochs or a smaller --batch-size"
    said = capsys.readouterr().out
    assert (message in said) == few
    assert ("a small model learns more with --learning-rate 0.001" in said) == (few and low)


def test_a_rate_that_never_reaches_its_peak_is_told(corpus, tmp_path, capsys):
    recipe = small.recipe(corpus, tmp_path, steps=2, warmup_steps=4)
    assert pretrain.run(recipe, Console(width=200), "test") == 0
    assert "warmup_steps=4 is not below steps=2: the rate never reaches its peak" in capsys.readouterr().out


@pytest.mark.parametrize("more", [0, 1])
def test_a_batch_that_is_more_than_the_text_is_told(more, corpus, tmp_path, capsys):
    rows = Corpus.open(corpus).manifest["splits"]["train"]["tokens"] // 32
    recipe = small.recipe(corpus, tmp_path, steps=1, warmup_steps=0, batch_size=rows + more)
    assert pretrain.run(recipe, Console(width=200), "test") == 0
    told = f"batch_size={rows + 1} is more than the {rows} rows of n=32 tokens that data='{corpus}' has"
    assert (told in " ".join(capsys.readouterr().out.split())) == bool(more)
