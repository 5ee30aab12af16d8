r"""Equation 6 of the paper: P replaced by its best approximation of rank k, beside E and F of the same k.

The paper weighs this route and rejects it, because each P would have to be decomposed. Here is what is lost by that: a
pretrained encoder computes with $P_{low}$, the best matrix of rank k that there is (Eckart and Young), and with
$\bar P F^T$, where $\bar P = \mathrm{softmax}(Q (E^T K)^T / \sqrt{d})$ and E and F are means over windows, fitted to
the passage at hand (do such E and F exist?), or fitted to other passages (does one pair serve all inputs?).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ..benchmark.measure import interleaved
from ..projections import window_matrix
from .attentions import watching
from .qkv import Recorder

SVD, POOLED, UNIFORM = "best rank k (SVD)", "E, F means over windows", "uniform average"
OWN, OTHERS = "E, F fitted to the passage", "E, F fitted to other passages"

# Of Adam, times 1/n, since a step moves EᵀK by the sum of n entries. What is to serve all must not follow each batch.
OWN_RATE, OTHERS_RATE = 0.3, 0.1

Replacement = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """What a way to approximate P loses at k, both relative to what is approximated, in the Frobenius norm.

    Attributes:
        way: which.
        k: the rank.
        heads: the error of P V, mean over layers, heads and passages, each computed from exact inputs.
        model: the error of the encoder's last hidden states where all layers approximate.
    """

    way: str
    k: int
    heads: float
    model: float


def low_rank(probs: Tensor, k: int) -> Tensor:
    r"""$P_{low}$: P onto the k directions in which its rows are longest, the leading eigenvectors of $P^T P$."""
    precise = probs.double()
    _, directions = torch.linalg.eigh((precise.mT @ precise).cpu())  # a GPU takes one matrix after the other
    leading = directions[..., -k:].to(probs.device)
    return (precise @ leading @ leading.mT).to(probs.dtype)


def linear(query: Tensor, key: Tensor, E: Tensor, F: Tensor) -> Tensor:
    r"""$\bar P F^T$, (b, h, n, n): multiplied with V it is linear attention. E and F are (n, k) or (h, n, k)."""
    scores = query @ (E.mT @ key).mT / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ F.mT


def fit(
    model: PreTrainedModel,
    ids: Tensor,
    k: int,
    name: str,
    *,
    steps: int = 300,
    batch: int = 4,
    rate: float = OTHERS_RATE,
    on_layer: Callable[[], None] = lambda: None,
) -> list[tuple[Tensor, Tensor]]:
    """E and F of each layer, (h, n, k), fitted so that linear attention gives P V on passages (count, n)."""
    n = ids.shape[1]
    inputs: list[list[list[Tensor]]] = []  # by passage, layer, and query, key, value
    with torch.no_grad(), Recorder(model, name) as recorder:
        for row in ids:
            model(row[None].to(model.device))
            inputs.append([list(tensors) for tensors in recorder.seen])
    fitted = []
    for layer in range(len(recorder.seen)):
        query, key, value = (torch.cat([passage[layer][place] for passage in inputs]) for place in range(3))
        start = window_matrix(n, k, n, query.device).expand(query.shape[1], n, k)
        E, F = (start.clone().requires_grad_() for _ in range(2))
        optimiser = torch.optim.Adam([E, F], lr=rate / n)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        generator = torch.Generator().manual_seed(layer)
        for _ in range(steps):
            rows = torch.randperm(len(query), generator=generator)[:batch].to(query.device)
            q, k_, v = query[rows], key[rows], value[rows]
            with torch.no_grad():
                target = scaled_dot_product_attention(q, k_, v)
            error = scaled_dot_product_attention(q, E.mT @ k_, F.mT @ v) - target
            loss = (error.square().sum((-1, -2)) / target.square().sum((-1, -2))).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        fitted.append((E.detach(), F.detach()))
        on_layer()
    return fitted


def losses(
    model: PreTrainedModel,
    ids: Tensor,
    k: int,
    name: str,
    fitted: Sequence[tuple[Tensor, Tensor]],
    *,
    steps: int = 300,
    on_passage: Callable[[], None] = lambda: None,
) -> list[Loss]:
    """What each way loses at k, on passages (count, n); `fitted` are E and F of each layer, fitted to others."""
    n = ids.shape[1]
    window = window_matrix(n, k, n, model.device)
    with torch.no_grad(), Recorder(model, name) as recorder:

        def projected(layer: int, E: Tensor, F: Tensor) -> Tensor:
            query, key, _ = recorder.seen[layer]
            return linear(query, key, E, F)

        ways: dict[str, Replacement] = {
            SVD: lambda layer, probs: low_rank(probs, k),
            OWN: lambda layer, probs: projected(layer, *own[layer]),
            OTHERS: lambda layer, probs: projected(layer, *fitted[layer]),
            POOLED: lambda layer, probs: projected(layer, window, window),
            UNIFORM: lambda layer, probs: torch.full_like(probs, 1 / n),
        }
        sums = {way: torch.zeros(2) for way in ways}
        for row in ids:
            tokens = row[None].to(model.device)
            exact = model(tokens).last_hidden_state
            with torch.enable_grad():
                own = fit(model, row[None], k, name, steps=steps, rate=OWN_RATE)
            for way, replace in ways.items():
                errors: list[Tensor] = []

                def compare(
                    layer: int, probs: Tensor, replace: Replacement = replace, errors: list[Tensor] = errors
                ) -> None:
                    value = recorder.seen[layer][2]
                    difference, whole = (replace(layer, probs) - probs) @ value, probs @ value
                    errors.append(difference.norm(dim=(-1, -2)) / whole.norm(dim=(-1, -2)))

                with watching(compare, n):
                    model(tokens)
                with watching(replace, n):
                    approximate = model(tokens).last_hidden_state
                whole = (approximate - exact).norm() / exact.norm()
                sums[way] += torch.stack([torch.cat(errors).mean(), whole]).cpu()
            on_passage()
    return [Loss(way, k, *(total / len(ids)).tolist()) for way, total in sums.items()]


def seconds(n: int, projected: Sequence[int], heads: int, d: int, device: str | torch.device) -> dict[str, Any]:
    """How long one layer's attention takes from Q, K and V on: as it is, by SVD, and by E and F."""
    query, key, value = torch.randn(3, 1, heads, n, d, device=device)

    def by_svd(k: int) -> Tensor:
        return low_rank((query @ key.mT / math.sqrt(d)).softmax(-1), k) @ value

    def by_projection(E: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, E.mT @ key, E.mT @ value)

    runs: dict[tuple[str, int | None], Callable[[], Tensor]] = {
        ("exact", None): lambda: scaled_dot_product_attention(query, key, value)
    }
    for k in projected:
        E = torch.randn(n, k, device=device) / n
        runs[SVD, k] = lambda k=k: by_svd(k)  # type: ignore[misc]
        runs["E, F", k] = lambda E=E: by_projection(E)  # type: ignore[misc]
    with torch.no_grad():
        for run in runs.values():
            run()
        times = interleaved(runs, min_seconds=0.1)
    return {way: {k: t for (own, k), t in times.items() if own == way} for way in ("exact", SVD, "E, F")}
