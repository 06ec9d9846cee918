"""scripts/compare_qat.py on a few images: each training is measured once, and the table says what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "scripts/compare_qat.py"


def run(checkout: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *map(str, words)], cwd=checkout, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def digits(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "digits"
    words = ["data/demo/make_digits.py", str(folder), "--train", "20", "--val", "6"]
    subprocess.run([sys.executable, *words], cwd=checkout, capture_output=True, check=True)
    return folder / "data.yaml"


@pytest.fixture(scope="module")
def measured(checkout: Path, demo_weights: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the first of twenty trainings, one of the default form."""
    folder = tmp_path_factory.mktemp("runs") / "compare"
    words = ["--weights", demo_weights, "--data", digits, "--imgsz", 128, "--device", "cpu", "--workers", 0]
    done = run(checkout, *words, "--steps", 2, "--seeds", 1, "--part", "1/20", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_training_is_measured_with_its_controls(measured):
    (path,) = measured.glob("*.json")
    assert path.name == "max-task_learned-0.json"
    result = json.loads(path.read_text())
    assert result["run"] == {"start": "max", "form": "task, learned", "seed": 0}
    assert result["steps"] == [0, 1, 2]
    assert len(result["ap"]) == len(result["held_out"]) == 3
    assert result["images"] == 6
    assert all(0 <= result[name] <= 1 for name in ("float_ap", "random_ap"))
    assert all(0 <= result[name] < 1 for name in ("error", "random_error"))
    assert result["held_out"][1] != result["held_out"][0]


def test_what_is_there_is_not_trained_again_and_the_table_shows_it(measured, checkout, demo_weights, digits):
    (path,) = measured.glob("*.json")
    before = path.stat().st_mtime_ns
    words = ["--weights", demo_weights, "--data", digits, "--imgsz", 128, "--device", "cpu", "--workers", 0]
    done = run(checkout, *words, "--steps", 2, "--seeds", 1, "--part", "1/20", "--output", measured)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mtime_ns == before
    done = run(checkout, "--table", "--output", measured)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    row = next(line for line in done.stdout.splitlines() if line.startswith("max"))
    assert "task, learned" in row
    assert f"{result['ap'][0]:.4f}" in row
    assert f"{result['ap'][-1]:.4f}" in row
    assert f"float AP {result['float_ap']:.4f}, 6 images, 2 steps" in done.stdout
    assert (measured / "ap_per_step.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "--output", "nowhere"], "there are no results in nowhere"),
        (["--part", "3/2"], "'3/2' is no part such as 2/8"),
        (["--data", "nowhere.yaml"], "nowhere.yaml"),
        ([], "--weights is missing"),
    ],
)
def test_mistakes_are_one_line(checkout, words, message):
    done = run(checkout, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
