"""Rows for masked-language modelling: functions of their number alone, masked as the paper says."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from linformers.training.corpus import Corpus
from linformers.training.rows import BLOCK, IGNORED, MaskedRows, Vocabulary, as_it_is

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
    masked = batch["input_ids"][chosen] == VOCABULARY.mask
    kept = batch["input_ids"][chosen] == batch["labels"][chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.01)
    replaced = batch["input_ids"][chosen][~masked & ~kept]
    assert (replaced >= 5).all()
    assert len(replaced.unique()) > 500
    assert (batch["labels"][chosen] >= 5).all()  # special tokens are never to be predicted
    assert (batch["input_ids"][~chosen] != VOCABULARY.mask).all()


def test_masks_fall_everywhere():
    chosen = rows(count=2000).__getitems__(range(2000))["labels"] != IGNORED
    share = chosen.float().mean(0)
    assert share.min() > 0.1
    assert share.max() < 0.2


def test_row_is_a_function_of_its_number():
    dataset = rows(short_rows=0.3)
    together = dataset.__getitems__(range(40))
    for numbers in ([3], [39, 0, 17], range(BLOCK - 1, BLOCK + 2)):
        apart = rows(short_rows=0.3).__getitems__(numbers)
        for name, tensor in apart.items():
            assert torch.equal(tensor, together[name][list(numbers)])
    assert torch.equal(dataset[5]["input_ids"], together["input_ids"][5])


def test_workers_and_copies_give_the_same_rows():
    dataset = rows()
    expected = dataset.__getitems__(range(32))
    (batch, *_) = DataLoader(dataset, 32, num_workers=1, collate_fn=as_it_is)
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    copy = pickle.loads(pickle.dumps(dataset)).__getitems__(range(32))
    assert torch.equal(copy["labels"], expected["labels"])


def test_seeds_and_epochs_differ():
    dataset = rows(count=10_000)
    in_epoch = dataset.rows_in_epoch
    first, second = (dataset.__getitems__(range(start, start + 8)) for start in (0, in_epoch))
    other = rows(seed=1).__getitems__(range(8))
    assert not torch.equal(originals(first), originals(second))
    assert not torch.equal(originals(first), originals(other))


def test_an_epoch_has_each_row_once():
    dataset = rows(size=64 * 30)
    assert dataset.rows_in_epoch == 29
    for epoch in range(2):
        batch = originals(dataset.__getitems__(range(29 * epoch, 29 * epoch + 29)))
        assert len({tuple(row.tolist()) for row in batch}) == 29


def test_rows_in_order_are_the_corpus():
    dataset = rows(shuffle=False, count=10)
    text = torch.from_numpy(Stream(640).tokens.astype(np.int64))
    assert torch.equal(originals(dataset.__getitems__(range(10))).flatten(), text)


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


def test_rows_of_a_real_corpus(corpus):
    opened = Corpus.open(corpus)
    tokenizer = opened.tokenizer()
    special = tuple(tokenizer.all_special_ids)
    vocabulary = Vocabulary(opened.vocab_size, tokenizer.mask_token_id, tokenizer.pad_token_id, special)
    dataset = MaskedRows(opened.tokens("train"), vocabulary, rows=4, length=32, seed=0)
    text = tokenizer.decode(originals(dataset.__getitems__(range(4)))[0])
    assert "fox" in text or "quick" in text or "the" in text


def test_corpus_that_is_too_small():
    with pytest.raises(ValueError, match="the corpus has 100 tokens, but rows of 64 need at least 128"):
        rows(size=100)
