"""What `linformers lowrank` measures and writes: error and time of P's best rank k, beside E and F."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from .. import plots
from ..benchmark.report import markdown
from ..checks import check_size, make_folder
from ..errors import UserError
from ..progress import progress, stoppable
from ..provenance import commit, environment
from ..training.checkpointing import write_text
from . import attentions, lowrank
from .lowrank import OTHERS, OWN, SVD, Loss
from .qkv import check_plain
from .spectrum import fingerprint, hashes


@dataclass(frozen=True)
class Settings:
    """What to approximate, and how.

    Attributes:
        model: a folder or a hub name.
        texts: files and folders.
        projected: k.
        length: n, the tokens of a passage.
        passages: that errors are measured on.
        others: passages that E and F are fitted to beforehand.
        steps: of fitting.
        seed: of the choice of passages.
        text_column: of tables.
    """

    model: str
    texts: Sequence[str]
    projected: Sequence[int] = (32, 64, 128, 256)
    length: int = 512
    passages: int = 4
    others: int = 64
    steps: int = 300
    seed: int = 0
    text_column: str = "text"

    def check(self) -> None:
        for name in ("length", "passages", "others", "steps"):
            check_size(name, getattr(self, name))
        for k in self.projected:
            if k >= self.length:
                raise UserError(f"projected={k} must be below length={self.length}")
        if not self.texts:
            raise UserError("text is missing: files or folders that passages are taken from")


def run(settings: Settings, *, out: Path, command: str, console: Console) -> None:
    """Measure, and write `lowrank.json`, `lowrank.md` and the figure to `out`."""
    settings.check()
    make_folder("out", out)
    where = {"command": command, "commit": commit(), **environment(), "model": settings.model, "n": settings.length}
    model, tokenizer = attentions.load_encoder(settings.model)
    wanted = settings.passages + settings.others
    ids = attentions.passages(
        settings.texts, tokenizer, settings.length, wanted, seed=settings.seed, text_column=settings.text_column
    )
    if len(ids) < wanted:
        raise UserError(
            f"passages={settings.passages} and others={settings.others} are more than the {len(ids)} of "
            f"length={settings.length} that the texts have"
        )
    layers, heads = attentions.check_watchable(model, ids, settings.model)
    check_plain(model, ids, settings.model)
    kept = out / "losses.json"
    with stoppable(console, lambda: stopped(kept, settings.projected)):
        losses = measured(settings, model, ids, layers, kept, console)
        with console.status("times"):
            d = model.config.hidden_size // heads
            times = lowrank.seconds(settings.length, settings.projected, heads, d, model.device)

    tables, lines = [error_table(losses, settings.projected), time_table(times)], sentences(losses, times)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    record = {**where, "losses": [asdict(loss) for loss in losses], "seconds": times}
    (out / "lowrank.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "lowrank.md").write_text(markdown(tables, lines, where, "P replaced by low rank"), encoding="utf-8")
    ways = dict.fromkeys(loss.way for loss in losses)
    curves = {way: [(loss.k, loss.heads) for loss in losses if loss.way == way] for way in ways}
    milliseconds = {
        way: [(k, 1000 * own.get(k, own.get(None, 0.0))) for k in settings.projected] for way, own in times.items()
    }
    for suffix in ("png", "svg"):
        plots.low_rank(curves, milliseconds, out / f"lowrank.{suffix}")
    kept.unlink()
    console.print(f"Written to {out}", markup=False)


def measured(
    settings: Settings, model: PreTrainedModel, ids: Tensor, layers: int, path: Path, console: Console
) -> list[Loss]:
    """The losses at each k, with a progress bar; a k that an interrupted run has measured is taken from `path`."""
    of = {"model": fingerprint(model), "passages": hashes(ids).tolist()}
    of |= {"measured": settings.passages, "steps": settings.steps}
    done = losses_before(path, of)
    passages, others = ids.split([settings.passages, settings.others])
    work = layers * (1 + settings.passages)  # at each k
    with progress(console) as bars:
        task = bars.add_task("", total=len(settings.projected) * work)
        for k in settings.projected:
            if k in done:
                console.print(f"k={k} was measured before", highlight=False)
                bars.advance(task, work)
                continue
            bars.update(task, description=f"k={k}, fitting E and F")
            fitted = lowrank.fit(
                model, others, k, settings.model, steps=settings.steps, on_layer=lambda: bars.advance(task)
            )
            bars.update(task, description=f"k={k}, errors")
            done[k] = lowrank.losses(
                model,
                passages,
                k,
                settings.model,
                fitted,
                steps=settings.steps,
                on_passage=lambda: bars.advance(task, layers),
            )
            write_text(path, json.dumps({**of, "losses": [asdict(loss) for own in done.values() for loss in own]}))
    return [loss for k in settings.projected for loss in done[k]]


def stopped(path: Path, projected: Sequence[int]) -> str:
    """What is said of an interrupted run, by what it has left."""
    done = {loss["k"] for loss in json.loads(path.read_text())["losses"]} if path.exists() else set()
    return f"Stopped after {len(done.intersection(projected))} of {len(projected)} k; run again, it goes on from there"


def losses_before(path: Path, of: dict[str, Any]) -> dict[int, list[Loss]]:
    """By k, what a run with the same model, passages and steps has left."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    losses = [Loss(**own) for own in record.pop("losses")]
    if record != of:
        raise UserError(
            f"{path} is of a run with another model, other texts, or other numbers of passages or steps, which was "
            "stopped; give another --out, or remove it"
        )
    return {k: [loss for loss in losses if loss.k == k] for k in dict.fromkeys(loss.k for loss in losses)}


def error_table(losses: Sequence[Loss], projected: Sequence[int]) -> Table:
    """Both errors of each way at each k."""
    table = Table("approximation", *(f"k={k}" for k in projected))
    table.title = "Relative error of P V (of the encoder's output, all layers replaced)"
    for way in dict.fromkeys(loss.way for loss in losses):
        own = [loss for loss in losses if loss.way == way]
        table.add_row(way, *(f"{loss.heads:.3f} ({loss.model:.3f})" for loss in own))
    return table


def time_table(times: dict[str, dict[int | None, float]]) -> Table:
    """Milliseconds of one layer's attention."""
    projected = list(times[SVD])
    table = Table("attention of one layer", *(f"k={k}" for k in projected), title="Milliseconds, one passage")
    for way, own in times.items():
        table.add_row(way, *(f"{1000 * own.get(k, own.get(None, 0.0)):.2f}" for k in projected))
    return table


def sentences(losses: Sequence[Loss], times: dict[str, dict[int | None, float]]) -> list[str]:
    """What follows, at the middle k."""
    projected = list(dict.fromkeys(loss.k for loss in losses))
    k = projected[len(projected) // 2]
    at = {loss.way: loss for loss in losses if loss.k == k}
    return [
        f"At k={k}, the matrix of rank k that is nearest to P (which need not be the best one for P V) misses P V by "
        f"{at[SVD].heads:.3f}, E and F fitted to the passage itself by {at[OWN].heads:.3f}, and E and F fitted to "
        f"other passages by {at[OTHERS].heads:.3f}: the first two see the passage they approximate, a trained "
        "Linformer does not.",
        f"The SVD of every P takes {times[SVD][k] / times['exact'][None]:.0f} times as long as exact attention, E and "
        f"F {times['E, F'][k] / times['exact'][None]:.2f} times: that an SVD costs more than it saves is why the paper "
        "leaves equation 6 aside.",
    ]
