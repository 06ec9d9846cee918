"""Upstream on a current stack: what stands in for removed modules, and scripts/run_upstream.py's own option."""

import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from utils.upstream import checkout

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = """
from unittest import mock
from utils.upstream import checkout
with mock.patch("importlib.util.find_spec", return_value=None):
    checkout.install()
import IPython, matplotlib, numpy, pkg_resources
from IPython.display import display
display(1)
assert numpy.trapz([0.0, 1.0, 1.0], [0.0, 1.0, 3.0]) == 2.5
assert IPython.get_ipython() is None
assert pkg_resources.parse_version("1.10") > pkg_resources.parse_version("1.9")
pkg_resources.require("no-such-thing")
matplotlib.use("agg")
import matplotlib.pyplot
matplotlib.pyplot.plot([1, 2])
matplotlib.pyplot.savefig({file!r})
"""


def test_upstream_and_matplotlib_work_beside_the_stand_ins(tmp_path):
    code = [sys.executable, "-c", WITHOUT.format(file=str(tmp_path / "plot.png"))]
    result = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-800:]
    assert (tmp_path / "plot.png").stat().st_size > 1000


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
def test_no_program_is_one_line(words):
    command = [sys.executable, str(ROOT / "scripts/run_upstream.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: name a program of the checkout")
