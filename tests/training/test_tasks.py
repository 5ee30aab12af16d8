"""Data of fine-tuning: tasks and tables of one's own, splits that share no text, orders that resume, metrics."""

import csv
import gzip
import json
import lzma
import os
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from linformers.training import metrics, tasks
from linformers.training.batches import EncodedExamples, EpochOrder, collate, encode
from linformers.training.tasks import Examples, custom_task, held_out

WORDS = [f"w{i}" for i in range(20)]


def refused(message, error=ValueError):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def write(path, rows):
    """Rows (dicts) as a table of the kind that the path says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", newline="") as file:
        if ".jsonl" in path.suffixes:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ".tsv" in path.suffixes else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def numbered(count, labels=(0, 1), column="text", word="Text"):
    return [{column: f"{word} {i}", "label": labels[i % len(labels)]} for i in range(count)]


def pairs(count, first, second, word="Text"):
    return [{first: f"{word} {i // 2}", second: f"Other {i}", "label": i % 2} for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate(special + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", model_max_length=12)


# The built-in tasks


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".tsv.gz", ".jsonl.xz"])
@pytest.mark.parametrize(
    ("name", "column", "reported"), [("sst2", "sentence", "validation"), ("imdb", "text", "test")], ids=["sst2", "imdb"]
)
def test_texts(name, column, reported, suffix, tmp_path):
    train, test = numbered(300, column=column), numbered(7, column=column, word="New")
    write(tmp_path / name / f"train{suffix}", train)
    write(tmp_path / name / f"{reported}{suffix}", test)
    write(tmp_path / name / f"test_unlabeled{suffix}", [{column: "x", "label": -1}])
    data = tasks.load(name, tmp_path)
    assert (data.name, data.label_names, data.note) == (name, ["negative", "positive"], "")
    assert data.reported_on == f"{reported}{suffix}"
    assert data.test.texts == [row[column] for row in test]
    assert data.test.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert data.test.labels.dtype == np.int64
    assert data.test.pairs is None
    label_of = {row[column]: row["label"] for row in train}
    for part in (data.train, data.validation):
        assert part.labels.tolist() == [label_of[text] for text in part.texts]
    assert sorted(data.train.texts + data.validation.texts) == sorted(label_of)
    assert 5 <= len(data.validation) <= 30


def test_labels_by_name(tmp_path):
    write(tmp_path / "sst2/train.csv", numbered(300, ("positive", "negative"), "sentence"))
    write(tmp_path / "sst2/validation.csv", numbered(2, (0, 1), "sentence"))
    data = tasks.load("sst2", tmp_path)
    assert set(zip([int(t.split()[1]) % 2 for t in data.train.texts], data.train.labels, strict=True)) == {
        (0, 1),
        (1, 0),
    }
    assert data.test.labels.tolist() == [0, 1]


def test_qnli_of_glue(tmp_path):
    write(tmp_path / "qnli/train.parquet", pairs(300, "question", "sentence"))
    write(tmp_path / "qnli/train_reconstructed_from_squad.parquet", pairs(300, "question", "sentence", "wrong"))
    write(tmp_path / "qnli/validation.parquet", pairs(4, "question", "sentence", "New"))
    data = tasks.load("qnli", tmp_path)
    assert data.note == ""
    assert data.label_names == ["entailment", "not_entailment"]
    assert data.test.texts == ["New 0", "New 0", "New 1", "New 1"]
    assert data.test.pairs == [f"Other {i}" for i in range(4)]
    assert data.train.texts[0].startswith("Text")
    # Both pairs of a question are on one side.
    assert len(data.validation) > 0
    assert not set(data.train.texts) & set(data.validation.texts)
    assert all(second == f"Other {2 * int(first.split()[1]) + label}" for first, second, label in zip_of(data.train))


def zip_of(examples):
    return zip(examples.texts, examples.pairs, examples.labels, strict=True)


def test_qnli_reconstructed(tmp_path):
    write(tmp_path / "qnli/train_reconstructed_from_squad_v2.parquet", pairs(300, "question", "sentence"))
    write(tmp_path / "qnli/validation.parquet", pairs(2, "question", "sentence", "New"))
    data = tasks.load("qnli", tmp_path)
    assert data.note == "train is a reconstruction from SQuAD, lower-cased; not GLUE's"
    assert (data.test.texts, data.test.pairs) == (["new 0", "new 0"], ["other 0", "other 1"])


@pytest.mark.parametrize(
    ("train", "reported", "is_subset"),
    [
        ("train_subset", "validation_subset", True),
        ("train", "validation_subset", True),
        ("train_subset", "validation", True),
        ("train", "validation", False),
    ],
)
def test_qqp(train, reported, is_subset, tmp_path):
    write(tmp_path / f"qqp/{train}.parquet", pairs(300, "question1", "question2"))
    write(tmp_path / f"qqp/{reported}.parquet", pairs(2, "question1", "question2", "New"))
    data = tasks.load("qqp", tmp_path)
    assert data.note == ("a subset of Quora's pairs with a split of its own; not GLUE's" if is_subset else "")
    assert data.label_names == ["not_duplicate", "duplicate"]
    assert (data.test.texts, data.test.pairs) == (["New 0", "New 0"], ["Other 0", "Other 1"])
    assert data.reported_on == f"{reported}.parquet"


def test_a_pair_may_lack_a_text(tmp_path):
    rows = pairs(300, "question1", "question2")
    rows[0]["question2"] = None
    write(tmp_path / "qqp/train.parquet", rows)
    write(tmp_path / "qqp/validation.parquet", rows[:1] + rows[3:4])
    assert tasks.load("qqp", tmp_path).test.pairs == ["", "Other 3"]


@pytest.mark.parametrize(
    ("name", "hub", "columns", "reported"),
    [
        ("sst2", ("nyu-mll/glue", "sst2"), ["sentence"], "validation"),
        ("qnli", ("nyu-mll/glue", "qnli"), ["question", "sentence"], "validation"),
        ("qqp", ("nyu-mll/glue", "qqp"), ["question1", "question2"], "validation"),
        ("imdb", ("stanfordnlp/imdb", None), ["text"], "test"),
    ],
)
def test_hub(name, hub, columns, reported, monkeypatch):
    asked = []

    class Table(list):
        def select_columns(self, names):
            return [{name: row[name] for name in names} for row in self]

    def load_dataset(path, config, *, split):
        asked.append((path, config, split))
        rows = range(300 if split == "train" else 3)
        return Table({"idx": i, "label": i % 2} | dict.fromkeys(columns, f"{split} {i}") for i in rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = tasks.load(name)
    assert asked == [(*hub, "train"), (*hub, reported)]
    assert data.reported_on == "/".join(filter(None, (*hub, reported)))
    assert data.test.texts == [f"{reported} {i}" for i in range(3)]
    assert (data.test.pairs is not None) == (len(columns) == 2)
    assert len(data.train) + len(data.validation) == 300
    assert data.note == ""


def test_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(
        "task 'sst2' comes from the hub, which takes the package datasets: "
        "pip install 'linformers[hub]', or pass --data DIR"
    ):
        tasks.load("sst2")


def test_tasks_that_cannot_be_found(tmp_path):
    with refused("task='sst-2' is not one of 'sst2', 'imdb', 'qnli', 'qqp'; did you mean 'sst2'?"):
        tasks.load("sst-2", tmp_path)
    with refused(f"data={str(tmp_path)!r} has no folder 'qnli'"):
        tasks.load("qnli", tmp_path)
    folder, kinds = tmp_path / "qnli", "(.jsonl, .csv, .tsv, .parquet, plain, .gz or .xz)"
    folder.mkdir()
    with refused(f"{folder} has no table 'train' or 'train_reconstructed_from_squad*' {kinds}"):
        tasks.load("qnli", tmp_path)
    write(folder / "train.csv", pairs(300, "question", "sentence"))
    (folder / "validation.txt").write_text("no table")
    with refused(f"{folder} has no table 'validation' or 'validation_reconstructed_from_squad*' {kinds}"):
        tasks.load("qnli", tmp_path)
    write(folder / "train.jsonl.gz", pairs(300, "question", "sentence"))
    with refused(f"{folder} has several files for 'train': train.csv, train.jsonl.gz; keep one"):
        tasks.load("qnli", tmp_path)
    (tmp_path / "sst2").mkdir()
    with refused(f"{tmp_path / 'sst2'} has no table 'train' {kinds}"):
        tasks.load("sst2", tmp_path)
    with refused("task 'mine' is not on the hub: pass the folder of its files as data"):
        tasks.load(tasks.Task("mine", ("text",)))


def test_unlabelled_rows_of_a_task(tmp_path):
    write(tmp_path / "sst2/train.parquet", numbered(300, column="sentence"))
    path = write(tmp_path / "sst2/validation.parquet", numbered(5, (-1,), "sentence"))
    with refused(f"{path} has the label '-1' in column 'label', which is not one of 'negative', 'positive', '0', '1'"):
        tasks.load("sst2", tmp_path)


def test_single_class_under_two_names(tmp_path):
    path = write(tmp_path / "sst2/train.csv", numbered(300, (1, "positive"), "sentence"))
    with refused(f"{path} has the single label '1' in column 'label'; a classifier needs two or more"):
        tasks.load("sst2", tmp_path)


# Tables of one's own


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.xz"])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("pos", "neg", "neutral"), ["neg", "neutral", "pos"]),
        ((0, 1), ["0", "1"]),
        ((10, 9, -1), ["-1", "9", "10"]),
        ((True, False), ["False", "True"]),
        ((2.0, 1.0), ["1", "2"]),
        (("10", "9", "n/a"), ["10", "9", "n/a"]),
    ],
    ids=str,
)
def test_labels_of_own_tables(labels, names, suffix, tmp_path):
    if isinstance(labels[0], float) and ("csv" in suffix or "tsv" in suffix):
        labels = tuple(map(int, labels))
    train = write(tmp_path / f"mine{suffix}", numbered(300, labels))
    test = write(tmp_path / f"test{suffix}", numbered(len(labels), labels, word="New"))
    data = tasks.load(custom_task(train, test=test, text_columns=["text"], label_column="label"))
    assert (data.name, data.label_names, data.reported_on, data.note) == ("mine", names, f"test{suffix}", "")
    assert [data.label_names[i] for i in data.test.labels] == [
        str(int(label)) if isinstance(label, float) else str(label) for label in labels
    ]


def test_own_columns_and_files(tmp_path):
    rows = [{"id": i, "a": f"a{i}", "b": f"b{i}", "class": "xy"[i % 2]} for i in range(90)]
    train, validation, test = (
        write(tmp_path / name, part)
        for name, part in (("train.csv", rows[:50]), ("valid.jsonl", rows[50:70]), ("test.parquet", rows[70:]))
    )
    task = custom_task(train, test=test, validation=validation, text_columns=["b", "a"], label_column="class")
    data = tasks.load(task)
    assert data.train.texts == [f"b{i}" for i in range(50)]
    assert data.train.pairs == [f"a{i}" for i in range(50)]
    assert data.validation.texts == [f"b{i}" for i in range(50, 70)]
    assert data.test.texts == [f"b{i}" for i in range(70, 90)]
    assert (data.label_names, data.note, data.reported_on) == (["x", "y"], "", "test.parquet")
    with refused(f"data={str(tmp_path)!r} has no effect on task 'train', which names its own files"):
        tasks.load(task, tmp_path)


def test_without_a_test_file_validation_is_reported(tmp_path):
    train = write(tmp_path / "train.csv", numbered(300))
    validation = write(tmp_path / "valid.csv", numbered(20, word="New"))
    data = tasks.load(custom_task(train, validation=validation))
    assert data.test.texts == [f"New {i}" for i in range(20)]
    assert data.note == "no test file: reported on valid.csv, selected on 5% held out of train.csv"
    assert data.reported_on == "valid.csv"
    assert len(data.train) + len(data.validation) == 300
    assert not set(data.train.texts) & set(data.validation.texts)


def test_without_other_files_two_parts_are_held_out(tmp_path):
    rows = numbered(300) + numbered(300)
    data = tasks.load(custom_task(write(tmp_path / "train.csv", rows)))
    parts = [set(part.texts) for part in (data.train, data.validation, data.test)]
    assert all(parts)
    assert len(data.train) + len(data.validation) + len(data.test) == 600
    assert sum(map(len, parts)) == 300  # equal texts are together, so no text is in two parts
    assert data.note == "no test file: reported on 5% held out of train.csv, selected on another 5%"
    assert data.reported_on == "5% of train.csv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": None}, "{} has no text in column 'text': each of its 60 rows is empty"),
        ({"text": "  "}, "{} has no text in column 'text': each of its 60 rows is empty"),
        ({"text": 3}, "{} has 3 in row 1, column 'text', which is no text"),
        ({"label": "same"}, "{} has the single label 'same' in column 'label'; a classifier needs two or more"),
        ({"label": None}, "{} has None in row 1, column 'label'; a label is text or a whole number"),
        ({"label": " "}, "{} has ' ' in row 1, column 'label'; a label is text or a whole number"),
        ({"label": 0.5}, "{} has 0.5 in row 1, column 'label'; a label is text or a whole number"),
        ({"label": [1]}, "{} has [1] in row 1, column 'label'; a label is text or a whole number"),
    ],
)
def test_bad_tables(change, message, tmp_path):
    train = write(tmp_path / "train.jsonl", [row | change for row in numbered(60)])
    with refused(message.format(train)):
        tasks.load(custom_task(train))


def test_half_a_character(tmp_path):
    """Which json can spell, and UTF-8 cannot."""
    lines = [json.dumps({"text": f"{i} \ud83d", "label": i % 2}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert all(text.endswith(" ?") for text in tasks.load(custom_task(tmp_path / "a.jsonl")).train.texts)


def test_bad_second_file(tmp_path):
    train = write(tmp_path / "train.csv", numbered(300, ("a", "b")))
    test = write(tmp_path / "test.csv", numbered(3, ("a", "b", "c")))
    with refused(f"{test} has the label 'c' in column 'label', which is not one of 'a', 'b'"):
        tasks.load(custom_task(train, test=test))
    with refused(f"{test} has the label 'c' in column 'label', which is not one of 'a', 'b'"):
        tasks.load(custom_task(train, validation=test, test=train))
    many = write(tmp_path / "many.csv", numbered(300, range(12)))
    with refused(
        f"{test} has the label 'a' in column 'label', which is not one of "
        "'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', ..."
    ):
        tasks.load(custom_task(many, test=test))
    write(test, [{"label": "a", "body": "x"}])
    with refused(f"{test} has no column 'text'; its columns are 'label', 'body'"):
        tasks.load(custom_task(train, test=test))
    test.write_text("text,label\n")
    with refused(f"{test} has no rows"):
        tasks.load(custom_task(train, test=test))
    with refused(f"{train} has no column 'stars'; its columns are 'text', 'label'"):
        tasks.load(custom_task(train, label_column="stars"))


@pytest.mark.parametrize("rows", [numbered(4), [{"text": "one", "label": i % 2} for i in range(300)]])
def test_too_little_to_hold_out(rows, tmp_path):
    train = write(tmp_path / "train.csv", rows)
    message = (
        f"{train} has {len(rows)} rows, too few different ones to hold out 5% of them; "
        "give more, or a validation and a test file"
    )
    with refused(message):
        tasks.load(custom_task(train))
    with refused(message):
        tasks.load(custom_task(train, test=train))
    assert len(tasks.load(custom_task(train, validation=train, test=train)).train) == len(rows)


def test_bad_arguments_of_own_tables(tmp_path):
    train, text = write(tmp_path / "train.csv", numbered(3)), tmp_path / "notes.txt"
    text.write_text("text")
    kinds = "(.jsonl, .csv, .tsv, .parquet, plain, .gz or .xz)"
    with refused(f"train={str(tmp_path / 'none.csv')!r} is no file"):
        custom_task(tmp_path / "none.csv")
    with refused(f"test={str(tmp_path)!r} is no file"):
        custom_task(train, test=tmp_path)
    with refused(f"validation={str(text)!r} is no table {kinds}"):
        custom_task(train, validation=text)
    with refused("text_columns='text' must be one column, such as ['text'], or two for pairs"):
        custom_task(train, text_columns="text")
    with refused("text_columns=[] must be one column, such as ['text'], or two for pairs"):
        custom_task(train, text_columns=[])
    with refused("text_columns=['a', 'b', 'c'] must be one column, such as ['text'], or two for pairs"):
        custom_task(train, text_columns=["a", "b", "c"])
    with refused("text_columns=['text', 'text'] and label_column='label' must all differ"):
        custom_task(train, text_columns=["text", "text"])
    with refused("text_columns=['text'] and label_column='text' must all differ"):
        custom_task(train, label_column="text")


# What is held out


def test_held_out_depends_on_the_text_alone():
    texts = [f"text {i}" for i in range(4000)]
    mask = held_out(texts)
    assert mask.sum() == 206  # known for good: another number would mix what earlier models were trained on
    assert [i for i in range(100) if mask[i]] == [3, 33, 43, 62]
    assert (held_out(texts[::-1]) == mask[::-1]).all()
    assert (held_out([f"{text} \n" for text in texts]) == mask).all()
    assert held_out([], 0.5).tolist() == []


def test_parts_are_disjoint_and_shares_are_kept():
    texts = [f"text {i}" for i in range(4000)]
    parts = np.stack([held_out(texts, 0.25, part) for part in range(4)])
    assert (parts.sum(axis=0) == 1).all()
    assert (abs(parts.mean(axis=1) - 0.25) < 0.03).all()


@pytest.mark.parametrize("share", [0, 1, 5, -0.1, "5%", None])
def test_shares_that_cannot_be(share):
    with refused(f"share={share!r} must be above 0 and below 1"):
        held_out(["text"], share)


# Token ids


def rows_of(encoded):
    return [encoded[i]["input_ids"].tolist() for i in range(len(encoded))]


def test_encode(tokenizer):
    examples = Examples(["w0 w1", "", "w0 w1 w2 w3 w4 w5 w6"], None, np.array([1, 0, 1]))
    encoded = encode(examples, tokenizer, 6)
    assert rows_of(encoded) == [[0, 4, 5, 2], [0, 2], [0, 4, 5, 6, 7, 2]]
    assert [encoded[i]["label"] for i in range(3)] == [1, 0, 1]
    assert encoded.tokens.dtype == np.uint32
    assert encoded.offsets.tolist() == [0, 4, 6, 12]
    with refused("row 3 of 3", IndexError):
        encoded[3]


def test_encode_pairs_cuts_the_longer_text(tokenizer):
    texts, others = ["w0 w1 w2 w3 w4 w5", "w0"], ["w9", "w1 w2 w3 w4 w5 w6"]
    encoded = encode(Examples(texts, others, np.array([0, 1])), tokenizer, 9)
    assert rows_of(encoded) == [[0, 4, 5, 6, 7, 2, 2, 13, 2], [0, 4, 2, 2, 5, 6, 7, 8, 2]]


def test_encode_in_several_batches(tokenizer):
    texts = [" ".join(WORDS[: 1 + i % 7]) for i in range(2500)]
    encoded = encode(Examples(texts, texts[::-1], np.arange(2500) % 3), tokenizer, 9)
    assert len(encoded) == 2500
    for i in (0, 999, 1000, 1001, 2000, 2499):
        alone = tokenizer(texts[i], texts[-1 - i], truncation="longest_first", max_length=9)["input_ids"]
        assert encoded[i]["input_ids"].tolist() == alone
        assert encoded[i]["label"] == i % 3


def test_lengths_without_room(tokenizer):
    with refused("max_length=2 leaves no room for text beside 2 special tokens"):
        encode(Examples(["w0"], None, np.array([0])), tokenizer, 2)
    with refused("max_length=4 leaves no room for text beside 4 special tokens"):
        encode(Examples(["w0"], ["w1"], np.array([0])), tokenizer, 4)
    with refused("max_length=0 must be a positive integer"):
        encode(Examples(["w0"], None, np.array([0])), tokenizer, 0)


def row(length, label=0):
    return {"input_ids": np.arange(5, 5 + length, dtype=np.uint32), "label": label}


def test_collate():
    batch = collate([row(2, 1), row(3, 0)], pad_token_id=1, max_length=12, multiple_of=4)
    assert batch["input_ids"].tolist() == [[5, 6, 1, 1], [5, 6, 7, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("longest", "width"), [(1, 8), (8, 8), (9, 12), (12, 12)])
def test_width_of_a_batch(longest, width):
    batch = collate([row(1), row(longest)], 1, 12)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, width)
    assert batch["attention_mask"].sum(dim=1).tolist() == [1, longest]


def test_row_that_is_too_long():
    with refused(
        "a row has 13 tokens, but at most n=12 are possible; shorten the input or encode it with max_length=12"
    ):
        collate([row(13)], 1, 12)


# The order of rows


def encoded(count):
    return EncodedExamples(
        np.arange(count, dtype=np.uint32), np.arange(count + 1, dtype=np.int64), np.arange(count, dtype=np.int64) % 2
    )


def drawn(order, numbers):
    return [int(order[g]["input_ids"][0]) for g in numbers]


def test_an_epoch_holds_each_row_once_in_an_order_of_its_own():
    order = EpochOrder(encoded(50), seed=3, total_rows=175)
    assert len(order) == 175
    all_rows = drawn(order, range(175))
    epochs = [all_rows[start : start + 50] for start in range(0, 150, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 4
    assert len(set(all_rows[150:])) == 25
    assert all(order[g]["label"] == all_rows[g] % 2 for g in range(175))
    other = EpochOrder(encoded(50), seed=4, total_rows=175)
    assert drawn(other, range(50)) != epochs[0]
    assert drawn(other, range(50)) != epochs[1]  # seed + 1 is no run that is an epoch ahead


def test_orders_stay_as_they_are():
    order = EpochOrder(encoded(6), seed=1, total_rows=12)
    assert drawn(order, range(12)) == [3, 5, 2, 0, 1, 4, 0, 5, 3, 4, 2, 1]


@pytest.mark.parametrize("start", [0, 1, 49, 50, 51, 120])
def test_resumed_order_is_that_of_the_whole_run(start):
    whole = drawn(EpochOrder(encoded(50), 7, 150), range(150))
    assert drawn(EpochOrder(encoded(50), 7, 150), range(start, 150)) == whole[start:]
    assert drawn(EpochOrder(encoded(50), 7, 150), reversed(range(150))) == whole[::-1]


@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (50, 8), (97, 5), (64, 4), (640, 10)])
def test_batches_hold_rows_of_similar_lengths(rows, batch):
    lengths = np.random.default_rng(0).integers(1, 100, rows)
    examples = EncodedExamples(
        np.repeat(np.arange(rows, dtype=np.uint32), lengths), np.concatenate([[0], np.cumsum(lengths)]), lengths % 2
    )
    total = 3 * rows
    order = EpochOrder(examples, 5, total, batch)
    drawn_rows = np.array(drawn(order, range(total)))
    epochs = drawn_rows.reshape(3, rows)
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows == 1 or len({tuple(epoch) for epoch in epochs}) == 3
    resumed = EpochOrder(examples, 5, total, batch)
    assert drawn(resumed, range(total - 1, -1, -1)) == drawn_rows[::-1].tolist()

    def padding(rows):
        widths = [lengths[rows[start : start + batch]].max() for start in range(0, len(rows), batch)]
        return batch * sum(widths) / lengths[rows].sum() - 1

    if rows == 640:
        plain = np.array(drawn(EpochOrder(examples, 5, total), range(total)))
        assert padding(drawn_rows) < 0.15 < 0.7 < padding(plain)
        # Batches come in random order, not by length.
        means = lengths[drawn_rows].reshape(-1, batch).mean(1)
        assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_longest_first():
    examples = EncodedExamples(np.array([7, 8, 8, 8, 9, 9]), np.array([0, 1, 4, 6]), np.array([0, 1, 0]))
    rows = list(examples.longest_first())
    assert [row["input_ids"].tolist() for row in rows] == [[8, 8, 8], [9, 9], [7]]
    assert [row["label"] for row in rows] == [1, 0, 0]


def test_order_in_worker_processes():
    whole = EpochOrder(encoded(10), 7, 25)
    loader = DataLoader(whole, batch_size=4, num_workers=2, collate_fn=pad, multiprocessing_context="fork")
    assert [ids for batch in loader for ids in batch["input_ids"][:, 0].tolist()] == drawn(whole, range(25))
    copy = pickle.loads(pickle.dumps(whole))
    assert drawn(copy, range(25)) == drawn(whole, range(25))


def pad(rows):
    return collate(rows, 0, 8)


def test_bad_arguments_of_an_order():
    with refused("total_rows=0 must be a positive integer"):
        EpochOrder(encoded(2), 0, 0)
    for seed in (-1, 2**64, 1.5, None):
        with refused(f"seed={seed!r} must be an integer, at least 0 and below 2**64"):
            EpochOrder(encoded(2), seed, 4)
    assert sorted(drawn(EpochOrder(encoded(9), 2**64 - 1, 9), range(9))) == list(range(9))
    with refused("batch_size=0 must be a positive integer"):
        EpochOrder(encoded(2), 0, 4, 0)
    with refused("examples has no rows to draw from"):
        EpochOrder(encoded(0), 0, 4)
    for g in (-1, 4):
        with refused(f"row {g} of 4", IndexError):
            EpochOrder(encoded(2), 0, 4)[g]


# Metrics


def test_accuracy():
    assert metrics.accuracy([0, 1, 2, 1], [0, 1, 1, 0]) == 0.5
    assert metrics.accuracy(np.array([2]), np.array([2])) == 1.0


@pytest.mark.parametrize(
    ("predictions", "labels", "num_labels", "expected"),
    [
        # Class 1: 2 hits, 3 predicted, 4 true: 2·2/(3 + 4).
        ([1, 1, 1, 0, 0], [1, 1, 0, 1, 1], 2, 4 / 7),
        ([1, 1], [1, 1], 2, 1.0),
        ([0, 0], [0, 0], 2, 0.0),
        ([0, 0], [1, 0], 2, 0.0),
        # Classes 0, 1 and 2: 2/2, 2·1/(2 + 1), 0; class 3 is nowhere.
        ([0, 1, 1], [0, 1, 2], 4, (1 + 2 / 3 + 0) / 3),
        # A class that is predicted but never true counts as 0.
        ([0, 3], [0, 0], 4, (2 / 3 + 0) / 2),
        ([1, 1], [1, 1], 3, 1.0),
    ],
)
def test_f1(predictions, labels, num_labels, expected):
    assert metrics.f1(predictions, labels, num_labels) == pytest.approx(expected, abs=1e-15)


def test_classification_metrics():
    logits = np.array([[0.0, 1.0], [2.0, 1.0], [-3.0, -2.0], [0.5, 0.0]])
    assert metrics.classification_metrics(logits, np.array([1, 0, 0, 1])) == {"accuracy": 0.5, "f1": 0.5}
    three = metrics.classification_metrics(np.eye(3), np.array([0, 1, 1]))
    assert three == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx((1 + 2 / 3 + 0) / 3)}
    logits[1, 0] = np.nan
    with refused("logits has NaN in 1 of 4 rows: training has diverged; lower its rate"):
        metrics.classification_metrics(logits, np.array([1, 0, 0, 1]))
    with refused("logits has shape (4,), expected (rows, classes)"):
        metrics.classification_metrics(logits[:, 0], np.array([1, 0, 0, 1]))


def test_spread():
    assert metrics.spread([0.9]) == (0.9, None)
    assert metrics.spread([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, (14 / 3) ** 0.5))
    with refused("values=[] must hold one number or more"):
        metrics.spread([])
    assert metrics.plus_minus((0.912, 0.004), 1, scale=100) == "91.2 ± 0.4"
    assert metrics.plus_minus((0.912, 0.0), 2) == "0.91 ± 0.00"
    assert metrics.plus_minus((0.912, None), 2) == "0.91"


@pytest.mark.parametrize(("predictions", "labels"), [([0, 1], [0]), ([], []), ([[0, 1]], [[0, 1]])])
def test_rows_that_do_not_match(predictions, labels):
    shapes = np.shape(predictions), np.shape(labels)
    message = (
        f"predictions of shape {shapes[0]} and labels of shape {shapes[1]} "
        "must be one number each for the same rows, one row or more"
    )
    with refused(message):
        metrics.accuracy(predictions, labels)
    with refused(message):
        metrics.f1(predictions, labels, 2)


# The real files


@pytest.mark.skipif("LINFORMERS_DATA" not in os.environ, reason="LINFORMERS_DATA names no folder of data")
@pytest.mark.parametrize(
    ("name", "rows", "reported", "note"),
    [
        ("sst2", 67349, 872, ""),
        ("imdb", 25000, 25000, ""),
        ("qnli", 23695, 5463, "train is a reconstruction from SQuAD, lower-cased; not GLUE's"),
        ("qqp", 29719, 4000, "a subset of Quora's pairs with a split of its own; not GLUE's"),
    ],
)
def test_real_files(name, rows, reported, note):
    data = tasks.load(name, Path(os.environ["LINFORMERS_DATA"]))
    assert (len(data.train) + len(data.validation), len(data.test), data.note) == (rows, reported, note)
    assert 0.045 < len(data.validation) / rows < 0.055
    assert not set(data.train.texts) & set(data.validation.texts)
    for part in (data.train, data.validation, data.test):
        assert 0.35 < part.labels.mean() < 0.65
    assert all(text == text.lower() for text in data.test.texts) == (name in ("sst2", "qnli"))
