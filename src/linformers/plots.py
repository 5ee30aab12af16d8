"""Figures in one style. Matplotlib is optional, and imported when the first figure is made."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Curves = Mapping[str, Sequence[tuple[float, float]]]  # points (x, y), by name

# Baselines are gray or brown and have a wide line; variants of a model are dashed and have its color.
BASELINES = dict.fromkeys(("Transformer", "Transformer twin", "Transformer, fused", "twin", "exact"), "#222222")
BASELINES |= {"Transformer, unfused": "#aaaaaa", "RoBERTa, SDPA": "#8c6d46"}
DASHED = (", compiled", ", plain start", ", twin")
# Colors of Okabe and Ito, safe for color-blind readers, and two more; the second round has other markers.
COLORS = ("#d55e00", "#009e73", "#0072b2", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
LOOKS = [(COLORS[i % 8], "os^DvPX<"[(i + i // 8) % 8]) for i in range(64)]
# Models that appear in several figures look the same in all of them.
MODELS = dict(zip(("k=128", "k=128 w=32", "k=256", "k=64", "k=512", "k=1024", "k=2048"), LOOKS, strict=False))


def new_figure(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of `width` by `height` inches with its panels."""
    from matplotlib.figure import Figure  # unlike pyplot, it has no global state

    figure = Figure((width, height), dpi=150, layout="constrained")
    panels = list(figure.subplots(1, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(which="both", labelsize=8)
    return figure, panels


def draw(axes: Any, curves: Curves, names: Sequence[str] = (), **style: Any) -> None:
    """A line for each curve. Panels that are given the same `names` give a model the same look."""
    models = dict.fromkeys(map(_model, (*names, *curves)))
    known = {name: (color, "o") for name, color in BASELINES.items()} | MODELS
    free = itertools.cycle(look for look in LOOKS if look not in [known.get(model) for model in models])
    looks = {model: known.get(model) or next(free) for model in models}
    for name, points in curves.items():
        model, dashed = _model(name), name.endswith(DASHED)
        color, marker = looks[model]
        # A wide line below the others shows where they cover it.
        line: Any = {"lw": 3, "zorder": 1.9} if model in BASELINES and not dashed else {"lw": 1.5}
        line |= {"ls": "--" if dashed else "-", "marker": marker, "markersize": 4, **style}
        axes.plot(*zip(*points, strict=True), color=color, label=name, **line)


def _model(name: str) -> str:
    """The common part of a model's names: `k=128 w=32` of `Linformer, k = 128, local window of 32, compiled`."""
    short = name.replace(" = ", "=").replace(", local window of ", " w=")
    return re.sub(rf"^Linformer,? (?=k=)|, n=\d+|({'|'.join(DASHED)})$", "", short)


def against_length(axes: Any, curves: Curves, names: Sequence[str] = (), **labels: str) -> None:
    """Draw curves over n on logarithmic axes, with a label at each n."""
    draw(axes, curves, names)
    lengths = sorted({x for points in curves.values() for x, _ in points})
    axes.set(xscale="log", yscale="log", **labels)
    axes.set_xticks(lengths, map("{:.0f}".format, lengths), fontsize=6)
    axes.set_xticks([], minor=True)
    values = [y for points in curves.values() for _, y in points] or [1]
    if max(values) < 4 * min(values):  # small differences should look small
        axes.set_ylim(min(values) / 2, max(values) * 2)
    label_powers(axes)


def label_powers(axes: Any) -> None:
    """Label a logarithmic y axis at powers of ten and, if there are few of them, at 2 and 5 times these."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 200 * low else "")


def one_legend(figure: Any, axes: Sequence[Any], where: str = "outside right center") -> None:
    """One legend for all panels."""
    lines = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    if lines:
        figure.legend(lines.values(), lines, loc=where, fontsize=8, frameon=False)


def save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.title.set(fontweight="bold", fontsize=10)
    figure.savefig(path)


@contextmanager
def optional() -> Iterator[None]:
    """Skip a plot if matplotlib is missing, and say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        print("No plot without matplotlib: pip install 'linformers[plots]'", file=sys.stderr)


@optional()
def efficiency(milliseconds: Curves, mebibytes: Curves, path: Path, xlabel: str) -> None:
    """Time and memory of a pass over n."""
    figure, axes = new_figure(2, 9.6, 3.5)
    against_length(axes[0], milliseconds, title="Time of a pass", ylabel="ms", xlabel=xlabel)
    against_length(axes[1], mebibytes, list(milliseconds), title="Memory of a pass", ylabel="MiB", xlabel=xlabel)
    one_legend(figure, axes)
    save(figure, path)


@optional()
def times(seconds: Curves, path: Path) -> Path | None:
    """Time to read a document over its length; returns the path, or None without matplotlib."""
    figure, (axes,) = new_figure(1, 4.8, 3.8)
    against_length(axes, seconds, title="Time to read a document", ylabel="seconds", xlabel="tokens of the document")
    one_legend(figure, [axes], "outside lower center")
    save(figure, path)
    return path


@optional()
def training(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Training loss and validation perplexity over the step, from the records of each run."""
    figure, axes = new_figure(2, 7.6, 3.4)
    for panel, key, style in zip(axes, ("loss", "perplexity"), ({"marker": ""}, {}), strict=True):
        curves = {name: [(r["step"], r[key]) for r in records if key in r] for name, records in runs.items()}
        draw(panel, {name: points for name, points in curves.items() if points}, list(runs), **style)
    axes[0].set(title="Training", xlabel="step", ylabel="loss (nats)")
    axes[1].set(title="Validation", xlabel="step", ylabel="perplexity", yscale="log")
    label_powers(axes[1])
    one_legend(figure, axes, "outside lower center")
    save(figure, path)
