import pytest

from . import small


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return small.corpus(tmp_path_factory.mktemp("corpus"))
