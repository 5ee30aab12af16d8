"""From raw text to the page of results, with tiny models; and what the page says of numbers."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformers import plots
from linformers.benchmark.efficiency import FUSED, UNFUSED
from linformers.cli import app
from linformers.reproduce import (
    chosen_k,
    figure1,
    figure3,
    long_documents,
    overview,
    quality,
    recall,
    sections,
    steps,
    table1,
    table2,
    table3,
)
from linformers.reproduce.jobs import ORIGIN
from linformers.reproduce.matrix import Place, corpus

ROOT = Path(__file__).parents[2]
QUIET = Console(quiet=True)
WORDS = ["the", "a", "film", "was", "good", "bad", "long", "short", "and", "of", "in", "it", "is", "not", "very"]


def sentence(draw, words):
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Wiki, books and the four tasks, a few kilobytes of each."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)

    def write(path, rows):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name in ("wiki", "books"):
        for split, count in (("train-00", 60), ("validation", 10)):
            write(folder / name / f"{split}.jsonl", [{"text": sentence(draw, 200)} for _ in range(count)])
    write(folder / "wikitext103_valtest" / "test.jsonl", [{"text": sentence(draw, 200)} for _ in range(20)])
    columns = {"sst2": ("sentence",), "imdb": ("text",), "qnli": ("question", "sentence")}
    columns |= {"qqp": ("question1", "question2")}
    for name, texts in columns.items():
        for split in ("train", "test" if name == "imdb" else "validation"):
            rows = [{**{text: sentence(draw, 12) for text in texts}, "label": i % 2} for i in range(120)]
            write(folder / name / f"{split}.jsonl", rows)
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], catch_exceptions=False)


def places(folder, data):
    options = {"--data": data, "--recipes": ROOT / "recipes" / "small"}
    options |= {"--runs": folder / "runs", "--results": folder / "results"}
    return [part for pair in options.items() for part in pair]


def test_one_cell_of_figure_3(data, tmp_path):
    arguments = ["figure3", *places(tmp_path, data), "--small", "--only", "n512-k128-w32"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "results" / "runs" / "pretraining" / "n512-k128-w32.json").read_text())
    assert [step for step, _ in record["result"]["curve"]] == [4, 8]
    assert record["decides"]["recipe"]["model"]["local_window"] == 4
    figure = json.loads((tmp_path / "results" / "figure3" / "figure3.json").read_text())
    curves = figure["panels"]["a"]["curves"]
    assert curves["Linformer k=128 w=32"] == record["result"]["curve"]
    assert curves["Transformer"] is None
    page = (tmp_path / "results" / "results.md").read_text()
    assert f"| missing | missing | missing | missing | {record['result']['perplexity']:.1f} |" in page
    assert "`linformers reproduce figure3 --data DIR --only n512-twin --only n512-k64-layerwise " in page
    assert "--only n512-k128-w32" not in page
    assert (tmp_path / "results" / "figure3" / "figure3.png").stat().st_size > 1000
    again = invoke(*arguments)
    assert "1 of 1 runs are there already" in again.output


@pytest.mark.usefixtures("forked")
def test_recall(data, tmp_path):
    result = invoke("recall", *places(tmp_path, data), "--small", "--only", "k128-w32-s0-recall")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results" / "recall" / "recall.json").read_text())["rows"]
    assert rows["twin"] is None
    accuracy, deviation = rows["k=128 w=32"]
    assert 0 <= accuracy <= 1
    assert deviation is None
    assert f"| k=128 w=32 | {100 * accuracy:.1f} |" in (tmp_path / "results" / "results.md").read_text()
    test = (tmp_path / "runs" / "recall" / "test.jsonl").read_text().splitlines()
    assert len(test) == recall.TINY_SIZES.test


@pytest.mark.usefixtures("forked")
def test_chosen_k(data, tmp_path):
    """What is chosen is not known before the twin has been trained."""
    result = invoke("chosen-k", *places(tmp_path, data), "--small", "--at-once", "2")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results" / "chosen-k" / "chosen-k.json").read_text())["rows"]
    assert "chosen" in {row["name"] for row in rows}
    assert all(row["perplexity"] > 1 and len(row["lengths"]) == 2 for row in rows)
    place = Place(data, ROOT / "recipes" / "small", tmp_path / "runs", tmp_path / "results", small=True)
    assert set(chosen_k.names(place)) == {job.name for job in chosen_k.jobs(place, QUIET)}


@pytest.mark.parametrize(("chosen", "how"), [(49.0, "better than"), (49.9, "not clearly better than")])
def test_what_a_choice_gains_is_told(chosen, how, tmp_path):
    choices = {"uniform": [128, 128], "chosen": [160, 96], "increasing": [96, 160], "decreasing": [160, 96]}
    write_run(tmp_path, "chosen-k/choice", choices=choices, costs=[{"seconds": s} for s in (0.1, 0.2, 0.1, 0.1)])
    perplexities = {"uniform": 50.0, "chosen": chosen, "increasing": 52.0, "decreasing": 51.0}
    for name, perplexity in perplexities.items():
        write_run(tmp_path, f"chosen-k/{name}", perplexity=perplexity)
    page = chosen_k.page(chosen_k.collect(Place(None, results=tmp_path)))
    assert f"| chosen | 160, 96 | 128 | 2.00 | {chosen} |" in page
    assert f"- The chosen k is {how} a uniform one: {chosen} against 50.0." in page
    gain = "; but a k that falls gains nothing over a uniform one (50.0)"
    assert f"- “Higher layers need less k”: confirmed; falling it ends at 51.0, rising at 52.0{gain}." in page


def test_secrets(data):
    sizes = recall.Sizes(40, 8, 50, 30, 40)
    found = recall.examples([data / "wiki"], sizes, seed=0)
    assert [sum(e["label"] == secret for e in found) for secret in recall.SECRETS] == [6] * 8
    for example in found:
        before, after = example["text"].split(f"The secret word is {example['label']}.")
        assert 30 <= len(before.split()) <= 40
        assert len(before.split()) + len(after.split()) == 50
    with pytest.raises(ValueError, match="the texts have 280 passages of 50 words, but 1008 are needed"):
        recall.examples([data / "wiki"], sizes._replace(train=1000), seed=0)


@pytest.mark.usefixtures("forked")
def test_long_documents(data, tmp_path):
    only = ["--only", "Linformer-k128-w32*", "--only", "speed"]
    result = invoke("long", *places(tmp_path, data), "--small", *only)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "results" / "long" / "long.json").read_text())["rows"]
    assert rows["Transformer twin"]["accuracy"] is rows["Transformer twin"]["pretrained"] is None
    assert all(own["seconds"] > 0 and own["peak_bytes"] > 0 for own in rows.values())
    found = rows["Linformer k=128 w=32"]
    accuracies = [100 * found[field] for field in ("accuracy", "pretrained")]
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    cells = [accuracies[0], found["perplexity"], accuracies[1], 1000 * found["seconds"]]
    row = "| Linformer k=128 w=32 | – | {:.1f} | {:.2f} | {:.1f} | {:.1f} | ".format(*cells)
    page = (tmp_path / "results" / "results.md").read_text()
    assert row in page
    missing = ("Transformer-twin", "Transformer-twin-pretrained", "Linformer-k256", "Linformer-k256-pretrained")
    only = " ".join(f"--only {name}" for name in missing)
    assert f"`linformers reproduce long --data DIR {only} --small --results {tmp_path / 'results'}` fills it" in page


def test_long_documents_beside_the_published(tmp_path):
    write_run(tmp_path, "long/Linformer-k256", accuracy=[0.54, None])
    write_run(tmp_path, "long/Linformer-k128-w32", accuracy=[0.64, None])
    write_run(tmp_path, "long/Linformer-k128-w32-pretrained", accuracy=[0.8, None])
    pure, local = long_documents.claims(long_documents.collect(Place(None, results=tmp_path)))
    assert pure == "Linformer k=256, from nothing: 54.0, above the published 53.94."
    assert local == "Linformer k=128 w=32, from nothing: 64.0, below the Transformer's published 64.27."
    for rate, tested, validated in ((0.0001, 0.61, 0.65), (0.001, 0.67, 0.62)):
        seeds = [{"accuracy": tested, "validation_accuracy": validated}]
        write_run(tmp_path, f"long/Linformer-k128-w32-rate-{rate:g}", accuracy=[tested, None], seeds=seeds)
    record = long_documents.collect(Place(None, results=tmp_path))
    _, local = long_documents.claims(record)
    assert "from nothing: 61.0, below" in local  # what did best on the validation set, not on the test set
    page = long_documents.page(record)
    assert (
        "| 12 epochs at a rate of 0.0005 with dropout 0.1 | missing | 54.0 (54.0) | 64.0 (64.0) | missing | missing |"
        in page
    )
    assert (
        "| 12 epochs at a rate of 0.0001 with dropout 0.1 | missing | missing | 61.0 (65.0) | missing | missing |"
        in page
    )
    assert "| 12 epochs at a rate of 0.001 with dropout 0.1 | – | – | 67.0 (62.0) | – | – |" in page
    assert (
        "--only Linformer-k128-w32-rate-0.0001-dropout-0.3-epochs-24 --only Linformer-k128-w32-rate-0.0002" in page[-2]
    )
    seeds = [{"validation_accuracy": 0.7}]
    write_run(tmp_path, "long/Linformer-k128-w4", accuracy=[0.68, None], seeds=seeds, stopped_after=8)
    write_run(tmp_path, "long/Linformer-k128-w4-rate-0.0001", accuracy=None, seeds=seeds, stopped_after=3)
    record = long_documents.collect(Place(None, results=tmp_path))
    assert long_documents.claims(record)[2] == (
        "Linformer k=128 w=4, from nothing: 68.0, above the Transformer's published 64.27. "
        "It was cut off after 8 of 12 epochs."
    )
    page = long_documents.page(record)
    assert any(row.endswith("| 64.0 (64.0) | 68.0 (70.0, stopped after 8) | missing |") for row in page)
    assert any(row.endswith("| 61.0 (65.0) | – (70.0, stopped after 3) | missing |") for row in page)
    write_run(tmp_path, "long/Linformer-k128-w2-4-8-32", accuracy=None, seeds=seeds, stopped_after=3)
    page = long_documents.page(long_documents.collect(Place(None, results=tmp_path)))
    assert any(row.startswith("| Linformer k=128 w=2-4-8-32 | – | cut off | – |") for row in page)
    assert "--only Linformer-k128-w4 --only Linformer-k128-w4-rate-0.0001 " in page[-2]
    write_run(tmp_path, "long/Transformer-twin", accuracy=[0.6, None])
    *_, fair = long_documents.claims(long_documents.collect(Place(None, results=tmp_path)))
    assert fair.endswith("in points beside its twin: Linformer k=256 -6.0, Linformer k=128 w=32 +4.0.")  # the same way
    write_run(tmp_path, "long/Linformer-k256-masked-bytes-repeated", perplexity=5.0)
    assert long_documents.claims(long_documents.collect(Place(None, results=tmp_path)))[-1] == (
        "Linformer k=256 was pretrained again for fine-tuning, which had lost the weights, and ended at 5.00."
    )
    (tmp_path / "runs" / "long" / "Linformer-k256-masked-bytes-repeated.json").unlink()
    write_run(tmp_path, "long/Transformer-twin-pretrained", accuracy=[0.83, None])
    write_run(tmp_path, "long/Linformer-k256-pretrained", accuracy=[0.84, None])
    *_, pretrained = long_documents.claims(long_documents.collect(Place(None, results=tmp_path)))
    assert pretrained == "Pretrained, in points beside its twin: Linformer k=256 +1.0, Linformer k=128 w=32 -3.0."


def test_tiny_results_do_not_mix_with_others(tmp_path):
    arguments = ["--runs", tmp_path / "runs", "--results", tmp_path / "results"]
    assert invoke("table1", *arguments, "--small").exit_code == 0
    text = (tmp_path / "results" / "results.md").read_text()
    assert text.startswith("# A test of the whole path")
    assert "“Linear time”" not in text
    assert f"`linformers reproduce figure3 --data DIR --small --results {tmp_path / 'results'}` fills it" in text
    assert invoke("page", *arguments).exit_code == 0
    assert (tmp_path / "results" / "results.md").read_text() == text
    with pytest.raises(ValueError, match=r"results='.*' holds results of tiny models; choose another folder"):
        invoke("table1", *arguments)
    record = tmp_path / "results" / "table1" / "table1.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "small": False}))
    with pytest.raises(ValueError, match=r"results='.*' holds results of full size; choose another folder"):
        invoke("table1", *arguments, "--small")


def test_averages_without_qnli_stand_beside_its_seeds():
    tasks = {task: [80.0, 1.0] for task in ("sst2", "imdb", "qqp")}
    rows = [{"n": 512, "model": name, "ours": {**tasks, "qnli": [60.0, 5.0]}} for name in ("twin", "other")]
    record = {"rows": rows, "seeds": []}
    assert table2.without_qnli(record) == []
    record["seeds"] = [[75.04, 60.0], [74.0, 61.0]]
    (line,) = table2.without_qnli(record)
    assert line.startswith("On QNLI, seeds of the twin learn or do not (75.0, 60.0; 74.0, 61.0)")
    assert line.endswith("the averages are: twin 80.0; other 80.0.")


def test_layerwise_sharing_is_judged_at_each_k():
    ways = ("", ", shared kv", ", shared kv, layer")
    averages = {(512, f"Linformer, 256{way}"): place for place, way in enumerate(ways)}
    (line,) = table2.layerwise(averages)
    assert line.startswith("“Layerwise sharing is best downstream”: confirmed at n = 512, k = 256 (headwise 0.00, ")
    averages |= {(512, f"Linformer, 128{way}"): -place for place, way in enumerate(ways)}
    (line,) = table2.layerwise(averages)
    assert "refuted at n = 512, k = 128, confirmed at n = 512, k = 256 (headwise 0.00, key-value -1.00" in line
    (line,) = table2.layerwise(averages, dict.fromkeys(averages, 1.0))  # by another average, there is no difference
    assert "not to be told at n = 512, k = 128, not to be told at n = 512, k = 256 (headwise 0.00 / 1.00," in line


def test_k_or_its_ratio_to_n_decides_downstream():
    averages = {(512, "Linformer, 256"): 82.0, (512, "Linformer, 128"): 80.0}
    assert table2.length(averages) == []
    (line,) = table2.length(averages | {(1024, "Linformer, 256"): 81.5})
    assert "at n = 1024 and k = 256: confirmed for headwise sharing (81.50, where n = 512 has 82.00 at k = 256" in line
    (line,) = table2.length(averages | {(1024, "Linformer, 256"): 80.5})
    assert "refuted for headwise sharing" in line
    (line,) = table2.length(averages | {(1024, "Linformer, 256"): 81.2})
    assert "not to be told for headwise sharing" in line


def test_linear_time_can_be_refuted():
    seconds = {name: [1.0, 2.0, 4.0] for name in table1.THEORY} | {"Transformer": [4.0, 16.0, 64.0]}
    record = {"lengths": [128, 256, 512], "hidden": 64, "seconds": seconds}
    assert table1.claims(record) == [
        "“Linear time” (an exponent of at most 1.2): confirmed, 1.0 where the Transformer has 2.0; the Transformer, "
        "with fused attention, takes 4.0 times at n = 128 and 16.0 times at n = 512 as long."
    ]
    seconds["Linformer"] = [1.0, 3.0, 9.0]
    assert table1.claims(record)[0].startswith("“Linear time” (an exponent of at most 1.2): refuted, 1.6 where")
    seconds["Linformer"] = [1.0, None, None]
    assert table1.claims(record) == []


def test_table_3_and_table_1_on_a_cpu(tmp_path):
    result = invoke("table3", "table1", "--runs", tmp_path / "runs", "--results", tmp_path / "results", "--small")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "results" / "results.md").read_text()
    assert "no cell of the paper's table" not in page
    assert page.count(" of 4 cells that were measured and fit are beaten") == 2
    assert "by the peak of a pass" in page
    assert "## Figure 3" in page
    assert "`linformers reproduce figure3 --data DIR --small --results " in page
    for figure in ("table3/table3", "table3/architecture", "table1/table1"):
        assert (tmp_path / "results" / f"{figure}.svg").stat().st_size > 1000
    again = invoke("table1", "--runs", tmp_path / "runs", "--results", tmp_path / "results", "--small")
    assert "is there already; delete it to measure again" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure4"], "section='figure4' is not one of"),
        (["figure3"], "data is missing: name the folder of wiki"),
        (["figure3", "--data", "/nowhere"], "data='/nowhere' is no folder"),
        (["figure3", "--data", str(ROOT / "docs")], "has no wiki with files called train"),
        (["table3", "--recipes", "/nowhere"], "recipes='/nowhere' is no folder; recipes/small of a clone has them"),
        (["figure3", "page", "--recipes", "/nowhere"], "recipes='/nowhere' is no folder"),
        (["table3", "--only", "k32"], "only=\\['k32'\\] has no effect: table3 has no runs of its own"),
        (["table1", "--at-once", "0"], "at_once=0"),
        (["table1", "--minutes", "0"], "minutes=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_reproduced(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        invoke(*arguments, "--runs", tmp_path / "runs", "--results", tmp_path / "results")


def test_recipes_that_are_not_there_are_told_before_anything_is_made(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "recipes='{}' holds no n512-twin.yaml; name the folder recipes/small of a clone with --recipes DIR"
    for options, recipes in (([], "recipes/small"), (["--recipes", ROOT / "recipes"], ROOT / "recipes")):
        with pytest.raises(ValueError, match=f"^{re.escape(message.format(recipes))}$"):
            invoke("figure3", "--data", data, *options)
    assert not list(tmp_path.iterdir())


def test_a_corpus_of_other_text_is_refused(data, tmp_path, capsys):
    place = Place(data, runs=tmp_path, small=True)
    made = corpus(place, "wiki", QUIET)
    assert corpus(place, "wiki", QUIET) == corpus(Place(None, runs=tmp_path, small=True), "wiki", QUIET) == made
    other = tmp_path / "other"
    (other / "imdb").mkdir(parents=True)  # tasks alone say nothing of the text
    assert corpus(Place(other, runs=tmp_path, small=True), "wiki", Console(width=500)) == made
    assert f"{other} has no text for it: the corpus in {made} is used" in capsys.readouterr().out
    (other / "wiki").mkdir()
    with pytest.raises(ValueError, match="has no wiki with files called train"):
        corpus(Place(other, runs=tmp_path, small=True), "wiki", QUIET)
    for name in ("train-0.jsonl", "validation.jsonl"):
        (other / "wiki" / name).write_text('{"text": "other"}\n')
    with pytest.raises(ValueError, match="was made of other files than data="):
        corpus(Place(other, runs=tmp_path, small=True), "wiki", QUIET)


@pytest.mark.usefixtures("forked")
def test_nothing_tiny_stands_among_the_results(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    result = invoke("figure3", "--data", data, "--small", "--only", "n512-twin", "--runs", "runs/mine")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "results").exists()
    assert "the numbers\nmean nothing" in (tmp_path / "runs" / "mine" / "results" / "results.md").read_text()


def test_a_run_that_is_not_there_is_refused_before_anything_is_made(data, tmp_path):
    with pytest.raises(ValueError, match="only='n512' is like none of the 19 runs; did you mean 'n512-"):
        invoke("figure3", *places(tmp_path, data), "--small", "--only", "n512")
    with pytest.raises(ValueError, match="only='chosen' is like none of the 2 runs; did you mean 'choice'"):
        invoke("chosen-k", *places(tmp_path, data), "--small", "--only", "chosen")
    assert not list(tmp_path.iterdir())


def write_run(folder, name, **result):
    if result.get("accuracy"):
        score = result["accuracy"][0]
        result = {"seeds": [{"accuracy": score, "validation_accuracy": score}], **result}
    path = folder / "runs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    where = dict.fromkeys(("key", "command", "commit", "device", "python", "torch", "transformers"), "")
    path.write_text(json.dumps({**where, "result": result}))


def test_what_the_paper_says_of_figure_3(tmp_path):
    ends = {"n512-twin": 40, "n512-k64-layerwise": 80, "n512-k128-layerwise": 60, "n512-k256-layerwise": 41}
    ends |= {"n1024-twin": 50, "n1024-k128-layerwise": 76, "n1024-k256-layerwise": 52}
    ends |= {"n2048-k256-layerwise": 54, "n4096-k256-layerwise": 90}
    for name, end in ends.items():
        write_run(tmp_path, f"pretraining/{name}", curve=[[1, 150.0], [2, float(end)]], perplexity=float(end))
    record = figure3.collect(Place(None, results=tmp_path))
    better, par, length, decides = figure3.claims(record)
    assert better == "“Better with k”: confirmed. At n = 512, k = 64, 128 and 256 end at 80.0, 60.0 and 41.0."
    assert par.startswith("“Nearly on par” with the Transformer at k = 256: confirmed")
    assert "confirmed at k = 256 (1.02, 1.04) for n=512, n=1024, and confirmed at k = 128 (1.50, 1.52)" in length
    assert "the perplexity itself is n=512 41.0, n=1024 52.0, n=2048 54.0, n=4096 90.0. Open at n=2048 and" in length
    assert length.endswith(" n=4096 did not leave the plateau on which every run begins.")
    page = "\n".join(figure3.page(record))
    assert "| Transformer twin | 40.0 | 50.0 | missing | missing |" in page
    assert "| E at the common rate | 41.0 | – | missing | missing |" in page
    for end, found in (
        (90.0, "Open at n=4096, where the twin did not learn"),
        (60.0, "refuted at k = 256 (1.02, 1.04, 1.02, 1.50) for"),
    ):
        write_run(tmp_path, "pretraining/n2048-twin", curve=[[2, 53.0]], perplexity=53.0)
        write_run(tmp_path, "pretraining/n4096-twin", curve=[[2, end]], perplexity=end)
        _, _, length, _ = figure3.claims(figure3.collect(Place(None, results=tmp_path)))
        assert found in length
    assert "--only n2048-twin --only n4096-twin --only n2048-k256-layerwise-fast-E" in page
    assert decides.startswith(
        "“k, not n/k, decides”: confirmed. From n = 512 to 1024 the twin itself goes from 40.0 to"
    )
    assert "from 1.50 to 1.52 where k stays 128 and from 1.02 to 1.04 where it stays 256" in decides
    assert "from 2.00 to 1.52 where n/k stays 8 and from 1.50 to 1.04 where it stays 4" in decides
    for name in (*ends, "n2048-twin", "n4096-twin"):  # nothing learns, as where all models are tiny
        write_run(tmp_path / "stuck", f"pretraining/{name}", curve=[[1, 150.0], [2, 140.0]], perplexity=140.0)
    _, _, length, _ = figure3.claims(figure3.collect(Place(None, results=tmp_path / "stuck")))
    assert "Open at n=512 and n=1024 and n=2048 and n=4096, where the twin did not learn, either." in length
    write_run(tmp_path, "pretraining/n512-k128-layerwise", curve=[[2, 90.0]])
    better, *_ = figure3.claims(figure3.collect(Place(None, results=tmp_path)))
    assert better.startswith("“Better with k”: refuted")
    write_run(tmp_path, "pretraining/n512-k128-layerwise", curve=[[2, 60.0]])
    write_run(tmp_path, "pretraining/n1024-k128-layerwise", curve=[[2, 120.0]])
    *_, length, decides = figure3.claims(figure3.collect(Place(None, results=tmp_path)))
    assert decides.startswith("“k, not n/k, decides”: refuted at k = 128, confirmed at k = 256")
    write_run(tmp_path, "pretraining/n1024-k256-layerwise", curve=[[2, 80.0]])
    *_, decides = figure3.claims(figure3.collect(Place(None, results=tmp_path)))
    assert decides.startswith("“k, not n/k, decides”: refuted")


def test_the_panels_of_figure_3(tmp_path, monkeypatch):
    for name in ("n512-twin", "n512-k64-layerwise", "n512-k128-layerwise", "n512-k128-w32", "n512-k128-none"):
        write_run(tmp_path, f"pretraining/{name}", curve=[[1, 100.0], [2, 50.0]])
    for name in ("n1024-twin", "n1024-k128-w32", "n1024-k128-layerwise"):
        write_run(tmp_path, f"pretraining/{name}", curve=[[1, 100.0], [2, 60.0]])
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    figure3.draw(figure3.collect(Place(None, results=tmp_path)), tmp_path)
    figures[0].draw_without_rendering()
    *drawn, empty = figures[0].axes
    short, long, sharing = ({line.get_label(): line.get_color() for line in axes.get_lines()} for axes in drawn)
    assert long.keys() == {"Transformer", "Linformer k=128", "Linformer k=128 w=32"}
    assert short.items() >= long.items()
    assert len(set(short.values())) == len(short) == 4
    assert sharing["layerwise"] == short["Linformer k=128"]
    assert sharing["none"] not in short.values()
    for axes in drawn:
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0  # below, where no line is
    assert [text.get_text() for text in empty.texts] == ["no runs yet"]
    assert not empty.axison
    for name in ("n512-k256-layerwise", "n4096-k256-layerwise-w32"):
        write_run(tmp_path, f"pretraining/{name}", curve=[[1, 100.0], [2, 40.0]])
    figure3.draw(figure3.collect(Place(None, results=tmp_path)), tmp_path)
    lines = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in figures[1].axes[3].get_lines()}
    assert lines.keys() == {"n=512", "n=512, twin", "n=1024, twin", "n=4096 w=32"}
    assert lines["n=512"][0] == lines["n=512, twin"][0]
    assert [lines[label][1] for label in ("n=512", "n=512, twin", "n=4096 w=32")] == ["-", "--", "-"]
    for figure in figures:
        plots.plt.close(figure)


def test_what_the_paper_says_of_table_2(tmp_path):
    for recipe, accuracy in {"n512-twin": 0.9, "n512-k256-layerwise": 0.897, "n512-k128-w32": 0.91}.items():
        for task in ("sst2", "imdb", "qnli", "qqp"):
            note = "a subset" if task == "qqp" else ""
            write_run(tmp_path, f"pretraining/{recipe}-{task}", accuracy=[accuracy, 0.01], note=note)
    record = table2.collect(Place(None, results=tmp_path))
    provisional, comparable, local, _ = table2.claims(record)
    assert provisional.startswith("Transformer twin: 90.0 ± 1.0 on QNLI, to be run at half and double the rate, too")
    assert "confirmed. The best pure Linformer (Linformer, 256, shared kv, layer, n = 512), chosen by" in comparable
    assert "has 89.70 on average, the twin 90.00" in comparable
    assert local == "With a local window of 32 it is 91.00: above the twin; without QNLI 91.0, and the twin 90.0."
    page = table2.page(record)
    assert "| 512 | Transformer twin | 90.0 ± 1.0 (93.1) | 90.0 ± 1.0 (94.1) |" in "\n".join(page)
    assert "| 512 | BERT-base | – (92.7) | – (93.5) | – (91.8) | – (89.6) | – (91.90) |" in page
    assert "- qqp: a subset." in page
    assert table2.trained_again(record) == []
    for name, perplexity in (("n512-twin", 18.1), ("n512-twin-repeated", 18.2)):
        write_run(tmp_path, f"pretraining/{name}", perplexity=perplexity)
    (line,) = table2.trained_again(table2.collect(Place(None, results=tmp_path)))
    assert line.endswith("at the end: Transformer twin (n = 512) 18.10 and 18.20.")
    write_run(tmp_path, "pretraining/n512-twin-qnli-half-rate", accuracy=[0.96, 0.01], note="")
    half, provisional, comparable, local, _ = table2.claims(table2.collect(Place(None, results=tmp_path)))
    assert half.startswith(
        "Transformer twin: 90.0 ± 1.0 on QNLI, and 96.0 ± 1.0 at half the rate; with the best of these, by what is"
    )
    assert "to be run at double the rate, too" in provisional
    assert "refuted. The best pure Linformer" in comparable
    assert "has 89.70 on average, the twin 91.50" in comparable
    assert local.startswith("With a local window of 32 it is 91.00: below the twin; ")
    write_run(tmp_path, "pretraining/n512-twin-qnli-double-rate", accuracy=[0.5, 0.01], note="")
    both, comparable, *_ = table2.claims(table2.collect(Place(None, results=tmp_path)))
    assert "90.0 ± 1.0 on QNLI, and 96.0 ± 1.0 at half the rate, 50.0 ± 1.0 at double the rate; with" in both
    assert "the twin 91.50" in comparable


def test_speeds_of_the_overview_are_those_beside_their_own_baseline(tmp_path):
    def benchmark(name, **seconds):
        cells = [
            {"model": f"{model}, compiled", "task": "inference", "n": 8192, "seconds": own}
            for model, own in ((overview.BASELINE, seconds["base"]), (seconds["model"], seconds["own"]))
        ]
        path = tmp_path / "efficiency" / name / "efficiency.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"lengths": cells, **dict.fromkeys(ORIGIN, "")}))

    benchmark("compiled", base=1.0, model="Linformer k=128", own=0.5)
    benchmark("compiled-k256", base=1.2, model="Linformer k=256", own=0.4)
    page = overview.page(overview.collect(Place(None, results=tmp_path)))
    assert "| Linformer, k = 128 | – | – | – | – | – | – | – | 2.0× | – |" in page
    assert "| Linformer, k = 256 | – | – | – | – | – | – | – | 3.0× | – |" in page
    assert "| Transformer twin | – | – | – | – | – | – | – | – | – |" in page
    benchmark("compiled", base=None, model="Linformer k=128", own=0.5)  # the baseline did not fit
    assert "| Linformer, k = 128 | – | – | – | – | – | – | – | – | – |" in overview.page(
        overview.collect(Place(None, results=tmp_path))
    )


def test_quality(tmp_path):
    for seed, end in enumerate((40.0, 42.0)):
        curve = [[500, 100.0], [1000, end]]
        write_run(tmp_path, f"quality/twin-s{seed}", curve=curve)
    write_run(tmp_path, "quality/twin-plain-start-s0", curve=[[500, 120.0], [1000, 82.0]])
    curve = [[500, 90.0], [1000, 20.5]]
    write_run(tmp_path, "quality/k128-w32-s0", curve=curve)
    write_run(tmp_path, "quality/k64-w32-s1", curve=curve)
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "steps.json").write_text(json.dumps({"seconds": {"twin": 0.04, "k=128 w=32": 0.02}}))
    record = quality.collect(Place(None, results=tmp_path))
    page = quality.page(record)
    assert "| k=64 w=32 | 1 | 20.5 | 0.50 | 0.25 | – |" in page
    assert "| k=128 w=32 | 1 | 20.5 | 0.50 | 0.25 | 0.50 |" in page
    assert "| twin | 2 | 41.0 ± 1.4 | 1.00 | 0.50 | 1.00 |" in page
    assert "| k=256 | 0 | missing |  |  |  |" in page
    quality.draw(record, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_the_time_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "DRAWN", ["twin", "k=128 w=32", "k=128 w=32, plain start"])
    places = ("--recipes", ROOT / "recipes" / "small", "--results", tmp_path / "results")
    result = invoke("steps", *places, "--small")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "results" / "steps" / "steps.json").read_text())
    assert record["tokens"] == 8 * 64
    assert all(seconds > 0 for seconds in record["seconds"].values())
    # How a model starts makes no difference to its time: it is measured once.
    assert record["seconds"]["k=128 w=32"] == record["seconds"]["k=128 w=32, plain start"]
    assert "| twin |" in "\n".join(steps.page(record))
    assert quality.step_seconds(Place(None, results=tmp_path / "results")) == record["seconds"]
    assert "is there already" in invoke("steps", *places, "--small").output


@pytest.mark.parametrize("section", [figure3, table2, quality, recall, chosen_k, long_documents])
def test_every_run_is_another_and_known_before(section, data, tmp_path):
    small = section is recall  # whose texts would not suffice
    place = Place(data, ROOT / "recipes" / "small", tmp_path / "runs", tmp_path / "results", small)
    names = section.names(place)
    assert not list(tmp_path.iterdir())
    every = section.jobs(place, QUIET)
    assert {job.name for job in every} == set(names)
    assert len({job.name for job in every}) == len({job.key for job in every}) == len(every)


def cell(model, n, k, seconds, batch):
    return {"model": model, "n": n, "k": k, "task": "inference", "seconds": seconds, "largest_batch": batch}


def test_table_3_beside_the_papers():
    cells = [cell(UNFUSED, 512, None, 1.6, 10), cell(FUSED, 512, None, 0.8, 10)]
    cells += [cell("Linformer k=128", 512, 128, 1.0, 20), cell("Linformer k=256", 512, 256, 1.5, 16)]
    cells += [cell("Linformer k=128, compiled", 512, 128, 0.1, None)]
    cells += [cell(UNFUSED, 65536, None, None, None), cell("Linformer k=128", 65536, 128, 1.0, 20)]
    page = "\n".join(table3.page({"cells": cells}))
    assert "| 512 | 1.6× (1.5×) | 1.1× (1.3×) | – |" in page
    assert "| 65536 | none (20×) |" in page
    assert "time: 1 of 2 cells that were measured and fit are beaten; not: n=512, k=256." in page
    assert "memory: 2 of 2 cells that were measured and fit are beaten." in page
    assert "Fused attention alone saves 2.0× at n = 512" in page
    assert "- Times as fast as fused attention at k = 128, nothing compiled: 0.80 at n = 512." in page


def test_fused_attention_is_praised_only_where_it_saves():
    cells = [cell(UNFUSED, 512, None, 1.01, 10), cell(FUSED, 512, None, 1.0, 10)]
    assert "Fused attention" not in "\n".join(table3.page({"cells": cells}))
    cells += [cell(UNFUSED, 1024, None, 3.0, 10), cell(FUSED, 1024, None, 2.0, 10)]
    assert "- Fused attention alone saves 1.5× at n = 1024: today's" in "\n".join(table3.page({"cells": cells}))


def test_the_papers_sizes_need_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(table3, "best_device", lambda: "cpu")
    with pytest.raises(ValueError, match=r"needs a GPU; .* with --small, or .* `linformers bench`"):
        table3.measure(Place(None, results=tmp_path), QUIET)
    assert not list(tmp_path.iterdir())


def test_memory_is_that_of_a_pass_where_no_batch_was_looked_for():
    cells = [{**cell(UNFUSED, 512, None, 1.0, None), "peak_bytes": 300}]
    cells += [{**cell("Linformer k=128", 512, 128, 1.0, None), "peak_bytes": 100}]
    assert table3.savings(cells, "memory") == {(512, 128): 3.0}


def test_growth_is_the_slope_at_the_longest_lengths():
    assert table1.exponent([1, 2, 4, 8, 16], [5.0, 2.0, 8.0, 32.0, 128.0]) == pytest.approx(2)
    assert table1.exponent([1, 2, 4, 8], [5.0, 2.0, 8.0, None]) == pytest.approx(
        table1.exponent([1, 2, 4], [5.0, 2.0, 8.0])
    )
    assert table1.exponent([1, 2], [1.0, None]) is None


def test_a_recurrent_layer_goes_on_from_piece_to_piece(monkeypatch):
    layer, x = table1.Recurrent(), torch.randn(2, 10, table1.HIDDEN)
    whole = layer(x)
    monkeypatch.setattr(table1.Recurrent, "PIECE", 4)
    torch.testing.assert_close(layer(x), whole)


def test_nothing_is_drawn_of_nothing(tmp_path):
    record = quality.collect(Place(None, results=tmp_path))
    quality.draw(record, tmp_path / "quality.png")
    assert not list(tmp_path.iterdir())


def test_spectra_that_are_there_and_those_that_are_missing():
    page = "\n".join(figure1.page(figure1.collect(Place(None, results=ROOT / "results"))))
    assert "[minilm-wikitext](../results/spectrum/minilm-wikitext/spectrum.md) | 953 | 0.834 |" in page
    missing = "- roberta-base-wikitext is missing: the weights were not at hand; `linformers spectrum FacebookAI"
    assert missing in page


@pytest.mark.usefixtures("forked")
def test_a_task_of_table_2_and_the_spectra_of_its_twin(data, tmp_path, monkeypatch):
    monkeypatch.setattr(figure1, "MODELS", {})
    monkeypatch.setattr(figure1, "TEXTS", {"wikitext": "wikitext103_valtest"})
    place = Place(data, ROOT / "recipes" / "small", tmp_path / "runs", tmp_path / "results", small=True)
    record = figure1.measure(place, QUIET)
    assert list(record["rows"].values()) == [None, None]
    assert sections.run(["table2", "figure1"], place, QUIET, only=["n512-twin", "n512-twin-imdb"]) == 0
    table = json.loads((tmp_path / "results" / "table2" / "table2.json").read_text())
    mean, deviation = table["rows"][0]["ours"]["imdb"]
    assert 0 <= mean <= 100
    assert deviation is None
    page = (tmp_path / "results" / "results.md").read_text()
    assert f"| 512 | Transformer twin | missing (93.1) | {mean:.1f} (94.1) | missing (90.9) |" in page
    filled = "`linformers reproduce table2 --data DIR --only n512-twin-sst2 --only n512-twin-qnli --only n512-twin-qqp "
    assert f"{filled}--only 'n512-k128-headwise-*' " in page
    record = figure1.collect(place)
    assert [own["sentences"] for own in record["rows"].values()] == [4, 4]
    before, after = (own["mean"] for own in record["rows"].values())
    assert before != after
    page = "\n".join(figure1.page(record))
    assert f"changes the mean share of our twin on wikitext from {before:.3f} to {after:.3f}" in page
    kept = [path.read_text() for kind in ("json", "md") for path in (tmp_path / "results").rglob(f"*.{kind}")]
    assert len(kept) >= 8
    assert not any(str(data) in text for text in kept)
    assert any("DIR/wikitext103_valtest" in text for text in kept)


def test_the_page_is_made_of_the_json(monkeypatch):
    """Nobody edits it by hand."""
    page = (ROOT / "docs" / "results.md").read_text()
    monkeypatch.chdir(ROOT)
    for results in (Path("results"), ROOT / "results"):
        place = Place(None, results=results)
        assert sections.page_path(place) == Path("docs/results.md")
        assert sections.page_text(place) == page


def test_the_page_of_other_results_stands_among_them(tmp_path, monkeypatch):
    own = tmp_path / "own"
    message = f"results='{own}' holds no results: name a folder that reproduce wrote to"
    for _ in range(2):  # without the folder, and with
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            invoke("page", "--results", own)
        assert not list(tmp_path.glob("own/*"))
        own.mkdir(exist_ok=True)
    write_run(own, "quality/twin-s0", curve=[[500, 100.0], [1000, 40.0]])
    monkeypatch.chdir(tmp_path)
    assert invoke("page", "--results", own).exit_code == 0  # which needs no recipes
    assert {path.name for path in tmp_path.iterdir()} == {"own"}
    page = (own / "results.md").read_text()
    links = re.findall(r"\]\((.+?)\)", page)
    assert "./quality/quality.png" in links
    assert all((own / link).exists() for link in links)
