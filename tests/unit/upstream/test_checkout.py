"""What stands in for removed modules, in a process that does not have them."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = """
from unittest import mock
from utils.upstream import checkout
with mock.patch("importlib.util.find_spec", return_value=None):
    checkout.install()
import IPython, matplotlib, pkg_resources
from IPython.display import display
display(1)
assert IPython.get_ipython() is None
assert pkg_resources.parse_version("1.10") > pkg_resources.parse_version("1.9")
pkg_resources.require("no-such-thing")
matplotlib.use("agg")
import matplotlib.pyplot
matplotlib.pyplot.plot([1, 2])
matplotlib.pyplot.draw()
matplotlib.pyplot.savefig({file!r})
"""


def test_upstream_and_matplotlib_work_beside_the_stand_ins(tmp_path):
    file = tmp_path / "plot.png"
    code = [sys.executable, "-c", WITHOUT.format(file=str(file))]
    result = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-800:]
    assert file.stat().st_size > 1000


def test_trapz_is_there_and_integrates(monkeypatch):
    from utils.upstream import checkout

    # pytest itself asks for more than the stand-in has, where other tests extend sys.path
    monkeypatch.setitem(sys.modules, "pkg_resources", types.ModuleType("pkg_resources"))
    checkout.install()
    assert np.trapz([0.0, 1.0, 1.0], [0.0, 1.0, 3.0]) == pytest.approx(2.5)
