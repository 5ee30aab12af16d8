import shutil
from pathlib import Path

import pytest

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
