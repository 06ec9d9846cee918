"""The size of the house: the limits of tests/house.py, and that its counts see what they are to see."""

import ast
from pathlib import Path

import house
import pytest


@pytest.mark.parametrize("row", house.measure(), ids=lambda row: row.what)
def test_the_house_keeps_its_limits(row):
    assert row.count <= row.limit, (
        f"{row.what}: {row.count}, and the limit in tests/house.py is {row.limit}. Say what your change "
        f"replaces, or raise the limit and give the reason in the commit's message. {row.names}"
    )


def test_what_is_counted():
    source = "def _once(): _once()\ndef _twice(): ...\ndef run(): ...\ndef same(): ...\n_once(); _twice(); _twice()\n"
    tree = ast.parse(source)
    assert list(house.used_once(tree)) == ["_once"]
    other = ast.parse("from utils import a\nfrom utils.core import distributed\ndef same(): ...\ndef run(): ...\n")
    trees = {Path("utils/a.py"): tree, Path("utils/b.py"): other}
    assert house.defined_twice(trees) == ["same: utils/a.py, utils/b.py"]
    assert house.single_importers(trees) == ["utils/a.py ← utils/b.py"]
    assert [house.knows_processes(one) for one in (tree, other)] == [False, True]
