"""Every figure of the project, with one look."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

matplotlib.use("Agg")

# Points (x, y) by the name of what they belong to.
Curves = Mapping[str, Sequence[tuple[float, float]]]

LOOK: Any = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.hashsalt": "linformers",
}
# What a Linformer is measured against: always in the same shade, and thick.
TRANSFORMERS = {
    "Transformer": "#222222",
    "twin": "#222222",
    "Transformer twin": "#222222",
    "Transformer, fused": "#222222",
    "Transformer, unfused": "#aaaaaa",
    "RoBERTa, SDPA": "#8c6d46",
    "exact": "#222222",
    "uniform average": "#aaaaaa",
}
# The lines and shades of what is only there to be beaten, by how its name begins.
GREYS = {"zeros": (":", "#999999"), "mean of": ("s-.", "#555555"), "ε": ("--", "#999999")}
# What is added to the name of a model whose line is dashed, in the colour of the model.
DASHED = (", compiled", ", plain start", ", twin")
# Okabe and Ito's colours, which colour-blind readers tell apart, and two more, each with a marker; where there are more
# models than colours, these come again with other markers.
COLOURS = ("#d55e00", "#009e73", "#0072b2", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LOOKS = [(COLOURS[i % 8], MARKERS[(i + i // 8) % 8]) for i in range(64)]
# Models that stand in several pictures look the same in all of them; at other n, k = 256 has shades of its colour.
MODELS = {
    **dict(zip(("k=128", "k=128 w=32", "k=256", "k=64", "k=512", "k=1024", "k=2048"), LOOKS, strict=False)),
    "Linformer": LOOKS[0],
    "layerwise": LOOKS[0],
    "headwise": LOOKS[6],
    "k=128 headwise": LOOKS[6],
    "n=512": ("#7fbfe8", "o"),
    "n=1024": ("#2f8fcb", "s"),
    "n=2048": ("#005a8d", "^"),
    "n=4096": ("#002b45", "D"),
}


def efficiency(milliseconds: Curves, mebibytes: Curves, path: Path, *, tokens_fixed: bool = True) -> None:
    """Time and memory of a pass against n."""
    xlabel = f"sequence length n ({'tokens in a pass fixed' if tokens_fixed else 'one sequence in a pass'})"
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
        _costs(axes, milliseconds, mebibytes, xlabel)
        _one_legend(figure, axes)
        _save(figure, path)


def demo(
    milliseconds: Curves, mebibytes: Curves, losses: Curves, path: Path, *, tokens: int, length: int, title: str
) -> None:
    """Time and memory of a pass of so many tokens against n, and the loss while training at one length."""
    names = (*milliseconds, *losses)
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(1, 3, figsize=(13.4, 3.6), layout="constrained")
        figure.suptitle(title, fontsize=8)
        _costs(axes[:2], milliseconds, mebibytes, f"sequence length n ({tokens:,} tokens in a pass)", names)
        _draw(axes[2], losses, names, marker="")
        axes[2].set(title=f"Training, n = {length}", xlabel="step", ylabel="loss (nats)")
        _one_legend(figure, axes)
        _save(figure, path)


def training(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Loss and validation perplexity against the step, for each of several runs' records."""
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained")
        for place, key in zip(axes, ("loss", "perplexity"), strict=True):
            points = {name: [(r["step"], r[key]) for r in records if key in r] for name, records in runs.items()}
            style = {"marker": ""} if key == "loss" else {}
            _draw(place, {name: own for name, own in points.items() if own}, list(runs), **style)
        axes[0].set(title="Training", xlabel="step", ylabel="loss (nats)")
        axes[1].set(title="Validation", xlabel="step", ylabel="perplexity", yscale="log")
        axes[1].yaxis.set_major_formatter("{x:g}")
        _one_legend(figure, axes, "outside lower center")
        _save(figure, path)


