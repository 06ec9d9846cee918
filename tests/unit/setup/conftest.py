"""Tests of scripts start hundreds of processes that run nothing of the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unmeasured import unmeasured


@pytest.fixture(autouse=True, scope="module")
def _unmeasured() -> Iterator[None]:
    with unmeasured():
        yield
