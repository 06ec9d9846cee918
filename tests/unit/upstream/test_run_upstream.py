"""scripts/run_upstream.py: its own option, and those that upstream's parsers call otherwise."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "run_upstream.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("run_upstream_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fast_is_channels_last_without_deterministic_algorithms(monkeypatch):
    import torch

    from utils.upstream import checkout

    class Network(torch.nn.Module):
        def forward(self, x: torch.Tensor, augment: bool = False) -> tuple[torch.Tensor, bool]:
            return x, augment

    asked = []
    general, yolo = types.ModuleType("utils.general"), types.ModuleType("models.yolo")
    general.init_seeds = lambda seed=0, deterministic=False: asked.append((seed, deterministic))
    yolo.DetectionModel = Network
    for module in (general, yolo):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        package, _, name = module.__name__.partition(".")
        monkeypatch.setattr(importlib.import_module(package), name, module, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    checkout.prefer_speed()
    general.init_seeds(3, deterministic=True)
    assert asked == [(3, False)]
    assert torch.backends.cudnn.benchmark
    image = torch.rand(1, 3, 8, 8)
    seen, augment = yolo.DetectionModel()(image, augment=True)
    assert augment
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen, image)


@pytest.mark.parametrize("words", [[], [""], ["--fast"], ["--fast", ""]])
def test_no_program_is_one_line(program, monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["run_upstream.py", *words])
    assert program.main() == 2
    assert capsys.readouterr().err.startswith("error: name a program of the checkout")
