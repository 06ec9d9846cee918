"""Modules that are imported when something of them is asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from utils.core.late_modules import LateModule, import_late

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package `slow_one` with a module `below`."""
    (tmp_path / "slow_one").mkdir()
    (tmp_path / "slow_one/__init__.py").write_text("option = 'real'\ndef work():\n    return 7\n")
    (tmp_path / "slow_one/below.py").write_text("from slow_one import work\nresult = work() + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_one"
    for name in ("slow_one", "slow_one.below"):
        sys.modules.pop(name, None)


def is_late(name: str) -> bool:
    return type(sys.modules[name]) is LateModule


def test_an_attribute_makes_it_real(package):
    import_late(package)
    import slow_one

    assert is_late(package)
    assert slow_one.work() == 7
    assert not is_late(package)
    assert slow_one.option == "real"  # the stand-in that was imported goes on working
    with pytest.raises(AttributeError, match="missing"):
        _ = slow_one.missing


def test_a_module_below_it_makes_it_real(package):
    import_late(package)
    from slow_one.below import result

    assert result == 8
    assert not is_late(package)


def test_looking_at_it_does_not(package):
    import_late(package)
    import slow_one

    assert importlib.util.find_spec(package) is not None
    assert not hasattr(slow_one, "__file__")
    assert is_late(package)


def test_answers_come_first_and_then_the_real_ones(package):
    import_late(package, option="ours")
    import slow_one

    assert slow_one.option == "ours"
    assert is_late(package)
    assert slow_one.work() == 7
    assert slow_one.option == "real"


def test_what_is_imported_or_not_installed_is_left_alone(package):
    import slow_one

    import_late(package)
    assert sys.modules[package] is slow_one
    import_late("not_installed_at_all")
    assert "not_installed_at_all" not in sys.modules


LIGHT = """
import sys
sys.path.insert(0, {root!r})
from utils.core.light_torchvision import torchvision
import torch
print(torchvision.ops.nms(torch.tensor([[0., 0, 2, 2], [0, 0, 2, 1.9]]), torch.tensor([0.9, 0.8]), 0.5).tolist())
print("torch._dynamo" in sys.modules, "torch._dynamo.utils" in sys.modules)
boxes = [torch.tensor([[0., 0, 4, 4]])]
print(torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), boxes, 2).flatten().tolist())
import torch._dynamo.utils
print(type(torch._dynamo.utils).__name__)
"""


def test_torchvision_without_the_compiler_computes_what_it_computes():
    command = [sys.executable, "-c", LIGHT.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["[0]", "False False", "[1.0, 1.0, 1.0, 1.0]", "module"]
