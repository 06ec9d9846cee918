"""How far the image size walks: functions of this project from a command line to the training step."""

import subprocess
import sys
from pathlib import Path

from qat_runs import write_small_set

WALK = Path(__file__).resolve().parents[1] / "walk.py"


def test_from_imgsz_of_quantize_to_the_training_step(checkout, demo_weights, demo_data, tmp_path):
    data = write_small_set(tmp_path / "set", demo_data, train=2, val=2)
    size = "352"  # which the checkpoint does not hold as another number: reading that would count as a stop
    command = [
        *("Finetuner._step", size, "qat.py", "quantize", "--weights", demo_weights, "--data", data, "--imgsz", size),
        *("--batch-size", "2", "--epochs", "1", "--iters", "1", "--calib-images", "2", "--no-eval-origin"),
        *("--no-eval-ptq", "--project", tmp_path, "--device", "cpu", "--workers", "0"),
    ]
    done = subprocess.run([sys.executable, WALK, *command], cwd=checkout, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    stops = [line for line in done.stdout.splitlines() if ".py: " in line]
    assert 10 < len(stops) <= 40, stops
