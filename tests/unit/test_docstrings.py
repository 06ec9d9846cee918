"""Examples in docstrings: they give what they show."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# That of models.quantize needs a checkpoint: test_docs.py runs it with a stand-in.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("models", "utils")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__init__.py" and re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def test_there_are_examples():
    assert len(MODULES) >= 10


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
