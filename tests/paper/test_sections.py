"""From raw text to the page of results, with tiny models; and the verdicts on the paper's claims."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from paper.experiments import Workspace
from paper.jobs import ORIGIN, write_records

from linformers import plots
from linformers.errors import UserError
from paper import (
    chosen_k,
    experiments,
    figure3,
    long,
    overview,
    page,
    quality,
    recall,
    sections,
    table1,
    table2,
    table3,
)

ROOT = Path(__file__).parents[2]
TRAINED = (figure3, table2, quality, recall, chosen_k, long)


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(name, folder, *arguments):
    """The exit code of `python -m paper.NAME`."""
    folders = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    with pytest.raises(SystemExit) as ended:
        sections.main([name], [*folders, *map(str, arguments)])
    return ended.value.code


def small(folder, data):
    return Workspace(data, folder / "runs", folder / "results", small=True)


def write_runs(folder, section, runs):
    """Records of runs, each of its name and result."""
    path = folder / section / "runs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    origin = dict.fromkeys(("key", *ORIGIN), "")
    write_records(path, before | {name: {**origin, "result": result} for name, result in runs.items()})


def tuned(accuracy, deviation=0.01, **more):
    seeds = [{"accuracy": accuracy, "validation_accuracy": accuracy}]
    return {"accuracy": [accuracy, deviation], "seeds": seeds, "note": "", **more}


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
    assert records.keys() == {"n512-k128-w32"}
    record = records["n512-k128-w32"]
    assert [step for step, _ in record["result"]["curve"]] == [4, 8]
    assert record["description"]["recipe"]["model"]["local_window"] == 4
    text = (tmp_path / "results" / "results.md").read_text()
    assert text.startswith("# A test of the whole path")
    assert f"| missing | missing | missing | missing | {record['result']['perplexity']:.1f} |" in text
    assert "“Better with k”" not in text
    links = [link for link in re.findall(r"\]\((.+?)\)", text) if link.endswith(".png")]
    assert "figure3/figure3.png" in links
    assert all((tmp_path / "results" / link).stat().st_size > 1000 for link in links)
    kept = [path.read_text() for path in (tmp_path / "results").rglob("*.*") if path.suffix in (".json", ".md")]
    assert not any(str(data) in own for own in kept)
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "1 of 1 runs are recorded" in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_recall(data, tmp_path):
    assert run("recall", tmp_path, "--data", data, "--small", "--only", "k128-w32-s0") == 0
    rows = recall.collect(small(tmp_path, data))["rows"]
    assert rows["twin"] is None
    accuracy, deviation = rows["k=128 w=32"]
    assert 0 <= accuracy <= 1
    assert deviation is None
    assert f"| k=128 w=32 | {100 * accuracy:.1f} |" in (tmp_path / "results" / "results.md").read_text()


@pytest.mark.usefixtures("forked")
def test_chosen_k(data, tmp_path):
    """The choices are not known before the twin is trained."""
    assert run("chosen_k", tmp_path, "--data", data, "--small", "--at-once", "2") == 0
    work = small(tmp_path, data)
    rows = chosen_k.collect(work)["rows"]
    assert "chosen" in rows
    assert all(row["perplexity"] > 1 and len(row["lengths"]) == 2 for row in rows.values())
    assert set(chosen_k.names(work)) == {job.name for job in chosen_k.jobs(work)}


@pytest.mark.usefixtures("forked")
def test_long_documents(data, tmp_path):
    assert run("long", tmp_path, "--data", data, "--small", "--only", "Linformer-k128-w32*") == 0
    rows = long.collect(small(tmp_path, data))["rows"]
    assert rows[long.TWIN]["trial"] is rows[long.TWIN]["pretrained"] is None
    assert all(row["cell"]["seconds"] > 0 and row["cell"]["peak_bytes"] > 0 for row in rows.values())
    assert all(0 <= own <= 1 for own in (rows[long.LOCAL]["outcome"].accuracy, rows[long.LOCAL]["pretrained"]))


@pytest.mark.usefixtures("forked")
def test_a_task_of_table_2(data, tmp_path):
    assert run("table2", tmp_path, "--data", data, "--small", "--only", "n512-twin", "--only", "n512-twin-imdb") == 0
    ((mean, deviation),) = [own for own in table2.collect(small(tmp_path, data))["rows"][0]["ours"].values() if own]
    assert 0 <= mean <= 100
    assert deviation is None
    text = (tmp_path / "results" / "results.md").read_text()
    assert f"| 512 | Transformer twin | missing (93.1) | {mean:.1f} (94.1) | missing (90.9) |" in text


@pytest.mark.usefixtures("forked")
def test_measured_sections_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paper.steps.DRAWN", ["twin", "k=128 w=32", "k=128 w=32, plain start"])
    for name in ("table1", "table3", "steps"):
        assert run(name, tmp_path, "--small") == 0
    text = (tmp_path / "results" / "results.md").read_text()
    assert "by the peak of a pass" in text
    assert "`python -m paper.figure3 --data DIR --small`" in text
    steps = json.loads((tmp_path / "results" / "steps" / "steps.json").read_text())
    assert steps["tokens"] == 8 * 64
    assert steps["seconds"].keys() == {"twin", "k=128 w=32"}
    assert run("table1", tmp_path, "--small") == 0
    assert "exists; delete it to measure again" in capsys.readouterr().out.replace("\n", " ")
    assert run("table1", tmp_path) == 2  # tiny results do not mix with others
    assert "holds results of tiny models" in capsys.readouterr().err
    (tmp_path / "results" / experiments.SMALL_MARK).unlink()
    assert run("table1", tmp_path, "--small") == 2


def test_nothing_tiny_among_the_results():
    work = sections.workspace(sections.parser(["figure3"]).parse_args(["--small", "--runs", "mine"]))
    assert (work.runs, work.results) == (Path("mine"), Path("mine/results"))
    assert sections.workspace(sections.parser(["figure3"]).parse_args([])) == Workspace()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("figure3", [], "data is missing"),
        ("figure3", ["--data", "/nowhere"], "data='/nowhere'"),
        ("figure3", ["--data", "docs"], "has no folder wiki"),
        ("figure3", ["--data", "docs", "--only", "n512"], "only='n512' matches none of 19 runs"),
        ("table3", ["--only", "k32"], "only='k32'"),
        ("table1", ["--at-once", "0"], "at_once=0"),
        ("table1", ["--minutes", "0"], "minutes=0.0"),
    ],
)
def test_wrong_arguments(name, arguments, message, tmp_path, capsys):
    assert run(name, tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("forked")
def test_a_corpus_of_other_text_is_refused(data, tmp_path):
    made = experiments.corpus(small(tmp_path, data), "wiki")
    assert experiments.corpus(small(tmp_path, data), "wiki") == made
    other = tmp_path / "other"
    shutil.copytree(data / "wiki", other / "wiki")
    (other / "wiki" / "validation.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(UserError, match="made from other files"):
        experiments.corpus(small(tmp_path, other), "wiki")


@pytest.mark.parametrize("section", TRAINED, ids=lambda own: own.__name__)
def test_recorded_runs_are_not_repeated(section, tmp_path, monkeypatch):
    """Every run has its own name and hash, and those of the repository are known by theirs."""
    work = Workspace(tmp_path, tmp_path / "runs")
    corpora = {"wiki-books": "figure3/n512-twin", "wiki": "quality/twin-s0"}
    corpora["imdb-bytes"] = "long/Linformer-k256-masked-bytes"
    data = {"recall-task": "recall/twin-s0", chosen_k.TEXTS: chosen_k.CHOICE}
    data |= {task: f"table2/n512-twin-{task}" for task in experiments.TASKS}

    def recorded(name, field):
        return work.records.read(name)["description"][field]

    monkeypatch.setattr(experiments, "corpus_hash", lambda folder: recorded(corpora[folder.name], "corpus"))
    for module in (experiments, recall, chosen_k):
        monkeypatch.setattr(module, "hashes", lambda folder: recorded(data[folder.name], "data"))
    for module in (figure3, table2, quality, recall, chosen_k):
        monkeypatch.setattr(module, "corpus", lambda work, name: Path(name), raising=False)
    monkeypatch.setattr(experiments, "prepare", lambda work, name, *rest, **options: Path(name))
    monkeypatch.setattr(recall, "files", lambda work: Path("recall-task"))
    monkeypatch.setattr(Path, "exists", lambda path: "-start-" in path.name or path.is_file())
    every = section.jobs(work)
    assert {job.name for job in every} == set(section.names(work))
    assert len({job.name for job in every}) == len({job.key for job in every}) == len(every)
    records = {job.name: work.records.read(job.name) for job in every}
    known = [job for job in every if records[job.name] and records[job.name]["key"] != "stopped"]
    assert len(known) >= 6
    assert [job.name for job in known if work.records.find(job) is None] == []


def test_the_page_is_rendered_from_the_json():
    """Nobody edits it by hand."""
    assert page.render(Workspace(), sections.load(sections.SECTIONS)) == (ROOT / "docs" / "results.md").read_text()


def test_claims_of_figure_3(tmp_path):
    ends = {"n512-twin": 40, "n512-k64-layerwise": 80, "n512-k128-layerwise": 60, "n512-k256-layerwise": 41}
    ends |= {"n1024-twin": 50, "n1024-k128-layerwise": 76, "n1024-k256-layerwise": 52, "n4096-k256-layerwise": 90}
    write_runs(tmp_path, "figure3", {name: {"curve": [[1, 150.0], [2, float(end)]]} for name, end in ends.items()})
    text = text_of(figure3, tmp_path)
    assert "“Better with k” at n = 512 is confirmed" in text
    assert "n = 512, k = 128, the paper's cell, is not seen at this budget: 1.50 times" in text
    assert "n = 1024, k = 256, the paper's cell, is confirmed: 1.04 times" in text
    assert "at k = 256 is confirmed: 1.02 at n = 512, 1.04 at n = 1024." in text
    assert "n = 4096 did not leave the plateau" in text
    assert "“k, not n/k, decides” at k = 128 is confirmed: from n = 512 to 1024 the ratio to the twin goes" in text
    assert "from 1.50 to 1.52 at the same k, and from 2.00 to 1.52 at the same n/k" in text
    assert "| Transformer twin | 40.0 | 50.0 | missing | missing |" in text
    assert "Sharing costs little" not in text
    write_runs(tmp_path, "figure3", {"n512-k128-layerwise": {"curve": [[2, 90.0]]}})
    assert "“Better with k” at n = 512 is not seen" in text_of(figure3, tmp_path)


def test_the_panels_of_figure_3(tmp_path, monkeypatch):
    names = ("n512-twin", "n512-k128-layerwise", "n512-k256-layerwise", "n1024-twin", "n4096-k256-layerwise-w32")
    write_runs(tmp_path, "figure3", {name: {"curve": [[1, 100.0], [2, 50.0]]} for name in names})
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    figure3.draw(figure3.collect(Workspace(results=tmp_path)), tmp_path)
    short, _, sharing, last = figures[0].axes
    assert {line.get_label() for line in short.get_lines()} == {"Transformer", "Linformer k=128", "Linformer k=256"}
    assert [line.get_label() for line in sharing.get_lines()] == ["layerwise"]
    lines = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in last.get_lines()}
    assert lines.keys() == {"n=512", "n=512, twin", "n=1024, twin", "n=4096 w=32"}
    assert lines["n=512"][0] == lines["n=512, twin"][0]
    assert [lines[label][1] for label in ("n=512", "n=512, twin", "n=4096 w=32")] == ["-", "--", "-"]


def test_no_two_models_of_a_figure_look_the_same(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    quality.draw(quality.collect(Workspace()), tmp_path)
    overview.draw(overview.collect(Workspace()), tmp_path)
    for axes in [axes for figure in figures for axes in figure.axes]:
        looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()]
        assert len(set(looks)) == len(looks) > 3


def test_claims_of_table_2(tmp_path):
    for variant, accuracy in {"n512-twin": 0.9, "n512-k256-layerwise": 0.897, "n512-k128-w32": 0.91}.items():
        write_runs(tmp_path, "table2", {f"{variant}-{task}": tuned(accuracy) for task in experiments.TASKS})
    claims = table2.collect(Workspace(results=tmp_path))["claims"]
    assert claims["comparable"]["verdict"] == "confirmed"
    assert claims["comparable"]["best"] == (512, "Linformer, 256, shared kv, layer")
    assert "| 512 | Transformer twin | 90.0 ± 1.0 (93.1) |" in text_of(table2, tmp_path)
    for name, perplexity in (("n512-twin", 18.1), ("n512-twin-repeated", 18.2)):
        write_runs(tmp_path, "figure3", {name: {"perplexity": perplexity}})
    write_runs(tmp_path, "table2", {"n512-twin-qnli-half-rate": tuned(0.96)})
    record = table2.collect(Workspace(results=tmp_path))
    assert record["claims"]["twin"] == pytest.approx(91.5)  # with the best of its rates
    assert record["claims"]["comparable"]["verdict"] == "not seen at this budget"
    assert record["repeated"] == {"Transformer twin (n = 512)": [18.1, 18.2]}


def test_differences_below_the_noise_decide_nothing():
    names = [f"Linformer, 256{suffix}" for suffix in table2.SHARING.values()]
    averages = {(512, name): float(points) for points, name in enumerate(names)}
    assert [own["verdict"] for own in table2.layerwise(averages)] == ["confirmed"]
    assert [own["verdict"] for own in table2.layerwise({cell: -own for cell, own in averages.items()})] == [
        "not seen at this budget"
    ]
    (own,) = table2.layerwise(averages, dict.fromkeys(averages, 1.0))
    assert own["verdict"] == "undecided: the difference is below 0.5 points"
    averages = {(512, "Linformer, 256"): 82.0, (512, "Linformer, 128"): 80.0}
    assert list(table2.k_decides(averages)) == []
    for average, verdict in ((81.5, "confirmed"), (80.5, "not seen"), (81.2, "undecided")):
        (own,) = table2.k_decides(averages | {(1024, "Linformer, 256"): average})
        assert own["verdict"].startswith(verdict)


def test_the_best_trial_is_chosen_on_the_validation_set(tmp_path):
    write_runs(tmp_path, "long", {"Linformer-k128-w32": tuned(0.64, None)})
    for rate, tested, validated in ((0.0001, 0.61, 0.65), (0.001, 0.67, 0.62)):
        own = {"accuracy": [tested, None], "seeds": [{"validation_accuracy": validated}]}
        write_runs(tmp_path, "long", {f"Linformer-k128-w32-rate-{rate:g}": own})
    stopped = {"seeds": [{"validation_accuracy": 0.7}], "stopped_after": 8}
    write_runs(tmp_path, "long", {"Linformer-k128-w4": {"accuracy": [0.68, None], **stopped}})
    write_runs(tmp_path, "long", {"Linformer-k128-w2-4-8-32": {"accuracy": None, **stopped}})
    text = text_of(long, tmp_path)
    assert "| Linformer k=128 w=32 | – | 61.0 (best of 3) |" in text
    assert "Linformer k=128 w=32, from scratch: 61.0, below the Transformer's published 64.27." in text
    assert "68.0, above the Transformer's published 64.27. The run was cut off after 8 of 12 epochs." in text
    assert (
        "| 12 | 0.0005 | 0.1 | missing | missing | 64.0 (64.0) | 68.0 (70.0; 8 epochs) | – (70.0; 8 epochs) |" in text
    )
    assert "| Linformer k=128 w=2-4-8-32 | – | cut off |" in text


@pytest.mark.parametrize(("chosen", "gains"), [(49.0, True), (49.9, False)])
def test_gains_of_a_chosen_k(chosen, gains):
    values = {"uniform": 50.0, "chosen": chosen, "increasing": 52.0, "decreasing": 51.0}
    assert chosen_k.claims(values) == {"gains": gains, "falls": "confirmed", "falling_gains": False}


def test_secrets(data):
    sizes = recall.Sizes(40, 8, 50, 30, 40)
    found = recall.examples([data / "wiki"], sizes, seed=0)
    assert [sum(own["label"] == secret for own in found) for secret in recall.SECRETS] == [6] * 8
    for own in found:
        before, after = own["text"].split(f"The secret word is {own['label']}.")
        assert 30 <= len(before.split()) <= 40
        assert len(before.split()) + len(after.split()) == 50
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
    quality.draw(quality.collect(Workspace(results=tmp_path / "none")), tmp_path)
    assert not list(tmp_path.glob("*.png"))  # nothing is drawn without runs


def test_speeds_are_relative_to_the_baseline():
    def cell(model, seconds):
        return {"model": f"{model}, compiled", "task": "inference", "n": 8192, "seconds": seconds}

    cells = [cell(overview.BASELINE, 1.0), cell("Linformer k=128", 0.5), cell("Linformer k=256", None)]
    assert overview.times(cells)["speeds"]["Linformer k=128"] == [(8192, 2.0)]
    assert overview.times(cells[1:])["speeds"] == {"Linformer k=128": []}  # the baseline did not fit


def cell(model, n, k, seconds, batch, peak=None):
    own = {"model": model, "n": n, "k": k, "task": "inference", "seconds": seconds}
    return {**own, "largest_batch": batch, "peak_bytes": peak}


def test_table_3_next_to_the_papers():
    cells = [cell(table3.UNFUSED, 512, None, 1.6, 10), cell(table3.FUSED, 512, None, 0.8, 10)]
    cells += [cell("Linformer k=128", 512, 128, 1.0, 20), cell("Linformer k=256", 512, 256, 1.5, 16)]
    cells += [cell(table3.UNFUSED, 65536, None, None, None), cell(table3.FUSED, 65536, None, 1.0, 1)]
    cells += [cell("Linformer k=128", 65536, 128, 1.0, 20)]
    found = table3.summary(cells)
    assert found["tables"]["time"][512] == [(1.6, 1.5), (pytest.approx(1.6 / 1.5), 1.3)]
    assert found["tables"]["time"][65536][0] == (None, 20)
    assert found["beaten"]["time"] == {"count": 1, "of": 2, "missed": [(512, 256)]}
    assert found["beaten"]["memory"]["count"] == 2
    assert found["fusion"] == {512: 2.0}
    assert found["against_fused"] == {512: 0.8, 65536: 1.0}
    cells = [cell(table3.UNFUSED, 512, None, 1.0, None, 300), cell("Linformer k=128", 512, 128, 1.0, None, 100)]
    assert table3.savings(cells, "memory") == {(512, 128): 3.0}


def test_the_papers_sizes_need_a_gpu(monkeypatch):
    monkeypatch.setattr(table3, "best_device", lambda: "cpu")
    with pytest.raises(UserError, match="needs a GPU"):
        table3.measure(Workspace())


def test_growth_is_the_slope_at_the_longest_lengths():
    assert table1.exponent([1, 2, 4, 8, 16], [5.0, 2.0, 8.0, 32.0, 128.0]) == pytest.approx(2)
    assert table1.exponent([1, 2, 4], [1.0, 2.0, None]) == pytest.approx(1)
    assert table1.exponent([1, 2], [1.0, None]) is None
    seconds = {"Linformer": [1.0, 2.0, 4.0], "Transformer": [4.0, 16.0, 64.0]}
    record = {"lengths": [128, 256, 512], "seconds": seconds}
    found = table1.claim(record, {"Linformer": 1.0, "Transformer": 2.0})
    assert (found["verdict"], found["ratios"]) == ("confirmed", {128: 4.0, 512: 16.0})
    assert table1.claim(record, {"Linformer": 1.6, "Transformer": 2.0})["verdict"] == "not seen at this budget"
    assert table1.claim(record, {"Linformer": None, "Transformer": 2.0}) is None


def test_a_recurrent_layer_continues_from_piece_to_piece(monkeypatch):
    layer, x = table1.Recurrent(), torch.randn(2, 10, table1.HIDDEN)
    whole = layer(x)
    monkeypatch.setattr(table1.Recurrent, "PIECE", 4)
    torch.testing.assert_close(layer(x), whole)
