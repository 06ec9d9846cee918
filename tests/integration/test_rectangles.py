"""A camera's rectangle from the checkpoint to val_trt.py on ONNX, and `--rect` on very long images as val.py's."""

from __future__ import annotations

import json

import cv2
import numpy as np
import onnx
import pytest
import torch
from qat_runs import write_small_set

from models.quantize import checkpoint
from utils import upstream
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.options import CalibrateOptions, EvalOptions, QuantizeOptions, SensitiveOptions
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import import_upstream

SIZE = (96, 160)


@pytest.fixture(scope="module")
def rectangle(start, demo_weights, demo_data, tmp_path_factory):
    """The report of each stage, of the demo network, which was trained on squares, quantized at 96x160."""
    folder = tmp_path_factory.mktemp("rectangle")
    data = write_small_set(folder / "set", demo_data, 8, 8)

    def call(program, *words):
        done = start(program, *words, "--device", "cpu")
        assert done.returncode == 0, done.stderr

    common = ("--data", data, "--project", folder, "--workers", 0, "--batch-size", 4)

    few = ("--calib-images", 4, "--iters", 1, "--epochs", 1)
    call("qat.py", "quantize", "--weights", demo_weights, "--imgsz", 96, 160, *few, *common, "--name", "quantized")
    best = next((folder / "quantized/weights").glob("qat_best_*.pt"))
    call("qat.py", "eval", "--weights", best, *common, "--name", "qat")
    call("qat.py", "eval", "--weights", demo_weights, "--imgsz", "96x160", *common, "--name", "float")
    file = folder / "int8.onnx"
    call("export_qat.py", "--weights", best, "--output", file, "--typing", "weak")
    call("val_trt.py", file, *common, "--name", "onnx")
    return folder, data, best, file


def rows(folder, name):
    return json.loads((folder / name / "report.json").read_text())["rows"]


def test_every_stage_is_of_the_rectangle(rectangle, demo_weights):
    folder, data, *_ = rectangle
    table = [*rows(folder, "quantized"), *(rows(folder, name)[-1] for name in ("float", "qat", "onnx"))]
    assert {row["input_size"] for row in table} == {"96x160"}
    stages = {row["stage"]: row for row in rows(folder, "quantized")}
    model = upstream.call_fused(upstream.fuse(upstream.load_float(demo_weights).model))
    with TorchRunner(model, "cpu") as runner:
        config = EvalConfig(imgsz=SIZE, batch_size=4, workers=0)
        expected = evaluate(runner, load_data(data), config, progress=False).score.decides
    assert stages["float"]["ap"] == rows(folder, "float")[0]["ap"] == pytest.approx(expected, abs=1e-6)
    assert stages["PTQ"]["ap_difference_error"] is not None
    assert rows(folder, "qat")[0]["ap"] == pytest.approx(rows(folder, "quantized")[-1]["ap"], abs=1e-6)
    assert rows(folder, "onnx")[0]["ap"] == pytest.approx(rows(folder, "qat")[0]["ap"], abs=0.02)


def test_the_checkpoint_keeps_the_size_and_later_programs_take_it(rectangle):
    _, _, best, file = rectangle
    assert checkpoint.load_quantized(best).imgsz == SIZE
    shape = onnx.load(file).graph.input[0].type.tensor_type.shape.dim
    assert [side.dim_value for side in shape][2:] == [*SIZE]


@pytest.mark.parametrize("kind", [QuantizeOptions, CalibrateOptions, SensitiveOptions, EvalOptions])
@pytest.mark.parametrize(
    ("given", "size"), [([96], 96), ([96, 160], SIZE), ([(96, 160)], SIZE), ([96, 96], 96), ([*SIZE], SIZE)]
)
def test_sizes_of_each_command(kind, given, size):
    assert kind.of({"imgsz": given}).imgsz == size


@pytest.mark.parametrize("size", [(4000, 200), (20, 4000), (4000, 12)])
def test_very_long_images_with_rect_are_upstreams(tmp_path, size):
    import_upstream()
    from utils.dataloaders import create_dataloader

    folder = tmp_path / "images/val"
    folder.mkdir(parents=True)
    (tmp_path / "labels/val").mkdir(parents=True)
    cv2.imwrite(str(folder / "long.png"), np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8))
    (tmp_path / "labels/val/long.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/val\nval: images/val\nnames: {{0: a}}\n")
    data = load_data(tmp_path / "data.yaml")
    theirs = next(iter(create_dataloader(str(folder), 640, 32, 32, pad=0.5, rect=True, workers=0)[0]))
    ours = next(iter(make_loader(data, "val", imgsz=640, batch_size=32, rect=True, pad=0.5, workers=0)))
    assert torch.equal(ours.images, theirs[0])
    torch.testing.assert_close(ours.labels[:, 1:], theirs[1][:, 1:])
