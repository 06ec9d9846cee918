"""What stands in for removed modules, in processes that do not have them."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = (
    "from unittest import mock\nfrom utils.upstream import checkout\n"
    "with mock.patch('importlib.util.find_spec', return_value=None):\n    checkout.install()\n"
)


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-800:]


def test_matplotlib_draws_beside_the_stand_in_for_ipython(tmp_path):
    file = tmp_path / "plot.png"
    run(
        "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\n"
        f"figure, axes = plt.subplots()\naxes.plot([1, 2])\nplt.draw()\nfigure.savefig({str(file)!r})\n"
    )
    assert file.stat().st_size > 1000


def test_what_upstream_asks_of_both(tmp_path):
    run(
        "import IPython, pkg_resources as pkg\nfrom IPython.display import display\ndisplay(1)\n"
        "assert IPython.get_ipython() is None\n"
        "assert pkg.parse_version('1.10') > pkg.parse_version('1.9')\n"
        "assert [str(r) for r in pkg.parse_requirements('a>=1  # why\\n\\n# none\\nb\\n')] == ['a>=1', 'b']\n"
        "pkg.require('numpy>=1.0')\n"
        "for text, error in (('numpy<1', pkg.VersionConflict), ('no-such-thing', pkg.DistributionNotFound)):\n"
        "    try:\n        pkg.require(text)\n    except error:\n        continue\n    raise SystemExit(text)\n"
    )


def test_trapz_is_there_and_integrates(monkeypatch):
    from utils.upstream import checkout

    # pytest itself asks for more than the stand-in has, where other tests extend sys.path
    monkeypatch.setitem(sys.modules, "pkg_resources", types.ModuleType("pkg_resources"))
    checkout.install()
    assert np.trapz([0.0, 1.0, 1.0], [0.0, 1.0, 3.0]) == pytest.approx(2.5)
