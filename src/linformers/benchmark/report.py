"""The efficiency benchmark as tables, sentences, plots, markdown and json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import plots
from ..checks import check_choice, check_probability, check_size, make_folder
from ..config import FIXED_LENGTHS, PROJECTIONS, SHARINGS, check_window
from ..errors import UserError
from ..markdown import shown_table
from ..progress import steps
from ..provenance import commit, environment
from .efficiency import (
    FUSED,
    MODELS,
    ROBERTA,
    UNFUSED,
    Cell,
    as_records,
    compare,
    compare_projected_lengths,
    contenders,
    curves,
    mebibytes,
    milliseconds,
)
from .measure import best_device, fitting

TASKS = ("inference", "training")


@dataclass(frozen=True)
class Settings:
    """What `linformers bench` measures.

    Attributes:
        lengths: n.
        projected: k.
        tokens: in a pass, whatever n; `None` for one sequence in each pass.
        layers: of each model.
        hidden: d; heads have 64 channels.
        tasks: of `TASKS`.
        compiled: measure models through `torch.compile`, too.
        dropout: in training.
        sharing: of the Linformers.
        projection: of the Linformers.
        batches: find the largest batch that fits (on a GPU).
        models: of `MODELS`.
        windows: w of Linformers that are measured with a local window, too.
        memory: GiB that the largest batch may take; `None` for all that the GPU has.
    """

    lengths: Sequence[int]
    projected: Sequence[int]
    tokens: int | None
    layers: int
    hidden: int
    tasks: Sequence[str] = ("inference",)
    compiled: bool = False
    dropout: float = 0.0
    sharing: str = "layerwise"
    projection: str = "linear"
    batches: bool = False
    models: Sequence[str] = MODELS
    windows: Sequence[int] = ()
    memory: int | None = None

    def check(self) -> None:
        for name in ("layers", "hidden") if self.tokens is None else ("tokens", "layers", "hidden"):
            check_size(name, getattr(self, name))
        for model in self.models:
            check_choice("models", model, MODELS)
        for task in self.tasks:
            check_choice("task", task, TASKS)
        check_choice("sharing", self.sharing, SHARINGS)
        check_choice("projection", self.projection, [name for name in PROJECTIONS if name not in FIXED_LENGTHS])
        check_probability("dropout", self.dropout)
        if self.batches and best_device() != "cuda":
            raise UserError("batches=True needs a GPU: the memory of a CPU has no end that a pass could run into")
        if self.memory is not None:
            check_size("memory", self.memory)
            if not self.batches:
                raise UserError(f"memory={self.memory} has no effect without batches")
        for window in self.windows:
            check_window(window, "linear")
            if window > min(self.lengths):
                raise UserError(f"windows={window} exceeds lengths={min(self.lengths)}: at most n")
        if self.hidden % 64:
            raise UserError(f"hidden={self.hidden} must be a multiple of 64, the channels of a head")
        if self.tokens is not None:
            check_whole_sequences(self.lengths, self.tokens)
        if min(self.projected) >= max(self.lengths):
            raise UserError(f"projected={min(self.projected)} leaves nothing to measure: no length exceeds it")
        for n in self.lengths:  # what cannot be made is refused before anything is measured
            for contender in contenders(n, self.projected, windows=self.windows, **self.fields()):
                contender.config(n)

    def fields(self) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.hidden // 64,
            "intermediate_size": 4 * self.hidden,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "sharing": self.sharing,
            "projection": self.projection,
        }


def check_whole_sequences(lengths: Sequence[int], tokens: int) -> None:
    for n in lengths:
        if tokens % n:
            raise UserError(f"lengths={n} does not divide tokens={tokens}: each pass holds whole sequences")


def run(settings: Settings, *, out: Path, command: str, console: Console) -> None:
    """Measure, show, and write `efficiency.json`, `efficiency.md` and the plots to `out`."""
    settings.check()
    make_folder("out", out)
    device = best_device()
    dtype = "bfloat16" if device == "cuda" else "float32"
    fields = settings.fields()
    record = {"command": command, "commit": commit(), **environment(), "dtype": dtype}
    record |= {**fields, "tokens": settings.tokens, "lengths": [], "projected_lengths": []}
    which: dict[str, Any] = {"compiled": settings.compiled, "models": settings.models, "windows": settings.windows}
    n, k, smaller = max(settings.lengths), max(settings.projected), min(settings.projected)
    mixed = settings.tokens is not None and smaller < k < n and k % smaller == 0 and "linformer" in settings.models
    if settings.projection == "conv" and settings.sharing != "none":  # heads that share a kernel have one k
        mixed = False
    models = (len(contenders(n, settings.projected, **which, **fields)) for n in settings.lengths)
    saving = f"what a smaller k saves at n={n}"
    notes: list[str] = []
    with steps(console, len(settings.tasks) * sum(count + 1 for count in models) + mixed) as begin:
        for measured in compare(
            settings.lengths,
            settings.projected,
            tokens=settings.tokens,
            device=device,
            dtype=dtype,
            tasks=settings.tasks,
            with_floor=True,
            with_batches=settings.batches,
            memory=None if settings.memory is None else settings.memory * 2**30,
            on_model=begin,
            on_timing=begin,
            **which,
            **fields,
        ):
            record["lengths"] += as_records(measured)
            publish(record, out)  # whatever happens later, this much is there
        if mixed:
            begin(saving)
            sizes: dict[str, Any] = {"tokens": settings.tokens, "device": device, "dtype": dtype}
            found = fitting(lambda: list(compare_projected_lengths(k, smaller, n, **sizes, **fields)))
            record["projected_lengths"] = as_records(found or [])
            notes = [] if found else [f"There is too little memory to measure {saving}."]

    tables, sentences = publish(record, out, notes)
    for shown in tables:
        console.print(shown)
    for line in sentences:
        console.print(line, highlight=False)
    console.print(f"Written to {out}", markup=False)


def publish(record: dict[str, Any], out: Path, notes: Sequence[str] = ()) -> tuple[list[Table], list[str]]:
    """Write what was measured as `efficiency.json`, `efficiency.md` and plots; return its tables and sentences.

    `notes` are sentences to add. Where nothing fitted into memory there is nothing to plot.
    """
    (out / "efficiency.json").write_text(json.dumps(record, indent=1) + "\n")
    cells, mixed = ([Cell(**cell) for cell in record[name]] for name in ("lengths", "projected_lengths"))
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    tables = [table for task in tasks for table in task_tables(cells, task)]
    sentences = [line for task in tasks for line in crossovers(cells, task)]
    sentences += [line for task in tasks for line in below_floor(cells, task)]
    if record["tokens"] is None:
        sentences += [line for task in tasks for line in growth(cells, task)]
    if mixed:
        tables.append(saving_table(mixed, mixed[0].n))
    sentences += notes
    (out / "efficiency.md").write_text(markdown(tables, sentences, provenance(record)), encoding="utf-8")
    for task in tasks:
        own = [cell for cell in cells if cell.task == task]
        times, memory = curves(own, milliseconds), curves(own, mebibytes)
        for suffix in ("png", "svg") if times else ():
            plots.efficiency(times, memory, out / f"{task}.{suffix}", tokens_fixed=record["tokens"] is not None)
    return tables, sentences


def provenance(record: dict[str, Any]) -> dict[str, Any]:
    """Where the numbers of a record come from: all that is no list of them."""
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def task_tables(cells: Sequence[Cell], task: str) -> list[Table]:
    """What a pass costs in each measure, and how many times less than the baseline of that measure."""
    own = [cell for cell in cells if cell.task == task]
    fastest = baselines(own)
    unfused = [cell.model for cell in own if cell.model == UNFUSED][:1]
    tables = [
        length_table(own, milliseconds, f"Milliseconds, {task}", fastest, "faster than"),
        length_table(own, mebibytes, f"MiB beside the weights, {task}", unfused, "smaller than"),
        length_table(own, over_floor, f"Time over the floor of the hardware, {task}", digits=2),
    ]
    if any(cell.joules is not None for cell in own):
        tables.append(length_table(own, lambda c: c.joules, f"Joules, {task}", fastest, "less than", digits=2))
    if any(cell.largest_batch is not None for cell in own):
        title = f"Largest batch that fits, {task}"
        tables.append(length_table(own, lambda c: c.largest_batch, title, unfused, "that of", digits=0, inverse=True))
    return tables


def baselines(cells: Sequence[Cell]) -> list[str]:
    """What a user would pick instead, compiled where that was measured: RoBERTa with fused attention, and our twin."""
    measured = {cell.model for cell in cells}
    best = (next((name for name in (f"{m}, compiled", m) if name in measured), None) for m in (ROBERTA, FUSED))
    return [name for name in best if name] or [name for name in [UNFUSED] if name in measured]


def length_table(
    cells: Sequence[Cell],
    value: Callable[[Cell], float | None],
    title: str,
    against: Sequence[str] = (),
    than: str = "",
    *,
    digits: int = 1,
    inverse: bool = False,
) -> Table:
    """One measure at each n; in brackets, how many times better a Linformer is than each model it stands against."""
    if against:
        title = f"{title} (× {than} {' / '.join(against)})"
    models = list(dict.fromkeys(cell.model for cell in cells))
    lengths = list(dict.fromkeys(cell.n for cell in cells))
    table = Table("model", *(f"n={n}" for n in lengths), title=title)
    by_place = {(cell.model, cell.n): cell for cell in cells}
    for model in models:
        row = []
        for n in lengths:
            cell = by_place.get((model, n))
            if cell is None:
                row.append("–")
                continue
            own = value(cell)
            if cell.seconds is None or own is None:
                row.append("out of memory" if cell.seconds is None else "–")
                continue
            gains = []
            for other in (by_place.get((name, n)) for name in against) if cell.k is not None else ():
                base = None if other is None or other.seconds is None else value(other)
                gains.append(f"{own / base if inverse else base / own:.2f}×" if base else "–")
            gain = f" ({' / '.join(gains)})" if any(gain != "–" for gain in gains) else ""
            row.append(f"{own:,.{digits if own < 100 else 0}f}{gain}")
        table.add_row(model, *row)
    return table


def over_floor(cell: Cell) -> float | None:
    return None if cell.seconds is None or not cell.floor else cell.seconds / cell.floor


def below_floor(cells: Sequence[Cell], task: str) -> list[str]:
    """What was faster than its floor, which nothing can be."""
    ratios = {f"{cell.model}, n={cell.n}": over_floor(cell) for cell in cells if cell.task == task}
    below = [f"{name}: {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None and round(ratio, 2) < 1]
    if not below:
        return []
    why = "the floor was measured while the machine was busier; measure again on an idle one"
    return [f"{task}: some times are below the floor ({'; '.join(below)}): {why}."]


def crossovers(cells: Sequence[Cell], task: str) -> list[str]:
    """From which n on each Linformer is faster than what a user would pick instead, or fits where that does not."""
    own = [cell for cell in cells if cell.task == task]
    if not (others := baselines(own)):
        return []
    other = others[0]
    rival = {cell.n: cell.seconds for cell in own if cell.model == other}
    alike = [c for c in own if c.k is not None and c.model.endswith("compiled") == other.endswith("compiled")]
    lines = []
    for name in dict.fromkeys(cell.model for cell in alike):
        times = {cell.n: cell.seconds for cell in own if cell.model == name}
        # What alone runs out of memory has lost; where both do there is nothing to compare.
        both = {n: (times[n] or math.inf, seconds) for n in times if (seconds := rival[n]) is not None}
        last_loss = max((n for n, (ours, theirs) in both.items() if ours >= theirs), default=0)
        from_here = [n for n in both if n > last_loss]
        alone = [n for n in times if times[n] is not None and rival[n] is None]
        parts = []
        if from_here:
            parts.append(f"{name} is faster than {other} from n={min(from_here)} on")
        elif both:
            parts.append(f"{name} is faster than {other} at no n up to {last_loss}")
        if alone:
            parts.append(f"{other} runs out of memory at n={', '.join(map(str, alone))}, where {name} does not")
        if parts:
            lines.append(f"{task}: {'; '.join(parts)}.")
    return lines


def growth(cells: Sequence[Cell], task: str) -> list[str]:
    """How time and memory grow from n to 2n, at the worst."""
    lines = []
    for model in dict.fromkeys(cell.model for cell in cells):
        own = {cell.n: cell for cell in cells if (cell.model, cell.task) == (model, task) and cell.seconds is not None}
        pairs = [(own[n], own[2 * n]) for n in own if 2 * n in own]
        if pairs:
            time, at = max((milliseconds(long) / milliseconds(short), short.n) for short, long in pairs)
            memory, place = max((mebibytes(long) / mebibytes(short), short.n) for short, long in pairs)
            lines.append(
                f"{task}: from n to 2n, {model} takes at most {time:.2f} times as long (n={at}) "
                f"and {memory:.2f} times the memory (n={place})."
            )
    return lines


def saving_table(cells: Sequence[Cell], n: int) -> Table:
    table = Table("projected length", "time", "of the first", title=f"What a smaller k saves at n={n}")
    for cell in cells:
        assert cell.seconds is not None
        assert cells[0].seconds is not None
        table.add_row(cell.model, f"{milliseconds(cell):.1f} ms", f"{cell.seconds / cells[0].seconds:.2f}")
    return table


def markdown(
    tables: Sequence[Table], sentences: Sequence[str], where: dict[str, Any], title: str = "Efficiency"
) -> str:
    """The tables and sentences as a page, with where the numbers come from."""
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    for shown in tables:
        lines += [f"## {shown.title}", "", *shown_table(shown)]
    return "\n".join([*lines, *sentences, ""])
