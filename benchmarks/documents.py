"""Converted encoders on whole documents, beside the original: retrieval and classification.

    python -m benchmarks.documents retrieval ORIGINAL --data DIR --model copied=FOLDER --model distilled=FOLDER
    python -m benchmarks.documents classification ORIGINAL --data DIR --model copied=FOLDER --task papers

All rows see the same text, the first n tokens. Retrieval finds Wikipedia articles of the last shard in `DIR/wiki`,
which no model may be trained on, by their titles and by spans of them. Classification fine-tunes on `DIR/papers` or
`DIR/imdb`; runs that the result has already are not repeated.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from benchmarks.bags_of_words import bm25
from benchmarks.vectors import embed
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from linformers import LinformerModel, convert
from linformers.checks import check_choice, make_folder
from linformers.errors import UserError
from linformers.pooling import Pooling
from linformers.progress import progress
from linformers.provenance import commit, environment
from linformers.training import adopt
from linformers.training.checkpoints import load_whole
from linformers.training.corpus import open_tokenizer
from linformers.training.data import titled_documents
from linformers.training.distill import token_ids
from linformers.training.predict import BRANCHES, without_branch
from linformers.training.rows import special_tokens
from linformers_cli import run_script

ARTICLES, LEAST, LATE, SPAN = 1500, 1500, 1000, 40  # articles, tokens of each, where late spans begin, tokens of a span
RESAMPLES = 10_000
QUERIES = ("title", "span", "late span")
BASELINE = "original, mean of chunks"


@dataclass
class Encoder:
    """A model that makes vectors of texts of at most `size` tokens, special ones included.

    Attributes:
        load: loads the network.
        size: the longest input.
        tokenizer: the original's, which all models share.
        pooling: how to make a vector of the states.
        whole: whether a text of more tokens is cut into several chunks, and not cut off.
    """

    load: Callable[[], Any]
    size: int
    tokenizer: Any
    pooling: Pooling
    whole: bool = True

    def chunks(self, ids: Sequence[int], kind: str) -> list[list[int]]:
        """A text as inputs of the model: one, or with `whole` as many as it takes."""
        before, after = special_tokens(self.tokenizer)
        before = [*before, *self.tokenizer(self.pooling.prompt(kind), add_special_tokens=False)["input_ids"]]
        size = self.size - len(before) - len(after)
        starts = range(0, max(len(ids), 1), size) if self.whole else [0]
        return [[*before, *ids[start : start + size], *after] for start in starts]


def encoders(original: str, models: Sequence[str], length: int) -> dict[str, Encoder]:
    """The original, which reads a text in chunks or its beginning alone, and the models, named `name=folder`."""
    network = convert.load_original(original)
    tokenizer = open_tokenizer(original, f"original={original!r}")
    pooling = Pooling.of(adopt.source_folder(original, None))
    limit = network.config.max_position_embeddings - convert.unused_positions(network.config)
    if not type(network).__name__.endswith("Model"):
        raise UserError(f"original={original!r} is a {type(network).__name__}, expected an encoder without a head")
    shared = {"tokenizer": tokenizer, "pooling": pooling}
    found = {
        f"original, {limit} tokens": Encoder(lambda: copy.deepcopy(network), limit, whole=False, **shared),
        BASELINE: Encoder(lambda: copy.deepcopy(network), limit, **shared),
    }
    for text in models:
        name, _, folder = text.partition("=")
        if not folder or not (Path(folder) / "config.json").exists():
            raise UserError(f"model={text!r} must be a name and the folder of a converted model, as in copied=FOLDER")
        config = load_whole(LinformerModel, Path(folder)).config
        if config.max_position_embeddings < length:
            raise UserError(f"model={text!r} reads {config.max_position_embeddings} tokens, fewer than length={length}")
        found[name] = Encoder(lambda folder=folder: AutoModel.from_pretrained(folder), length, **shared)
    return found


def ablations(network: Any) -> Iterator[tuple[str, Any]]:
    """A network as it is and, where it has both, without each of its branches."""
    yield "", network
    if isinstance(network, LinformerModel) and all(network.config.local_windows):
        for branch in BRANCHES:
            yield f", without {branch}", without_branch(copy.deepcopy(network), branch)


def articles(folder: Path, tokenizer: Any, length: int) -> tuple[str, list[str], list[list[int]]]:
    """The last shard of Wikipedia, and the titles and tokens of its first long articles, cut to `length`."""
    shards = sorted((folder / "wiki").glob("train-*.parquet"))
    if not shards:
        raise UserError(f"data={str(folder)!r} has no wiki/train-*.parquet")
    titles, found = [], []
    rows = list(titled_documents(shards[-1]))
    for (title, _), ids in zip(rows, token_ids(tokenizer, (text for _, text in rows)), strict=True):
        if title and len(ids) >= LEAST and len(found) < ARTICLES:
            titles.append(title)
            found.append(ids[:length])
    if len(found) < ARTICLES:
        raise UserError(f"{shards[-1]} has {len(found)} articles of {LEAST} tokens, expected {ARTICLES}")
    return shards[-1].name, titles, found


def retrieval(rows: dict[str, Encoder], data: Path, length: int, console: Console) -> dict[str, Any]:
    """Recall of articles by their titles and by spans of them, and the differences to the mean of chunks."""
    tokenizer = rows[BASELINE].tokenizer
    _, ends = special_tokens(tokenizer)
    shard, titles, documents = articles(data, tokenizer, length - 2 * len(ends))
    random = np.random.default_rng(0)
    queries = {"title": list(token_ids(tokenizer, titles))}
    for kind, least in (("span", 0), ("late span", LATE)):
        starts = [int(random.integers(least, len(ids) - SPAN + 1)) for ids in documents]
        queries[kind] = [ids[start : start + SPAN] for ids, start in zip(documents, starts, strict=True)]
    console.print(f"{len(documents):,} articles of {shard}, which no model may be trained on", highlight=False)
    ranks: dict[str, dict[str, Tensor]] = {}
    seconds: dict[str, float] = {}

    def score(name: str, began: float, scores: Callable[[str], Tensor]) -> None:
        ranks[name] = {kind: ranks_of(scores(kind)) for kind in QUERIES}
        seconds[name] = time.perf_counter() - began

    with progress(console) as bars:
        for name, encoder in rows.items():
            for ablation, network in ablations(encoder.load()):
                began, pool = time.perf_counter(), encoder.pooling.pool
                chunks = [encoder.chunks(ids, "document") for ids in documents]
                inputs = [chunk for own in chunks for chunk in own]
                short = {kind: [encoder.chunks(ids, "query")[0] for ids in queries[kind]] for kind in QUERIES}
                total = len(inputs) + sum(map(len, short.values()))
                task = bars.add_task(f"{name}{ablation}", total=total)
                vectors, found = (
                    embed(network, own, pool, lambda count, task=task: bars.advance(task, count), bf16=True)
                    for own in (inputs, [query for own in short.values() for query in own])
                )
                asked = dict(zip(short, found.split(len(documents)), strict=True))
                owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor([len(own) for own in chunks]))
                means = torch.zeros(len(chunks), vectors.shape[1]).index_add(0, owners, vectors)
                means = functional.normalize(means, dim=-1)
                score(f"{name}{ablation}", began, lambda kind, asked=asked, means=means: asked[kind] @ means.T)
                if name == BASELINE:
                    best = {kind: best_chunk(asked[kind] @ vectors.T, owners, len(chunks)) for kind in QUERIES}
                    score("original, best chunk", began, best.__getitem__)
    texts = tokenizer.batch_decode(documents)
    began = time.perf_counter()
    score("BM25", began, lambda kind: bm25(texts, tokenizer.batch_decode(queries[kind])))
    result: dict[str, Any] = {"shard": shard, "articles": len(documents), "tokens": sum(map(len, documents))}
    result |= {"compared_with": BASELINE, "resamples": RESAMPLES, "rows": {}}
    for name, own in ranks.items():
        row: dict[str, Any] = {"seconds": seconds[name]}
        for kind in QUERIES:
            hits = {most: (own[kind] < most).float() for most in (1, 10)}
            row[kind] = {f"recall@{most}": hit.mean().item() for most, hit in hits.items()}
            row[kind]["difference"] = paired_interval(hits[1] - (ranks[BASELINE][kind] < 1).float())
        result["rows"][name] = row
    console.print(retrieval_table(result))
    return result


def best_chunk(scores: Tensor, owners: Tensor, count: int) -> Tensor:
    """The best score (queries, documents) of the chunks of each document."""
    best = torch.full((len(scores), count), -torch.inf)
    return best.scatter_reduce(1, owners.expand_as(scores), scores, "amax")


def ranks_of(scores: Tensor) -> Tensor:
    """How many other documents score as high as the own one, of each query."""
    assert scores.isfinite().all(), "a score is not finite"
    return (scores >= scores.diagonal()[:, None]).sum(1) - 1


def paired_interval(differences: Tensor) -> dict[str, float]:
    """The mean of differences of -1, 0 and 1, with its bootstrapped 95% interval."""
    values = np.array([-1, 0, 1])
    shares = np.array([(differences == value).float().mean().item() for value in values])
    drawn = np.random.default_rng(0).multinomial(len(differences), shares / shares.sum(), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / len(differences), [0.025, 0.975])
    return {"mean": differences.mean().item(), "low": float(low), "high": float(high)}


def retrieval_table(result: dict[str, Any]) -> Table:
    table = Table("vectors", *QUERIES, title=f"Recall@1 / @10 in %, and the difference of @1 to {BASELINE}")
    for name, row in result["rows"].items():
        cells = []
        for kind in QUERIES:
            both = " / ".join(f"{100 * row[kind][f'recall@{most}']:.1f}" for most in (1, 10))
            mean, low, high = (100 * row[kind]["difference"][key] for key in ("mean", "low", "high"))
            cells.append(f"{both}\n{mean:+.1f} ({low:+.1f} to {high:+.1f})")
        table.add_row(name, *cells)
    return table


def main(
    part: Annotated[str, typer.Argument(help="retrieval or classification.")],
    original: Annotated[str, typer.Argument(help="Folder or hub name of an encoder without a head.")],
    data: Annotated[Path, typer.Option(exists=True, help="Folder with the folders wiki, papers and imdb.")],
    model: Annotated[list[str] | None, typer.Option(help="Converted model, NAME=FOLDER; can be repeated.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a document that are read, n.")] = 4096,
    task: Annotated[str, typer.Option(help="Of classification: papers or imdb.")] = "papers",
    seeds: Annotated[int, typer.Option(min=1, help="Of classification: number of seeds.")] = 3,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Of classification: learning rate to try.", show_default="3e-5, 1e-4, 3e-4"),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A rehearsal with few documents.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/documents"),
) -> None:
    """Compare converted encoders with the original on whole documents."""
    global ARTICLES
    check_choice("part", part, ("retrieval", "classification"))
    make_folder("out", out)
    if part == "retrieval" and length < (least := LATE + SPAN + 16):  # special tokens and prompts included
        raise UserError(f"length={length} must be at least {least}, so that there are late spans")
    console, rows = Console(), encoders(original, model or [], length)
    record = {"command": shlex.join(["python", "-m", "benchmarks.documents", *sys.argv[1:]]), "commit": commit()}
    record |= {**environment(), "original": original, "models": model or [], "n": length, "small": small}
    if part == "retrieval":
        ARTICLES = 40 if small else ARTICLES
        found = retrieval(rows, data, length, console)
        (out / "retrieval.json").write_text(json.dumps({**record, **found}, indent=1) + "\n")
        return
    from benchmarks.classification import RATES, classification

    rates = rate or (RATES[:1] if small else RATES)
    classification(rows, data, task, length, seeds, rates, small, out / f"{task}.json", record, console)


if __name__ == "__main__":
    run_script(lambda: typer.run(main))
