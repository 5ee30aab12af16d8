"""The singular values of P in each layer and head of an encoder, averaged over passages (section 3 of the paper)."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from .. import plots
from ..checks import check_size, make_folder
from ..errors import UserError, counted
from ..progress import progress, stoppable
from ..provenance import commit, environment
from . import attentions

SECONDS_BETWEEN_SAVES = 30


def singular_values(matrices: Tensor, block: int = 128) -> Tensor:
    r"""Return the singular values of matrices (…, n, m), descending, in float64: (…, min(n, m)).

    The square roots of the eigenvalues of $P P^T$ take half the time of an SVD and lose only values below $10^{-8}$ of
    the largest. eigvalsh reads the lower triangle alone, so only that is computed.
    """
    n, precise = matrices.shape[-2], matrices.double()
    products = precise.new_zeros(*matrices.shape[:-1], n)
    for start in range(0, n, block):
        end = start + block
        products[..., start:end, :end] = precise[..., start:end, :] @ precise[..., :end, :].mT
    values = torch.linalg.eigvalsh(products.cpu())  # on a GPU, torch decomposes one matrix after the other
    return values.clamp(min=0).sqrt().flip(-1)[..., : min(matrices.shape[-2:])]


@dataclass(frozen=True)
class Spectrum:
    """Statistics over passages, each (layers, heads, n)."""

    sentences: int  # number of passages
    values: np.ndarray  # mean singular values
    cumulative: np.ndarray  # mean share of the first i of them in the sum of all, as in the paper's Figure 1
    cumulative_std: np.ndarray
    energy: np.ndarray  # mean share of the first i squared values, the most that a matrix of rank i can keep

    def record(self, at: int) -> dict[str, Any]:
        """Summarize as json: each head at `at` (layers, heads), means over heads (layers, n), and each head's curve."""
        record = {"sentences": self.sentences, "at": at, "cumulative": np.round(self.cumulative, 4).tolist()}
        for name in ("cumulative", "cumulative_std", "energy"):
            record[f"{name}_at"] = getattr(self, name)[:, :, at - 1].tolist()
            record[f"{name}_by_layer"] = np.round(getattr(self, name).mean(1), 6).tolist()
        return record


@dataclass(frozen=True)
class Moments:
    """Streaming statistics by Welford's method; `squares` is the sum of squared deviations from the mean."""

    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0

    def add(self, sample: np.ndarray) -> Moments:
        count, shift = self.count + 1, sample - self.mean
        mean = self.mean + shift / count
        return Moments(count, mean, self.squares + shift * (sample - mean))


def load_state(path: Path, model: str, passages: np.ndarray) -> tuple[Moments, np.ndarray]:
    """Return saved moments and the passages they cover, or the given ones if these are more."""
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            saved_model, seen, mean, squares = (file[name] for name in ("model", "passages", "mean", "squares"))
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
        raise UserError(f"{path} is not the state of a measurement; remove it or use another --out") from None
    both = min(len(seen), len(passages))
    if str(saved_model) != model or not np.array_equal(seen[:both], passages[:both]):
        raise UserError(f"{path} has another model, text, length or seed; remove it or use another --out")
    return Moments(len(seen), mean, squares), max(seen, passages, key=len)


def save_state(path: Path, model: str, passages: np.ndarray, moments: Moments) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, model=model, passages=passages[: moments.count], mean=moments.mean, squares=moments.squares)
    part.replace(path)


def measure(
    model: PreTrainedModel,
    passages: Tensor,
    *,
    name: str = "model",
    workers: int | None = None,
    state_file: Path | None = None,
    on_passage: Callable[[int], None] = lambda done: None,
) -> Spectrum:
    """Measure the spectrum of P over passages (count, n) of an encoder with eager attention (see `load_encoder`).

    `workers` threads decompose matrices, by default one for each core. Progress is saved to `state_file`; if it exists,
    the measurement resumes from it, and if it has more passages than requested, the result covers all of them.
    `on_passage` is called with the number of finished passages, at the start and after each.
    """
    attentions.check_full_attention(model, passages, name)
    moments, seen, key, saved = Moments(), passages.numpy(), fingerprint(model), time.monotonic()
    if state_file and state_file.exists():
        moments, seen = load_state(state_file, key, seen)
    on_passage(moments.count)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # workers with a matrix each are faster than torch's threads inside one decomposition
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        try:
            for ids in passages[moments.count :]:
                values = decompose(model, ids, pool)
                sums = values.cumsum(-1), (values**2).cumsum(-1)
                # One assignment, so that an interrupt leaves no passage half added.
                moments = moments.add(np.stack([values, *(sum_ / sum_[..., -1:] for sum_ in sums)]))
                on_passage(moments.count)
                if state_file and time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    save_state(state_file, key, seen, moments)
                    saved = time.monotonic()
        finally:
            if state_file and moments.count:
                save_state(state_file, key, seen, moments)
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
    (values, share, energy), deviation = moments.mean, np.sqrt(moments.squares / max(1, moments.count - 1))
    return Spectrum(moments.count, values, share, deviation[1], energy)


