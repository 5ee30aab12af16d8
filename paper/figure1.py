"""Figure 1: the singular values of P in pretrained encoders, with the paper's two claims about RoBERTa's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from linformers import plots
from linformers.analysis import spectrum
from linformers.errors import UserError

from . import report

TITLE = "Figure 1: is attention low rank?"
# Encoders by name: DATA/models/NAME if it exists, otherwise the hub's. The paper shows RoBERTa's.
MODELS = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
}
# Our Transformer twin of Table 2, before and after fine-tuning on IMDB.
TWINS = {"twin-pretrained": "figure3/n512-twin/model", "twin-finetuned": "table2/n512-twin-imdb/model"}
TEXTS = {"wikitext": "wikitext103_valtest", "imdb": "imdb/test.parquet"}
ROWS = {f"{model}-{text}": (model, text) for model in (*MODELS, *TWINS) for text in TEXTS}
# Curves that this page does not show: they would make the record ten times as large.
OMITTED = ("cumulative", "cumulative_std_by_layer", "energy_by_layer")
FULL, SMALL = {"length": 512, "sentences": 1000, "at": 128}, {"length": 64, "sentences": 4, "at": 16}


def measure(work: Any, console: Console) -> None:
    """Measure each encoder on each text that has no record yet; `work` has `data`, `runs`, `results` and `small`."""
    if work.data is None:
        raise UserError("data is missing: pass the folder of texts with --data DIR")
    path, sizes = work.results / "figure1" / "figure1.json", SMALL if work.small else FULL
    path.parent.mkdir(parents=True, exist_ok=True)
    records = report.read(path) or {}
    for row, (model, text) in ROWS.items():
        local = work.runs / TWINS[model] if model in TWINS else work.data / "models" / model
        name, out = str(local) if local.is_dir() else MODELS.get(model), work.runs / "spectrum" / row
        if row in records or name is None:
            continue
        options: dict[str, Any] = {"seed": 0, "text_column": "text", "workers": None, "out": out, **sizes}
        try:
            spectrum.run(name, [str(work.data / TEXTS[text])], command="", console=console, **options)
        except UserError as error:
            console.print(f"{row} is missing: {error}", style="yellow", markup=False)
            continue
        portable = {"command": "python -m paper.figure1 --data DIR", "model": model, "texts": [f"DIR/{TEXTS[text]}"]}
        record = json.loads((out / "spectrum.json").read_text()) | portable
        records[row] = {name: value for name, value in record.items() if name not in OMITTED}
        path.write_text("{\n" + ",\n".join(f'"{row}": {json.dumps(own)}' for row, own in records.items()) + "\n}\n")


def collect(work: Any) -> dict[str, Any]:
    """By row, the shares of the first singular values, and the rows that are missing."""
    records = report.read(work.results / "figure1" / "figure1.json") or {}
    rows = {}
    for row in sorted(records, key=[*ROWS, *records].index):
        own, shares = records[row], np.array(records[row]["cumulative_at"])  # (layers, heads)
        rows[row] = {
            **{name: own[name] for name in ("n", "at", "sentences", "cumulative_by_layer")},
            **{"mean": float(shares.mean()), "least": float(shares.min()), "most": float(shares.max())},
            "correlation": float(stats.spearmanr(range(len(shares)), shares.mean(1)).statistic),
        }
    return {"runs": records, "rows": rows, "missing_rows": [row for row in ROWS if row not in rows]}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Cumulative shares, averaged over layers and heads, with a panel for each text."""
    figure, axes = plots.new_figure(len(TEXTS), 9.6, 3.6)
    for panel, text in zip(axes, TEXTS, strict=True):
        rows = {row.removesuffix(f"-{text}"): own for row, own in record["rows"].items() if row.endswith(f"-{text}")}
        curves = {row: list(enumerate(np.mean(own["cumulative_by_layer"], 0), 1)) for row, own in rows.items()}
        plots.draw(panel, curves, marker="")
        panel.set(title=text, xlabel="number of singular values", ylabel="share of their sum")
    plots.one_legend(figure, axes)
    plots.save(figure, folder / "figure1.png")


def add_options(add: Callable[..., Any]) -> None:
    add("--data", type=Path, help="folder of texts, and of encoders in models/")
    add("--runs", type=Path, default=Path("runs/paper"), help="folder of training runs")
    add("--small", action="store_true", help="short passages: test the whole path on a CPU")


if __name__ == "__main__":
    report.main("figure1")
