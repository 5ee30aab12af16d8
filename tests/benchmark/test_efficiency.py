"""`linformers bench`: that it measures the right models, and reports what it measured."""

import json
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from linformers.benchmark import efficiency, measure
from linformers.benchmark.efficiency import FUSED, ROBERTA, UNFUSED, Cell, build, compare, model_configs, tables
from linformers_cli import app

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}


def bench(out, options, **expected):
    """Run `linformers bench`; returns its output and its record."""
    result = CliRunner().invoke(app, ["bench", *options.split(), "--out", str(out)], env={"COLUMNS": "300"}, **expected)
    return result, json.loads((out / "efficiency.json").read_text())


out_of_memory = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 EiB"))


def test_bench(tmp_path):
    options = "--lengths 64,128 --projected 16,32 --tokens 256 --layers 2 --hidden 64 --task inference,training"
    result, record = bench(tmp_path, options, catch_exceptions=False)
    assert result.exit_code == 0
    assert {"command", "commit", "device", "torch", "transformers", "dtype"} <= record.keys()
    assert [(cell["n"], cell["task"], cell["model"]) for cell in record["cells"]] == [
        (n, task, model)
        for n in (64, 128)
        for task in ("inference", "training")
        for model in (UNFUSED, ROBERTA, FUSED, "Linformer k=16", "Linformer k=32")
    ]
    assert all(cell["seconds"] > 0 and cell["peak_bytes"] > 0 for cell in record["cells"])
    assert {(cell["n"], cell["batch"]) for cell in record["cells"]} == {(64, 4), (128, 2)}
    assert all((tmp_path / f"{task}.png").stat().st_size > 1000 for task in ("inference", "training"))
    assert "Milliseconds, training" in result.output


def test_one_sequence_per_pass_and_local_windows(tmp_path):
    options = "--lengths 64 --projected 16 --tokens 0 --layers 1 --hidden 64 --models linformer --windows 4"
    result, record = bench(tmp_path, f"{options} --sharing headwise", catch_exceptions=False)
    assert result.exit_code == 0
    measured = [(cell["model"], cell["batch"]) for cell in record["cells"]]
    assert measured == [("Linformer k=16", 1), ("Linformer k=16 w=4", 1)]
    assert record["sharing"] == "headwise"
    configs = model_configs(64, [16], models=["linformer"], windows=[4], **SMALL)
    assert [config.local_window for config in configs.values()] == [0, 4]


def test_ragged_rows_and_rotary_positions(tmp_path):
    options = "--lengths 64 --projected 16 --tokens 256 --layers 1 --hidden 64 --windows 4 --rotary --ragged"
    result, record = bench(tmp_path, options, catch_exceptions=False)
    assert result.exit_code == 0
    assert [cell["model"] for cell in record["cells"]] == [ROBERTA, FUSED, "Linformer k=16", "Linformer k=16 w=4"]
    assert (record["rotary"], record["ragged"]) == (True, True)
    for config in model_configs(64, [16], models=["twin", "linformer"], rotary=True, **SMALL).values():
        assert config.position_embedding_type == "rotary"
    model = Mock(return_value=torch.zeros(8, 64, 4))
    efficiency.random_run(model, 64, "inference", True, batch=8)()
    lengths = model.call_args.kwargs["attention_mask"].sum(1)
    assert lengths.min() >= 16
    assert lengths.max() <= 64
    assert len(set(lengths.tolist())) == 8


def test_running_out_of_memory_is_an_entry(monkeypatch):
    def fail(config, compile=False):
        if config._attn_implementation == "plain":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
        return build(config, compile)

    monkeypatch.setattr(efficiency, "build", fail)
    ((first, *others),) = compare([64], [16], tokens=64, console=Console(quiet=True), **SMALL)
    assert (first.model, first.seconds, first.peak_bytes) == (UNFUSED, None, None)
    assert all(cell.seconds and cell.peak_bytes for cell in others)
    assert UNFUSED not in efficiency.curves([first, *others], "milliseconds")


@pytest.mark.parametrize("place", [(efficiency, "build"), (torch, "randint")])
def test_where_nothing_fits_nothing_is_plotted(place, monkeypatch, tmp_path):
    monkeypatch.setattr(*place, out_of_memory)
    options = "--lengths 64 --projected 16,32 --tokens 64 --layers 1 --hidden 64"
    result, record = bench(tmp_path, options, catch_exceptions=False)
    assert result.exit_code == 0
    assert {cell["seconds"] for cell in record["cells"]} == {None}
    assert result.output.count("out of memory") == 2 * len(record["cells"])
    assert not list(tmp_path.glob("*.png"))


