"""A task that needs the whole document: one word, hidden far from where the answer is given, in real text."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..errors import UserError
from ..markdown import table
from ..training import sources
from ..training.checkpointing import write_text
from ..training.finetune import Settings
from ..training.metrics import plus_minus
from . import quality
from .jobs import Job
from .matrix import Place, Task, corpus, finetuning, hashes, model_of

SECRETS = ("tiger", "river", "copper", "garden", "winter", "engine", "silver", "bridge")
VARIANTS = (quality.TWIN, "k=128, slow E", "k=128 w=32", "window alone, w=32", "window alone, w=96")
SETTINGS = Settings(seeds=3, epochs=2, batch_size=64, learning_rate=2e-4)
TINY = Settings(seeds=1, epochs=1, batch_size=16, learning_rate=1e-3)


class Sizes(NamedTuple):
    """Examples to train and to test on, the words of a text, and how many of them stand before the secret."""

    train: int = 16000
    test: int = 2000
    words: int = 300  # about 440 tokens
    nearest: int = 220
    furthest: int = 280


TINY_SIZES = Sizes(64, 32, 40, 20, 30)


def names(place: Place) -> list[str]:
    """What its runs are called."""
    return [f"{quality.GROUP}/{quality.run_name(name, 0)}{part}" for name in VARIANTS for part in ("", "-recall")]


def jobs(place: Place, console: Console) -> list[Job]:
    """The first seed of each variant, fine-tuned to tell the secret."""
    tokens, folder = corpus(place, "wiki", console), files(place)
    task = Task([str(folder / "train.jsonl"), "--test", str(folder / "test.jsonl")], hashes(folder))
    found = []
    for name in VARIANTS:
        first = quality.variant_job(place, tokens, name, 0)
        model, settings = model_of(place, first), TINY if place.small else SETTINGS
        found += [first, finetuning(place, f"{first.name}-recall", model, task, settings, first.key, first)]
    return found


def files(place: Place) -> Path:
    """The folder of the task, made unless it is there."""
    folder = place.runs / "recall"
    if not (folder / "train.jsonl").is_file():
        sizes = TINY_SIZES if place.small else Sizes()
        found = examples([place.folder("wiki")], sizes, seed=0)
        folder.mkdir(parents=True, exist_ok=True)
        # The one that is looked for comes last, so both are whole once it is there.
        for name, part in (("test", found[: sizes.test]), ("train", found[sizes.test :])):
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(example) + "\n" for example in part))
    return folder


def passages(texts: Sequence[str | Path], words: int) -> Generator[list[str], None, None]:
    """Running text in pieces of so many words."""
    for path in sources.find_files(texts):
        for document in sources.documents(path):
            own = document.split()
            for start in range(0, len(own) - words + 1, words):
                yield own[start : start + words]


def examples(texts: Sequence[str | Path], sizes: Sizes, seed: int) -> list[dict[str, str]]:
    """Texts with their labels, each label as often as the others in all of them."""
    rng, count = random.Random(seed), sizes.train + sizes.test
    found = []
    with closing(passages(texts, sizes.words)) as pieces:
        for number, piece in enumerate(itertools.islice(pieces, count)):
            secret = SECRETS[number % len(SECRETS)]
            place = rng.randint(sizes.nearest, sizes.furthest)
            text = " ".join([*piece[:place], f"The secret word is {secret}.", *piece[place:]])
            found.append({"text": text, "label": secret})
    if len(found) < count:
        raise UserError(
            f"the texts have {len(found)} passages of {sizes.words} words, but {count} are needed; name more texts"
        )
    rng.shuffle(found)
    return found


def collect(place: Place) -> dict[str, Any]:
    """The accuracy of each variant, mean and deviation over seeds; `None` where it is missing."""
    names = {name: f"{quality.GROUP}/{quality.run_name(name, 0)}-recall" for name in VARIANTS}
    results, runs = place.store.results(names.values())
    return {"runs": runs, "rows": {name: results.get(run, {}).get("accuracy") for name, run in names.items()}}


def page(record: Mapping[str, Any]) -> list[str]:
    """What each variant finds."""
    rows = [(name, "missing" if own is None else plus_minus(own, 1, scale=100)) for name, own in record["rows"].items()]
    return [
        f"“The secret word is tiger.” stands {Sizes().nearest} to {Sizes().furthest} words behind the start of real "
        f"text, and a classifier at the first token names the word, one of {len(SECRETS)}. A window alone reaches w "
        "tokens further in each of 8 layers: one of 32 is too short for it, one of 96 is not.",
        "",
        *table(("model", "accuracy"), rows),
    ]
