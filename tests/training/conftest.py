import shutil
from pathlib import Path

import pytest
import torch

from linformers import LinformerConfig, LinformerModel
from linformers.files import write_manifest
from linformers.training import finetune, tasks

from ..modes import randomized
from . import small, texts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return small.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return texts.write_jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", texts.TEXTS)


@pytest.fixture(scope="session")
def prepared(source, tmp_path_factory):
    """A corpus in many shards; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("prepared")
    texts.run([source], folder, shard_tokens=1000)
    return folder


@pytest.fixture
def copy(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory):
    """A finished pretraining run; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("finished")
    assert small.train(small.recipe(corpus, out)) == 0
    return out


@pytest.fixture(scope="session")
def model(finished):
    return finished / "model"


@pytest.fixture(scope="session")
def random(model, tmp_path_factory):
    """A model with random weights, n = 32, k = 8."""
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("random") / "model"))
    torch.manual_seed(0)
    randomized(LinformerModel(LinformerConfig.from_pretrained(folder)), std=0.4).save_pretrained(folder)
    write_manifest(folder)
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return small.labeled(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def task(files):
    return tasks.load(str(files / "train.csv"), test=files / "test.csv", text="sentence", label="kind")


@pytest.fixture(scope="session")
def tuned(task, model, tmp_path_factory):
    """A fine-tuned model."""
    out = tmp_path_factory.mktemp("finetuned")
    settings = finetune.Settings(seeds=2, epochs=3, batch_size=8, learning_rate=3e-3)
    assert finetune.run(task, model, out, settings, small.QUIET, "linformers finetune") == 0
    return out