def test_what_was_measured_before_a_crash_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "interleaved", Mock(side_effect=[{}, {}, ZeroDivisionError]))
    options = "--lengths 64,128 --projected 16 --tokens 128 --layers 1 --hidden 64 --models linformer"
    result, record = bench(tmp_path, f"{options} --task inference,training")
    assert isinstance(result.exception, ZeroDivisionError)
    assert [(cell["n"], cell["task"]) for cell in record["cells"]] == [(64, "inference"), (64, "training")]


def test_a_model_that_cannot_be_built_is_refused_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(efficiency, "build", out_of_memory)
    options = "--lengths 64,100 --projected 16 --projection mean --tokens 0 --layers 1 --hidden 64"
    result = CliRunner().invoke(app, ["bench", *options.split(), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "projected_length=16" in result.stderr


def test_compiled_models_and_largest_batches(monkeypatch):
    monkeypatch.setattr(measure, "largest_batch", lambda make, batch, memory: make(1) and memory + 4)
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    options = {"console": Console(quiet=True), "compile": True, "batches": True, "memory": 3}
    (cells,) = compare([64], [16, 64], tokens=64, **options, **SMALL)
    names = [UNFUSED, ROBERTA, f"{ROBERTA}, compiled", FUSED, f"{FUSED}, compiled"]
    assert [cell.model for cell in cells] == [*names, "Linformer k=16", "Linformer k=16, compiled"]
    assert [cell.largest_batch for cell in cells] == [7, 7, None, 7, None, 7, None]
    assert [cell.k for cell in cells] == [None] * 5 + [16, 16]


def test_all_models_have_the_same_size():
    """Except for E, and for two more positions of RoBERTa."""
    models = {name: build(own) for name, own in model_configs(64, [16], **SMALL, hidden_dropout_prob=0.0).items()}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert sizes[UNFUSED] == sizes[FUSED] == sizes["Linformer k=16"] - 64 * 16
    assert sizes[ROBERTA] == sizes[FUSED] + 2 * 64
    ids = torch.randint(5, 90, (2, 64))
    models[FUSED].load_state_dict(models[UNFUSED].state_dict())
    unfused, fused = (models[name].eval()(ids).last_hidden_state for name in (UNFUSED, FUSED))
    torch.testing.assert_close(unfused, fused)
    assert models[UNFUSED].config._attn_implementation == "plain"
    assert models[ROBERTA].config.hidden_dropout_prob == 0.0


def test_no_mask_keeps_a_compiled_roberta_from_fused_attention():
    masks = []

    def look(graph, inputs):
        masks.extend(n.kwargs["attn_mask"] for n in graph.graph.nodes if "scaled_dot_product" in str(n.target))
        return graph

    model = build(model_configs(64, [16], **SMALL)[ROBERTA])
    torch.compile(model, backend=look)(torch.full((2, 64), 7))
    assert masks == [None, None]


def cells_of(name, times, k=None, **values):
    return [Cell(name, n, k, 1, "inference", seconds, 1, **values) for n, seconds in times.items()]


def test_ratios_to_roberta_and_the_twin():
    cells = [*cells_of(f"{ROBERTA}, compiled", {64: 3.0, 128: 4.0}), *cells_of(FUSED, {64: 2.0, 128: None})]
    cells += [*cells_of("Linformer k=16", {64: 1.0, 128: 2.0}, 16), *cells_of("Linformer k=64", {128: 1.0}, 64)]
    (table, *_) = tables(cells, "inference")
    assert table.title.endswith(f"(times that of {ROBERTA}, compiled / {FUSED})")
    assert [list(column.cells) for column in table.columns[1:]] == [
        ["3,000.0", "2,000.0", "1,000.0 (0.33 / 0.50)", "–"],
        ["4,000.0", "out of memory", "2,000.0 (0.50 / –)", "1,000.0 (0.25 / –)"],
    ]


def test_without_other_rivals_the_unfused_transformer_is_one():
    cells = cells_of(UNFUSED, {64: 2.0}, largest_batch=80)
    time, _, batch = tables([*cells, *cells_of("Linformer k=16", {64: 1.0}, 16, largest_batch=1234)], "inference")
    assert list(time.columns[1].cells) == ["2,000.0", "1,000.0 (0.50)"]
    assert list(batch.columns[1].cells) == ["80", "1,234 (15.43)"]
