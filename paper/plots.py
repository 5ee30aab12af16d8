"""The figures of the reproduction, in the style of the package's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator

from linformers import plots

# Points (x, y) by the name of their curve.
Curves = Mapping[str, Sequence[tuple[float, float]]]


def perplexities(panels: Mapping[str, Curves], path: Path) -> None:
    """Figure 3: validation perplexity against the step, one panel per question."""
    figure, axes = plots.new_figure(len(panels), 3.8 * len(panels), 3.9)
    names = [name for curves in panels.values() for name in curves]
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        panel.set(title=title)
        if not curves:
            panel.set_axis_off()
            panel.text(0.5, 0.5, "no runs yet", transform=panel.transAxes, ha="center", color="#555555")
            continue
        plots.draw(panel, curves, names)
        for number, line in enumerate(panel.get_lines()):  # curves that coincide keep their markers apart
            line.set_markevery((number, len(curves)))
        _perplexity_axis(panel, curves.values())
        panel.set(xlabel="step")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=7, columnspacing=1)
    plots.save(figure, path)


def quality(panels: Mapping[str, tuple[str, Curves]], path: Path) -> None:
    """Validation perplexity against the quantity that each panel names for its x axis."""
    figure, axes = plots.new_figure(len(panels), 3.4 * len(panels) + 2.2, 3.8)
    names = list(dict.fromkeys(name for _, curves in panels.values() for name in curves))
    for panel, (title, (xlabel, curves)) in zip(axes, panels.items(), strict=True):
        plots.draw(panel, curves, names)
        _perplexity_axis(panel, curves.values())
        panel.set(title=title, xlabel=xlabel)
    plots.one_legend(figure, axes)
    plots.save(figure, path)


def overview(milliseconds: Curves, perplexity: Curves, path: Path) -> None:
    """The time of a pass against n, and validation perplexity during pretraining."""
    figure, (left, right) = plots.new_figure(2, 9.8, 3.4)
    names = list(dict.fromkeys((*milliseconds, *perplexity)))
    xlabel = "sequence length n (65,536 tokens per pass)"
    plots.against_length(left, milliseconds, names, title="Inference", xlabel=xlabel, ylabel="ms")
    plots.draw(right, perplexity, names)
    _perplexity_axis(right, perplexity.values())
    right.set(title="Pretraining, n = 512", xlabel="step")
    plots.one_legend(figure, [left, right])
    plots.save(figure, path)


def growth(milliseconds: Curves, path: Path) -> None:
    """Table 1: the time of one layer against n."""
    figure, (panel,) = plots.new_figure(1, 6.4, 3.6)
    plots.against_length(panel, milliseconds, title="Time of a layer", xlabel="sequence length n", ylabel="ms")
    plots.one_legend(figure, [panel])
    plots.save(figure, path)


def architecture(path: Path) -> None:
    """Figure 2, left: where E and F are in multi-head attention."""
    figure, (panel,) = plots.new_figure(1, 4.2, 5.2)
    panel.set(xlim=(0, 10), ylim=(0, 13))
    panel.axis("off")

    def box(x: float, y: float, text: str, color: str, width: float = 2.2) -> None:
        style: Any = {"boxstyle": "round,pad=0.1", "facecolor": color, "edgecolor": "#333333"}
        panel.add_patch(FancyBboxPatch((x - width / 2, y - 0.45), width, 0.9, **style))
        panel.text(x, y, text, ha="center", va="center", fontsize=8)

    def arrow(x: float, bottom: float, top: float, label: str = "") -> None:
        style: Any = {"arrowstyle": "-|>", "color": "#333333", "shrinkA": 0, "shrinkB": 0}
        panel.annotate("", (x, top), (x, bottom), arrowprops=style)
        panel.text(x + 0.15, (bottom + top) / 2, label, fontsize=7, va="center", color="#555555")

    for x, name in ((1.8, "Q"), (5.0, "K"), (8.2, "V")):
        panel.text(x, 0.3, name, ha="center", va="center", fontsize=11, fontweight="bold")
        arrow(x, 0.7, 1.6, "n × d")
        box(x, 2.15, f"W_{name}", "#dddddd")
    for x, name in ((5.0, "E"), (8.2, "F")):
        arrow(x, 2.7, 4.0, "n × d")
        box(x, 4.55, f"{name}ᵀ: n → k", "#f2b8c0")
        arrow(x, 5.1, 6.7, "k × d")
    arrow(1.8, 2.7, 6.7, "n × d")
    box(5.0, 7.25, "softmax(Q Kᵀ / √d) V:  n × k instead of n × n", "#b8dde2", 8.8)
    arrow(5.0, 7.8, 9.0, "n × d, for each head")
    box(5.0, 9.55, "concatenate", "#dddddd", 3.2)
    arrow(5.0, 10.1, 11.2)
    box(5.0, 11.75, "W_O", "#dddddd", 3.2)
    plots.save(figure, path)


def _perplexity_axis(panel: Any, curves: Iterable[Sequence[tuple[float, float]]]) -> None:
    """A logarithmic axis with a label at powers of ten and, if there are few of these, in between."""
    values = [y for points in curves for _, y in points]
    few = bool(values) and max(values) < 100 * min(values)
    panel.set(yscale="log", ylabel="validation perplexity")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5) if few else ()))
    panel.yaxis.set_minor_formatter("{x:g}")
