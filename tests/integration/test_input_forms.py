"""Files that take bytes, made by the programs: AP and results are those of files that take floats.

ONNX Runtime runs them, TensorRT-RTX builds them. References: the file that takes floats, and the evaluation of it.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from forms import FLAGS, SIDE, Program, images, lively
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with

import export_qat
from models.quantize import checkpoint, placement
from models.quantize.calibration import calibrate
from models.quantize.recipe import Calibration, Recipe
from utils import upstream
from utils.core.input_spec import InputSpec
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.jobs import export
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import metadata_of, set_metadata
from utils.runners.base import as_feed
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.build_options import BuildConfig

FORMS = {"float": [], "uint8": ["--input", "uint8"], "nhwc": ["--input", "uint8", "--input-layout", "nhwc"]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small network: float, quantized; one with masks, quantized; one of one channel."""
    folder = tmp_path_factory.mktemp("weights")
    floating = save_float(folder / "tiny.pt", lively(random_network(TINY)))
    masks = save_float(folder / "tiny-seg.pt", lively(random_network(tiny_with("Segment"))))
    return {
        "float": floating,
        "quantized": save_quantized(folder / "tiny-int8.pt", floating),
        "masks": save_quantized(folder / "masks.pt", masks),
        "grey": save_float(folder / "grey.pt", lively(random_network({**TINY, "ch": 1}))),
    }


def exported(program: Program, weights: Path, folder: Path, form: str, *words: object) -> Path:
    path = folder / f"{form}.onnx"
    arguments = ["--weights", weights, "--output", path, "--imgsz", SIDE, *FORMS[form], *words]
    code, out, err = program(export_qat.main, *arguments)
    assert (code, err) == (0, [])
    if form != "float":
        assert any(" images uint8 [" in line for line in out)
    return path


def results(path: Path, pixels: torch.Tensor) -> dict[str, np.ndarray]:
    with OnnxRuntimeRunner(path, threads=1) as runner:
        spec = runner.inputs[0]
        feed = as_feed(pixels, runner.input_spec, spec.dtype)
        return {name: value.numpy() for name, value in runner.infer({spec.name: feed}).items()}


@pytest.mark.parametrize(
    ("kind", "shape"), [("float", "dynamic"), ("quantized", "static"), ("quantized", "dynamic"), ("masks", "dynamic")]
)
def test_every_form_gives_the_same(kind, shape, weights, tmp_path, program):
    """Raw predictions, and detections (and masks) after NMS in the file; the export checks and verifies both."""
    words = ["--batch-size", 2] if shape == "static" else ["--dynamic"]
    words += ["--include", "onnx", "onnx_end2end", "--nms", "onnx", *FLAGS, "--check", 1]
    words += ["--typing", "weak"] * (kind != "float")
    pixels = (images(2) * 255).round().byte()
    expected: dict[str, dict[str, np.ndarray]] = {}
    for form in FORMS if (kind, shape) == ("quantized", "dynamic") else ("float", "nhwc"):
        path = exported(program, weights[kind], tmp_path, form, *words)
        for file in (path, path.with_name(f"{path.stem}-end2end.onnx")):
            found = results(file, pixels)
            reference = expected.setdefault(file.stem.removeprefix(form), found)
            assert found.keys() == reference.keys()
            for name, value in found.items():
                np.testing.assert_allclose(value, reference[name], atol=2e-3, err_msg=f"{form}, {name}")
            entries = metadata_of(onnx.load(file))
            assert entries["input_form"] == ("uint8" if form == "nhwc" else form)
            assert entries["input_layout"] == ("nhwc" if form == "nhwc" else "nchw")


@pytest.fixture(scope="module")
def quantized_demo(demo_weights: Path, demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's network, calibrated on images of its set."""
    batch = export.check_images(8, (320, 320), load_data(demo_data))
    model = upstream.fuse((source := upstream.load_float(demo_weights)).model)
    placement.apply(model, placement.plan(model, Recipe()))
    calibrate(model, [batch], Calibration(method="max"))
    path = tmp_path_factory.mktemp("demo") / "demo-int8.pt"
    content = (model, Recipe(), source.names, source.nc, source.stride, source.yaml)
    checkpoint.save(path, checkpoint.QuantizedCheckpoint(*content))
    return path


def in_form(path: Path, form: str) -> Path:
    """A file that takes floats, made to take another form; as the exporter does it, without another trace."""
    original, target = onnx.load(path), path.with_name(f"{form}.onnx")
    kinds = {"nhwc": InputSpec("uint8", "nhwc"), "uint8": InputSpec("uint8")}
    graph = take_bytes(original, kinds[form])
    onnx.save(set_metadata(graph, {**metadata_of(original), **kinds[form].metadata()}), target)
    return target


@pytest.mark.parametrize("typing", ["weak", "strong"])
def test_ap_is_that_of_floats(typing, quantized_demo, demo_data, tmp_path, program):
    path, scores = tmp_path / "float.onnx", {}
    words = ["--imgsz", 320, "--batch-size", 5, "--typing", typing, "--check", 0]
    assert program(export_qat.main, "--weights", quantized_demo, "--output", path, *words)[0] == 0
    config = EvalConfig(imgsz=320, batch_size=5, workers=0, limit=5)
    for form in FORMS:
        with OnnxRuntimeRunner(path if form == "float" else in_form(path, form), threads=1) as runner:
            scores[form] = evaluate(runner, load_data(demo_data), config, progress=False)
    expected = scores["float"]
    assert expected.ap > 0.5
    for form, found in scores.items():
        assert (found.ap, found.ap50) == pytest.approx((expected.ap, expected.ap50), abs=0.001), form


@pytest.fixture(scope="module")
def strong_file(weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strong") / "float.onnx"
    words = ["--typing", "strong", "--dynamic", "batch", "--check", 0, "--imgsz", SIDE, "--output", path]
    assert export_qat.main([str(word) for word in ("--weights", weights["quantized"], *words)]) == 0
    return path


@pytest.mark.parametrize("form", ["uint8", "nhwc"])
def test_it_builds(form, strong_file, tmp_path, monkeypatch):
    """For a GPU that is not there; with a dynamic batch."""
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    config = BuildConfig(targets=("SM89",), batch=(1, 4, 8), progress=False)
    rtx = tensorrt_api.load_tensorrt("tensorrt_rtx_bindings")
    note = build(in_form(strong_file, form), tmp_path / "net.engine", config, rtx)
    assert (note.precision, note.typing) == ("int8", "strong")
    assert note.metadata["input_form"] == "uint8"
    assert note.profile["images"][2] == ([8, SIDE, SIDE, 3] if form == "nhwc" else [8, 3, SIDE, SIDE])
