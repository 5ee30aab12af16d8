"""Figure 1 of the paper for any encoder: how fast the singular values of P add up, in each layer and head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TextColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import plots
from ..checks import check_size, make_folder
from ..errors import UserError
from ..markdown import table
from ..progress import progress, stoppable
from ..provenance import commit, environment
from . import attentions
from .spectrum import Spectrum, measure, rank_correlation


@dataclass(frozen=True)
class Settings:
    """What `linformers spectrum` measures.

    Attributes:
        model: a folder or a hub name.
        texts: files and folders.
        length: n, the tokens of a passage.
        sentences: how many passages.
        at: the number of singular values whose share the heat map shows.
        seed: of the choice of passages.
        text_column: of tables.
        workers: threads; `None` for one for each core.
    """

    model: str
    texts: Sequence[str]
    length: int = 512
    sentences: int = 1000
    at: int = 128
    seed: int = 0
    text_column: str = "text"
    workers: int | None = None

    def check(self) -> None:
        for name in ("length", "sentences", "at"):
            check_size(name, getattr(self, name))
        if self.workers is not None:
            check_size("workers", self.workers)
        if self.length < 2:
            raise UserError(f"length={self.length} must be at least 2, for P to have more than one singular value")
        if self.at >= self.length:
            raise UserError(f"at={self.at} must be below length={self.length}, the number of singular values")
        if not self.texts:
            raise UserError("text is missing: files or folders that passages are taken from")


def run(
    settings: Settings, *, out: Path, command: str, console: Console, known_as: Callable[[str], str] = str
) -> Spectrum:
    """Measure, and write `spectrum.json`, `spectrum.md` and the figure to `out`; `known_as` names paths there."""
    settings.check()
    make_folder("out", out)
    where = {"command": command, "commit": commit(), **environment()}
    texts = [settings.texts] if isinstance(settings.texts, str) else settings.texts
    where |= {"model": known_as(settings.model), "texts": list(map(known_as, texts)), "n": settings.length}
    spectrum = measured(settings, *attentions.load_encoder(settings.model), out, console)
    lines = sentences(spectrum, settings.at)
    for line in lines:
        console.print(line, highlight=False)
    record = {**where, **as_record(spectrum, settings.at)}
    (out / "spectrum.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    (out / "spectrum.md").write_text(page(spectrum, settings.at, where, lines), encoding="utf-8")
    draw(out)
    console.print(f"Written to {out}", markup=False)
    return spectrum


def draw(folder: Path) -> None:
    """The figure, from the `spectrum.json` that is there."""
    record = json.loads((folder / "spectrum.json").read_text())
    names = ("cumulative_by_layer", "cumulative_std_by_layer", "cumulative_at")
    by_layer, spread, shares = (np.array(record[name]) for name in names)
    for suffix in ("png", "svg"):
        plots.spectrum(by_layer, spread, shares, record["at"], title(record), folder / f"spectrum.{suffix}")


def title(record: Mapping[str, Any]) -> str:
    """What was measured, with the last two parts of each path, which are enough to know it by."""
    model, *texts = (str(Path(*Path(name).parts[-2:])) for name in (record["model"], *record["texts"]))
    return f"{model} on {', '.join(texts)}: n = {record['n']:,}, {record['sentences']:,} passages"


def measured(
    settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, console: Console
) -> Spectrum:
    """The spectrum, with a progress bar; what an interrupted run has measured is in `out` and not measured again."""
    with console.status("reading the texts"):
        ids = attentions.passages(
            settings.texts,
            tokenizer,
            settings.length,
            settings.sentences,
            seed=settings.seed,
            text_column=settings.text_column,
        )
    if len(ids) < settings.sentences:
        console.print(f"The texts have {len(ids)} passages of {settings.length} tokens; all are taken", highlight=False)
    with progress(console, None, TextColumn("{task.fields[speed]}")) as bars:
        task = bars.add_task("passages", total=len(ids), speed="")
        matrices = 0

        def start(done: int, layers: int, heads: int) -> None:
            nonlocal matrices
            matrices = layers * heads
            bars.update(task, completed=min(done, len(ids)))
            more = f", more than the {len(ids)} asked for: the result is of all" if done > len(ids) else ""
            if done:
                console.print(f"{done} passages were measured before{more}", highlight=False)

        def advance() -> None:
            bars.advance(task)
            speed = bars.tasks[task].speed
            bars.update(task, speed=f"{speed * matrices:.0f} matrices/s" if speed else "")

        def stopped() -> str:
            done = int(bars.tasks[task].completed)
            return f"Stopped after {done} of {len(ids)} passages; run again, it goes on from there"

        with stoppable(console, stopped):
            return measure(
                model,
                ids,
                name=settings.model,
                workers=settings.workers,
                state_file=out / "state.npz",
                on_start=start,
                on_sentence=advance,
            )


def sentences(spectrum: Spectrum, at: int) -> list[str]:
    """The paper's two claims, with numbers: a long tail everywhere, and lower rank in higher layers."""
    shares = spectrum.cumulative[:, :, at - 1]  # (layers, heads)
    layers, heads, n = spectrum.cumulative.shape
    low, high = np.unravel_index(shares.argmin(), shares.shape), np.unravel_index(shares.argmax(), shares.shape)
    lines = [
        f"The first {at} of {n} singular values hold {shares.mean():.3f} of their sum on average over {layers} layers "
        f"and {heads} heads ({spectrum.sentences} passages): least {shares.min():.3f} (layer {low[0] + 1}, head "
        f"{low[1] + 1}), most {shares.max():.3f} (layer {high[0] + 1}, head {high[1] + 1}); a flat spectrum would have "
        f"{at / n:.3f}.",
        f"Of the sum of their squares they hold {spectrum.energy[:, :, at - 1].mean():.3f}, at the least "
        f"{spectrum.energy[:, :, at - 1].min():.3f}.",
    ]
    if layers > 2:
        over_layers = rank_correlation(range(layers), shares.mean(1).tolist())
        over_heads = rank_correlation(np.repeat(np.arange(layers), heads).tolist(), shares.flatten().tolist())
        verdict = "higher layers are lower in rank" if over_layers > 0.5 else "higher layers are not lower in rank"
        lines.append(
            f"Rank correlation of a layer's number and its share: {over_layers:.2f} (over single heads "
            f"{over_heads:.2f}): {verdict}."
        )
    return lines


