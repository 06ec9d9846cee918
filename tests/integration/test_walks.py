"""How far the image size walks: functions of this project from a command line to the training step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from qat_runs import write_small_set

WALK = Path(__file__).resolve().parents[1] / "walk.py"
COMMON = ("--device", "cpu", "--workers", "0")


def stops(goal: str, size: int, *words: object) -> list[str]:
    """The stops of a command line of a program in the patched checkout."""
    done = subprocess.run(
        [sys.executable, WALK, goal, str(size), *map(str, words)], cwd=os.environ["YOLOV9_CHECKOUT"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ours = json.loads(Path(os.environ["YOLOV9_CHECKOUT"], ".yolov9_overlay/manifest.json").read_text())["files"]
    return [line for line in done.stdout.replace("\r", "\n").splitlines() if line.partition(": ")[0] in ours]


def test_from_imgsz_of_quantize_to_the_training_step(demo_weights, demo_data, tmp_path):
    data = write_small_set(tmp_path / "set", demo_data, train=2, val=2)
    size = 352  # which the checkpoint does not hold as another number: reading that would count as a stop
    found = stops(
        "Finetuner._step", size, "qat.py", "quantize", "--weights", demo_weights, "--data", data, "--imgsz", size,
        "--batch-size", 2, "--epochs", 1, "--iters", 1, "--calib-images", 2, "--no-eval-origin", "--no-eval-ptq",
        "--project", tmp_path, *COMMON,
    )  # fmt: skip
    assert 10 < len(found) <= 40, found
