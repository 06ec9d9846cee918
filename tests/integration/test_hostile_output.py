"""The real programs, with upstream and torch loaded: into `head -1`, and in a locale without UTF-8."""

import os
import subprocess
import sys

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_in_a_locale_without_utf_8(checkout, demo_data, demo_weights, tmp_path):
    command = ["qat.py", "quantize", "--weights", demo_weights, "--data", demo_data, "--imgsz", "64", "--device", "cpu",
               "--ptq-only", "--no-eval-origin", "--no-eval-ptq", "--calib-images", "2", "--workers", "0",
               "--project", tmp_path]  # fmt: skip
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=checkout, env=os.environ | PLAIN, capture_output=True, check=False,
        timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert b" \\u2192 " in result.stdout
    assert (tmp_path / "exp/report.json").is_file()
