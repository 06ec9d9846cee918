"""scripts/run_upstream.py: its own option, and those that upstream's parsers call otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from utils.upstream import checkout

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "run_upstream.py"


def test_fast_is_channels_last_without_deterministic_algorithms(monkeypatch):
    seeds = []
    general, yolo = types.ModuleType("utils.general"), types.ModuleType("models.yolo")
    general.init_seeds = lambda seed=0, deterministic=False: seeds.append((seed, deterministic))
    yolo.DetectionModel = type("Network", (torch.nn.Module,), {"forward": lambda self, x, augment=False: (x, augment)})
    for module in (general, yolo):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        package, _, name = module.__name__.partition(".")
        monkeypatch.setattr(importlib.import_module(package), name, module, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    checkout.prefer_speed()
    general.init_seeds(3, deterministic=True)
    assert (seeds, torch.backends.cudnn.benchmark) == ([(3, False)], True)
    image = torch.rand(1, 3, 8, 8)
    x, augment = yolo.DetectionModel()(image, augment=True)
    assert augment
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, image)


@pytest.mark.parametrize("words", [[], [""], ["--fast", ""]])
def test_no_program_is_one_line(monkeypatch, capsys, words):
    spec = importlib.util.spec_from_file_location("run_upstream_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["run_upstream.py", *words])
    assert module.main() == 2
    assert capsys.readouterr().err.startswith("error: name a program of the checkout")
