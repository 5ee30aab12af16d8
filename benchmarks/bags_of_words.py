"""What documents are compared with: BM25, and logistic regression on TF-IDF or on given features."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

K1, B = 1.2, 0.75  # BM25's usual constants
LEAST_DOCUMENTS, MOST_FEATURES = 2, 300_000  # of TF-IDF: documents that a feature is in, and features
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the squared weights, times half the mean over documents


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def bm25(documents: Sequence[str], queries: Sequence[str]) -> Tensor:
    """The scores (queries, documents) of Okapi BM25 (Robertson and Zaragoza, 2009)."""
    counts = [Counter(words(text)) for text in documents]
    lengths = np.array([sum(count.values()) for count in counts])
    norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1))
    places, occurrences = defaultdict(list), defaultdict(list)
    for place, count in enumerate(counts):
        for word, number in count.items():
            places[word].append(place)
            occurrences[word].append(number)
    scores = np.zeros((len(queries), len(documents)), dtype=np.float32)
    for row, query in zip(scores, queries, strict=True):
        for word in words(query):
            if word in places:
                where, often = np.array(places[word]), np.array(occurrences[word])
                rarity = math.log(1 + (len(documents) - len(where) + 0.5) / (len(where) + 0.5))
                row[where] += rarity * often * (K1 + 1) / (often + norms[where])
    return torch.from_numpy(scores)


def tf_idf(sets: Sequence[Sequence[str]]) -> list[Tensor]:
    """Sparse features (documents, features) of each set: words and pairs of words, weighted by the first set.

    Frequencies count by their logarithm, and rows have length 1.
    """

    def terms(text: str) -> Counter[str]:
        own = words(text)
        return Counter([*own, *(f"{first} {second}" for first, second in pairwise(own))])

    counted = [terms(text) for text in sets[0]]
    documents = Counter(term for count in counted for term in count)
    kept = [term for term, number in documents.most_common(MOST_FEATURES) if number >= LEAST_DOCUMENTS]
    features = {term: place for place, term in enumerate(kept)}
    idf = np.log((1 + len(counted)) / (1 + np.array([documents[term] for term in kept]))) + 1
    matrices = []
    for number, texts in enumerate(sets):
        rows, columns, values = [], [], []
        for row, text in enumerate(texts):
            count = counted[row] if number == 0 else terms(text)
            places = np.array([features[term] for term in count if term in features], dtype=np.int64)
            often = np.array([often for term, often in count.items() if term in features], dtype=np.float64)
            weights = (1 + np.log(often)) * idf[places]
            rows.append(np.full(len(places), row))
            columns.append(places)
            values.append(weights / max(np.linalg.norm(weights), 1e-12))
        indices = torch.from_numpy(np.stack([np.concatenate(rows), np.concatenate(columns)]))
        entries, shape = torch.from_numpy(np.concatenate(values)).float(), (len(texts), len(kept))
        matrices.append(torch.sparse_coo_tensor(indices, entries, shape, check_invariants=True).coalesce())
    return matrices


def logistic_regression(sets: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The predictions for the third set by the penalty that is best on the second one, and this penalty."""
    best: tuple[float, Tensor, float] | None = None
    for penalty in PENALTIES:
        weights = fit(sets[0], labels[0], penalty)
        found = [predict(features, weights) for features in sets[1:]]
        accuracy = (found[0] == labels[1]).float().mean().item()
        if best is None or accuracy > best[0]:
            best = (accuracy, found[1], penalty)
    assert best is not None
    return best[1], best[2]


def fit(features: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """The weights (features, classes) and biases that minimize cross-entropy with a penalty, by L-BFGS."""
    classes = int(labels.max()) + 1
    weights = torch.zeros(features.shape[1], classes, requires_grad=True)
    biases = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, biases], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(features @ weights + biases, labels) + penalty / 2 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach(), biases.detach()


def predict(features: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    return (features @ weights[0] + weights[1]).argmax(1)
