"""scripts/compare_qat.py on a few images: each training is measured once, and the table says what it found."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from qat_runs import write_small_set

from utils.cli import run_program

PROGRAM = "scripts/compare_qat.py"


@pytest.fixture
def run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The program in this process: its exit code, standard output and standard error."""
    spec = importlib.util.spec_from_file_location("compare_qat_program", checkout / PROGRAM)
    program = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(program)

    def call(*words: object) -> tuple[int, str, str]:
        try:
            code = run_program(program.make_parser(), program.main, [*map(str, words)])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def digits(demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_set(tmp_path_factory.mktemp("set"), demo_data, train=20, val=6)


@pytest.fixture(scope="module")
def measured(start, demo_weights: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the first of twenty trainings, one of the default form."""
    folder = tmp_path_factory.mktemp("runs") / "compare"
    words = ["--weights", demo_weights, "--data", digits, "--imgsz", 128, "--device", "cpu", "--workers", 0]
    words += ["--steps", 2, "--seeds", 1, "--part", "1/20", "--output", folder]
    done = start(PROGRAM, *words)
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


def test_what_is_there_is_not_trained_again_and_the_table_shows_it(measured, run, demo_weights, digits):
    (path,) = measured.glob("*.json")
    before = path.stat().st_mtime_ns
    words = ["--weights", demo_weights, "--data", digits, "--imgsz", 128, "--device", "cpu", "--workers", 0]
    code, _, err = run(*words, "--steps", 2, "--seeds", 1, "--part", "1/20", "--output", measured)
    assert code == 0, err
    assert path.stat().st_mtime_ns == before
    code, out, err = run("--table", "--output", measured)
    assert code == 0, err
    result = json.loads(path.read_text())
    row = next(line for line in out.splitlines() if line.startswith("max"))
    assert "task, learned" in row
    assert f"{result['ap'][0]:.4f}" in row
    assert f"{result['ap'][-1]:.4f}" in row
    assert f"float AP {result['float_ap']:.4f}, 6 images, 2 steps" in out
    assert (measured / "ap_per_step.png").stat().st_size > 1000


@pytest.mark.parametrize("words", [("--imgsz", 96), ("--steps", 3), ("--batch-size", 5)])
def test_results_of_another_comparison_are_not_taken_for_these(measured, run, demo_weights, digits, words):
    same = {"--weights": demo_weights, "--data": digits, "--imgsz": 128, "--steps": 2, "--output": measured}
    given = [word for pair in {**same, **dict([words])}.items() for word in pair]
    code, _, err = run(*given, "--device", "cpu", "--workers", 0, "--seeds", 1, "--part", "1/20")
    assert (code, err.count("\n")) == (2, 1)
    assert f"the results in {measured} were made with other {words[0]}" in err


def test_a_start_that_loses_nothing_has_nothing_to_regain(measured, run, tmp_path):
    (path,) = measured.glob("*.json")
    result = json.loads(path.read_text())
    result["float_ap"] = result["ap"][0]
    (tmp_path / path.name).write_text(json.dumps(result))
    code, out, err = run("--table", "--output", tmp_path)
    assert code == 0, err
    assert next(line for line in out.splitlines() if line.startswith("max")).split()[-1] == "-"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "--output", "nowhere"], "there are no results in nowhere"),
        (["--part", "3/2"], "'3/2' is no part such as 2/8"),
        (["--data", "nowhere.yaml"], "nowhere.yaml"),
        ([], "--weights is missing"),
    ],
)
def test_mistakes_are_one_line(run, words, message):
    code, _, err = run(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
