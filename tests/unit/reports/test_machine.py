"""The environment of a report is told without importing what is slow."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from utils.reports.machine import library_versions


def test_versions_come_without_importing_the_libraries():
    code = "import sys; from utils.reports import machine; machine.library_versions(); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"
    assert library_versions()["numpy"] == np.__version__
