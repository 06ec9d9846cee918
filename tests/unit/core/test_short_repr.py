"""Values in messages: short, on one line, whatever they are."""

from pathlib import Path

import numpy as np
import pytest
import torch

from utils.core.text import plural, short_repr

CYCLE: list = [1]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "None"), (-1.5, "-1.5"), ("two\nlines", r"'two\nlines'"), (Path("a b"), f"{Path('a b')!r}"),
     (list(range(9)), "[0, 1, 2, 3, ...]"), ([[[[1]]]], "[[[...]]]"),
     (torch.zeros(2, 3, dtype=torch.float16), "Tensor float16 [2, 3]"), (np.zeros((2,)), "ndarray float64 [2]")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_in_a_few_words(value, text):
    assert short_repr(value) == text


@pytest.mark.parametrize("value", [["x" * 10**6] * 10**4, {"x" * 10**5: CYCLE}], ids=range(2))
def test_a_large_value_stays_short(value):
    assert len(short_repr(value)) < 450


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "image", "1 image"), (0, "image", "0 images"), (2, "batch", "2 batches"), (3, "class", "3 classes"),
     (2, "epoch", "2 epochs"), (2, "copy", "2 copies"), (2, "day", "2 days"), (1, "box", "1 box")],
)  # fmt: skip
def test_counts_and_their_nouns(count, noun, text):
    assert plural(count, noun) == text