def decompose(model: PreTrainedModel, ids: Tensor, pool: ThreadPoolExecutor) -> np.ndarray:
    """Return the singular values of every P on a passage (n,): (layers, heads, n)."""
    layers: list[Iterator[Tensor]] = []  # the workers start while the model computes the next layers
    watch = attentions.WatchAttention(lambda _, probs: layers.append(pool.map(singular_values, probs[0])), len(ids))
    with torch.no_grad(), watch:
        model(ids[None].to(model.device))
    return np.stack([list(layer) for layer in layers])


def fingerprint(model: PreTrainedModel) -> str:
    """Hash the weights of a model."""
    digest = hashlib.blake2b(digest_size=16)
    for key, weight in model.state_dict().items():
        digest.update(key.encode() + weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(
    model: str,
    text: list[str],
    *,
    length: int | None,
    sentences: int,
    at: int | None,
    seed: int,
    text_column: str,
    workers: int | None,
    out: Path,
    command: str,
    console: Console,
    revision: str | None = None,
) -> Spectrum:
    """Measure the spectrum of P and write `spectrum.json` and `spectrum.png` to `out`; resume an interrupted run."""
    for name, value in {"length": length, "sentences": sentences, "at": at, "workers": workers}.items():
        check_size(name, 1 if value is None else value)
    make_folder("out", out)
    encoder, tokenizer = attentions.load_encoder(model, revision)
    length = length or min(512, tokenizer.model_max_length)
    at = at or max(1, length // 4)
    if at >= length:
        raise UserError(f"at={at} must be below length={length}, the number of singular values")
    origin = {"command": command, "commit": commit(), **environment(), "model": model, "texts": text, "n": length}
    origin |= {"revision": revision} if revision else {}
    with console.status("reading text"):
        passages = attentions.passages(text, tokenizer, length, sentences, seed=seed, text_column=text_column)
    if len(passages) < sentences:
        console.print(f"The text has only {counted(len(passages), 'passage')} of {length} tokens", highlight=False)
    options: Any = {"name": model, "workers": workers, "state_file": out / "state.npz"}
    with progress(console) as bars:
        task = bars.add_task("passages", total=len(passages))
        with stoppable(
            console, lambda: f"Stopped after {counted(int(bars.tasks[0].completed), 'passage')}; run again to resume"
        ):
            spectrum = measure(encoder, passages, **options, on_passage=lambda done: bars.update(task, completed=done))
    record = {**origin, **spectrum.record(at)}
    shares = np.array(record["cumulative_at"])  # (layers, heads)
    console.print(
        f"The first {at} of {length} singular values hold {shares.mean():.3f} of their sum (by head {shares.min():.3f} "
        f"to {shares.max():.3f}; a flat spectrum: {at / length:.3f}), over {spectrum.sentences} passages.",
        highlight=False,
    )
    (out / "spectrum.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    draw(record, out / "spectrum.png")
    console.print(f"Written to {out}", markup=False)
    return spectrum


@plots.optional()
def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the curve of each layer (mean over heads) and a heat map of the heads' shares at `at`."""
    from matplotlib import colormaps

    figure, (left, right) = plots.new_figure(2, 7.6, 3.7)
    curves, spread = np.array(record["cumulative_by_layer"]), np.array(record["cumulative_std_by_layer"])
    shares, (layers, n) = np.array(record["cumulative_at"]), curves.shape
    x, colors = np.arange(1, n + 1), colormaps["viridis"](np.linspace(0, 1, layers))
    for layer, (mean, std, color) in enumerate(zip(curves, spread, colors, strict=True), 1):
        left.plot(x, mean, color=color, lw=1.2, label=f"layer {layer}")
        left.fill_between(x, mean - std, mean + std, color=color, alpha=0.12, lw=0)
    left.plot(x, x / n, ":", color="#999999", label="flat")
    left.axvline(record["at"], color="#999999", lw=0.8)
    left.set(title="Singular values of P", xlabel="number of singular values", ylabel="share of their sum")
    left.legend(fontsize=6, ncols=2, frameon=False)
    right.grid(visible=False)
    image = right.imshow(shares, aspect="auto", origin="lower", extent=(0.5, shares.shape[1] + 0.5, 0.5, layers + 0.5))
    right.set(title=f"Share of the first {record['at']}", xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=right)
    plots.save(figure, path)
