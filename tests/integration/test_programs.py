"""Programs as users start them: val_trt.py on a file of the demo network, qat.py in a locale without UTF-8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from qat_runs import write_small_set

from utils import upstream
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.evaluation.results import EvalResult
from utils.runners.pytorch import TorchRunner

TESTS = Path(__file__).resolve().parents[1]
IMAGES = 9  # so that batches of 4 and of 16 end with one that is not full


@pytest.fixture(scope="module")
def some_images(tmp_path_factory, demo_data):
    """A data.yaml for some images of the demo set, without annotations."""
    demo = load_data(demo_data)
    folder = tmp_path_factory.mktemp("some")
    images = sorted((demo.root / "images/val").iterdir())[:IMAGES]
    (folder / "val.txt").write_text("".join(f"{path}\n" for path in images))
    content = {"path": str(folder), "train": "val.txt", "val": "val.txt", "names": dict(demo.names)}
    (folder / "data.yaml").write_text(yaml.safe_dump(content))
    return folder / "data.yaml"


def evaluated(weights: Path, data: Path) -> EvalResult:
    model = upstream.call_fused(upstream.fuse(upstream.load_float(weights).model))
    config = EvalConfig(imgsz=320, batch_size=16, workers=0)
    return evaluate(TorchRunner(model, "cpu"), load_data(data), config, progress=False)


@pytest.mark.parametrize("batch", [4, 16])
def test_the_onnx_scores_as_the_network_it_was_made_from(run, demo_weights, some_images, tmp_path, batch):
    onnx_file = tmp_path / "digits.onnx"
    words = ["--weights", demo_weights, "--imgsz", 320, "--batch-size", batch, "--output", onnx_file, "--device", "cpu"]
    run("export_qat.py", *words)
    words = ["--engine-file", onnx_file, "--data", some_images, "--project", tmp_path, "--save-json", "--workers", 2]
    out = run("val_trt.py", *words)
    row = json.loads((tmp_path / "exp/report.json").read_text())["rows"][0]
    expected = evaluated(demo_weights, some_images)
    assert expected.ap > 0.5
    assert (row["ap"], row["ap50"]) == pytest.approx((expected.ap, expected.ap50), abs=1e-3)
    assert f"batch {batch}, 320x320" in row["measured_on"]
    assert f"results: {tmp_path / 'exp'}" in out
    assert "no annotations for this split" in out
    assert len(json.loads((tmp_path / "exp/digits_predictions.json").read_text())) > IMAGES


def test_from_a_checkpoint_to_the_ap_of_its_engine(checkout, demo_weights, fork_server, some_images, tmp_path):
    """scripts/val_trt.sh, with a stand-in for TensorRT and the GPU."""
    weights, python = tmp_path / "w.pt", tmp_path / "python"
    weights.write_bytes(demo_weights.read_bytes())
    fork_server.interpreter(python, TESTS / "support/run_on_stand_in.py")
    variables = {"PYTHON": str(python), "BATCH": "1 8 16", "EXPORT_ARGS": "--device cpu",
                 "VAL_ARGS": f"--workers 2 --project {tmp_path}"}  # fmt: skip
    command = [checkout / "scripts/val_trt.sh", weights, some_images, "320"]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "exp/report.json").read_text())["rows"][0]
    expected = evaluated(demo_weights, some_images)
    assert (row["stage"], row["file"]) == ("TensorRT FP16", str(tmp_path / "w.engine"))
    assert (row["ap"], row["ap50"]) == pytest.approx((expected.ap, expected.ap50), abs=1e-3)
    assert "batch 16, 320x320" in row["measured_on"]
    note = json.loads((tmp_path / "w.engine.json").read_text())
    assert note["profile"]["images"] == [[batch, 3, 320, 320] for batch in (1, 8, 16)]


FEW = ("--ptq-only", "--no-eval-origin", "--no-eval-ptq", "--calib-images", 2, "--workers", 0, "--device", "cpu")


def test_quantize_in_a_locale_without_utf_8(checkout, demo_data, demo_weights, tmp_path):
    words = ["--weights", demo_weights, "--data", demo_data, "--imgsz", 64, "--project", tmp_path, *FEW]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "qat.py", "quantize", *map(str, words)]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **plain}, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert b" \\u2192 " in done.stdout
    assert (tmp_path / "exp/report.json").is_file()


def test_how_far_the_image_size_walks_to_the_training_step(checkout, demo_weights, demo_data, tmp_path):
    size = "352"  # which the checkpoint does not hold as another number: reading that would count as a stop
    words = ["--weights", demo_weights, "--data", write_small_set(tmp_path / "set", demo_data, 2, 2), "--imgsz", size,
             "--batch-size", 2, "--epochs", 1, "--iters", 1, "--project", tmp_path, *FEW[1:]]  # fmt: skip
    command = [sys.executable, TESTS / "walk.py", "Finetuner._step", size, "qat.py", "quantize", *map(str, words)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    stops = [line for line in done.stdout.splitlines() if ".py: " in line]
    assert 10 < len(stops) <= 55, (
        stops
    )  # steps of a name of their own; a method of `Inputs` or of `Session` counts, whatever it is for