def spectrum(by_layer: Any, spread: Any, shares: Any, at: int, title: str, path: Path) -> None:
    """Figure 1: the cumulative singular values of each layer (mean over heads), and their share at `at` by head.

    The curves and their spread are (layers, n), the shares (layers, heads).
    """
    layers, n = by_layer.shape
    heads = shares.shape[1]
    with plt.rc_context(LOOK):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.7), layout="constrained")
        figure.suptitle(textwrap.fill(title, 110), fontsize=8)
        colours = plt.get_cmap("viridis")
        places = range(1, n + 1)
        for layer, (mean, std) in enumerate(zip(by_layer, spread, strict=True)):
            colour = colours(layer / max(1, layers - 1))
            left.plot(places, mean, color=colour, lw=1.2, label=f"layer {layer + 1}")
            left.fill_between(places, mean - std, mean + std, color=colour, alpha=0.12, lw=0)
        left.plot([1, n], [1 / n, 1], ":", color="#999999", label="flat")
        left.axvline(at, color="#999999", lw=0.8)
        left.set(title="Singular values of P", xlabel="number of singular values", ylabel="share of their sum")
        left.legend(fontsize=6, ncols=2)
        right.grid(visible=False)
        image = right.imshow(shares, aspect="auto", origin="lower", cmap="viridis")
        right.set(title=f"Share of the first {at}", xlabel="head", ylabel="layer")
        right.set_xticks(range(heads), range(1, heads + 1))
        right.set_yticks(range(layers), range(1, layers + 1))
        figure.colorbar(image, ax=right)
        _save(figure, path)


def low_rank(errors: Curves, milliseconds: Curves, path: Path) -> None:
    """Error and time of approximations of P against k."""
    with plt.rc_context(LOOK):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained")
        _draw(left, errors)
        left.set(title="Error of P V", xlabel="k", ylabel="relative to P V")
        left.set_ylim(bottom=0)
        _draw(right, milliseconds)
        right.set(title="Attention of one layer", xlabel="k", ylabel="ms", yscale="log")
        right.yaxis.set_major_formatter("{x:g}")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.minorticks_off()
            _legend_below(axes)
        _save(figure, path)


def quality(panels: Mapping[str, tuple[str, Curves]], path: Path) -> None:
    """Validation perplexity of several models against what each panel, by its title, names for its axis."""
    names = list(dict.fromkeys(name for _, curves in panels.values() for name in curves))
    with plt.rc_context(LOOK):
        size = (3.4 * len(panels) + 2.2, 3.8)
        figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for place, (title, (xlabel, curves)) in zip(axes[0], panels.items(), strict=True):
            _draw(place, curves, names)
            place.set(title=title, xlabel=xlabel, yscale="log")
            _label_decades(place.yaxis, [y for points in curves.values() for _, y in points])
        axes[0, 0].set_ylabel("validation perplexity")
        _one_legend(figure, axes[0])
        _save(figure, path)


def perplexities(panels: Mapping[str, Curves], path: Path) -> None:
    """Figure 3: validation perplexity against the step, a panel for each question."""
    names = list(itertools.chain(*panels.values()))
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(2, 2, figsize=(7.6, 7.0), layout="constrained", sharey=True)
        for place, (title, curves) in zip(axes.flat, panels.items(), strict=True):
            place.set(title=title, xlabel="step", ylabel="validation perplexity", yscale="log")
            if not curves:
                place.set_axis_off()
                place.text(0.5, 0.5, "no runs yet", transform=place.transAxes, ha="center", color="#555555")
                continue
            _draw(place, curves, names)
            for own, line in enumerate(place.get_lines()):  # of curves that coincide, the markers do not
                line.set_markevery((own, len(curves)))
            _label_decades(place.yaxis, [y for points in curves.values() for _, y in points])
            place.tick_params(which="both", labelleft=True)
            _legend_below(place)
        _save(figure, path)


