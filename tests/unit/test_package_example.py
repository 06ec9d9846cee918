"""The example in the docstring of models/quantize runs as it stands, with a small network for the checkpoint."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from small_networks import chain

import models.quantize
from models.quantize.modules import QuantConv2d
from utils import upstream


def run_example(text: str, names: dict[str, object]) -> int:
    """Run a docstring's example in `names`, and give the number of its statements that failed."""
    test = doctest.DocTestParser().get_doctest(text, names, "models.quantize", None, None)
    assert len(test.examples) == 6
    test.globs = names  # not the copy
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None, clear_globs=False).failed


@pytest.fixture
def names(monkeypatch) -> dict[str, object]:
    load = create_autospec(upstream.load_float, return_value=SimpleNamespace(model=chain()))
    monkeypatch.setattr(upstream, "load_float", load)
    monkeypatch.setattr(upstream, "fuse", create_autospec(upstream.fuse, side_effect=lambda model: model))
    return {"batches": [torch.rand(2, 3, 32, 32)] * 2}


def test_the_example_quantizes_and_calibrates_a_network(names):
    assert run_example(models.quantize.__doc__, names) == 0
    model = names["model"]
    assert isinstance(model.model[6], QuantConv2d)
    assert any(float(one.amax) != 1 for one in model.activation_quantizers.values())
