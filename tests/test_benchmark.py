"""The benchmark: that it measures the right thing, and says what it measured."""

import importlib
import io
import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from linformers import LinformerConfig, plots, provenance
from linformers.benchmark import efficiency, floor, measure, report
from linformers.benchmark.efficiency import FUSED, ROBERTA, UNFUSED, Cell, Contender
from linformers.benchmark.measure import interleaved, peak_memory
from linformers.cli import app
from linformers.markdown import shown_table
from linformers.progress import SILENCE, progress, steps

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}


def test_bench(tmp_path):
    arguments = ["--lengths", "64,128", "--projected", "16,32", "--tokens", "256", "--layers", "2", "--hidden", "64"]
    arguments += ["--task", "inference,training", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "efficiency.json").read_text())
    assert {"command", "commit", "device", "torch", "transformers", "dtype"} <= record.keys()
    assert [(cell["n"], cell["task"], cell["model"]) for cell in record["lengths"]] == [
        (n, task, model)
        for n in (64, 128)
        for task in ("inference", "training")
        for model in (UNFUSED, ROBERTA, FUSED, "Linformer k=16", "Linformer k=32")
    ]
    assert len(record["projected_lengths"]) == 4
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 and cell["floor"] > 0 for cell in record["lengths"])
    for name in ("inference.png", "inference.svg", "training.png", "training.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    page = (tmp_path / "efficiency.md").read_text()
    for text in ("| Linformer k=16 |", "## Milliseconds, training", "is faster than RoBERTa, SDPA", record["torch"]):
        assert text in page


@pytest.mark.parametrize("options", [["--projection", "conv", "--models", "linformer"], ["--models", "twin"]])
def test_no_heads_of_different_k_where_there_are_none(options, tmp_path):
    arguments = ["--lengths", "32,64", "--projected", "4,8", "--tokens", "64", "--layers", "2", "--hidden", "64"]
    result = CliRunner().invoke(app, ["bench", *arguments, *options, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "efficiency.json").read_text())
    assert (len(record["lengths"]), record["projected_lengths"]) == (4 if "linformer" in options else 2, [])


def test_running_out_of_memory_is_an_entry(monkeypatch, tmp_path):
    build = Contender.build

    def fail(self, n, device, dtype):
        if self.name == UNFUSED:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
        return build(self, n, device, dtype)

    monkeypatch.setattr(Contender, "build", fail)
    ((first, *others),) = efficiency.compare([64], [16], tokens=64, device="cpu", **SMALL)
    assert (first.model, first.seconds, first.peak_bytes) == (UNFUSED, None, None)
    assert all(cell.seconds and cell.peak_bytes for cell in others)
    (table, *_) = report.task_tables([first, *others], "inference")
    assert "out of memory" in list(table.columns[1].cells)
    assert UNFUSED not in efficiency.curves([first, *others], efficiency.milliseconds)


def out_of_memory(*arguments, **options):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 25600000000 bytes")


def test_a_floor_that_finds_no_memory_is_an_entry(monkeypatch):
    monkeypatch.setattr(floor, "product_seconds", out_of_memory)
    options = {"tokens": 64, "device": "cpu", "models": ["linformer"], "with_floor": True}
    ((cell,),) = efficiency.compare([64], [16], **options, **SMALL)
    assert cell.seconds > 0
    assert cell.floor is None
    assert list(report.task_tables([cell], "inference")[2].columns[1].cells) == ["–"]


@pytest.mark.parametrize("place", [(Contender, "build"), (torch, "randint")])
def test_where_nothing_fits_nothing_is_claimed_or_plotted(place, monkeypatch, tmp_path):
    monkeypatch.setattr(*place, out_of_memory)
    arguments = ["--lengths", "64", "--projected", "16,32", "--tokens", "64", "--layers", "1", "--hidden", "64"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    cells = json.loads((tmp_path / "efficiency.json").read_text())["lengths"]
    assert {cell["seconds"] for cell in cells} == {None}
    page = (tmp_path / "efficiency.md").read_text()
    assert page.count("| out of memory |") == 3 * len(cells)
    assert "is faster" not in page
    assert page.endswith("There is too little memory to measure what a smaller k saves at n=64.\n")
    assert not list(tmp_path.glob("*.png"))
    plots.efficiency({}, {}, tmp_path / "empty.png")  # no warning of an empty legend


def test_what_was_measured_before_a_crash_is_there(monkeypatch, tmp_path):
    interleaved = efficiency.interleaved
    calls = iter([interleaved, interleaved, lambda runs: 1 / 0])
    monkeypatch.setattr(efficiency, "interleaved", lambda runs, **options: next(calls)(runs))
    arguments = ["--lengths", "64", "--projected", "16", "--tokens", "64", "--layers", "1", "--hidden", "64"]
    arguments += ["--models", "linformer", "--task", "inference,training,inference", "--out", str(tmp_path)]
    assert isinstance(CliRunner().invoke(app, ["bench", *arguments]).exception, ZeroDivisionError)
    cells = json.loads((tmp_path / "efficiency.json").read_text())["lengths"]
    assert [cell["task"] for cell in cells] == ["inference", "training"]


def test_what_cannot_be_made_is_refused_before_measuring():
    settings = report.Settings([64], [7], tokens=64, layers=1, hidden=64, projection="mean")
    with pytest.raises(ValueError, match="projected_length=7 does not divide"):
        settings.check()


def test_a_copy_of_the_code_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("LINFORMERS_COMMIT", "0123abc")
    assert provenance.commit() == "0123abc"


def test_a_commit_is_that_of_this_code(monkeypatch, tmp_path):
    """Neither that of a project which it is installed in, nor needed."""
    monkeypatch.delenv("LINFORMERS_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "lib" / "provenance.py"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "provenance.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    assert provenance.commit() is None
    subprocess.run([*git, "add", "lib"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert len(provenance.commit()) == 40
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert provenance.commit() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a largest batch")
def test_a_cpu_has_no_largest_batch():
    settings = report.Settings([64], [16], tokens=64, layers=1, hidden=64, batches=True)
    with pytest.raises(ValueError, match="batches=True needs a GPU"):
        settings.check()


def test_other_errors_are_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="shape"), measure.memory_errors():
        raise RuntimeError("wrong shape")


def test_contenders_are_the_same_model():
    """The same sizes and number of weights, but for E and RoBERTa's two positions more."""
    models = {
        c.name: c.build(64, "cpu", "float32") for c in efficiency.contenders(64, [16], **SMALL, hidden_dropout_prob=0.0)
    }
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert sizes[UNFUSED] == sizes[FUSED] == sizes["Linformer k=16"] - 64 * 16
    assert sizes[ROBERTA] == sizes[FUSED] + 2 * 64
    ids = torch.randint(5, 90, (2, 64))
    models[FUSED].load_state_dict(models[UNFUSED].state_dict())
    unfused, fused = (models[name].eval()(ids).last_hidden_state for name in (UNFUSED, FUSED))
    torch.testing.assert_close(unfused, fused)
    assert models[UNFUSED].config._attn_implementation == efficiency.PLAIN
    assert models[ROBERTA].config.hidden_dropout_prob == 0.0


def test_no_mask_keeps_a_compiled_roberta_from_fused_attention():
    masks = []

    def look(graph, inputs):
        masks.extend(n.kwargs["attn_mask"] for n in graph.graph.nodes if "scaled_dot_product" in str(n.target))
        return graph

    model = Contender("", None, {**SMALL, "projection": "identity"}, is_roberta=True).build(64, "cpu", "float32")
    torch.compile(model, backend=look)(torch.full((2, 64), 7))
    assert masks == [None, None]


def test_compiled_models_are_measured_too():
    names = [c.name for c in efficiency.contenders(64, [16, 64], compiled=True, **SMALL)]
    assert names == [
        UNFUSED, ROBERTA, f"{ROBERTA}, compiled", FUSED, f"{FUSED}, compiled",
        "Linformer k=16", "Linformer k=16, compiled",
    ]  # fmt: skip


def test_local_windows_are_measured_too():
    models = efficiency.contenders(64, [16], models=["linformer"], windows=[4], **SMALL)
    assert [c.name for c in models] == ["Linformer k=16", "Linformer k=16 w=4"]
    assert [c.config(64).local_windows for c in models] == [(0, 0), (4, 4)]
    cells = [*cells_of(FUSED, {64: 2.0}), *cells_of("Linformer k=16", {64: 3.0}, 16)]
    cells += cells_of("Linformer k=16 w=4", {64: 1.0}, 16)
    assert report.crossovers(cells, "inference")[1:] == [
        f"inference: Linformer k=16 w=4 is faster than {FUSED} from n=64 on."
    ]


def test_gains_over_roberta_and_the_twin():
    cells = [*cells_of(f"{ROBERTA}, compiled", {64: 3.0, 128: 4.0}), *cells_of(FUSED, {64: 2.0, 128: None})]
    (table, *_) = report.task_tables([*cells, *cells_of("Linformer k=16", {64: 1.0, 128: 2.0}, 16)], "inference")
    assert table.title.endswith(f"(× faster than {ROBERTA}, compiled / {FUSED})")
    assert [list(column.cells)[-1] for column in table.columns[1:]] == [
        "1,000 (3.00× / 2.00×)",
        "2,000 (2.00× / –)",
    ]


def test_training_leaves_no_gradient_behind():
    model = Contender("", 16, {**SMALL, "projected_length": 16}).build(64, "cpu", "float32")
    run = efficiency.make_run(model, torch.full((2, 64), 7), "training")
    seen = []
    model.embeddings.word_embeddings.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    run()
    assert model.training
    assert seen[0] > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_products_are_those_of_the_model():
    """The products of the floor are the FLOPs that torch counts, those within attention aside."""
    from torch.utils.flop_counter import FlopCounterMode

    from linformers import LinformerModel

    choices = [{"sharing": sharing} for sharing in ("layerwise", "headwise", "none")]
    for choice in (*choices, {"projection": "identity"}, {"projection": "mean"}, {"projection": "dynamic"}):
        config = LinformerConfig(**SMALL, max_position_embeddings=32, projected_length=8, **choice)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model, ids = LinformerModel(config), torch.ones(3, 32, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(ids)
        keys = 32 if choice.get("projection") == "identity" else 8
        attention = 2 * 4 * 3 * 32 * keys * 64
        assert sum(p.flops for p in floor.products(config, 3, 32)) + attention == counter.get_total_flops()


def test_floor(monkeypatch):
    monkeypatch.setattr(floor, "product_seconds", lambda product, device, dtype: product.flops / 1e12)
    monkeypatch.setattr(floor, "bandwidth", lambda device: 1e11)
    config = LinformerConfig(**SMALL, max_position_embeddings=32, projected_length=8)
    seconds = floor.floor_seconds(config, 4, 32, training=False, device="cpu", dtype="float32")
    flops = sum(p.flops for p in floor.products(config, 4, 32))
    attention = 2 * max(4 * 128 * 8 * 64 / 1e12, (2 * 128 + 2 * 4 * 8) * 64 * 4 / 1e11)
    assert seconds == pytest.approx(flops / 1e12 + 5 * 3 * 128 * 64 * 4 / 1e11 + attention)
    assert floor.floor_seconds(config, 4, 32, training=True, device="cpu", dtype="float32") > 2 * seconds


def cells_of(name, times, k=None):
    return [Cell(name, n, k, 1, "inference", seconds, 1) for n, seconds in times.items()]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({512: 3.0, 1024: 1.0, 2048: 1.0}, "from n=1024 on"),
        ({512: 1.0, 1024: 3.0, 2048: 1.0}, "from n=2048 on"),
        ({512: 1.0, 1024: 1.0, 2048: 1.0}, "from n=512 on"),
        ({512: 3.0, 1024: 3.0}, "at no n up to 1024"),
        ({512: 3.0, 4096: None}, "at no n up to 512"),
        ({512: 1.0, 4096: None}, "from n=512 on"),
        ({512: None, 1024: 1.0}, "from n=1024 on"),
        ({512: 1.0, 1024: None}, "at no n up to 1024"),
    ],
)
def test_crossover(times, expected):
    rival = cells_of(ROBERTA, {512: 2.0, 1024: 2.0, 2048: 2.0, 4096: None})
    (line,) = report.crossovers([*rival, *cells_of("Linformer k=64", times, 64)], "inference")
    assert line == f"inference: Linformer k=64 is faster than {ROBERTA} {expected}."


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({512: 3.0, 4096: 3.0}, f"Linformer k=64 is faster than {ROBERTA} at no n up to 512; "),
        ({512: 1.0, 4096: 3.0}, f"Linformer k=64 is faster than {ROBERTA} from n=512 on; "),
        ({4096: 3.0}, ""),
    ],
)
def test_nothing_is_faster_than_what_ran_out_of_memory(times, expected):
    rival = cells_of(ROBERTA, {512: 2.0, 4096: None})
    (line,) = report.crossovers([*rival, *cells_of("Linformer k=64", times, 64)], "inference")
    assert line == f"inference: {expected}{ROBERTA} runs out of memory at n=4096, where Linformer k=64 does not."
    assert not report.crossovers([*rival, *cells_of("Linformer k=64", {4096: None}, 64)], "inference")


def test_a_time_below_the_floor_is_explained():
    cells = [Cell(FUSED, n, None, 1, "inference", seconds, 1, 1.0) for n, seconds in {64: 0.9, 128: 0.999}.items()]
    (line,) = report.below_floor([*cells, *cells_of(UNFUSED, {64: 1.0})], "inference")
    assert f"({FUSED}, n=64: 0.90): the floor was measured while the machine was busier" in line
    assert not report.below_floor(cells[1:], "inference")


def test_batches_are_whole_numbers():
    cells = [
        Cell(name, 64, k, 1, "inference", 1.0, 1, largest_batch=batch)
        for name, k, batch in ((UNFUSED, None, 80), ("Linformer k=16", 16, 1234), ("Linformer k=32", 32, 0))
    ]
    table = report.task_tables(cells, "inference")[-1]
    assert list(table.columns[1].cells) == ["80", "1,234 (15.43×)", "0 (0.00×)"]


def test_without_a_terminal_each_step_is_a_line():
    console = Console(file=io.StringIO(), width=100)
    with steps(console, 2) as begin:
        begin("[a]")
        begin("b")
        assert console.file.getvalue() == "0/2 [a]\n1/2 b\n"  # b has begun, and is not done
    assert "2/2" in console.file.getvalue().splitlines()[-1]


def test_without_a_terminal_long_work_says_how_far_it_is():
    console, now = Console(file=io.StringIO(), width=100), [0.0]
    with progress(console) as bars:
        bars.get_time = lambda: now[0]
        task = bars.add_task("rows", total=10)
        for _ in range(5):
            bars.advance(task)
            now[0] += SILENCE / 2
        assert console.file.getvalue().split("\n") == ["1/10 rows", "3/10 rows", "5/10 rows", ""]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["inference", "training"])
