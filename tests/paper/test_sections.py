"""From raw text to the page of results, with tiny models; and the verdicts on the paper's claims."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from paper.experiments import Workspace
from paper.jobs import ORIGIN, write_records
from paper.overview import BASELINE, times

from linformers import plots
from linformers.errors import UserError
from linformers.training.recipe import read
from paper import chosen_k, experiments, figure3, length, long, page, quality, recall, sections, table1, table2, table3

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(name, folder, *arguments):
    """The exit code of `python -m paper.NAME`."""
    folders = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    with pytest.raises(SystemExit) as ended:
        sections.main([name], [*folders, *map(str, arguments)])
    return ended.value.code


def write_runs(folder, section, runs):
    """Records of runs, each of its name and result."""
    path = folder / section / "runs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    origin = dict.fromkeys(("key", *ORIGIN), "")
    write_records(path, before | {name: {**origin, "result": result} for name, result in runs.items()})


def tuned(accuracy):
    return {"accuracy": [accuracy, 0.01], "seeds": [{"accuracy": accuracy, "validation_accuracy": accuracy}]}


def text_of(module, folder):
    """The section of the page, from records in a folder."""
    work = Workspace(results=folder)
    name = module.__name__.partition(".")[2]
    return page.section_text(page.environment(), name, module.collect(work), work)


@pytest.mark.usefixtures("forked")
def test_one_cell_of_figure_3(data, tmp_path, capsys):
    arguments = ("figure3", tmp_path, "--data", data, "--small", "--only", "n512-k128-w32")
    assert run(*arguments) == 0
    records = json.loads((tmp_path / "results" / "figure3" / "runs.json").read_text())
    (record,) = records.values()
    assert [step for step, _ in record["result"]["curve"]] == [4, 8]
    assert record["description"]["recipe"]["model"]["local_window"] == 4
    text = (tmp_path / "results" / "results.md").read_text()
    assert text.startswith("# A test of the whole path")
    assert f"| missing | missing | missing | missing | {record['result']['perplexity']:.1f} |" in text
    assert "“Better with k”" not in text
    assert (tmp_path / "results" / "figure3" / "figure3.png").stat().st_size > 1000
    assert str(data) not in text + json.dumps(records)
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "1 of 1 runs are recorded" in capsys.readouterr().out
    shutil.copytree(data, tmp_path / "other")
    (tmp_path / "other" / "wiki" / "validation.jsonl").write_text('{"text": "other"}\n')
    assert run("figure3", tmp_path, "--data", tmp_path / "other", "--small") == 2
    assert "made from other files" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("section", "only", "runs"),
    [
        (recall, ["k128-w32-s0"], {"k128-w32-s0"}),
        (chosen_k, [], {"choice", "chosen"}),  # which are known when the twin is trained
        (long, ["Linformer-k256*"], {"Linformer-k256", "Linformer-k256-masked-bytes", "Linformer-k256-pretrained"}),
        (table2, ["n512-twin", "n512-twin-imdb"], {"n512-twin-imdb"}),
    ],
)
def test_other_sections(section, only, runs, data, tmp_path):
    name, patterns = section.__name__.partition(".")[2], [part for own in only for part in ("--only", own)]
    assert run(name, tmp_path, "--data", data, "--small", "--at-once", "2", *patterns) == 0
    work = Workspace(data, tmp_path / "runs", tmp_path / "results", small=True)
    assert work.records.section(name).keys() >= runs
    assert set(section.names(work)) == {job.name for job in section.jobs(work)}
    text = (tmp_path / "results" / "results.md").read_text()
    assert f"Not run yet: `python -m paper.{name} " not in text


@pytest.mark.usefixtures("forked")
def test_measured_sections_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paper.steps.DRAWN", ["twin", "k=128 w=32", "k=128 w=32, plain start"])
    for name in ("table1", "table3", "steps"):
        assert run(name, tmp_path, "--small") == 0
    steps = json.loads((tmp_path / "results" / "steps" / "steps.json").read_text())
    assert (steps["tokens"], list(steps["seconds"])) == (8 * 64, ["twin", "k=128 w=32"])
    assert run("table1", tmp_path, "--small") == 0
    assert "exists; delete it to measure again" in capsys.readouterr().out.replace("\n", " ")
    assert run("table1", tmp_path) == 2  # tiny results do not mix with others
    assert "holds results of tiny models" in capsys.readouterr().err
    (tmp_path / "results" / experiments.SMALL_MARK).unlink()
    assert run("table1", tmp_path, "--small") == 2
    tiny = sections.workspace(sections.parser(["table1"]).parse_args(["--small"]))
    assert (tiny.runs, tiny.results) == (Path("runs/paper-small"), Path("runs/paper-small/results"))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("figure3", [], "data is missing"),
        ("figure3", ["--data", "docs"], "data='docs'"),
        ("figure3", ["--data", "docs", "--only", "n512"], "only='n512' matches none of 19 runs"),
        ("table1", ["--at-once", "0"], "at_once=0"),
        ("table1", ["--minutes", "0"], "minutes=0.0"),
    ],
)
def test_wrong_arguments(name, arguments, message, tmp_path, capsys):
    assert run(name, tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("section", [figure3, table2, quality, recall, chosen_k, long])
def test_recorded_runs_are_not_repeated(section, tmp_path, monkeypatch):
    """Every run has its own name and hash, and those of the repository are known by theirs."""
    work = Workspace(tmp_path, tmp_path / "runs")
    known = {"wiki-books": "figure3/n512-twin", "wiki": "quality/twin-s0", "recall-task": "recall/twin-s0"}
    known |= {"imdb-bytes": "long/Linformer-k256-masked-bytes", chosen_k.TEXTS: chosen_k.CHOICE}
    known |= {task: f"table2/n512-twin-{task}" for task in experiments.TASKS}
    described = {folder: work.records.read(name)["description"] for folder, name in known.items()}
    monkeypatch.setattr(experiments, "corpus_hash", lambda folder: described[folder.name]["corpus"])
    for module in (experiments, recall, chosen_k):
        monkeypatch.setattr(module, "hashes", lambda folder: described[folder.name]["data"])
    for module in (figure3, table2, quality, recall, chosen_k):
        monkeypatch.setattr(module, "corpus", lambda work, name: Path(name), raising=False)
    monkeypatch.setattr(experiments, "prepare", lambda work, name, *rest, **options: Path(name))
    monkeypatch.setattr(recall, "files", lambda work: Path("recall-task"))
    monkeypatch.setattr(Path, "exists", lambda path: "-start-" in path.name or path.is_file())
    every = section.jobs(work)
    assert {job.name for job in every} == set(section.names(work))
    assert len({job.name for job in every}) == len({job.key for job in every}) == len(every)
    done = [job for job in every if (work.records.read(job.name) or {"key": "stopped"})["key"] != "stopped"]
    assert len(done) >= 6
    assert [job.name for job in done if work.records.find(job) is None] == []


def test_the_page_is_rendered_from_the_json():
    """Nobody edits it by hand."""
    assert page.render(Workspace(), sections.load(sections.SECTIONS)) == (ROOT / "docs" / "results.md").read_text()


def test_claims_of_figure_3(tmp_path):
    ends = {"n512-twin": 40, "n512-k64-layerwise": 80, "n512-k128-layerwise": 60, "n512-k256-layerwise": 41}
    ends |= {"n1024-twin": 50, "n1024-k128-layerwise": 76, "n1024-k256-layerwise": 52, "n4096-k256-layerwise": 90}
    write_runs(tmp_path, "figure3", {name: {"curve": [[1, 150.0], [2, float(end)]]} for name, end in ends.items()})
    record = figure3.collect(Workspace(results=tmp_path))
    claims, seen, unseen = record["claims"], "confirmed", "not seen at this budget"
    assert claims["better_with_k"]["verdict"] == seen
    assert [own["verdict"] for own in claims["on_par"]] == [unseen, seen, seen]  # of which two are the paper's
    length = [(own["k"], own["verdict"], len(own["ratios"])) for own in claims["length"]]
    assert length == [(256, seen, 2), (128, seen, 2)]
    assert [own["verdict"] for own in claims["k_decides"]] == [seen, seen]
    assert claims["k_decides"][0]["same_ratio"] == (2.0, 1.52)
    assert claims["sharing"] is None
    assert record["stuck"] == ["n=4096"]
    write_runs(tmp_path, "figure3", {"n512-k128-layerwise": {"curve": [[2, 90.0]]}})
    assert figure3.collect(Workspace(results=tmp_path))["claims"]["better_with_k"]["verdict"] == unseen


def test_no_two_models_of_a_figure_look_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "save", save := Mock())
    for section in sections.load(("quality", "overview", "figure3")).values():
        section.draw(section.collect(Workspace()), tmp_path)
    panels = [axes for call in save.call_args_list for axes in call.args[0].axes]
    for axes in panels:
        looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()]
        assert len(set(looks)) == len(looks) > 3
    colors = {line.get_label(): line.get_color() for line in panels[-1].get_lines()}  # of Figure 3 d
    assert colors["n=512"] == colors["n=512, twin"] != colors["n=4096 w=32"]


def test_claims_of_table_2(tmp_path):
    for variant, accuracy in {"n512-twin": 0.9, "n512-k256-layerwise": 0.897, "n512-k128-w32": 0.91}.items():
        write_runs(tmp_path, "table2", {f"{variant}-{task}": tuned(accuracy) for task in experiments.TASKS})
    comparable = table2.collect(Workspace(results=tmp_path))["claims"]["comparable"]
    assert (comparable["verdict"], comparable["best"]) == ("confirmed", (512, "Linformer, 256, shared kv, layer"))
    write_runs(tmp_path, "figure3", {"n512-twin": {"perplexity": 18.1}, "n512-twin-repeated": {"perplexity": 18.2}})
    write_runs(tmp_path, "table2", {"n512-twin-qnli-half-rate": tuned(0.96)})
    record = table2.collect(Workspace(results=tmp_path))
    assert record["claims"]["twin"] == pytest.approx(91.5)  # at the best of its rates
    assert record["claims"]["comparable"]["verdict"] == "not seen at this budget"
    assert list(record["repeated"].values()) == [[18.1, 18.2]]


def test_differences_below_the_noise_decide_nothing():
    averages = {(512, f"Linformer, 256{suffix}"): float(i) for i, suffix in enumerate(table2.SHARING.values())}
    others = [averages, {cell: -own for cell, own in averages.items()}, dict.fromkeys(averages, 1.0)]
    verdicts = [own["verdict"] for other in others for own in table2.layerwise(averages, other)]
    assert verdicts == ["confirmed", *["undecided: the difference is below 0.5 points"] * 2]  # unless averages agree
    averages = {(512, "Linformer, 256"): 82.0, (512, "Linformer, 128"): 80.0}
    assert list(table2.k_decides(averages)) == []
    for average, verdict in ((81.5, "confirmed"), (80.5, "not seen"), (81.2, "undecided")):
        (own,) = table2.k_decides(averages | {(1024, "Linformer, 256"): average})
        assert own["verdict"].startswith(verdict)


def test_the_best_trial_is_chosen_on_the_validation_set(tmp_path):
    def trial(tested, validated, **more):
        return {"accuracy": tested and [tested, None], "seeds": [{"validation_accuracy": validated}], **more}

    rates = {"": trial(0.64, 0.64), "-rate-0.0001": trial(0.61, 0.65), "-rate-0.001": trial(0.67, 0.62)}
    write_runs(tmp_path, "long", {f"Linformer-k128-w32{suffix}": own for suffix, own in rates.items()})
    write_runs(tmp_path, "long", {"Linformer-k128-w4": trial(0.68, 0.7, stopped_after=8)})
    write_runs(tmp_path, "long", {"Linformer-k128-w2-4-8-32": trial(None, 0.7, stopped_after=8)})
    text = text_of(long, tmp_path)
    assert "| Linformer k=128 w=32 | – | 61.0 (best of 3) |" in text
    assert "| 0.0005 | 0.1 | missing | missing | 64.0 (64.0) | 68.0 (70.0; 8 epochs) | – (70.0; 8 epochs) |" in text
    assert "| Linformer k=128 w=2-4-8-32 | – | cut off |" in text


def test_gains_of_a_chosen_k():
    values = {"uniform": 50.0, "chosen": 49.9, "increasing": 52.0, "decreasing": 51.0}
    assert chosen_k.claims(values) == {"gains": False, "falls": "confirmed", "falling_gains": False}
    assert chosen_k.claims(values | {"chosen": 49.0})["gains"] is True


def test_secrets(data):
    sizes = recall.Sizes(40, 8, 50, 30, 40)
    found = recall.examples([data / "wiki"], sizes, seed=0)
    assert [sum(own["label"] == secret for own in found) for secret in recall.SECRETS] == [6] * 8
    for own in found:
        before, after = (part.split() for part in own["text"].split(f"The secret word is {own['label']}."))
        assert 30 <= len(before) <= 40
        assert len(before) + len(after) == 50
    with pytest.raises(UserError, match="280 passages of 50 words, but 1008"):
        recall.examples([data / "wiki"], sizes._replace(train=1000), seed=0)


def test_quality(tmp_path):
    curves = {"twin-s0": 40.0, "twin-s1": 42.0, "twin-plain-start-s0": 82.0, "k128-w32-s0": 20.5, "k64-w32-s1": 20.5}
    write_runs(tmp_path, "quality", {name: {"curve": [[500, 100.0], [1000, end]]} for name, end in curves.items()})
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "steps.json").write_text(json.dumps({"seconds": {"twin": 0.04, "k=128 w=32": 0.02}}))
    text = text_of(quality, tmp_path)
    assert "| k=64 w=32 | 1 | 20.5 | 0.50 | 0.25 | – |" in text
    assert "| k=128 w=32 | 1 | 20.5 | 0.50 | 0.25 | 0.50 |" in text
    assert "| twin | 2 | 41.0 ± 1.4 | 1.00 | 0.50 | 1.00 |" in text


def test_speeds_are_relative_to_the_baseline():
    named = {BASELINE: 1.0, "Linformer k=128": 0.5, "Linformer k=256": None}
    cells = [{"model": f"{m}, compiled", "task": "inference", "n": 8192, "seconds": s} for m, s in named.items()]
    assert times(cells)["speeds"]["Linformer k=128"] == [(8192, 2.0)]
    assert times(cells[1:])["speeds"] == {"Linformer k=128": []}  # the baseline did not fit


def test_table_3_next_to_the_papers():
    def cell(model, n, k, seconds, batch, peak=None):
        own = {"model": model, "n": n, "k": k, "task": "inference", "seconds": seconds}
        return {**own, "largest_batch": batch, "peak_bytes": peak}

    short = [cell(table3.UNFUSED, 512, None, 1.6, 10), cell(table3.FUSED, 512, None, 0.8, 10)]
    short += [cell("Linformer k=128", 512, 128, 1.0, 20), cell("Linformer k=256", 512, 256, 1.5, 16)]
    long = [cell(table3.FUSED, 65536, None, 1.0, 1), cell("Linformer k=128", 65536, 128, 1.0, 20)]
    found = table3.summary([*short, *long, cell(table3.UNFUSED, 65536, None, None, None)])
    assert found["tables"]["time"][512] == [(1.6, 1.5), (pytest.approx(1.6 / 1.5), 1.3)]
    assert found["tables"]["time"][65536][0] == (None, 20)
    assert found["beaten"]["time"] == {"count": 1, "of": 2, "missed": [(512, 256)]}
    assert (found["fusion"], found["against_fused"]) == ({512: 2.0}, {512: 0.8, 65536: 1.0})
    cells = [cell(table3.UNFUSED, 512, None, 1.0, None, 300), cell("Linformer k=128", 512, 128, 1.0, None, 100)]
    assert table3.savings(cells, "memory") == {(512, 128): 3.0}


def test_growth_is_the_slope_at_the_longest_lengths():
    assert table1.exponent([1, 2, 4, 8, 16], [5.0, 2.0, 8.0, 32.0, 128.0]) == pytest.approx(2)
    assert table1.exponent([1, 2, 4], [1.0, 2.0, None]) == pytest.approx(1)
    assert table1.exponent([1, 2], [1.0, None]) is None
    record = {"lengths": [128, 512], "seconds": {"Linformer": [1.0, 4.0], "Transformer": [4.0, 64.0]}}
    for exponent, verdict in ((1.0, "confirmed"), (1.6, "not seen at this budget")):
        found = table1.claim(record, {"Linformer": exponent, "Transformer": 2.0})
        assert (found["verdict"], found["ratios"]) == (verdict, {128: 4.0, 512: 16.0})


def test_a_recurrent_layer_continues_from_piece_to_piece(monkeypatch):
    layer, x = table1.Recurrent(), torch.randn(2, 10, table1.HIDDEN)
    whole = layer(x)
    monkeypatch.setattr(table1.Recurrent, "PIECE", 4)
    torch.testing.assert_close(layer(x), whole)


def test_runs_of_long_input_have_recipes_and_names_of_their_own():
    work = Workspace()
    names = length.names(work)
    assert len(names) == len(set(names)) > 20
    for name, own in length.VARIANTS.items():
        recipe = read(ROOT / "recipes" / "long.yaml", [f"variant={own.variant}", f"steps={own.steps}", *own.changes])
        assert recipe.batch_size * recipe.max_length == 2**15, name  # tokens of a step
        assert not own.start or own.steps + length.VARIANTS[own.start].steps == length.STEPS
    small = dataclasses.replace(work, small=True)
    assert {name for name in names if "upper" in name} == set(names) - set(length.names(small))
