"""`linformers theorems`: every statement of the paper's theory on random and on real inputs, as records and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskProgressColumn

from .. import plots
from ..checks import check_size, make_folder
from ..errors import UserError
from ..progress import progress
from ..provenance import commit, environment
from . import theorem_page, theorem_tables
from .existence import STEPS, Fit, existence
from .linear_attention import Construction, gamma, proved_k, theorem_2
from .qkv import Head, Passages, generator, pick_heads, random_head, read_passages
from .theorems import RandomLowRank, Record, check_epsilon, johnson_lindenstrauss, theorem_1

# The mean of values that share one, in standard deviations.
SHIFT = 2.0
# Draws are so cheap for the lemma that its tails can be seen.
LEMMA_DRAWS = 20000


@dataclass(frozen=True)
class Settings:
    """What `linformers theorems` tests.

    Attributes:
        lengths: n of random inputs; real ones take those that the model and the text allow.
        dims: d of random inputs.
        epsilons: ε.
        draws: of R in each setting.
        seed: of everything that is drawn.
        model: folder of an encoder; `None` for random inputs alone.
        text: a file that it reads.
        layer: of the model, counted from 1; `None` for the one halfway up.
        deltas: δ of Theorem 2, beside 1/n; 0 stands for 2⁻ⁿ.
        far: n at which Theorem 2 alone is tested, too.
        projected: k of the fits.
        fit_length: n of the fits, or the longest there is.
        steps: of each fit.
    """

    lengths: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    dims: Sequence[int] = (32, 64)
    epsilons: Sequence[float] = (0.1, 0.2, 0.5)
    draws: int = 200
    seed: int = 0
    model: Path | None = None
    text: Path | None = None
    layer: int | None = None
    deltas: Sequence[float] = (0.0, 0.01, 0.1, 0.3, 1.0, 3.0)
    far: Sequence[int] = (65536, 262144)
    projected: Sequence[int] = (8, 16, 32, 64, 128, 256)
    fit_length: int = 512
    steps: int = STEPS

    def check(self) -> None:
        for name in ("draws", "steps", "fit_length"):
            check_size(name, getattr(self, name))
        for name in ("lengths", "dims", "projected"):
            for value in getattr(self, name):
                check_size(name, value)
        if min(self.dims) < 2 or min(self.lengths) < 2:
            raise UserError(f"dims={min(self.dims)} and lengths={min(self.lengths)} must be at least 2: log 1 is 0")
        for epsilon in self.epsilons:
            check_epsilon(epsilon)
        if (self.model is None) != (self.text is None):
            given, missing = ("text", "model") if self.model is None else ("model", "text")
            raise UserError(f"{missing} is missing: {given} was given, and a real input needs both")


def quick(settings: Settings) -> Settings:
    """The same in seconds: a look at whether it works, not at the numbers."""
    lengths = [n for n in settings.lengths if n <= 256] or [min(settings.lengths)]
    few: dict[str, Any] = {"draws": min(settings.draws, 40), "far": (), "steps": 20, "fit_length": 128}
    few |= {"dims": settings.dims[:1], "epsilons": settings.epsilons[-1:], "projected": (8, 32)}
    return replace(settings, lengths=lengths, **few)


@dataclass
class Findings:
    """All that a run found out; `limits` says in a sentence what a real input did not allow."""

    records: list[Record] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    proof: list[dict[str, Any]] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "records": [record.as_dict() for record in self.records],
            "fits": [fit.as_dict() for fit in self.fits],
            "proof": self.proof,
            "limits": self.limits,
        }


def run(settings: Settings, *, out: Path, command: str, console: Console) -> Findings:
    """Test everything, and write `theorems.json`, `theorems.md` and the plot to `out`."""
    settings.check()
    make_folder("out", out)
    with progress(console, TaskProgressColumn()) as bars:
        task = bars.add_task("reading", total=None)

        def on_work(done: float, total: float, what: str) -> None:
            bars.update(task, completed=done, total=total, description=what)

        found = explore(settings, on_work)
    where = {"command": command, "commit": commit(), **environment(), "seed": settings.seed, "draws": settings.draws}
    (out / "theorems.json").write_text(as_json(found, settings, where), encoding="utf-8")
    findings = write_page(out)
    tables = theorem_tables.tables(findings.records, findings.fits, findings.proof)
    unbounded = console.options.update(width=1000)
    if (wanted := max(console.measure(table, options=unbounded).maximum for table in tables)) <= console.width:
        for table in tables:
            console.print(table)
    else:
        console.print(f"The tables are {wanted} columns wide: they are in {out / 'theorems.md'}", markup=False)
    console.print(theorem_page.conclusion(findings.records, findings.fits), highlight=False, markup=False)
    for line in theorem_page.sentences(findings.records, findings.fits, findings.proof) + findings.limits:
        console.print(f"- {line}", highlight=False, markup=False)
    console.print(f"Written to {out}", markup=False)
    return findings


def as_json(found: Findings, settings: Settings, where: Mapping[str, Any]) -> str:
    """All of it, with a line for each record: thousands of lines of one number each help nobody."""
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    whole = {**where, "settings": chosen, **found.as_dict()}
    # δ stays exact: the page is made by comparing it with 1/n.
    records = [{**{key: _short(own) for key, own in each.items()}, "delta": each["delta"]} for each in whole["records"]]
    whole |= {"columns": list(records[0]), "records": []}
    lines = ",\n".join("  " + json.dumps(list(each.values()), ensure_ascii=False) for each in records)
    text = json.dumps(whole, indent=1, ensure_ascii=False).replace('"records": []', f'"records": [\n{lines}\n ]')
    return text + "\n"


def write_page(folder: Path) -> Findings:
    """Write page and figure from the `theorems.json` that is there, so that they say no more than it holds."""
    whole = json.loads((folder / "theorems.json").read_text(encoding="utf-8"))
    columns, _ = whole.pop("columns"), whole.pop("settings")
    findings = Findings(
        records=[_record(dict(zip(columns, row, strict=True))) for row in whole.pop("records")],
        fits=[Fit(**fit) for fit in whole.pop("fits")],
        proof=whole.pop("proof"),
        limits=whole.pop("limits"),
    )
    for suffix in ("png", "svg"):
        plots.theorems(theorem_tables.panels(findings.records, findings.fits), folder / f"theorems.{suffix}")
    page = theorem_page.page(findings.records, findings.fits, findings.proof, findings.limits, where=whole)
    (folder / "theorems.md").write_text(page, encoding="utf-8")
    return findings


def _record(row: Mapping[str, Any]) -> Record:
    return Record(**{own.name: row[own.name] for own in fields(Record)})


def _short(value: Any) -> Any:
    """Five digits of a number: more are noise."""
    if isinstance(value, tuple):
        return [_short(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def explore(settings: Settings, on_work: Callable[[float, float, str], None] = lambda *_: None) -> Findings:
    """All statements on all inputs; `on_work` hears how much of the work is done."""
    found = Findings()
    passages = None
    if settings.model is not None and settings.text is not None:
        passages = read_passages(settings.model, settings.text, max(settings.lengths))
        if passages.longest < max(settings.lengths):
            found.limits.append(
                f"{passages.name} on this text allows n = {passages.longest:,}: real inputs go no further, and no text "
                "is repeated to make them longer."
            )
    jobs = list(_jobs(settings, passages, found))
    total = sum(cost for cost, _, _ in jobs)
    done = 0.0
    for cost, what, job in jobs:
        on_work(done, total, what)
        job()
        done += cost
    on_work(total, total, "done")
    return found


def _jobs(
    settings: Settings, passages: Passages | None, found: Findings
) -> Iterator[tuple[float, str, Callable[[], None]]]:
    """What there is to do: about how much work it is, what it is called, and the work."""
    seed, longest = settings.seed, max(settings.lengths)
    fit_length = min(settings.fit_length, longest)
    if passages is not None:
        fit_length = min(fit_length, passages.longest)
    if fit_length < (k := min(settings.projected)):
        raise UserError(f"n={fit_length} is too short to fit E and F at k={k}; take longer lengths, or a longer text")
    swept = {fit_length, longest}

    def drawn(n: int, d: int, which: int = 0, mean: float = 0.0) -> Head:
        return random_head(n, d, generator(seed, "random", n, d, which), mean)

    for n in settings.lengths:
        deltas = settings.deltas if n in swept else ()
        for d, mean in (*((d, 0.0) for d in settings.dims), (max(settings.dims), SHIFT)):
            work = partial(_test, settings, partial(drawn, n, d, mean=mean), deltas, found)
            yield 1 + (n / 4096) ** 2 + n / 2048 + len(deltas), f"random, n={n}, d={d}", work
    for n in [n for n in settings.far if n not in settings.lengths]:
        yield n / 20000, f"random, n={n}", partial(_test_far, settings, partial(drawn, n, max(settings.dims)), found)
    fitted = 1.0 * len(settings.projected)
    d = min(settings.dims)
    if passages is not None:
        layer = passages.middle if settings.layer is None else settings.layer
        heads, others = passages.heads(fit_length, layer), passages.heads(fit_length, layer, other=True)
        d = heads[0].d
        lengths = [n for n in settings.lengths if n <= passages.longest] or [passages.longest]
        for kind, place in pick_heads(passages.heads(lengths[-1], layer)).items():
            name = f"{passages.name} layer {layer} head {place + 1} ({kind})"
            for n in lengths:
                head = replace(passages.heads(n, layer)[place], name=name)
                deltas = settings.deltas if n == lengths[-1] else ()
                yield (
                    1.0 + len(deltas),
                    f"{name}, n={n}",
                    partial(_test, settings, partial(replace, head), deltas, found),
                )
            pair = replace(heads[place], name=name), replace(others[place], name=name)
            yield fitted, f"{name}, fits", partial(_fit, settings, *pair, found)
    yield fitted, "random, fits", partial(_fit, settings, drawn(fit_length, d), drawn(fit_length, d, 1), found)


def _test(settings: Settings, make: Callable[[], Head], deltas: Sequence[float], found: Findings) -> None:
    head = make()
    rng = generator(settings.seed, "statements", head.name, head.n, head.d)
    found.records += johnson_lindenstrauss(head, settings.epsilons, LEMMA_DRAWS, rng)
    found.records += theorem_1(head, settings.epsilons, settings.draws, rng)
    found.records += theorem_2(head, settings.epsilons, settings.draws, rng, deltas)
    if deltas:
        found.proof.append(_steps(settings, head))


def _test_far(settings: Settings, make: Callable[[], Head], found: Findings) -> None:
    head = make()
    rng = generator(settings.seed, "far", head.name, head.n, head.d)
    found.records += theorem_2(head, settings.epsilons, settings.draws, rng)


def _fit(settings: Settings, head: Head, other: Head, found: Findings) -> None:
    projected = [k for k in settings.projected if k <= head.n]
    rng = generator(settings.seed, "fits", head.name)
    deltas = [delta for delta in settings.deltas if delta > 0]
    found.fits += existence(head, other, projected, deltas, rng, steps=settings.steps)


def _steps(settings: Settings, head: Head) -> dict[str, Any]:
    """What the steps of the proof take for granted, measured at the proof's k."""
    rng = generator(settings.seed, "steps", head.name, head.n, head.d)
    epsilon = max(settings.epsilons)
    k = min(proved_k(head.n, head.d, epsilon).k, head.n)
    drawn = Construction(head, settings.draws, rng)
    needed, written = drawn.step_b(k, 1 / head.n)
    steps = {
        "inputs": head.name,
        "n": head.n,
        "d": head.d,
        "k": k,
        "needed": needed,
        "written": written,
        "flatness": drawn.flatness,
        "condition": RandomLowRank(head, head.d, rng).condition,
        "smallest_relative": drawn.smallest(epsilon, "softmax", "|sV|"),
        "gamma": None,
    }
    if 2 * head.d <= head.n <= 2048:  # needs all of A
        steps["gamma"] = {str(delta): gamma(head, k, delta, rng) for delta in (1 / head.n, 1.0)}
    return steps
