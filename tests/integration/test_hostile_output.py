"""The real programs, with upstream and torch loaded: into `head -1`, and in a locale without UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from interrupting import programs

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(("index", "redirect"), [(0, ""), (3, "2>&1")], ids=["quantize", "val_trt"])
def test_into_head(index, redirect, checkout, demo_data, demo_weights, tmp_path):
    words = " ".join(programs(demo_weights, demo_data, tmp_path)[index])
    # quantize prints a recipe at once; val_trt.py prints its first line when it has evaluated
    if index:
        words += " --limit 8"
    shell = f"set -o pipefail; '{sys.executable}' {words} {redirect} | head -n 1"
    result = subprocess.run(["bash", "-c", shell], cwd=checkout, capture_output=True, check=False, timeout=200)
    assert b"Traceback" not in result.stdout + result.stderr
    assert b"rror" not in result.stdout + result.stderr
    assert result.stdout.count(b"\n") == 1
    assert result.returncode == 141
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


def test_in_a_locale_without_utf_8(checkout, demo_data, demo_weights, tmp_path):
    command = ["qat.py", "quantize", "--weights", demo_weights, "--data", demo_data, "--imgsz", "64", "--device", "cpu",
               "--ptq-only", "--no-eval-origin", "--no-eval-ptq", "--calib-batches", "1", "--workers", "0",
               "--project", tmp_path]  # fmt: skip
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=checkout, env=os.environ | PLAIN, capture_output=True, check=False,
        timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert b" \\u2192 " in result.stdout
    assert (tmp_path / "exp/report.json").is_file()
