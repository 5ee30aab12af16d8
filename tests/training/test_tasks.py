"""Tasks and labeled tables: what is read, how it is split, how it is scored."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from linformers.training import tasks
from linformers.training.rows import Example

from ..modes import refused
from .small import write_table as write


def numbered(count, labels=(0, 1), column="text", word="Text"):
    return [{column: f"{word} {i}", "label": labels[i % len(labels)]} for i in range(count)]


def pairs(count, first, second, word="Text"):
    return [{first: f"{word} {i // 2}", second: f"Other {i}", "label": i % 2} for i in range(count)]


def texts(examples):
    return [example.text for example in examples]


def load(path, **options):
    return tasks.load(str(path), **options)


# Named tasks.


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".tsv.gz", ".jsonl.xz"])
@pytest.mark.parametrize("labels", [(0, 1), ("negative", "positive")], ids=["numbers", "names"])
@pytest.mark.parametrize(
    ("name", "column", "reported"), [("sst2", "sentence", "validation"), ("imdb", "text", "test")], ids=["sst2", "imdb"]
)
def test_named_tasks(name, column, reported, labels, suffix, tmp_path):
    train, test = numbered(300, labels, column), numbered(7, column=column, word="New")
    write(tmp_path / name / f"train{suffix}", train)
    write(tmp_path / name / f"{reported}{suffix}", test)
    write(tmp_path / name / f"test_unlabeled{suffix}", [{column: "x", "label": -1}])
    data = tasks.load(name, tmp_path)
    assert (data.name, data.label_names, data.note) == (name, ["negative", "positive"], "")
    assert data.reported_on == f"{reported}{suffix}"
    assert data.test == [Example(row[column], None, row["label"]) for row in test]
    every = [Example(row[column], None, labels.index(row["label"])) for row in train]
    assert sorted(data.train + data.validation) == sorted(every)
    assert 5 <= len(data.validation) <= 30


@pytest.mark.parametrize(
    ("name", "first", "second", "labels"),
    [
        ("qnli", "question", "sentence", ["entailment", "not_entailment"]),
        ("qqp", "question1", "question2", ["not_duplicate", "duplicate"]),
    ],
)
def test_pairs(name, first, second, labels, tmp_path):
    rows = pairs(300, first, second)
    rows[0][second] = None  # a missing text is empty
    write(tmp_path / name / "train.parquet", rows)
    write(tmp_path / name / "validation.parquet", pairs(4, first, second, "New"))
    data = tasks.load(name, tmp_path)
    assert data.label_names == labels
    assert data.test == [Example(f"New {i // 2}", f"Other {i}", i % 2) for i in range(4)]
    # Both pairs of a question are in the same set.
    assert data.validation
    assert not set(texts(data.train)) & set(texts(data.validation))
    assert Example("Text 0", "", 0) in data.train + data.validation
    assert all(e.pair == f"Other {2 * int(e.text.split()[1]) + e.label}" for e in data.train if e.pair)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_hub(name, monkeypatch):
    asked, task = [], tasks.TASKS[name]

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split))
        rows = range(300 if split == "train" else 3)
        return ({"idx": i, "label": i % 2} | dict.fromkeys(task.text_columns, f"{split} {i}") for i in rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = tasks.load(name)
    path, _, config = task.hub.partition(":")
    assert set(asked) == {(path, config or None, split) for split in ("train", task.reported)}
    assert data.reported_on == f"{task.hub}/{task.reported}"
    assert texts(data.test) == [f"{task.reported} {i}" for i in range(3)]
    assert (data.test[0].pair is not None) == (len(task.text_columns) == 2)
    assert len(data.train) + len(data.validation) == 300


def test_tasks_that_cannot_be_found(tmp_path):
    with refused("did you mean 'sst2'"):
        tasks.load("sst-2", tmp_path)
    with refused(f"data='{tmp_path}' has no folder 'qnli'"):
        tasks.load("qnli", tmp_path)
    train, folder = pairs(300, "question", "sentence"), tmp_path / "qnli"
    write(folder / "validation.csv", train[:4])
    with refused(f"{folder} must have one table 'train'"):
        tasks.load("qnli", tmp_path)
    for name in ("train.csv", "train.jsonl.gz"):
        write(folder / name, train)
    with refused("but has train.csv, train.jsonl.gz"):
        tasks.load("qnli", tmp_path)
    for option in ({"test": tmp_path}, {"validation": tmp_path}, {"text": "a"}, {"label": "a"}):
        with refused(f"{next(iter(option))} has no effect on task='sst2'"):
            tasks.load("sst2", tmp_path, **option)


@pytest.mark.parametrize(
    ("train", "validation", "wrong", "message"),
    [((0, 1), (-1,), "validation", "has the label '-1'"), ((1, "positive"), (0, 1), "train", "the single label '1'")],
    ids=["unlabeled rows", "one class under two names"],
)
def test_wrong_labels_of_a_task(train, validation, wrong, message, tmp_path):
    write(tmp_path / "sst2/train.csv", numbered(300, train, "sentence"))
    write(tmp_path / "sst2/validation.csv", numbered(5, validation, "sentence"))
    with refused(f"{tmp_path / 'sst2' / wrong}.csv has {message.removeprefix('has ')}"):
        tasks.load("sst2", tmp_path)


# Labeled tables.


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.xz"])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("pos", "neg", "neutral"), ["neg", "neutral", "pos"]),
        ((0, 1), ["0", "1"]),
        ((10, 9, -1), ["-1", "9", "10"]),
        ((True, False), ["False", "True"]),
        ((2.0, 1.0), ["1", "2"]),
        (("2.0", "1."), ["1", "2"]),
        (("10", "9", "n/a"), ["10", "9", "n/a"]),
    ],
    ids=str,
)
def test_labels_of_tables(labels, names, suffix, tmp_path):
    train = write(tmp_path / f"mine{suffix}", numbered(300, labels))
    test = write(tmp_path / f"test{suffix}", numbered(len(labels), labels, word="New"))
    data = load(train, test=test)
    assert (data.name, data.label_names, data.reported_on, data.note) == ("mine", names, f"test{suffix}", "")
    expected = [str(label).split(".")[0] for label in labels]
    assert [data.label_names[example.label] for example in data.test] == expected


def test_columns_and_files(tmp_path):
    rows = [{"id": i, "a": f"a{i}", "b": f"b{i}", "class": "xy"[i % 2]} for i in range(90)]
    names = {"train.csv": rows[:50], "valid.jsonl": rows[50:70], "test.parquet": rows[70:]}
    train, validation, test = (write(tmp_path / name, part) for name, part in names.items())
    data = load(train, test=test, validation=validation, text="b,a", label="class")
    assert data.train == [Example(f"b{i}", f"a{i}", i % 2) for i in range(50)]
    assert texts(data.validation) == [f"b{i}" for i in range(50, 70)]
    assert texts(data.test) == [f"b{i}" for i in range(70, 90)]
    assert (data.label_names, data.note, data.reported_on) == (["x", "y"], "", "test.parquet")
    with refused(f"data='{tmp_path}' has no effect on task="):
        load(train, data=tmp_path)


def test_blank_rows_are_left_out_and_named(tmp_path):
    train = write(tmp_path / "train.csv", [*numbered(50), {"text": " ", "label": ""}])
    test = write(tmp_path / "test.jsonl", [{"text": "", "label": "x"}] * 12 + numbered(2))
    data = load(train, test=test, validation=train)
    assert (len(data.train), len(data.validation), len(data.test)) == (50, 50, 2)
    one = "left out 1 blank row of train.csv: 51"
    assert data.note == f"{one}; {one}; left out 12 blank rows of test.jsonl: {', '.join(map(str, range(1, 11)))}, …"


@pytest.mark.parametrize("with_validation", [True, False])
def test_without_a_test_file(with_validation, tmp_path):
    """Validation is reported, or 5% that are held out; models are selected on another 5%."""
    train = write(tmp_path / "train.csv", numbered(300) + numbered(300))
    validation = write(tmp_path / "valid.csv", numbered(20, word="New")) if with_validation else None
    data = load(train, validation=validation)
    assert data.reported_on == ("valid.csv" if with_validation else "train.csv, held out")
    assert f"reported on {'valid.csv' if with_validation else 'about 5%'}" in data.note
    sizes = [len(part) for part in (data.train, data.validation, data.test)]
    assert min(sizes) > 0
    assert sum(sizes) == 600 + 20 * with_validation
    # Equal texts stay together, so no text is in two parts.
    assert sum(len(set(texts(part))) for part in (data.train, data.validation, data.test)) == 300 + 20 * with_validation
    assert not with_validation or texts(data.test) == [f"New {i}" for i in range(20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "  "}, "no text in the columns 'text'"),
        ({"text": 3}, "has 3 in row 1, column 'text'"),
        ({"label": "same"}, "single label 'same'"),
        ({"label": 0.5}, "single label 0.5"),
        ({"label": [1]}, "single label [1]"),
        *(({"label": value}, f"has {value!r} in row 1, column 'label', which is not a l") for value in (None, " ", {})),
        ({"label": [None]}, "has [None] in row 1, column 'label', which is not a list of labels"),
    ],
)
def test_bad_tables(change, message, tmp_path):
    train = write(tmp_path / "train.jsonl", [row | change for row in numbered(60)])
    with refused(message) as error:
        load(train)
    assert str(error.value).startswith(str(train))


def test_bad_second_file(tmp_path):
    train = write(tmp_path / "train.csv", numbered(300, ("a", "b")))
    test = write(tmp_path / "test.csv", numbered(3, ("a", "b", "c")))
    for options in ({"test": test}, {"validation": test, "test": train}):
        with refused(f"{test} has the label 'c', which is not one of 'a', 'b'"):
            load(train, **options)
    many = write(tmp_path / "many.csv", numbered(300, range(12)))
    with refused("'9', ..."):
        load(many, test=test)
    write(test, [{"label": "a", "body": "x"}])
    with refused(f"{test} has no column 'text'; its columns are 'label', 'body'"):
        load(train, test=test)
    test.write_text("text,label\n")
    with refused(f"{test} has no text"):
        load(train, test=test)
    with refused(f"{train} has no column 'stars'; its columns are 'text', 'label'"):
        load(train, label="stars")


@pytest.mark.parametrize("rows", [numbered(4), [{"text": "one", "label": i % 2} for i in range(300)]])
def test_too_little_to_hold_out(rows, tmp_path):
    train = write(tmp_path / "train.csv", rows)
    for options in ({}, {"test": train}):
        with refused(f"{train} has {len(rows)} rows, too few distinct ones"):
            load(train, **options)
    assert len(load(train, validation=train, test=train).train) == len(rows)


def test_bad_arguments(tmp_path):
    train, text = write(tmp_path / "train.csv", numbered(300)), tmp_path / "notes.txt"
    text.write_text("text")
    for argument, path in (("test", tmp_path), ("validation", text), ("task", text), ("task", tmp_path / "none.csv")):
        with refused(f"{argument}='{path}' is not a table"):
            tasks.load(**{"task": str(train), argument: path if argument != "task" else str(path)})
    for columns in ("a,b,c", "text,text", "label"):
        with refused(f"text='{columns}' and label='label'"):
            load(train, text=columns)


def test_hash_is_that_of_the_content(tmp_path):
    first, second = (write(tmp_path / f"{i}.csv", numbered(300)) for i in range(2))
    other = write(tmp_path / "c.csv", numbered(300, (1, 0)))
    one, same, another = (load(path, test=first, validation=first).hash() for path in (first, second, other))
    assert one == same != another


# Held-out texts.


def test_held_out_texts_never_change():
    texts = [f"text {i}" for i in range(4000)]
    mask = [tasks.held_out(text, 0) for text in texts]
    assert sum(mask) == 206  # another number would mix what earlier models were trained on
    assert [i for i in range(100) if mask[i]] == [3, 33, 43, 62]
    assert [tasks.held_out(f"{text} \n", 0) for text in texts] == mask
    parts = np.array([[tasks.held_out(text, part) for text in texts] for part in range(20)])
    assert (parts.sum(axis=0) == 1).all()
    assert (abs(parts.mean(axis=1) - 0.05) < 0.015).all()


# Scores.


def test_spread():
    assert tasks.spread([0.9]) == (0.9, None)
    assert tasks.spread([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, (14 / 3) ** 0.5))
    assert tasks.plus_minus((0.912, 0.004), 1, scale=100) == "91.2 ± 0.4"
    assert tasks.plus_minus((0.912, 0.0), 2) == "0.91 ± 0.00"
    assert tasks.plus_minus((0.912, None), 2) == "0.91"


def test_a_table_with_semicolons_gets_a_hint(tmp_path):
    (tmp_path / "a.csv").write_text("text;label\na;1\n")
    with refused("has no column 'text'; its columns are 'text;label'; its columns are separated by semicolons"):
        load(tmp_path / "a.csv")
