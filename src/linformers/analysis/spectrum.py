r"""Section 3.1 of the paper: the singular values of P, for each layer and head, over many passages of text."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checks import check_size
from ..errors import UserError
from .attentions import check_watchable, watching

SECONDS_BETWEEN_SAVES = 30


def singular_values(matrices: Tensor, block: int = 128) -> Tensor:
    r"""The singular values of matrices (…, n, m), falling, in float64: square roots of the eigenvalues of $P P^T$.

    In float64 that loses nothing that matters (a value below $10^{-8}$ of the largest may come out as 0), and takes
    half the time of an SVD. Of the symmetric product only the lower triangle is needed, so it is computed in blocks.
    """
    n = matrices.shape[-2]
    precise = matrices.double()
    products = precise.new_zeros(*matrices.shape[:-1], n)
    for start in range(0, n, block):
        end = start + block
        products[..., start:end, :end] = precise[..., start:end, :] @ precise[..., :end, :].mT
    values = torch.linalg.eigvalsh(products.cpu())  # a GPU takes one matrix after the other
    return values.clamp(min=0).sqrt().flip(-1)[..., : min(matrices.shape[-2:])]


def cumulative(values: Tensor) -> Tensor:
    """The share of the first i of the values in the sum of all, for each i."""
    sums = values.cumsum(-1)
    return sums / sums[..., -1:]


class Moments:
    """The mean and the spread of arrays that come one batch after the other; none of them is kept."""

    def __init__(self, count: int = 0, mean: Any = 0.0, squares: Any = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, batch: np.ndarray) -> None:
        """Take in arrays that stand behind each other along the first axis."""
        size, mean = len(batch), batch.mean(0)
        shift, total = mean - self.mean, self.count + size
        self.squares = self.squares + ((batch - mean) ** 2).sum(0) + shift**2 * (self.count * size / total)
        self.mean = self.mean + shift * (size / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / max(1, self.count - 1))


@dataclass(frozen=True)
class Spectrum:
    """What was measured, each (layers, heads, n).

    Attributes:
        sentences: over so many passages.
        values: the mean singular values.
        cumulative: the mean share of the first i singular values in the sum of all: the paper's Figure 1.
        cumulative_std: its standard deviation over passages.
        energy: the mean share of the first i squared singular values, which is what a projection of rank i can keep.
        energy_std: its standard deviation over passages.
    """

    sentences: int
    values: np.ndarray
    cumulative: np.ndarray
    cumulative_std: np.ndarray
    energy: np.ndarray
    energy_std: np.ndarray


SERIES = ("values", "cumulative", "energy")


class State:
    """How far a measurement has come, on disk; a run with the same model and first passages goes on from there."""

    def __init__(self, path: Path | None, model: str, passages: np.ndarray) -> None:
        self.path, self.model, self.passages = path, model, passages
        self.moments = {name: Moments() for name in SERIES}
        self.saved = time.monotonic()
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            with path.open("rb") as raw, np.load(raw) as file:
                arrays = {name: file[name] for name in ("model", "passages", *_arrays(self.moments))}
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            raise UserError(f"{path} is no state of a measurement; give another --out, or remove it") from None
        both = min(len(arrays["passages"]), len(self.passages))
        if str(arrays["model"]) != self.model or (arrays["passages"][:both] != self.passages[:both]).any():
            raise UserError(
                f"{path} is of another model, other texts or another length or seed; give another --out, or remove it"
            )
        if both == len(self.passages):
            self.passages = arrays["passages"]
        for name in SERIES:
            own = (arrays[f"{name}_mean"], arrays[f"{name}_squares"])
            self.moments[name] = Moments(len(arrays["passages"]), *own)

    @property
    def done(self) -> int:
        return self.moments["values"].count

    def add(self, values: np.ndarray) -> None:
        """Take in the singular values of one more passage, (layers, heads, n)."""
        grown = {name: copy(own) for name, own in self.moments.items()}
        for name, array in zip(SERIES, _series(values), strict=True):
            grown[name].add(array[None])
        self.moments = grown  # all at once: an interrupt comes before or after it
        if time.monotonic() - self.saved > SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Write all of it, or nothing."""
        if self.path is None or not self.done:
            return
        buffer = io.BytesIO()
        np.savez(buffer, model=self.model, passages=self.passages[: self.done], **_arrays(self.moments))
        part = self.path.with_suffix(".part")
        part.write_bytes(buffer.getvalue())
        part.replace(self.path)
        self.saved = time.monotonic()

    def result(self) -> Spectrum:
        values, share, energy = (self.moments[name] for name in SERIES)
        return Spectrum(self.done, values.mean, share.mean, share.std, energy.mean, energy.std)


def _arrays(moments: dict[str, Moments]) -> dict[str, Any]:
    means = {f"{name}_mean": own.mean for name, own in moments.items()}
    return means | {f"{name}_squares": own.squares for name, own in moments.items()}


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    name: str = "model",
    workers: int | None = None,
    state_file: Path | None = None,
    on_start: Callable[[int, int, int], None] = lambda done, layers, heads: None,
    on_sentence: Callable[[], None] = lambda: None,
) -> Spectrum:
    """The spectrum of P over passages (count, n), exact, one passage at a time.

    Layers are decomposed by `workers` threads, by default one for each core, while the model computes the next.

    Args:
        model: an encoder with eager attention, as `load_encoder` gives it.
        ids: the passages.
        name: what errors call the model.
        workers: threads.
        state_file: where to keep how far the measurement has come; if that is there already, it goes on from there, and
            if it has more passages than `ids`, all of them are the result.
        on_start: called with the passages that are done already, the layers and the heads.
        on_sentence: called after each passage.
    """
    if workers is not None:
        check_size("workers", workers)
    layers, heads = check_watchable(model, ids, name)
    state = State(state_file, fingerprint(model), hashes(ids))
    on_start(state.done, layers, heads)
    with _one_thread_each(), ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        pending: list[list[Any]] = []

        def finish() -> None:
            futures = pending.pop(0)
            state.add(np.stack([np.concatenate([part.result() for part in layer]) for layer in futures]))
            on_sentence()

        try:
            for row in ids[state.done :]:
                futures: list[list[Any]] = []

                def decompose(layer: int, probs: Tensor, futures: list[list[Any]] = futures) -> None:
                    futures.append([pool.submit(_values, part) for part in probs[0].split(1)])

                with torch.no_grad(), watching(decompose, ids.shape[1]):
                    model(row[None].to(model.device))
                pending.append(futures)
                if len(pending) > 1:
                    finish()
            while pending:
                finish()
        finally:
            state.save()
            for futures in pending:
                for future in (part for layer in futures for part in layer):
                    future.cancel()
    return state.result()


def fingerprint(model: PreTrainedModel) -> str:
    """What tells a model from others."""
    digest = hashlib.blake2b(digest_size=16)
    for key, weight in model.state_dict().items():
        digest.update(key.encode())
        digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().data if weight.numel() else b"")
    return digest.hexdigest()


def hashes(ids: Tensor) -> np.ndarray:
    """What tells each of the passages (count, n) from others, (count,)."""
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in ids.numpy())
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _series(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    own = torch.from_numpy(values)
    return values, cumulative(own).numpy(), cumulative(own**2).numpy()


def _values(matrices: Tensor) -> np.ndarray:
    return singular_values(matrices).numpy()


@contextmanager
def _one_thread_each() -> Any:
    """Threads that decompose one matrix each beat one that does so with all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
