r"""Equation 6: P replaced by its best approximation of rank k, compared with E and F of the same k.

The paper rejects this approach because it decomposes every P. Here a pretrained encoder computes with P_low, the best
matrix of rank k (Eckart and Young), and with P̄ Fᵀ, where P̄ = softmax(Q (EᵀK)ᵀ / √d) and E and F are averages over
windows, fitted to the passage at hand (do such E and F exist?), or fitted to other passages (does one pair serve all
inputs?).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer
from transformers import PreTrainedModel

from linformers import plots
from linformers.analysis import attentions
from linformers.checks import check_size, whole_numbers
from linformers.errors import UserError
from linformers.progress import steps
from linformers.projections import window_matrix

from . import report
from .heads import attention_as, observe

TITLE = "Equation 6: P replaced by its best rank k"
EXACT, SVD, PROJECTED = "exact", "best rank k (SVD)", "E, F"
OWN, OTHERS = "E, F fitted to the passage", "E, F fitted to other passages"
POOLED, UNIFORM = "E, F means over windows", "uniform average"
# Adam's learning rate, times 1/n, because a step changes EᵀK by a sum of n entries. A fit that serves all passages must
# not follow each batch.
OWN_RATE, OTHERS_RATE = 0.3, 0.1


def low_rank(probs: Tensor, k: int) -> Tensor:
    """P_low: P projected onto the k leading eigenvectors of PᵀP."""
    precise = probs.double()
    _, directions = torch.linalg.eigh((precise.mT @ precise).cpu())  # on a GPU, torch decomposes one after the other
    leading = directions[..., -k:].to(probs.device)
    return (precise @ leading @ leading.mT).to(probs.dtype)


def linear(query: Tensor, key: Tensor, value: Tensor, E: Tensor, F: Tensor) -> Tensor:
    """Linear attention, P̄ Fᵀ V, with E and F of (n, k) or (h, n, k)."""
    return scaled_dot_product_attention(query, E.mT @ key, F.mT @ value)


def attention_matrix(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)


def relative_error(output: Tensor, exact: Tensor) -> Tensor:
    return (output - exact).norm(dim=(-1, -2)) / exact.norm(dim=(-1, -2))


def fit(
    query: Tensor, key: Tensor, value: Tensor, k: int, *, steps: int, rate: float, batch: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """E and F, (h, n, k), fitted by Adam from mean pooling so that linear attention gives PV; inputs (b, h, n, d)."""
    heads, n = query.shape[1:3]
    start = window_matrix(n, k, n, query.device).expand(heads, n, k)
    E, F = (start.clone().requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([E, F], lr=rate / n)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(len(query), generator=generator)[:batch].to(query.device)
        inputs = query[rows], key[rows], value[rows]
        loss = relative_error(linear(*inputs, E, F), scaled_dot_product_attention(*inputs)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return E.detach(), F.detach()


def fit_layers(passages: Sequence[Any], k: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """E and F of each layer, fitted to passages of which `observe` returned the queries, keys and values."""
    layers = [[torch.cat(own) for own in zip(*layer, strict=True)] for layer in zip(*passages, strict=True)]
    return [fit(*layer, k, seed=place, **options) for place, layer in enumerate(layers)]


def losses(
    model: PreTrainedModel, ids: Tensor, k: int, name: str, fitted: Sequence[tuple[Tensor, Tensor]], steps: int
) -> list[dict[str, Any]]:
    """Relative errors of each way at k, on passages (count, n); `fitted` are E and F fitted to other passages.

    `heads` is the error of PV, averaged over layers, heads and passages, with exact inputs; `model` is the error of the
    last hidden states if all layers are approximated.
    """
    n, sums = ids.shape[1], dict[str, Tensor]()
    window = window_matrix(n, k, n, model.device)
    for row in ids:
        exact, layers = observe(model, row, name)
        own = fit_layers([layers], k, steps=steps, rate=OWN_RATE)
        ways: dict[str, Callable[..., Tensor]] = {
            SVD: lambda layer, *inputs: low_rank(attention_matrix(*inputs[:2]), k) @ inputs[2],
            OWN: lambda layer, *inputs, own=own: linear(*inputs, *own[layer]),
            OTHERS: lambda layer, *inputs: linear(*inputs, *fitted[layer]),
            POOLED: lambda layer, *inputs: linear(*inputs, window, window),
            UNIFORM: lambda layer, query, key, value: value.mean(-2, keepdim=True).expand_as(value),
        }
        for way, approximate in ways.items():
            with torch.no_grad(), attention_as(model, name, approximate):
                output = model(row[None].to(model.device)).last_hidden_state
            heads = [
                relative_error(approximate(i, *own), scaled_dot_product_attention(*own)) for i, own in enumerate(layers)
            ]
            both = torch.stack([torch.cat(heads).mean(), relative_error(output, exact)[0]]).cpu()
            sums[way] = sums.get(way, torch.zeros(2)) + both / len(ids)
    return [{"way": way, "k": k, "heads": float(own[0]), "model": float(own[1])} for way, own in sums.items()]


def seconds(n: int, projected: Sequence[int], heads: int, d: int, device: Any) -> dict[str, dict[str, float]]:
    """The time of one layer's attention, given Q, K and V: exact, by SVD, and by E and F, for each k."""
    query, key, value = torch.randn(3, 1, heads, n, d, device=device)
    projections = {k: torch.randn(n, k, device=device) / n for k in projected}
    ways: dict[str, Callable[[int], Tensor]] = {
        EXACT: lambda k: scaled_dot_product_attention(query, key, value),
        SVD: lambda k: low_rank(attention_matrix(query, key), k) @ value,
        PROJECTED: lambda k: linear(query, key, value, projections[k], projections[k]),
    }
    found: dict[str, dict[str, float]] = {way: {} for way in ways}
    for way, k in itertools.product(ways, projected):
        timer = Timer("run(k)", globals={"run": ways[way], "k": k}, num_threads=torch.get_num_threads())
        found[way][str(k)] = timer.blocked_autorange(min_run_time=0.2).median
    return found


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and write `equation6.json`."""
    for name in ("passages", "others", "steps"):
        check_size(name, getattr(options, name))
    if options.model is None or not options.text:
        raise UserError("model or text is missing: pass an encoder, and files or folders to draw passages from")
    model, tokenizer = attentions.load_encoder(options.model)
    n = options.length or min(512, tokenizer.model_max_length)
    projected = options.projected or list(dict.fromkeys(max(1, n // part) for part in (16, 8, 4, 2)))
    if max(projected) >= n:
        raise UserError(f"projected={max(projected)} must be below length={n}")
    sizes, drawn = [options.passages, options.others], {"seed": options.seed, "text_column": options.text_column}
    ids = attentions.passages(options.text, tokenizer, n, sum(sizes), **drawn)
    if len(ids) < sum(sizes):
        raise UserError(f"passages={sizes[0]} and others={sizes[1]} exceed the {len(ids)} of length={n} in text")
    _, heads = attentions.check_full_attention(model, ids, options.model)
    passages, others = ids.split(sizes)
    known = [observe(model, row, options.model)[1] for row in others]
    found = []
    with steps(console, len(projected) + 1) as step:
        for k in projected:
            step(f"k={k}")
            fitted = fit_layers(known, k, steps=options.steps, rate=OTHERS_RATE)
            found += losses(model, passages, k, options.model, fitted, options.steps)
        step("times")
        times = seconds(n, projected, heads, model.config.hidden_size // heads, model.device)
    record = {**report.origin("paper.equation6"), "model": options.model, "n": n, "losses": found, "seconds": times}
    (options.results / "equation6" / "equation6.json").write_text(json.dumps(record, indent=1) + "\n")


def collect(work: Any) -> dict[str, Any]:
    """The numbers of the page: errors and times by way and k."""
    record = report.read(work.results / "equation6" / "equation6.json")
    if record is None:
        return {"runs": {}}
    errors: dict[str, dict[int, Any]] = {}
    for loss in record["losses"]:
        errors.setdefault(loss["way"], {})[loss["k"]] = loss
    times = {way: {k: 1000 * own[str(k)] for k in errors[SVD]} for way, own in record["seconds"].items()}
    runs = {"equation6": {name: record[name] for name in report.ORIGIN}}
    return {"runs": runs, "model": record["model"], "n": record["n"], "errors": errors, "times": times}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Error and time against k."""
    errors = {way: [(k, loss["heads"]) for k, loss in own.items()] for way, own in record["errors"].items()}
    times = {way: list(own.items()) for way, own in record["times"].items()}
    figure, axes = plots.new_figure(2, 9.6, 3.4)
    plots.against_length(axes[0], errors, [*errors, *times], title="Error of P V", xlabel="k", ylabel="relative to P V")
    plots.against_length(axes[1], times, [*errors, *times], title="Attention of one layer", xlabel="k", ylabel="ms")
    plots.one_legend(figure, axes)
    plots.save(figure, folder / "equation6.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure, and write the page."""
    parser = report.parser("equation6", TITLE)
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub name of an encoder such as BERT or RoBERTa")
    add("--text", action="append", help="file or folder of text; can be repeated")
    add("--projected", type=lambda own: whole_numbers("projected", own), help="ranks k (default: n/16 to n/2)")
    add("--length", type=int, help="tokens of a passage, n (default: 512 or the model's maximum)")
    add("--passages", type=int, default=4, help="passages to measure errors on")
    add("--others", type=int, default=64, help="passages to fit E and F to")
    add("--steps", type=int, default=300, help="steps of each fit")
    add("--seed", type=int, default=0, help="seed of the choice of passages")
    add("--text-column", default="text", help="column of tables that holds the text")
    report.run("equation6", TITLE, sys.modules[__name__], parser, arguments)


if __name__ == "__main__":
    main()
