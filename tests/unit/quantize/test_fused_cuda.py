"""The Triton kernels without a GPU: Triton's interpreter runs the tests that a GPU runs."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
TESTS = "tests/gpu/test_fused_fake_quantize.py"


def why_not() -> str:
    """Why the interpreter cannot run the kernels here, or ''."""
    if importlib.util.find_spec("triton") is None:
        return "Triton comes with torch for CUDA"
    found = importlib.metadata.version("triton")
    old = Version(found) < Version("3.1")
    return f"the interpreter of Triton {found} takes no range in a function that a kernel calls" if old else ""


@pytest.mark.skipif(why_not() != "", reason=why_not())
def test_the_kernels_compute_what_they_should():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                            text=True, timeout=280)  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout


def test_they_are_imported_where_they_are_used_only():
    code = "import sys, models.quantize.modules; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