def overview(milliseconds: Curves, perplexity: Curves, path: Path) -> None:
    """How fast and how good: the time of a pass against n, and validation perplexity while pretraining."""
    names = list(dict.fromkeys((*milliseconds, *perplexity)))
    with plt.rc_context(LOOK):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 3.4), layout="constrained")
        xlabel = "sequence length n (65,536 tokens in a pass)"
        _against_length(left, milliseconds, names, title="Inference", xlabel=xlabel, ylabel="ms")
        _draw(right, perplexity, names)
        right.set(title="Pretraining, n = 512", xlabel="step", ylabel="validation perplexity", yscale="log")
        _label_decades(right.yaxis, [y for points in perplexity.values() for _, y in points])
        _one_legend(figure, (left, right))
        _save(figure, path)


def growth(milliseconds: Curves, path: Path) -> None:
    """Table 1: the time of one layer against n."""
    with plt.rc_context(LOOK):
        figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
        _against_length(axes, milliseconds, title="Time of a layer", xlabel="sequence length n", ylabel="ms")
        _one_legend(figure, [axes])
        _save(figure, path)


def architecture(path: Path) -> None:
    """Figure 2, left: where E and F stand in multi-head attention."""
    with plt.rc_context({**LOOK, "axes.grid": False}):
        figure, axes = plt.subplots(figsize=(4.2, 5.2), layout="constrained")
        axes.set(xlim=(0, 10), ylim=(0, 13))
        axes.axis("off")

        def box(x: float, y: float, text: str, colour: str, width: float = 2.2) -> None:
            style: Any = {"boxstyle": "round,pad=0.1", "facecolor": colour, "edgecolor": "#333333"}
            axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.45), width, 0.9, **style))
            axes.text(x, y, text, ha="center", va="center", fontsize=8)

        def arrow(start: tuple[float, float], end: tuple[float, float], label: str = "") -> None:
            axes.annotate(
                "", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "shrinkA": 0, "shrinkB": 0}
            )
            if label:
                axes.text(end[0] + 0.15, (start[1] + end[1]) / 2, label, fontsize=7, va="center", color="#555555")

        for x, name in ((1.8, "Q"), (5.0, "K"), (8.2, "V")):
            axes.text(x, 0.3, name, ha="center", va="center", fontsize=11, fontweight="bold")
            arrow((x, 0.7), (x, 1.6), "n × d")
            box(x, 2.15, f"W_{name}", "#dddddd")
        for x, name in ((5.0, "E"), (8.2, "F")):
            arrow((x, 2.7), (x, 4.0), "n × d")
            box(x, 4.55, f"{name}ᵀ: n → k", "#f2b8c0")
            arrow((x, 5.1), (x, 6.7), "k × d")
        arrow((1.8, 2.7), (1.8, 6.7), "n × d")
        box(5.0, 7.25, "softmax(Q Kᵀ / √d) V:  n × k instead of n × n", "#b8dde2", 8.8)
        arrow((5.0, 7.8), (5.0, 9.0), "n × d, for each head")
        box(5.0, 9.55, "concatenate", "#dddddd", 3.2)
        arrow((5.0, 10.1), (5.0, 11.2))
        box(5.0, 11.75, "W_O", "#dddddd", 3.2)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)  # the same picture, the same file
    plt.close(figure)


def _costs(
    axes: Sequence[Any], milliseconds: Curves, mebibytes: Curves, xlabel: str, names: Sequence[str] = ()
) -> None:
    _against_length(axes[0], milliseconds, names, title="Time of a pass", ylabel="ms", xlabel=xlabel)
    _against_length(axes[1], mebibytes, names, title="Memory of a pass", ylabel="MiB", xlabel=xlabel)


def _against_length(axes: Any, curves: Curves, names: Sequence[str] = (), **labels: str) -> None:
    _draw(axes, curves, names)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _label_points(axes, curves)
    values = [y for points in curves.values() for _, y in points]
    if values and max(values) < 4 * min(values):  # small differences should look small
        axes.set_ylim(min(values) / 2, max(values) * 2)
    _label_decades(axes.yaxis, values)
    axes.set(**labels)


