"""A few hundred documents, a corpus of them, and their text from its tokens."""

import random

import numpy as np

from linformers.training.prepare import prepare

from .small import QUIET, write_table

WORDS = ["the", "attention", "is", "linear", "in", "length", "漢字", "naïve", "🙂", ".", "\n", "x1", "<mask>", "</s>"]


def text(seed, words=40):
    draw = random.Random(seed)
    return f"Document {seed}. " + " ".join(draw.choice(WORDS) for _ in range(words))


TEXTS = [text(seed) for seed in range(200)]


def write_jsonl(path, texts):
    return str(write_table(path, [{"text": item} for item in texts]))


def run(sources, out, **options):
    options = {"vocab_size": 400, "validation_share": 0.1, "workers": 1, "console": QUIET} | options
    return prepare([str(source) for source in sources], out, **options)


def texts_of(opened, split):
    """The documents of a split, decoded."""
    stream, tokenizer = opened.tokens(split), opened.tokenizer()
    ids = stream.read(0, len(stream))
    ends = np.flatnonzero(ids == opened.manifest["eos_token_id"])
    assert len(ids) == 0 or ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder):
    """The bytes of all files of a corpus."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
