"""A grey camera's rectangle from upstream's training to one table."""

import json
import re
import shutil

import cv2
import onnx
import pytest
from patched_checkout import ROOT

from models.quantize import checkpoint
from utils import upstream
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.labels import label_file
from utils.evaluation.loop import evaluate
from utils.reports.tables import stage_name
from utils.runners.pytorch import TorchRunner

SIZE = (96, 160)


def write_camera_set(folder, demo_data):
    """Eight images of each split of the demo set as a grey camera of twice `SIZE` sees them, squeezed."""
    demo = load_data(demo_data)
    for split in ("train", "val"):
        for name in ("images", "labels"):
            (folder / name / split).mkdir(parents=True)
        for path in find_images(demo.paths(split))[:8]:
            labels = label_file(path)
            shutil.copy(labels, folder / "labels" / split)
            grey = cv2.resize(cv2.imread(path, cv2.IMREAD_GRAYSCALE), (2 * SIZE[1], 2 * SIZE[0]))
            cv2.imwrite(str(folder / "images" / split / f"{labels.stem}.png"), grey)
    names = json.dumps(list(demo.names.values()))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {names}\n")
    return folder / "data.yaml"


@pytest.fixture(scope="module")
def camera(run, demo_weights, demo_data, checkout, tmp_path_factory):
    """A folder with what each program wrote. Upstream's --imgsz is one number; with --rect it trains at 96x160."""
    folder = tmp_path_factory.mktemp("camera")
    data = write_camera_set(folder / "set", demo_data)

    common = ("--data", data, "--project", folder, "--device", "cpu", "--workers", 0, "--batch-size", 4)
    demo = ("--weights", demo_weights, "--cfg", demo_weights.with_suffix(".yaml"))
    demo += ("--hyp", checkout / "data/demo/hyp.digits.yaml", "--epochs", 1, "--imgsz", 160, "--rect", "--noplots")
    run("scripts/run_upstream.py", "train.py", *demo, *common, "--name", "trained")
    trained, grey = folder / "trained/weights/last.pt", folder / "grey.pt"
    page = (ROOT / "docs/grey-images.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(snippet.replace("best-grey.pt", str(grey)).replace("best.pt", str(trained)), {})

    few = ("--calib-images", 4, "--iters", 1, "--epochs", 1)
    run("qat.py", "quantize", "--weights", grey, "--imgsz", 96, 160, *few, *common, "--name", "quantized")
    best = next((folder / "quantized/weights").glob("qat_best_*.pt"))
    run("qat.py", "eval", "--weights", best, *common, "--name", "qat")
    run("qat.py", "eval", "--weights", grey, "--imgsz", "96x160", *common, "--name", "float")
    bytes_last = ("--typing", "weak", "--input", "uint8", "--input-layout", "nhwc")
    file = folder / "int8.onnx"
    run("export_qat.py", "--weights", best, "--output", file, *bytes_last, "--data", data, "--device", "cpu")
    run("val_trt.py", file, *common, "--name", "onnx")
    table = run("scripts/make_report.py", folder / "quantized", folder / "onnx", "--output", folder / "page")
    return folder, data, trained, best, file, table


def rows(folder, name):
    return json.loads((folder / name / "report.json").read_text())["rows"]


def test_every_stage_is_in_one_table(camera):
    """Of the camera's rectangle; the float network of one channel is the trained one of three, which sees grey."""
    folder, data, trained, best, file, table = camera
    stages = {row["stage"]: row for row in rows(folder, "page")}
    assert [*list(stages)[:2], list(stages)[-1]] == ["float", "PTQ", "ONNX"]
    assert {row["input_size"] for row in stages.values()} == {"96x160"}
    for stage, row in stages.items():
        assert re.search(rf"^{re.escape(stage_name(stage))} .*{row['ap']:.4f}", table, re.MULTILINE), stage
    assert stages["float"]["ap"] == rows(folder, "float")[0]["ap"] > 0.1
    for weights, tolerance in ((folder / "grey.pt", 1e-6), (trained, 1e-4)):
        model = upstream.call_fused(upstream.fuse(upstream.load_float(weights).model))
        with TorchRunner(model, "cpu") as runner:
            config = EvalConfig(imgsz=SIZE, batch_size=4, workers=0)
            expected = evaluate(runner, load_data(data), config, progress=False).score.decides
        assert stages["float"]["ap"] == pytest.approx(expected, abs=tolerance)
    assert stages["PTQ"]["ap_difference_error"] is not None
    qat = rows(folder, "qat")[0]
    assert (qat["ap"], qat["input_size"]) == (pytest.approx(rows(folder, "quantized")[-1]["ap"], abs=1e-6), "96x160")
    assert stages["ONNX"]["ap"] == pytest.approx(qat["ap"], abs=0.02)
    assert checkpoint.load_quantized(best).imgsz == SIZE  # so that later programs take it
    shape = onnx.load(file).graph.input[0].type.tensor_type.shape.dim
    assert [side.dim_value for side in shape][1:] == [*SIZE, 1]
