"""Sets that several files of tests evaluate."""

import pytest
from known_images import MIXED, SQUARE
from known_sets import Known


@pytest.fixture(scope="session")
def mixed(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="session")
def square(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("square"), SQUARE)
