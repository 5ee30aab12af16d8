"""Equation 6: P replaced by its best approximation of rank k, compared with E and F of the same k.

The paper rejects this approach because it decomposes every P. E and F are averages over windows, fitted to the passage
at hand (do such E and F exist?), or fitted to other passages (does one pair serve all inputs?).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as full_attention
from torch.utils.benchmark import Timer
from transformers import AttentionInterface, PreTrainedModel

from linformers import plots
from linformers.analysis import attentions
from linformers.checks import check_size
from linformers.errors import UserError
from linformers.progress import steps
from linformers.projections import window_matrix

from . import report

TITLE = "Equation 6: P replaced by its best rank k"
EXACT, SVD, PROJECTED = "exact", "best rank k (SVD)", "E, F"
OWN, OTHERS = "E, F fitted to the passage", "E, F fitted to other passages"
POOLED, UNIFORM = "E, F means over windows", "uniform average"
# Adam's learning rates, times 1/n, because a step changes EᵀK by a sum of n entries.
OWN_RATE, OTHERS_RATE = 0.3, 0.1


@contextmanager
def attention_as(model: PreTrainedModel, name: str, attend: Callable[..., Tensor]) -> Iterator[None]:
    """Let `attend(layer, query, key, value)` compute the attention of each layer in one pass; all are (b, h, n, d)."""
    layers = itertools.count()

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any = None, scaling: float = 1, **_: Any) -> Any:
        if mask is not None:
            raise UserError(f"model={name!r} adds a bias to its logits; use an encoder such as BERT or RoBERTa")
        query = query * (scaling * math.sqrt(query.shape[-1]))  # so that logits are always Q Kᵀ / √d
        return attend(next(layers), query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("paper", attention)
    model.set_attn_implementation("paper")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")
    if next(layers) == 0:
        raise UserError(f"model={name!r} does not use transformers' attention interface; use BERT or RoBERTa")


def observe(model: PreTrainedModel, ids: Tensor, name: str) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The last hidden states, and the queries, keys and values of each layer, (1, h, n, d), on tokens (n,)."""
    seen = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((query, key, value))
        return full_attention(query, key, value)

    with torch.no_grad(), attention_as(model, name, attend):
        output = model(ids[None].to(model.device)).last_hidden_state
    return output, seen


def low_rank(probs: Tensor, k: int) -> Tensor:
    """P_low: P projected onto the k leading eigenvectors of PᵀP."""
    precise = probs.double()
    _, directions = torch.linalg.eigh((precise.mT @ precise).cpu())  # on a GPU, torch decomposes one after the other
    leading = directions[..., -k:].to(probs.device)
    return (precise @ leading @ leading.mT).to(probs.dtype)