def test_peers(task, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import peers

    sizes = {"layers": 1, "heads": 2, "hidden": 32, "intermediate": 64}
    cells = {cell["model"]: cell for cell in peers.measure(128, 16, 256, task, sizes, [])}
    assert {"linformers", "ModernBERT", "Longformer", "BigBird", "Nyströmformer"} <= cells.keys()
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 for cell in cells.values())
    monkeypatch.setattr(peers, "interleaved", lambda runs, may_run_out: {"linformers": 1.0})  # the others ran out
    ran_out = peers.measure(128, 16, 256, task, sizes, [])
    assert {c["failure"] for c in ran_out if c["model"] != "linformers"} == {"out of memory"}
    assert len(peers.table_of(ran_out).rows) == len(ran_out) == len(cells)
    monkeypatch.setattr(peers.Embedded, "__init__", lambda self, model: 1 / 0)
    failed = peers.measure(128, 16, 256, task, sizes, [])
    assert [cell["failure"] for cell in failed if cell["model"] == "BigBird"] == ["ZeroDivisionError: division by zero"]


def test_attention(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention

    arguments = ["--lengths", "64,128", "--projected", "16,32", "--tokens", "128", "--heads", "2", "--channels", "16"]
    monkeypatch.setattr("sys.argv", ["attention.py", *arguments, "--out", str(tmp_path)])
    attention.main()
    record = json.loads((tmp_path / "attention.json").read_text())
    assert {(cell["n"], cell["k"]) for cell in record["cells"]} == {(64, 16), (64, 32), (128, 16), (128, 32)}
    assert all(cell["forward"] > 0 for cell in record["cells"] if "failure" not in cell)
    assert "Attention, backward" in (tmp_path / "attention.md").read_text()


SCRIPTS = {
    "peers": {
        "--task train": "task='train' is not one of 'inference', 'training'; did you mean 'training'?",
        "--only bert": "only='bert' is not one of 'linformers', 'linformer', 'linformer-pytorch', 'ModernBERT',",
        "--compile bert": "compile='bert' is not one of 'linformers', 'linformer', 'linformer-pytorch'",
        "--projected 256 --lengths 512,128": "projected=256 must be below lengths=128",
        "--projected 0": "projected=0 must be a positive integer",
        "--hidden 100": "hidden=100 must be a multiple of 64, the channels of a head",
        "--layers 0": "layers=0 must be a positive integer",
        "--lengths 200 --tokens 256": "lengths=200 does not divide tokens=256",
        "--lengths 128,a": "lengths='128,a' must be positive whole numbers separated by commas",
        "--name a/b": "name='a/b' must be the name of a file without its folder",
        "--out FILE/x": "is no folder that can be written to: Not a directory",
    },
    "attention": {
        "--heads 0": "heads=0 must be a positive integer",
        "--channels -1": "channels=-1 must be a positive integer",
        "--projected 16,0": "projected='16,0' must be positive whole numbers separated by commas",
        "--lengths 100 --tokens 256": "lengths=100 does not divide tokens=256",
        "--out FILE/x": "is no folder that can be written to: Not a directory",
    },
}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [(script, arguments, text) for script, cases in SCRIPTS.items() for arguments, text in cases.items()],
)
def test_what_the_scripts_refuse(script, arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module(script)
    (tmp_path / "file").touch()
    arguments = arguments.replace("FILE", str(tmp_path / "file")).split()
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_peers_write_files_of_a_name_with_versions(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import peers

    cell = {"model": "linformers", "n": 64, "k": 16, "task": "inference", "batch": 1, "peak_bytes": 1, "failure": None}
    tasks = iter([[{**cell, "seconds": 1.0}]])
    monkeypatch.setattr(peers, "measure", lambda *arguments: next(tasks, None) or stop())
    monkeypatch.setattr(peers.importlib.metadata, "version", {"linformer": "1.2"}.__getitem__)
    monkeypatch.setattr(peers.importlib.metadata, "PackageNotFoundError", KeyError)
    arguments = ["--lengths", "64", "--tokens", "64", "--projected", "16", "--name", "mine.1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["peers.py", *arguments])

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        peers.main()
    assert capsys.readouterr().err == "stopped; what was measured before is written\n"
    assert {path.name for path in tmp_path.iterdir()} == {"mine.1.json", "mine.1.md"}
    record = json.loads((tmp_path / "mine.1.json").read_text())
    assert record["linformer"] == "1.2"
    assert "linformer-pytorch" not in record
    assert len(record["cells"]) == 1


def test_peers_whose_input_does_not_fit(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import peers

    monkeypatch.setattr(torch, "randn", out_of_memory)
    sizes = {"layers": 1, "heads": 2, "hidden": 32, "intermediate": 64}
    assert {c["failure"] for c in peers.measure(128, 16, 256, "inference", sizes, [])} == {"out of memory"}


@pytest.mark.parametrize("place", ["torch.randn", "attention.captured"])
def test_attention_that_does_not_fit(place, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention

    monkeypatch.setattr(place, out_of_memory)
    cells = attention.measure(64, 16, 64, 2, 16)
    assert {cell["failure"] for cell in cells} == {"out of memory"}
    assert set(attention.tables_of(cells)[0].columns[2].cells) == {"out of memory"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has kernels to compare")
def test_attention_without_a_gpu_compares_nothing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention

    cells = attention.measure(64, 16, 64, 2, 16)
    assert [table.title for table in attention.tables_of(cells)] == [
        "Attention, forward: milliseconds",
        "Attention, backward: milliseconds",
    ]
    (line,) = attention.sentences(cells)
    assert "compares kernels of a GPU, and there is none here" in line


def test_attention_is_held_against_the_best_backend(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import attention

    def cell(model, forward):
        return {"model": model, "n": 64, "k": 16, "forward": forward}

    cells = [cell(attention.DISPATCH, 2.0), cell("SDPA, cuDNN", 3.0), cell("SDPA, flash", 1.0)]
    cells.append({"model": "SDPA, memory-efficient", "n": 64, "k": 16, "failure": "no"})
    assert attention.ratios(cells, attention.DISPATCH, "forward") == {(64, 16): 0.5}
    assert attention.sentences(cells) == ["forward: through the dispatch at least 0.50× the best backend (n=64, k=16)."]


def test_growth():
    cells = cells_of("Linformer k=64", {512: 1.0, 1024: 1.5, 2048: 3.3, 8192: 100.0}, 64)
    (line,) = report.growth(cells, "inference")
    assert "at most 2.20 times as long (n=1024) and 1.00 times the memory" in line


def test_one_sequence_in_each_pass(tmp_path):
    arguments = ["--lengths", "64,128", "--projected", "16", "--tokens", "0", "--layers", "1", "--hidden", "64"]
    arguments += ["--models", "linformer", "--projection", "mean", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "efficiency.json").read_text())
    assert [(cell["model"], cell["n"], cell["batch"]) for cell in record["lengths"]] == [
        ("Linformer k=16", 64, 1),
        ("Linformer k=16", 128, 1),
    ]
    assert record["projection"] == "mean"
    assert "from n to 2n, Linformer k=16" in (tmp_path / "efficiency.md").read_text()


def test_largest_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    limits, tried = [], []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 200)
    monkeypatch.setattr(measure, "release", lambda: None)  # a collection of garbage takes a third of a second

    def run(batch):
        tried.append(batch)
        if batch > 90:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert 85 <= measure.largest_batch(run, batch=10, peak_bytes=100) <= 90
    assert tried[0] == 100
    assert not limits
    assert 88 <= measure.largest_batch(run, batch=10, peak_bytes=250) <= 90  # 40 were reckoned
    tried.clear()
    assert measure.largest_batch(run, batch=10, peak_bytes=None) >= 88
    assert len(tried) < 20
    measure.largest_batch(run, batch=10, peak_bytes=100, memory=500)
    assert limits == [0.7, 1.0]
    assert measure.largest_batch(lambda batch: run(89 + batch), batch=1, peak_bytes=None) == 1
    assert measure.largest_batch(lambda batch: run(100), batch=10, peak_bytes=100) == 0


def test_peak_memory_counts_what_lives_at_once():
    x = torch.ones(1000, 1000)  # 4 MB

    def run():
        a = x + 1  # 4 MB
        b = a + 1  # 8 MB
        del a
        return torch.cat([b, b, b]).sum()  # 4 + 12 MB

    assert peak_memory(run, "cpu") == pytest.approx(16e6, rel=0.01)


def test_timing_is_of_the_right_function():

    times = interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, min_seconds=0.05)
    assert times["slow"] >= 0.02
    assert times["fast"] < times["slow"]


def test_what_finds_no_memory_while_it_is_timed_is_left_out():
    calls = []

    def large():
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    runs = {"large": large, "small": lambda: None}
    assert interleaved(runs, min_seconds=0.01, may_run_out=True).keys() == {"small"}
    with pytest.raises(measure.OutOfMemoryError, match="CUDA out of memory"):
        interleaved(runs, min_seconds=0.01)


@pytest.mark.parametrize("step", [1, 7, 50])
def test_joules_are_counted_from_step_to_step_of_the_counter(step):
    used = [0]

    def run():
        used[0] += 2000
        time.sleep(0.001)

    per_run = measure.joules_by(lambda: used[0] // (1000 * step) * 1000 * step, run, 0.001, 0.3)
    assert per_run == pytest.approx(2, rel=0.3)


def test_a_counter_of_joules_that_stands_still():
    assert measure.joules_by(lambda: 5, lambda: time.sleep(0.001), 0.001, 0.02) is None


def test_a_bar_in_a_cell_does_not_end_it():
    shown = Table("norm", "error")
    shown.add_row("|x|", "0.5")
    assert shown_table(shown) == ["| norm | error |", "|---|---|", "| \\|x\\| | 0.5 |", ""]
