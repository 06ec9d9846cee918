"""Readers of what people write, given anything: a value that holds, or one line that names the file."""

import math
import tempfile
from pathlib import Path

import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from models.quantize.recipe import Recipe
from utils.core.errors import DataError, RecipeError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.labels import read_labels

EXAMPLES = settings(deadline=None, max_examples=300, derandomize=True, database=None)
CLASSES = 3
NUMBERS = st.one_of(st.integers(-1, CLASSES).map(str), st.floats(-0.2, 1.2).map("{:.3f}".format))
WORDS = st.one_of(NUMBERS, st.floats().map(str), st.sampled_from(["cat", "0x1", "1_0", "½", "-"]))
LINES = st.one_of(
    st.tuples(st.integers(0, CLASSES - 1).map(str), *[NUMBERS] * 4).map(" ".join),
    st.lists(WORDS, min_size=1, max_size=10).map(" ".join),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(".")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def is_right(line):
    """Whether a line is a box of fractions by upstream's documentation: class cx cy w h. None: not said so simply."""
    try:
        label, *box = [float(np.float32(word)) for word in line.split()]
    except ValueError:
        return False
    if len(box) != 4 or not all(map(math.isfinite, (label, *box))):
        return None if len(box) > 5 and len(box) % 2 == 0 else False
    if label not in range(CLASSES):
        return False
    return True if all(0 <= value <= 1 for value in box) else None


@EXAMPLES
@given(st.lists(LINES, max_size=6))
def test_every_line_of_labels_is_a_row_or_is_named(lines):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.txt")
        file.write_text("\n".join(lines))
        labels = read_labels(file, CLASSES)
    bad = {int(text.split()[1].rstrip(":")) for text in labels.bad}
    clipped = {int(text.split()[1].rstrip(":")) for text in labels.clipped}
    used = [line for number, line in enumerate(lines, 1) if number not in bad]
    assert bad.isdisjoint(clipped)
    assert {float(line.split()[0]) for line in used} == set(labels.rows[:, 0].tolist())
    assert (labels.rows >= 0).all()
    assert (labels.rows[:, 1:] <= 1).all()
    for number, line in enumerate(lines, 1):
        if (right := is_right(line)) is not None:
            assert right == (number not in bad | clipped), line
            row = np.array(line.split(), np.float32) if right else np.empty(0)
            assert not right or (labels.rows == row).all(1).any(), line


def reads(read, error, content):
    """What `read` makes of a YAML file; None if it raised `error` in one line that names the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file.yaml")
        file.write_text(yaml.safe_dump(content))
        try:
            return read(file)
        except error as caught:
            message = str(caught)
    assert str(file) in message
    assert len(message.splitlines()) == 1
    return None


@EXAMPLES
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("names", "nc", "val", "train", "path", "other"), VALUES)))
def test_any_data_yaml_is_a_dataset_or_is_refused(content):
    data = reads(load_data, DataError, content)
    if data:
        assert len(data.names) == len(content["names"]) > 0
        assert content.get("nc") in (None, data.nc)
        assert set(data.splits) & {"train", "val"}


SECTIONS = {"calibration": ("method", "percentile", "images"), "finetune": ("epochs", "iters", "lr", "train")}
RECIPES = {key: st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES)) for key, names in SECTIONS.items()}


@EXAMPLES
@given(st.fixed_dictionaries({}, optional={**RECIPES, **dict.fromkeys(("head", "add", "float"), VALUES)}))
def test_any_recipe_is_one_or_is_refused(content):
    recipe = reads(Recipe.from_file, RecipeError, content)
    if recipe:
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert not any(isinstance(value, float) and math.isnan(value) for value in vars(recipe.finetune).values())
