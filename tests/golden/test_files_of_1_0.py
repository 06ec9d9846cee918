"""Files that 1.0 wrote (tests/golden/written-by-1.0) load, evaluate, export and resume, or say what to do.

`UPDATE_GOLDEN=1` writes tests/golden/files-1.0.json anew. The networks are random, so their AP is near 0.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from golden import golden
from graph_signature import signature

HERE = Path(__file__).parent
WEIGHTS = {"float": "float.pt", "ptq": "runs/qat/killed/weights/ptq_ap_0.0002_float.pt", "masks": "int8-seg.pt"}
FEW = ("--data", "set/data.yaml", "--imgsz", "96", "--batch-size", "2", "--workers", "0", "--device", "cpu")
TIME = 1_700_000_000  # of the images, which a run remembers


@pytest.fixture
def run(fork_server: Any, checkout: Path, tmp_path: Path) -> Any:
    """Runs a program in a copy of what 1.0 wrote; gives what `subprocess.run` gives."""
    shutil.copytree(HERE / "written-by-1.0", tmp_path / "here")
    for file in (tmp_path / "here/set").rglob("*"):
        os.utime(file, (TIME, TIME))
    report = tmp_path / "here/runs/qat/finished/report.json"  # 1.0 wrote where the images lay: absolute paths
    report.write_text(report.read_text().replace("SET_IS_IN", str(tmp_path / "here")))

    def call(program: str, *words: object, code: int = 0) -> Any:
        done = fork_server.run([checkout / program, *words], tmp_path / "here", timeout=200)
        assert done.returncode == code, done.stderr
        return done

    return call


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_checkpoint_has_the_same_ap_and_is_exported_as_the_same_graph(kind, run, tmp_path):
    if kind != "masks":
        run("qat.py", "eval", "--weights", WEIGHTS[kind], *FEW)
        (row,) = json.loads((tmp_path / "here/runs/qat_eval/exp/report.json").read_text())["rows"]
        found = {key: row[key] for key in ("ap", "ap50", "precision", "recall")}
        assert found == pytest.approx(golden("files-1.0.json", f"{kind} AP", found), rel=1e-4)
    run("export_qat.py", "--weights", WEIGHTS[kind], "--imgsz", 96, *(["--typing", "weak"] * (kind != "float")),
        "--output", "out.onnx", "--device", "cpu")  # fmt: skip
    found = json.dumps(signature(onnx.load(tmp_path / "here/out.onnx")), sort_keys=True)
    assert found == golden("files-1.0.json", f"{kind} graph", found)


def test_a_killed_run_is_not_continued_and_left_as_it_was(run, tmp_path):
    done = run("qat.py", "quantize", "--resume", "runs/qat/killed", code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "1.0" in line
    folders = (folder / "runs/qat/killed/weights" for folder in (tmp_path / "here", HERE / "written-by-1.0"))
    ours, theirs = (sorted(file.name for file in folder.iterdir()) for folder in folders)
    assert ours == theirs


def test_a_recipe_is_taken(run, tmp_path):
    done = run("qat.py", "quantize", "--weights", "float.pt", *FEW, "--recipe", "recipe.yaml", "--ptq-only")
    assert "calibration" in done.stdout


def test_a_report_is_a_page(run, tmp_path):
    run("scripts/make_report.py", "runs/qat/finished", "--output", "page")
    text = next((tmp_path / "here/page").rglob("*.html")).read_text()
    for row in json.loads((tmp_path / "here/runs/qat/finished/report.json").read_text())["rows"]:
        assert row["stage"] in text
