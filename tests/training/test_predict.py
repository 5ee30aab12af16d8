"""Prediction and evaluation with saved models, and the whole path from text to predictions."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, pipeline

from linformers import LinformerForMaskedLM, pretrained
from linformers.training import checkpoints, predict

from ..modes import random_model, refused
from . import small


def answers(model, lines, **options):
    out = io.StringIO()
    predict.predict_lines(model, lines, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def evaluate(model, **options):
    return predict.evaluate(model, console=small.QUIET, **options)


def test_labels(tuned, task):
    texts = [*(example.text for example in task.test), "the dog " * 200]  # the last one is truncated
    *rows, blank = answers(tuned / "model", [f"{text}\n" for text in (*texts, " ")], batch_size=7)
    assert [row["text"] for row in rows] == texts
    assert {row["label"] for row in rows} == {"dogs", "trees"}
    assert blank == {"text": " ", "error": "the line is blank"}


def test_words(model):
    """The same as a pipeline's, without the space before a word: every token, in batches, also of truncated text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["the quick <mask> fox", "<mask> dog", "a <mask>" + " dog" * 200]
    rows = answers(model, texts, best=len(tokenizer), batch_size=2)
    (row,) = answers(model.parent / "checkpoint-24", texts[:1], best=3)
    for guess, expected in zip(row["guesses"], rows[0]["guesses"], strict=False):
        assert guess == {"word": expected["word"], "score": pytest.approx(expected["score"])}
    truncation = {"truncation": True, "max_length": tokenizer.model_max_length}
    fill = pipeline("fill-mask", model=str(model), top_k=len(tokenizer), tokenizer_kwargs=truncation)
    for row, expected in zip(rows, fill(texts), strict=True):
        guesses = {guess["word"]: guess["score"] for guess in row["guesses"]}
        assert {" ", "\n"} < guesses.keys()
        assert guesses == pytest.approx({e["token_str"].strip() or e["token_str"]: e["score"] for e in expected})


