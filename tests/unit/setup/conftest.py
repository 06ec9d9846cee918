"""Tests of scripts start hundreds of processes that run nothing of the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def digits_on_path() -> Iterator[None]:
    """The modules of data/demo, which is no package, can be imported."""
    root = Path(__file__).resolve().parents[3]
    added = [str(root / "data/demo"), str(root)]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)
