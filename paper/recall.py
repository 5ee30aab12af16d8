"""A task that needs the whole text: name a word that is hidden far from where the answer is read."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linformers.errors import UserError
from linformers.training.data import documents, find_files

from . import quality
from .experiments import Task, Tuning, Workspace, corpus, finetuning, hashes
from .jobs import Job, write_text
from .sections import main

TITLE = "A task that needs the whole text"
SECRETS = ("tiger", "river", "copper", "garden", "winter", "engine", "silver", "bridge")
VARIANTS = (quality.TWIN, "k=128, slow E", "k=128 w=32", "window alone, w=32", "window alone, w=96")
TUNING = Tuning(seeds=3, epochs=2, batch_size=64, learning_rate=2e-4)
TINY = Tuning(seeds=1, epochs=1, batch_size=16, learning_rate=1e-3)


class Sizes(NamedTuple):
    """Examples to train and test on, words of a text, and the range of positions of the secret."""

    train: int = 16000
    test: int = 2000
    words: int = 300  # about 440 tokens
    nearest: int = 220
    furthest: int = 280


SIZES = Sizes()
TINY_SIZES = Sizes(64, 32, 40, 20, 30)


def run_name(variant: str) -> str:
    return quality.run_name(variant, 0).replace("quality/", "recall/")


def names(work: Workspace) -> list[str]:
    return [name for own in VARIANTS for name in (quality.run_name(own, 0), run_name(own))]


def jobs(work: Workspace) -> list[Job]:
    """The first seed of each variant, fine-tuned to name the secret."""
    tokens, folder = corpus(work, "wiki"), files(work)
    task = Task([str(folder / "train.jsonl"), "--test", str(folder / "test.jsonl")], hashes(folder))
    found = []
    for name in VARIANTS:
        first = quality.variant_job(work, tokens, name, 0)
        found += [first, finetuning(work, run_name(name), task, TINY if work.small else TUNING, first)]
    return found


def files(work: Workspace, sizes: Sizes = SIZES, name: str = "recall-task", texts: Sequence[str] = ("wiki",)) -> Path:
    """The folder of a task of these sizes, made unless it exists."""
    folder = work.runs / name
    if not (folder / "train.jsonl").is_file():
        sizes = TINY_SIZES if work.small else sizes
        found = examples([work.folder(text) for text in texts], sizes, seed=0)
        folder.mkdir(parents=True, exist_ok=True)
        # The training file is written last: if it exists, both are complete.
        for name, part in (("test", found[: sizes.test]), ("train", found[sizes.test :])):
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(example) + "\n" for example in part))
    return folder


def passages(texts: Sequence[Path], words: int) -> Iterator[list[str]]:
    """Running text in pieces of equal length."""
    for path in find_files(texts):
        for document in documents(path):
            own = document.split()
            for start in range(0, len(own) - words + 1, words):
                yield own[start : start + words]


def examples(texts: Sequence[Path], sizes: Sizes, seed: int) -> list[dict[str, str]]:
    """Texts with their labels; every label occurs equally often."""
    rng, count = random.Random(seed), sizes.train + sizes.test
    found = []
    for number, piece in enumerate(itertools.islice(passages(texts, sizes.words), count)):
        secret = SECRETS[number % len(SECRETS)]
        position = rng.randint(sizes.nearest, sizes.furthest)
        text = " ".join([*piece[:position], f"The secret word is {secret}.", *piece[position:]])
        found.append({"text": text, "label": secret})
    if len(found) < count:
        raise UserError(f"the texts have {len(found)} passages of {sizes.words} words, but {count} are needed")
    rng.shuffle(found)
    return found


def collect(work: Workspace) -> dict[str, Any]:
    """The accuracy of each variant, mean and standard deviation over seeds; `None` where it is missing."""
    own = {name: run_name(name) for name in VARIANTS}
    results, origins = work.records.results_of(own.values())
    return {
        "runs": origins,
        "rows": {name: results.get(run, {}).get("accuracy") for name, run in own.items()},
        "missing": [run.partition("/")[2] for run in own.values() if run not in results],
        "sizes": SIZES,
        "secrets": len(SECRETS),
    }


if __name__ == "__main__":
    main(["recall"])