def linear(query: Tensor, key: Tensor, value: Tensor, E: Tensor, F: Tensor) -> Tensor:
    """Linear attention, P̄ Fᵀ V, with E and F of (n, k) or (h, n, k)."""
    return full_attention(query, E.mT @ key, F.mT @ value)


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
        loss = relative_error(linear(*inputs, E, F), full_attention(*inputs)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return E.detach(), F.detach()


def fit_layers(passages: Sequence[Any], k: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """E and F of each layer, fitted to passages of which `observe` returned the queries, keys and values."""
    layers = [[torch.cat(own) for own in zip(*layer, strict=True)] for layer in zip(*passages, strict=True)]
    return [fit(q, k_, v, k, seed=layer, **options) for layer, (q, k_, v) in enumerate(layers)]


def losses(
    model: PreTrainedModel, ids: Tensor, k: int, name: str, fitted: Sequence[tuple[Tensor, Tensor]], steps: int
) -> list[dict[str, Any]]:
    """Relative errors of each way at k on passages (count, n): `heads` of PV, with exact inputs, averaged over layers,
    heads and passages; `model` of the last hidden states if all layers are approximated.
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
            heads = [relative_error(approximate(i, *own), full_attention(*own)) for i, own in enumerate(layers)]
            both = torch.stack([torch.cat(heads).mean(), relative_error(output, exact)[0]]).cpu()
            sums[way] = sums.get(way, torch.zeros(2)) + both / len(ids)
    return [{"way": way, "k": k, "heads": float(own[0]), "model": float(own[1])} for way, own in sums.items()]


def seconds(n: int, projected: Sequence[int], heads: int, d: int, device: Any) -> dict[str, dict[str, float]]:
    """The time of one layer's attention, given Q, K and V: exact, by SVD, and by E and F, for each k."""
    query, key, value = torch.randn(3, 1, heads, n, d, device=device)
    projections = {k: torch.randn(n, k, device=device) / n for k in projected}
    ways: dict[str, Callable[[int], Tensor]] = {
        EXACT: lambda k: full_attention(query, key, value),
        SVD: lambda k: low_rank(attention_matrix(query, key), k) @ value,
        PROJECTED: lambda k: linear(query, key, value, projections[k], projections[k]),
    }

    def time(way: str, k: int) -> float:
        timer = Timer("run(k)", globals={"run": ways[way], "k": k}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    return {way: {str(k): time(way, k) for k in projected} for way in ways}


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and write `equation6.json`."""
    for name in ("passages", "others", "steps"):
        check_size(name, getattr(options, name))
    if options.model is None or not options.text:
        raise UserError("model or text is missing: pass an encoder, and files or folders to draw passages from")
    model, tokenizer = attentions.load_encoder(options.model)
    n = options.length or min(512, tokenizer.model_max_length)
    default = ",".join(str(max(1, n // i)) for i in (16, 8, 4, 2))
    projected = report.whole_numbers("projected", options.projected or default)
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
    record = {**report.origin(), "model": options.model, "n": n, "losses": found, "seconds": times}
    options.path.write_text(json.dumps(record, indent=1) + "\n")


def collect(work: Any) -> dict[str, Any]:
    """The numbers of the page: errors and times by way and k."""
    if (record := report.read(work.results / "equation6" / "equation6.json")) is None:
        return {"runs": {}}
    ways = dict.fromkeys(loss["way"] for loss in record["losses"])
    errors = {way: {loss["k"]: loss for loss in record["losses"] if loss["way"] == way} for way in ways}
    times = {way: {k: 1000 * own[str(k)] for k in errors[SVD]} for way, own in record["seconds"].items()}
    return {"runs": {"equation6": record}, "model": record["model"], "n": record["n"], "errors": errors, "times": times}


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Error and time against k."""
    errors = {way: [(k, loss["heads"]) for k, loss in own.items()] for way, own in record["errors"].items()}
    times = {way: list(own.items()) for way, own in record["times"].items()}
    figure, axes = plots.new_figure(2, 9.6, 3.4)
    plots.against_length(axes[0], errors, [*errors, *times], title="Error of P V", xlabel="k", ylabel="relative to P V")
    plots.against_length(axes[1], times, [*errors, *times], title="Attention of one layer", xlabel="k", ylabel="ms")
    plots.one_legend(figure, axes)
    plots.save(figure, folder / "equation6.png")


def add_options(add: Callable[..., Any]) -> None:
    add("model", nargs="?", help="folder or hub name of an encoder such as BERT or RoBERTa")
    add("--text", action="append", help="file or folder of text; can be repeated")
    add("--projected", help="ranks k, separated by commas (default: n/16 to n/2)")
    add("--length", type=int, help="tokens of a passage, n (default: 512 or the model's maximum)")
    add("--passages", type=int, default=4, help="passages to measure errors on")
    add("--others", type=int, default=64, help="passages to fit E and F to")
    add("--steps", type=int, default=300, help="steps of each fit")
    add("--seed", type=int, default=0, help="seed of the choice of passages")
    add("--text-column", default="text", help="column of tables that holds the text")


if __name__ == "__main__":
    report.main("equation6")
