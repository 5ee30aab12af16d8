"""A task that needs the whole document: one word, hidden far from where the answer is given, in real text.

    python benchmarks/recall.py data/wiki-text --out data/recall
    linformers finetune data/recall/train.jsonl --test data/recall/test.jsonl --model MODEL --out runs/recall

A sentence, "The secret word is tiger.", stands in running text, `--from` to `--to` words behind its start; the label is
the word. A classifier that reads the first token sees it only through attention: with a local window alone, w tokens
further in each layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

from rich.progress import track

from linformers.training import sources

SECRETS = ("tiger", "river", "copper", "garden", "winter", "engine", "silver", "bridge")


def passages(texts: Sequence[str | Path], words: int) -> Generator[list[str], None, None]:
    """Running text in pieces of so many words."""
    for path in sources.find_files(texts):
        for document in sources.documents(path):
            own = document.split()
            for start in range(0, len(own) - words + 1, words):
                yield own[start : start + words]


def examples(texts: Sequence[str | Path], count: int, words: int, nearest: int, furthest: int, seed: int) -> list[dict]:
    """Texts with their labels, each label as often as the others."""
    rng = random.Random(seed)
    found = []
    with closing(passages(texts, words)) as pieces:
        for number, piece in enumerate(itertools.islice(pieces, count)):
            secret = SECRETS[number % len(SECRETS)]
            place = rng.randint(nearest, furthest)
            text = " ".join([*piece[:place], f"The secret word is {secret}.", *piece[place:]])
            found.append({"text": text, "label": secret})
    if len(found) < count:
        raise ValueError(
            f"the texts have {len(found)} passages of {words} words, but {count} are needed; name more texts, or lower "
            "--train, --test or --words"
        )
    rng.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("texts", nargs="+", help="files or folders of running text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=16000, help="examples")
    parser.add_argument("--test", type=int, default=2000, help="examples, from other passages")
    parser.add_argument("--words", type=int, default=340, help="of a text; 340 fill about 500 tokens")
    parser.add_argument("--from", dest="nearest", type=int, default=230, help="words before the secret, at least")
    parser.add_argument("--to", dest="furthest", type=int, default=320, help="and at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 <= options.nearest <= options.furthest <= options.words:
        parser.error(f"--from {options.nearest} and --to {options.furthest} must lie within --words {options.words}")
    count = options.train + options.test
    try:
        found = examples(options.texts, count, options.words, options.nearest, options.furthest, options.seed)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", found[: options.test]), ("train", found[options.test :])):
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(example) + "\n" for example in track(part, name))
    print(f"Written to {options.out}")


if __name__ == "__main__":
    main()