def _label_points(axes: Any, curves: Curves) -> None:
    """Numbers on the axis of x where the points are, and nowhere else."""
    places = sorted({x for points in curves.values() for x, _ in points})
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter("{x:.9g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=7 if len(places) < 8 else 6)


def _label_decades(axis: Any, values: Sequence[float]) -> None:
    """Numbers on a logarithmic axis: at powers of ten, and where there are few of these, between them, too."""
    axis.set_major_formatter("{x:g}")
    few = bool(values) and max(values) < 100 * min(values)
    axis.set_minor_locator(LogLocator(subs=(2, 5) if few else ()))
    axis.set_minor_formatter("{x:g}")


def _draw(axes: Any, curves: Curves, names: Sequence[str] = (), **style: Any) -> None:
    """A line for each model, which looks the same in all panels that are given all `names`; variants are dashed."""
    looks = _looks((*names, *curves))
    for name, points in curves.items():
        model, dashed = _model(name), name.endswith(DASHED)
        colour, marker = looks[model]
        # The wider line lies below, and shows on both sides of one that covers it.
        wide = model in TRANSFORMERS and not dashed
        shape: Any = {"lw": 3, "zorder": 1.9} if wide else {"lw": 1.5}
        shape |= {"ls": "--" if dashed else "-", "marker": marker, "markersize": 4, **style}
        axes.plot(*zip(*points, strict=True), color=colour, label=name, **shape)


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each model: those it has in every picture, or the next that no other model has here."""
    known = {name: (shade, "o") for name, shade in TRANSFORMERS.items()} | MODELS
    models = dict.fromkeys(map(_model, names))
    free = itertools.cycle([look for look in LOOKS if look not in [known.get(model) for model in models]])
    return {model: known.get(model) or next(free) for model in models}


def _model(name: str) -> str:
    """What its several names have in common: "k=128 w=32" of "Linformer, k = 128, local window of 32, compiled"."""
    plain = next((name.removesuffix(suffix) for suffix in DASHED if name.endswith(suffix)), name)
    short = plain.replace(" = ", "=").replace(", local window of ", " w=")
    return re.sub(r"^Linformer,? (?=k=)|, n=\d+", "", short)


def _one_legend(figure: Any, axes: Sequence[Any], where: str = "outside right center") -> None:
    """One legend beside all panels."""
    lines: dict[str, Any] = {}
    for place in axes:
        for line, name in zip(*place.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    if lines:
        figure.legend(lines.values(), lines, loc=where, fontsize=8)


def _legend_below(axes: Any, fontsize: int = 7) -> None:
    """A panel's own legend under it, where no line is."""
    below_labels = axes.transAxes + ScaledTranslation(0, -0.4, axes.figure.dpi_scale_trans)  # inches
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below_labels}
    axes.legend(**place, ncols=2, fontsize=fontsize, columnspacing=1)


def theorems(panels: Sequence[tuple[Curves, Mapping[str, str]]], path: Path) -> None:
    """Errors against n, δ and k, a panel for each pair of curves and labels; what a curve must beat is grey."""
    with plt.rc_context(LOOK):
        figure, places = plt.subplots(2, 2, figsize=(10.2, 8.8), layout="constrained")
        for axes, (curves, labels) in zip(places.flat, panels, strict=True):
            own = ((f"{marker}-", colour) for colour, marker in LOOKS)
            for name, points in curves.items():
                if points:
                    line, colour = _grey(name) or next(own)
                    axes.plot(*zip(*points, strict=True), line, color=colour, label=name, lw=1.5, markersize=4)
            axes.set(xscale="log", yscale="log", **labels)
            _label_points(axes, curves)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            low, high = axes.get_ylim()
            if high < 4 * low:  # small differences should look small
                low, high = low / 2, high * 2
            if high < 100 * low:  # a single power of ten says little
                axes.set_yticks([size * 10.0**power for power in range(-3, 3) for size in (1, 1.5, 2, 3, 5, 7)])
                axes.set_ylim(low, high)
            _legend_below(axes, fontsize=6)
        _save(figure, path)


def _grey(name: str) -> tuple[str, str] | None:
    """The line and the shade of what a curve must beat, none of them like another."""
    return next((style for start, style in GREYS.items() if name.startswith(start)), None)