def page(spectrum: Spectrum, at: int, where: dict[str, Any], lines: Sequence[str]) -> str:
    """The share of the first values in each layer and head, with where it comes from."""
    shares, spread = spectrum.cumulative[:, :, at - 1], spectrum.cumulative_std[:, :, at - 1]
    heads = range(1, shares.shape[1] + 1)
    rows = ["# Spectrum of P", "", *(f"- {name}: {value}" for name, value in where.items()), "", *lines, ""]
    rows += [f"## Share of the first {at} singular values (± standard deviation over passages)", ""]
    cells = [
        (str(layer), *(f"{mean:.3f} ± {std:.3f}" for mean, std in zip(means, stds, strict=True)))
        for layer, (means, stds) in enumerate(zip(shares, spread, strict=True), 1)
    ]
    return "\n".join([*rows, *table(("layer", *(f"head {head}" for head in heads)), cells)])


def as_record(spectrum: Spectrum, at: int) -> dict[str, Any]:
    """What the figure and the page can be made of again, and the curve of each head to four digits.

    `…_at` are the values of each head at `at`, (layers, heads); `…_by_layer` means over heads, (layers, n).
    """
    series = {name: getattr(spectrum, name) for name in ("cumulative", "cumulative_std", "energy")}
    values = {f"{name}_at": own[:, :, at - 1].tolist() for name, own in series.items()}
    curves = {f"{name}_by_layer": np.round(own.mean(1), 6).tolist() for name, own in series.items()}
    shares = np.round(spectrum.cumulative, 4).tolist()
    return {"sentences": spectrum.sentences, "at": at, **values, **curves, "cumulative": shares}
