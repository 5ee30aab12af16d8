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
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, pipeline

from linformers import LinformerForMaskedLM, pretrained
from linformers.training import checkpoints, data, predict
from linformers.training.batches import Text, TextEncoder

from ..modes import random_model, refused
from . import small


def answers(model, lines, **options):
    out = io.StringIO()
    predict.predict_lines(model, lines, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def evaluate(model, **options):
    return predict.evaluate(model, console=small.QUIET, **options)


def test_labels(tuned, task):
    texts = [*(example.text for example in task.test), "the dog " * 200]
    *rows, blank = answers(tuned / "model", [f"{text}\n" for text in (*texts, " ")], tokens=70)
    assert [row["text"] for row in rows] == texts
    assert {row["label"] for row in rows} == {"dogs", "trees"}
    assert blank == {"text": " ", "error": "the line is blank"}


def test_words(model):
    """The same as a pipeline's, without the space before a word: every token, in batches."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["the quick <mask> fox", "<mask> dog", "a <mask>" + " dog" * 5]
    rows = answers(model, texts, best=len(tokenizer), tokens=16)
    (row,) = answers(model.parent / "checkpoint-24", texts[:1], best=3)
    for guess, expected in zip(row["guesses"], rows[0]["guesses"], strict=False):
        assert guess == {"word": expected["word"], "score": pytest.approx(expected["score"])}
    fill = pipeline("fill-mask", model=str(model), top_k=len(tokenizer))
    for row, expected in zip(rows, fill(texts), strict=True):
        guesses = {guess["word"]: guess["score"] for guess in row["guesses"]}
        assert {" ", "\n"} < guesses.keys()
        assert guesses == pytest.approx({e["token_str"].strip() or e["token_str"]: e["score"] for e in expected})


def test_wrong_lines_do_not_stop_the_others(model):
    lines = ["a <mask>", "", "no mask", "the <mask>", "", "a dog <mask>", "<mask> <mask>"]
    use = "contains no <mask>, expected exactly one; to label texts, pass --model, a model of linformers finetune"
    wrong = [None, "the line is blank", use, None, "the line is blank", None, "contains 2 <mask>, expected exactly one"]
    for size in (1, 30, 4096):
        out = io.StringIO()
        with refused(f"line 3 {use}; 1 more with errors"):
            predict.predict_lines(model, lines, out, tokens=size)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [row["text"] for row in rows] == lines
        for row, expected in zip(rows, wrong, strict=True):
            assert ("guesses" in row) == (expected is None)
            assert row.get("error") == expected
    assert len(answers(model, ["a <mask>\n", " \n"])) == 2


def test_long_texts_are_read_in_parts(tuned, model, tmp_path, capsys):
    """A label is that of all parts together, a word that of the part with the mask; both are counted."""
    network, tokenizer = predict.load_model(tuned / "model", predict.CLASSIFY), AutoTokenizer.from_pretrained(model)
    texts = ["fox dog " * 40 + "tree of " * 4, "tree of", "tree of " * 60]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    console, out = Console(width=200), tmp_path / "out.jsonl"
    predict.predict(tuned / "model", tmp_path / "lines.txt", out, console=console)
    said = "texts longer than n=32 tokens, read in overlapping parts, whose answers are merged: 2 of 3"
    assert capsys.readouterr().out == f"{said}\n3 rows in {out}\n"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    encoder = TextEncoder(tokenizer, 32)
    for text, row in zip(texts, rows, strict=True):
        (tokens,) = encoder.encode([Text(text)])
        total = 0
        for part in encoder.parts(0, tokens):
            logits = network(torch.from_numpy(part.ids)[None]).logits[0].detach()
            total = total + logits * (part.own[1] - part.own[0]) / len(tokens.ids)
        assert row["score"] == pytest.approx(float(total.softmax(-1).max()), abs=1e-5)
        assert row["label"] == network.config.id2label[int(total.argmax())]
    text = "the dog " * 50 + "a lazy <mask>"
    (row,) = answers(model, [text], best=1)
    *_, last = encoder.parts(0, encoder.encode([Text(text)])[0])
    network = predict.load_model(model, predict.FILL_MASK)
    logits = network(torch.from_numpy(last.ids)[None]).logits[0, last.ids.tolist().index(tokenizer.mask_token_id)]
    assert row["guesses"][0]["score"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-5)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables(kind, pairs, tuned, tmp_path):
    """The answers are columns of the same table, whose rows may have several lines; no name is taken twice."""
    bodies = ["fox dog\njumps", "tree, of", None, 'under "tree"', "dog " * 50]
    rows = [{"n": i, "body": body, "other": "the dog " * 30, "label": "x"} for i, body in enumerate(bodies)]
    source = small.write_table(tmp_path / f"in.{kind}", rows)
    lines = [" ".join((body or "").split()) for body in bodies]
    lines = [f"{line}\t{'the dog ' * 30}" if pairs else line for line in lines]
    expected = answers(tuned / "model", lines, pairs=pairs)
    options = {"text": "body,other" if pairs else "body", "console": small.QUIET}
    for suffix in ("jsonl", "csv", "parquet"):
        out = tmp_path / f"out.{suffix}"
        predict.predict(tuned / "model", source, out, **options)
        found = list(data.table_rows(out, ["n", "body", "other", "label"]))
        assert [int(row["n"]) for row in found] == list(range(5))
        assert [(row["body"] or "") for row in found] == [body or "" for body in bodies]
        for row, answer in list(zip(found, expected, strict=True))[1:]:  # a line cannot hold the first text
            assert (row.get("predicted_label") or None) == answer.get("label")
            score = row.get("predicted_score")
            assert float(score or 0) == pytest.approx(answer.get("score", 0), abs=1e-5)
            assert (row.get("predicted_error") or "").replace("row", "line") == answer.get("error", "")
        with refused(f"out={str(out)!r} exists already"):
            predict.predict(tuned / "model", source, out, **options)
    assert not list(tmp_path.glob(".*"))


def test_cut_pairs_are_counted(tuned, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("the dog\ta fox\n" + "the dog " * 40 + "\ta fox\n")
    predict.predict(tuned / "model", tmp_path / "lines.txt", io.StringIO(), pairs=True, console=Console(width=200))
    said = capsys.readouterr().out
    assert said == "pairs longer than n=32 tokens, of which the longer text was cut: 1 of 2\n"


def test_blank_rows_have_errors_and_no_score(tuned, tmp_path, capsys):
    """Both commands count them."""
    rows = [
        {"text": text, "label": label} for text, label in (("fox", "dogs"), (" ", "dogs"), ("of", "trees"), ("", ""))
    ]
    table, out = small.write_table(tmp_path / "a.csv", rows), tmp_path / "out.csv"
    predict.predict(tuned / "model", table, out, console=Console(width=500))
    assert capsys.readouterr().out == f"4 rows in {out}, 2 with an error\n"
    found = evaluate(tuned / "model", task=str(table))
    assert (found["rows"], found["note"].split("; ")[-1]) == (2, "left out 2 blank rows of a.csv: 2, 4")


def test_guesses_in_tables(model, tmp_path):
    source = small.write_table(tmp_path / "in.csv", [{"text": "a <mask>"}, {"text": "no mask"}])
    for suffix in ("jsonl", "csv", "parquet"):
        out = tmp_path / f"out.{suffix}"
        with refused("row 2 contains no <mask>"):
            predict.predict(model, source, out, best=2, console=small.QUIET)
        first, second = data.table_rows(out, ["text"])
        guesses = json.loads(first["guesses"]) if suffix == "csv" else first["guesses"]
        assert guesses == answers(model, ["a <mask>"], best=2)[0]["guesses"]
        assert "contains no <mask>" in second["error"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_and_standard_input(encoding, model, tmp_path, monkeypatch):
    out, again = io.StringIO(), io.StringIO()
    (tmp_path / "lines.txt").write_text("a <mask>\nthe <mask>\n", encoding=encoding)
    predict.predict(model, tmp_path / "lines.txt", out, console=small.QUIET)
    stdin = io.TextIOWrapper(io.BytesIO(b"a \xe9 <mask>\nthe <mask>\n"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    predict.predict(model, None, again, console=small.QUIET)
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["a <mask>", "the <mask>"]
    assert json.loads(again.getvalue().splitlines()[0])["text"] == "a \ufffd <mask>"
    with refused(f"{tmp_path} cannot be read"):
        predict.predict(model, tmp_path, out, console=small.QUIET)


def test_wrong_arguments_of_predict(tuned, model, tmp_path):
    with refused("line 2 has 0 tabs, expected one between two texts"):
        answers(tuned / "model", ["a\tb", "a b"], pairs=True)
    with refused("pairs has no effect on model="):
        answers(model, [], pairs=True)
    table, lines = small.write_table(tmp_path / "a.csv", [{"text": "a"}]), tmp_path / "lines.txt"
    lines.write_text("a")
    for file, out, options, message in [
        (table, "out.txt", {}, "the ending of out='.txt' is not one of '.jsonl', '.csv', '.parquet'"),
        (table, "out.csv", {"text": "body"}, "has no column 'body'; its columns are 'text'"),
        (table, "out.csv", {"text": "a,b,c"}, "text='a,b,c' must be one or two columns"),
        (table, "out.csv", {"pairs": True}, "pairs has no effect on a table: name two columns"),
        (table, "out.csv", {"tokens": 0}, "tokens=0 must be a positive integer"),
        (lines, "out.csv", {"text": "body"}, "text='body' has no effect on"),
    ]:
        with refused(message):
            predict.predict(tuned / "model", file, tmp_path / out, console=small.QUIET, **options)
    assert not list(tmp_path.glob("*out*"))
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
        predict.predict(folder, None, io.StringIO(), console=small.QUIET)
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