def test_wrong_lines_do_not_stop_the_others(model):
    far = "the dog " * 50 + "<mask>"
    lines = ["a <mask>", "", "no mask", "the <mask>", far, "", "a dog <mask>", "<mask> <mask>"]
    wrong = [None, "blank", "contains no <mask>", None, "after the first 32 tokens", "blank", None, "contains 2 <mask>"]
    for size in (1, 3, 32):
        out = io.StringIO()
        with refused("line 3 contains no <mask>, expected exactly one; 2 more with errors"):
            predict.predict_lines(model, lines, out, batch_size=size)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [row["text"] for row in rows] == lines
        for row, expected in zip(rows, wrong, strict=True):
            assert ("guesses" in row) == (expected is None)
            assert expected is None or expected in row["error"]
    assert len(answers(model, ["a <mask>\n", " \n"])) == 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_and_standard_input(encoding, model, tmp_path, monkeypatch):
    out, again = io.StringIO(), io.StringIO()
    (tmp_path / "lines.txt").write_text("a <mask>\nthe <mask>\n", encoding=encoding)
    predict.predict(model, tmp_path / "lines.txt", out)
    stdin = io.TextIOWrapper(io.BytesIO(b"a \xe9 <mask>\nthe <mask>\n"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    predict.predict(model, None, again)
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["a <mask>", "the <mask>"]
    assert json.loads(again.getvalue().splitlines()[0])["text"] == "a \ufffd <mask>"
    with refused(f"{tmp_path} cannot be read"):
        predict.predict(model, tmp_path, out)


def test_wrong_arguments_of_predict(tuned, model, tmp_path):
    with refused("line 2 has 0 tabs, expected one between two texts"):
        answers(tuned / "model", ["a\tb", "a b"], pairs=True)
    with refused("pairs has no effect on model="):
        answers(model, [], pairs=True)
    with refused("best=100000 exceeds the 300 tokens"):
        answers(model, [], best=100_000)
    unfinished = Path(shutil.copytree(model.parent, tmp_path / "run"))
    shutil.rmtree(unfinished / "model")
    os.utime(unfinished / "checkpoint-20", (0, 0))
    with refused("checkpoint-24'"):
        answers(unfinished, [])


def test_the_code_of_a_tokenizer_never_runs(model, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(model, tmp_path / "copy"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}})
    )
    (folder / "manifest.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # transformers would ask here
    with refused("the tokenizer does not load"):
        predict.predict(folder, None, io.StringIO())
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("kind", ["model", "checkpoint-24"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_models_are_named(kind, name, model, corpus, tmp_path):
    folder = Path(shutil.copytree(model.parent / kind, tmp_path / "copy"))
    for spoil in (small.flip, lambda path: os.truncate(path, path.stat().st_size - 100)):
        spoil(folder / name)
        for use in (lambda: answers(folder, ["a <mask>"]), lambda: evaluate(folder, data=corpus)):
            with refused(f"{folder / name} "):
                use()


def test_weights_that_the_config_asks_for_are_not_made_up(model, corpus, tmp_path):
    """A config with more layers, or wider ones, whose hash was accepted."""
    for fields, message in [
        ({"num_hidden_layers": 3}, "lacks 16 of the weights of its config, such as layers.2.attention.key.bias"),
        ({"hidden_size": 32}, "does not fit its config: linformer.embeddings.norm.bias is (16,), expected (32,)"),
        (
            {"intermediate_size": 40},
            "config: linformer.layers.0.feed_forward.intermediate.bias is (32,)",
        ),
        ({"vocab_size": 100}, "has vocab_size=100, but the ids of its tokenizer reach 299"),
    ]:
        folder = Path(shutil.copytree(model, tmp_path / str(fields)))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        checkpoints.verify(folder, True, small.QUIET)
        with refused(message):
            answers(folder, ["a <mask>"])
        with refused("embeddings" if "vocab_size" in fields else message):
            evaluate(folder, data=corpus)


def test_nan_is_no_answer(model, tuned, tmp_path):
    for name, folder in (("masked", model), ("classifier", tuned / "model")):
        spoiled = Path(shutil.copytree(folder, tmp_path / name))
        weights = load_file(folder / "model.safetensors")
        weights["linformer.embeddings.norm.weight"].fill_(torch.nan)
        save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
        checkpoints.verify(spoiled, True, small.QUIET)
        with refused(f"model={str(spoiled)!r} computes NaN"):
            answers(spoiled, ["a <mask>"])


def test_evaluate(tuned, model, corpus, files):
    results = json.loads((tuned / "results.json").read_text())
    best = max(results["seeds"], key=lambda seed: seed["validation_accuracy"])
    found = evaluate(tuned / "model", task=str(files / "test.csv"), text="sentence", label="kind")
    assert found["accuracy"] == pytest.approx(best["accuracy"])
    assert (found["f1"], found["rows"], found["f1_of"]) == (pytest.approx(best["f1"]), 40, "'trees'")
    expected = small.read_metrics(model.parent)[-1]["perplexity"]
    assert evaluate(model, data=corpus, rows=8)["perplexity"] == pytest.approx(expected, rel=1e-4)
    few, many = (evaluate(model, data=corpus, mask_share=share)["masked_tokens"] for share in (0.15, 0.5))
    assert many > 2 * few


@pytest.mark.parametrize("bias", [None, 0.0])
def test_evaluate_without_a_branch(bias, corpus, tmp_path):
    """The same as a model that never had it; with rotary positions, one without a window rotates before E."""
    fields = {"local_window": 2, "initial_far_bias": bias, "initializer_range": 0.2}
    fields["position_embedding_type"] = "absolute"
    small.train(small.recipe(corpus, tmp_path, steps=8, model=fields))
    ids = torch.randint(5, 300, (2, 32))
    whole = predict.load_model(tmp_path / "model", predict.FILL_MASK)(ids).logits
    for branch, fields in {"projected": {"projection": "none"}, "window": {"local_window": 0}}.items():
        found = predict.without_branch(predict.load_model(tmp_path / "model", predict.FILL_MASK), branch)(ids).logits
        other = LinformerForMaskedLM.from_pretrained(tmp_path / "model", **fields, initial_far_bias=None).eval()
        torch.testing.assert_close(found, other(ids).logits, rtol=0, atol=1e-5)
        assert (found - whole).abs().max() > 1e-3
    assert evaluate(tmp_path / "model", data=corpus, without="window")["masked_tokens"] > 0
    with refused("without='window' needs a model whose layers all have projected keys and a local window"):
        predict.without_branch(random_model(), "window")


def test_wrong_arguments_of_evaluate(tuned, model, corpus, files, tmp_path):
    classifier, file = tuned / "model", str(files / "test.csv")
    for own, options, message in [
        (model, {"data": corpus, "label": "stars"}, "label='stars' has no effect on perplexity"),
        (model, {"data": corpus, "without": "keys"}, "without='keys'"),
        (classifier, {"task": file, "rows": 5}, f"rows=5 has no effect on task={file!r}"),
        (model, {}, "data is missing"),
        (classifier, {"data": corpus}, "is for text-classification, not for fill-mask"),
        (model, {"task": file}, "is for fill-mask, not for text-classification"),
        (classifier, {"task": file, "data": corpus}, f"has no effect on task={file!r}"),
        (model, {"data": corpus, "rows": 0}, "rows=0 must be a positive integer"),
        (model, {"data": corpus, "mask_share": 2}, "mask_share=2 must be above 0 and below 1"),
    ]:
        with refused(message):
            evaluate(own, **options)
    rows = [{"text": f"a {i}", "sentence": f"b {i}", "label": i % 2} for i in range(300)]
    for split in ("train", "validation"):
        table = small.write_table(tmp_path / "sst2" / f"{split}.csv", rows)
    with refused("has the label '0'"):
        evaluate(classifier, task=str(table))
    with refused("has the labels ['dogs', 'trees'], task 'sst2' has"):
        evaluate(classifier, task="sst2", data=tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize(("bundled", "lines"), [(False, 200_000), (True, 20_000)])
def test_memory_does_not_grow_with_the_number_of_lines(model, bundled, lines):
    program = """
import os, re, sys
from pathlib import Path
from linformers.training import predict
with open(os.devnull, "w") as out:
    predict.predict_lines(Path(sys.argv[1]), (f"the {i} <mask>" for i in range(int(sys.argv[2]))), out)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
    result = subprocess.run(
        [sys.executable, "-c", program, pretrained() if bundled else str(model), str(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes = int(result.stdout) * 1024 / 1e6
    print(f"{lines:,} lines: {megabytes:.0f} MB")
    assert megabytes < 700
