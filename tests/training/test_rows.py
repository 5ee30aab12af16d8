"""Rows of training data: functions of their number alone; masks, padding, and orders that resume."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from linformers.training.corpus import Corpus
from linformers.training.rows import (
    BLOCK,
    IGNORED,
    EpochOrder,
    Example,
    MaskedRows,
    Vocabulary,
    already_batched,
    collate,
    encode,
    longest_first,
)

from ..modes import refused
from .small import WORDS

VOCABULARY = Vocabulary(size=1000, mask=4, pad=1, special=(0, 1, 2, 3, 4))


class Stream:
    """Tokens that say where they stand, with an end of text here and there."""

    def __init__(self, size):
        self.tokens = np.where(np.arange(size) % 97 == 96, 2, 5 + np.arange(size) % 995).astype(np.uint16)

    def __len__(self):
        return len(self.tokens)

    def read(self, start, count):
        return self.tokens[start : start + count].copy()


def rows(count=320, length=64, size=20_000, **options):
    return MaskedRows(Stream(size), VOCABULARY, rows=count, length=length, **{"seed": 0, **options})


def originals(batch):
    """The tokens before they were masked, where they are known."""
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def test_fifteen_percent_of_which_80_10_10():
    batch = rows(count=2000).__getitems__(range(2000))
    chosen = batch["labels"] != IGNORED
    assert (chosen.sum(1) == int(0.15 * 64)).all()
    assert 0.1 < chosen.float().mean(0).min() < chosen.float().mean(0).max() < 0.2  # at all positions
    masked = batch["input_ids"][chosen] == VOCABULARY.mask
    kept = batch["input_ids"][chosen] == batch["labels"][chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.01)
    replaced = batch["input_ids"][chosen][~masked & ~kept]
    assert (replaced >= 5).all()
    assert len(replaced.unique()) > 500
    assert (batch["labels"][chosen] >= 5).all()  # special tokens are never to be predicted
    assert (batch["input_ids"][~chosen] != VOCABULARY.mask).all()


def test_a_mask_share_that_falls():
    falling = rows(count=301, length=100, mask_share=0.3, final_mask_share=0.15)
    counts = (falling.__getitems__(range(301))["labels"] != IGNORED).sum(1)
    assert counts[[0, 150, 300]].tolist() == [30, 22, 15]
    assert (counts.diff() <= 0).all()
    for number in (0, 150, 300):  # whichever rows are in a batch
        constant = rows(count=301, length=100, mask_share=0.3 - 0.0005 * number)
        for name, tensor in falling.__getitems__([number]).items():
            assert torch.equal(tensor, constant.__getitems__([number])[name])


def test_row_is_a_function_of_its_number():
    together = rows(short_rows=0.3).__getitems__(range(40))
    for numbers in ([3], [39, 0, 17], range(BLOCK - 1, BLOCK + 2)):
        apart = rows(short_rows=0.3).__getitems__(numbers)
        for name, tensor in apart.items():
            assert torch.equal(tensor, together[name][list(numbers)])


def test_workers_and_copies_give_the_same_rows():
    dataset = rows()
    expected = dataset.__getitems__(range(32))
    (batch, *_) = DataLoader(dataset, 32, num_workers=1, collate_fn=already_batched)
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    copy = pickle.loads(pickle.dumps(dataset)).__getitems__(range(32))
    assert torch.equal(copy["labels"], expected["labels"])


def test_an_epoch_has_each_row_once_and_seeds_and_epochs_differ():
    dataset, other = rows(size=64 * 30), rows(size=64 * 30, seed=1)
    assert dataset.rows_in_epoch == 29
    starts = ((dataset, 0), (dataset, 29), (other, 0))
    epochs = [originals(own.__getitems__(range(start, start + 29))) for own, start in starts]
    assert all(len(epoch.unique(dim=0)) == 29 for epoch in epochs)
    assert not any(map(torch.equal, epochs, epochs[1:] + epochs[:1]))
    in_order = originals(rows(shuffle=False, count=10).__getitems__(range(10)))
    assert torch.equal(in_order.flatten(), torch.from_numpy(Stream(640).tokens.astype(np.int64)))


def test_short_rows_end_in_padding():
    batch = rows(count=3000, short_rows=0.25).__getitems__(range(3000))
    lengths = batch["attention_mask"].sum(1)
    short = lengths < 64
    assert short.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert lengths.min() >= 1
    assert lengths[short].float().mean().item() == pytest.approx(32, abs=3)
    padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == VOCABULARY.pad).all()
    assert (batch["labels"][padding] == IGNORED).all()
    assert (batch["attention_mask"] == (torch.arange(64) < lengths[:, None])).all()


def test_vocabulary_of_a_tokenizer(corpus):
    opened = Corpus.open(corpus)
    found = Vocabulary.of(opened.tokenizer(), opened.vocab_size)
    assert (found.size, found.mask, found.pad, set(found.special)) == (300, 4, 1, {0, 1, 2, 3, 4})


def test_corpus_that_is_too_small():
    with refused("100 tokens, but rows of 64 need 128"):
        rows(size=100)


# Labeled texts.


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Corpus.open(corpus).tokenizer()


@pytest.mark.parametrize("paired", [False, True], ids=["texts", "pairs"])
def test_encode(paired, tokenizer):
    texts = [" ".join(WORDS[: 1 + i % 8]) for i in range(2500)]
    examples = [Example(texts[i], texts[-1 - i] if paired else None, i % 3) for i in range(2500)]
    encoded = encode(examples, tokenizer, 9)
    assert [row["label"] for row in encoded] == [i % 3 for i in range(2500)]
    assert max(len(row["input_ids"]) for row in encoded) == 9
    for i in (0, 7, 999, 1000, 1001, 2000, 2499):
        own = tokenizer(*examples[i][: 1 + paired], truncation="longest_first", max_length=9)["input_ids"]
        assert encoded[i]["input_ids"].tolist() == own


@pytest.mark.parametrize(("pair", "max_length"), [(None, 2), ("fox", 4), (None, 0)])
def test_lengths_without_room(pair, max_length, tokenizer):
    with refused(f"max_length={max_length}"):
        encode([Example("the", pair, 0)], tokenizer, max_length)


def row(length, label=0):
    return {"input_ids": np.arange(5, 5 + length), "label": label}


@pytest.mark.parametrize(("longest", "width"), [(1, 8), (8, 8), (9, 12), (12, 12)])
def test_collate(longest, width):
    batch = collate([row(1, 1), row(longest, 0)], pad_token_id=1, max_length=12)
    tokens = [*range(5, 5 + longest)]
    assert batch["input_ids"].tolist() == [[5] + [1] * (width - 1), tokens + [1] * (width - longest)]
    assert batch["attention_mask"].tolist() == [[1] + [0] * (width - 1), [1] * longest + [0] * (width - longest)]
    assert batch["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_longest_first():
    examples = [row(1, 0), row(3, 1), row(2, 0), row(3, 0)]
    found = [(len(own["input_ids"]), own["label"]) for own in longest_first(examples)]
    assert found == [(3, 1), (3, 0), (2, 0), (1, 0)]


def numbered(lengths):
    """Rows that contain their number."""
    return [{"input_ids": np.full(n, i), "label": i % 2} for i, n in enumerate(lengths)]


def drawn(order, numbers):
    return [int(order[g]["input_ids"][0]) for g in numbers]


def test_orders_never_change():
    order = EpochOrder(numbered([1] * 6), seed=1, total_rows=15)
    assert drawn(order, range(12)) == [3, 5, 2, 0, 1, 4, 0, 5, 3, 4, 2, 1]
    assert len({*drawn(order, range(12, 15))}) == 3  # half an epoch
    other = EpochOrder(numbered([1] * 6), seed=2, total_rows=15)
    assert drawn(other, range(6)) not in ([3, 5, 2, 0, 1, 4], [0, 5, 3, 4, 2, 1])  # seed + 1 is not an epoch ahead
    assert len(order) == 15
    for number in (-1, 15):
        with pytest.raises(IndexError):
            order[number]


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (50, 1), (50, 8), (97, 5), (64, 4), (640, 10)])
def test_batches_have_rows_of_similar_lengths(rows, batch):
    lengths = np.random.default_rng(0).integers(1, 100, rows)
    examples, total = numbered(lengths), 3 * rows
    order = EpochOrder(examples, 5, total, batch)
    drawn_rows = np.array(drawn(order, range(total)))
    assert all(order[g]["label"] == drawn_rows[g] % 2 for g in range(total))
    epochs = drawn_rows.reshape(3, rows)
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows == 1 or len({tuple(epoch) for epoch in [*epochs, range(rows)]}) == 4
    for start in (1, rows - 1, rows, rows + 1, 2 * rows):  # a resumed run, which starts in any epoch
        assert drawn(EpochOrder(examples, 5, total, batch), range(start, total)) == drawn_rows[start:].tolist()
    assert drawn(EpochOrder(examples, 5, total, batch), reversed(range(total))) == drawn_rows[::-1].tolist()

    def padding(rows):
        widths = [lengths[rows[start : start + batch]].max() for start in range(0, len(rows), batch)]
        return batch * sum(widths) / lengths[rows].sum() - 1

    if rows == 640:
        plain = np.array(drawn(EpochOrder(examples, 5, total), range(total)))
        assert padding(drawn_rows) < 0.15 < 0.7 < padding(plain)
        # Batches are in random order, not sorted by length.
        means = lengths[drawn_rows].reshape(-1, batch).mean(1)
        assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_order_in_worker_processes():
    whole = EpochOrder(numbered([1] * 10), 7, 25)
    options = {"collate_fn": lambda rows: collate(rows, 0, 8), "multiprocessing_context": "fork"}
    loader = DataLoader(whole, batch_size=4, num_workers=2, **options)
    assert [ids for batch in loader for ids in batch["input_ids"][:, 0].tolist()] == drawn(whole, range(25))
    assert drawn(pickle.loads(pickle.dumps(whole)), range(25)) == drawn(whole, range(25))
