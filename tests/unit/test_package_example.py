"""The example in the docstring of models/quantize runs as it stands, with a small network for the checkpoint."""

import doctest
from types import SimpleNamespace
from unittest.mock import create_autospec

import torch
from small_networks import chain

import models.quantize
from models.quantize.modules import QuantConv2d
from utils import upstream


def test_the_example_quantizes_and_calibrates_a_network(monkeypatch):
    load = create_autospec(upstream.load_float, return_value=SimpleNamespace(model=chain()))
    monkeypatch.setattr(upstream, "load_float", load)
    monkeypatch.setattr(upstream, "fuse", create_autospec(upstream.fuse, side_effect=lambda model: model))
    names = {"batches": [torch.rand(2, 3, 32, 32)] * 2}
    test = doctest.DocTestParser().get_doctest(models.quantize.__doc__, {}, "models.quantize", None, None)
    test.globs = names  # not the copy
    result = doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None, clear_globs=False)
    assert (result.failed, result.attempted > 0) == (0, True)
    model = names["model"]
    assert isinstance(model.model[6], QuantConv2d)
    assert any(float(one.amax) != 1 for one in model.activation_quantizers.values())
