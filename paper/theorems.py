"""The lemma and both theorems of the paper, tested on random inputs and on heads of an encoder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from linformers import plots
from linformers.analysis import attentions
from linformers.checks import check_size
from linformers.errors import UserError

from . import report
from .equation6 import observe
from .theorem1 import RANDOM, Head, RandomLowRank, generator, lemma, random_head, theorem_1
from .theorem2 import Construction, existence, proof_k, theorem_2

TITLE = "Theorems 1 and 2, tested"
SHIFT = 2.0  # the mean of values that share one, in standard deviations
LEMMA_DRAWS = 20000
DELTAS = (0.0, 0.01, 0.1, 0.3, 1.0, 3.0)  # δ of Theorem 2 besides 1/n; 0 stands for 2⁻ⁿ
FULL = {"far": (65536, 262144), "fit_length": 512, "fit_steps": 500, "fit_k": (8, 16, 32, 64, 128, 256)}
QUICK = {"far": (), "fit_length": 128, "fit_steps": 20, "fit_k": (8, 32)}


def layer_heads(model: PreTrainedModel, ids: Tensor, layer: int | None, name: str) -> list[Head]:
    """All heads of a layer, counted from 1, on tokens (n,); without a layer, those of the middle one."""
    seen = observe(model, ids, name)[1]
    layer = (len(seen) + 1) // 2 if layer is None else layer
    if not 1 <= layer <= len(seen):
        raise UserError(f"layer={layer} must be between 1 and {len(seen)}, the number of layers of model={name!r}")
    per_head = zip(*(tensor[0].cpu().unbind(0) for tensor in seen[layer - 1]), strict=True)
    return [Head(f"{name} layer {layer} head {i}", *parts) for i, parts in enumerate(per_head, 1)]


def explore(options: argparse.Namespace, show: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Test all statements on all inputs; `limits` lists what a real input did not allow."""
    sizes: dict[str, Any] = QUICK if options.quick else FULL
    seed, epsilons, draws, longest = options.seed, options.epsilon, options.draws, max(options.lengths)
    fit_length = min(sizes["fit_length"], longest)
    found: dict[str, Any] = {"records": [], "fits": [], "proof": [], "limits": []}

    def drawn(n: int, d: int, which: int = 0, mean: float = 0.0) -> Head:
        return random_head(n, d, generator(seed, "random", n, d, which), mean)

    def test(head: Head, deltas: Sequence[float]) -> None:
        show(f"{head.name}, n={head.n}, d={head.d}")
        rng = generator(seed, "statements", head.name, head.n, head.d)
        found["records"] += lemma(head, epsilons, LEMMA_DRAWS, rng)
        found["records"] += theorem_1(head, epsilons, draws, rng)
        found["records"] += theorem_2(head, epsilons, draws, rng, deltas)
        if deltas:  # what step (b) of Theorem 2 takes to be small, at the proof's k, and κ of Theorem 1
            k, rng = min(proof_k(head.n, head.d, max(epsilons)), head.n), generator(seed, "steps", head.name, head.n)
            steps = {"needed": Construction(head, draws, rng).step_b(k, 1 / head.n)}
            steps |= {"condition": RandomLowRank(head, head.d, rng).condition}
            found["proof"].append({"inputs": head.name, "n": head.n, "d": head.d, "k": k, **steps})

    def fit(head: Head, other: Head) -> None:
        show(f"{head.name}, fits")
        projected, rng = [k for k in sizes["fit_k"] if k <= head.n], generator(seed, "fits", head.name)
        found["fits"] += existence(head, other, projected, [1 / head.n, *DELTAS[1:]], rng, sizes["fit_steps"])

    for n in options.lengths:
        for d, mean in (*((d, 0.0) for d in options.dims), (max(options.dims), SHIFT)):
            test(drawn(n, d, mean=mean), DELTAS if n in (fit_length, longest) else ())
    for n in [n for n in sizes["far"] if n not in options.lengths]:
        show(f"{RANDOM}, n={n}")
        head = drawn(n, max(options.dims))
        found["records"] += theorem_2(head, epsilons, draws, generator(seed, "far", head.name, n, head.d))
    if options.model is not None:
        model, tokenizer = attentions.load_encoder(str(options.model))
        most, name = min(longest, tokenizer.model_max_length), options.model.name
        passages = attentions.passages(options.text, tokenizer, most, 2)
        attentions.check_full_attention(model, passages, name)
        if most < longest:
            found["limits"].append(f"{name} accepts n = {most:,} tokens, so its heads are tested up to this length.")
        lengths, fit_length = [n for n in options.lengths if n <= most] or [most], min(fit_length, most)
        heads = layer_heads(model, passages[0], options.layer, name)
        order = sorted(range(len(heads)), key=lambda i: heads[i].entropy())
        for kind, place in (("sharpest", order[0]), ("median", order[len(order) // 2]), ("most diffuse", order[-1])):
            inputs = [passages[0, :n] for n in lengths] + [own[:fit_length] for own in (passages[0], passages[-1])]
            chosen = (layer_heads(model, ids, options.layer, name)[place] for ids in inputs)
            *tested, head, other = (replace(own, name=f"{own.name} ({kind})") for own in chosen)
            for own in tested:
                test(own, DELTAS if own.n == lengths[-1] else ())
            fit(head, other)
    fit(*(drawn(fit_length, min(options.dims), which) for which in (0, 1)))
    return found


def run(options: argparse.Namespace, console: Console) -> None:
    """Test everything and write `theorems.json`, with one line for each record."""
    check_size("draws", options.draws)
    options.lengths, options.dims = (report.whole_numbers(name, getattr(options, name)) for name in ("lengths", "dims"))
    options.epsilon = report.fractions("epsilon", options.epsilon)
    if min(options.dims) < 2 or min(options.lengths) < 8:
        raise UserError(f"dims={min(options.dims)} must be at least 2 and lengths={min(options.lengths)} at least 8")
    if not all(0 < epsilon < 1 for epsilon in options.epsilon):
        raise UserError(f"epsilon={options.epsilon} must be between 0 and 1, where ε² − ε³ is positive")
    if (options.model is None) != (options.text is None):
        raise UserError("model or text is missing: real inputs need both")
    if options.quick:
        options.lengths = [n for n in options.lengths if n <= 256] or options.lengths[:1]
        options.dims, options.epsilon, options.draws = options.dims[:1], options.epsilon[-1:], min(options.draws, 40)
    with console.status("testing") as status:
        found = explore(options, status.update)
    records = found.pop("records")
    whole = {**report.origin(), "seed": options.seed, "draws": options.draws, **found}
    text = json.dumps({**whole, "columns": list(records[0]), "records": []}, indent=1, ensure_ascii=False)
    lines = ",\n".join("  " + json.dumps(list(own.values()), ensure_ascii=False) for own in records)
    options.path.write_text(text.replace('"records": []', f'"records": [\n{lines}\n ]') + "\n", encoding="utf-8")


def pick(records: Iterable[Mapping[str, Any]], statement: str, *norms: str) -> list[Any]:
    """The records whose statement starts with `statement`, in these norms."""
    return [each for each in records if each["statement"].startswith(statement) and each["norm"] in norms]


def collect(work: Any) -> dict[str, Any]:
    """The numbers of the page and the figure, from `theorems.json`."""
    if (whole := report.read(work.results / "theorems" / "theorems.json")) is None:
        return {"runs": {}}
    records = [dict(zip(whole["columns"], row, strict=True)) for row in whole["records"]]
    for own in records:
        own |= {"limit": own["delta"] == 1 / own["n"], "real": not own["inputs"].startswith(RANDOM)}
    last: dict[str, Any] = {}  # Theorem 1 by input, at the largest n, d and ε
    for own in sorted(pick(records, "Theorem 1", "|Pw|"), key=lambda own: (own["n"], own["d"], own["epsilon"])):
        last[own["inputs"]] = own
    return {**whole, "runs": {"theorems": whole}, "records": records, "pick": pick, "theorem_1": list(last.values())}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Errors of both theorems against n, at the largest ε and d."""
    epsilon, d = (max(own[name] for own in record["records"] if not own["real"]) for name in ("epsilon", "d"))
    records = [own for own in record["records"] if own["epsilon"] == epsilon and (own["d"] == d or own["real"])]
    first: dict[str, list[tuple[float, float]]] = {}
    for own in pick(records, "Theorem 1", "|Pw|"):
        first.setdefault(own["inputs"], []).append((own["n"], own["error"]))
    random = [own for own in records if own["inputs"] == RANDOM]
    stated, kept = (pick(random, name, "|s||V|") for name in ("Theorem 2, softmax, stated", "k tokens kept"))
    second = {
        "E, F of Theorem 2": [(own["n"], own["error"]) for own in stated],
        "k random tokens": [(own["n"], own["error"]) for own in kept if own["k"] < own["n"]],
        "zeros": [(own["n"], own["zero"]) for own in stated],
    }
    figure, axes = plots.new_figure(2, 9.6, 4)
    for panel, curves, name, norm in ((axes[0], first, "Theorem 1", "‖Pw‖"), (axes[1], second, "Theorem 2", "‖s‖‖V‖")):
        shown = {own: points for own, points in curves.items() if points}
        plots.against_length(panel, shown, title=f"{name}, ε = {epsilon:g}", xlabel="n", ylabel=f"error / {norm}")
        panel.legend(fontsize=6, frameon=False)
    plots.save(figure, folder / "theorems.png")


def add_options(add: Callable[..., Any]) -> None:
    add("--model", type=Path, help="folder of an encoder whose heads are tested, too")
    add("--text", type=Path, help="file or folder of text for the encoder")
    add("--layer", type=int, help="its layer, from 1 (default: the middle one)")
    add("--lengths", default="128,256,512,1024,2048,4096,8192,16384", help="lengths n, separated by commas")
    add("--dims", default="32,64", help="channels d of random heads, separated by commas")
    add("--epsilon", default="0.1,0.2,0.5", help="errors ε, separated by commas")
    add("--draws", type=int, default=200, help="draws of R in each setting")
    add("--seed", type=int, default=0, help="seed of all draws")
    add("--quick", action="store_true", help="few lengths, draws and steps: a test in seconds")


if __name__ == "__main__":
    report.main("theorems")
