"""An engine beside ONNX Runtime: results of the image are right, those of another one, or of nothing, are told."""

import math
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from one_conv import WEIGHT, write_onnx
from onnx import numpy_helper
from tensorrt_stand_in import stand_in

from utils.core.input_spec import FLOATS, InputSpec
from utils.core.tasks import Prediction
from utils.jobs import check_engine
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import metadata_of, set_metadata
from utils.trt.build import build
from utils.trt.preflight import BuildConfig

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import build_engine

STATIC = (4, 3, 64, 64)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def api(monkeypatch):
    return stand_in(monkeypatch)


def network(path: Path, *, swapped: bool = False, **others) -> Path:
    """Boxes of some hundred pixels and scores that follow from the image; `swapped` ones are of the other class."""
    model = onnx.load(write_onnx(path, **{"shape": STATIC, **others}))
    weight = WEIGHT * np.array([[100]] * 4 + [[0.1]] * 2, np.float32)
    weight[4:] = weight[[5, 4] if swapped else [4, 5]]
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "weight")
    tensor.CopyFrom(numpy_helper.from_array(weight[..., None, None], "weight"))
    onnx.save(model, path)
    return path


def engine_of(file: Path, **options) -> Path:
    engine = file.with_suffix(".engine")
    build(file, engine, BuildConfig(progress=False, **options))
    return engine


@pytest.mark.parametrize(
    ("shape", "options", "count"),
    [
        (STATIC, {}, 5),
        (("batch", 3, 64, 64), {"batch": (1, 1, 1)}, 2),
        (("batch", 3, "height", "width"), {"batch": (4, 4, 8), "height": (32, 96, 128), "width": (32, 64, 128)}, 3),
    ],
)
@pytest.mark.parametrize(("prototypes", "form"), [(False, FLOATS), (True, InputSpec("uint8", "nhwc"))])
def test_a_right_engine(tmp_path, monkeypatch, shape, options, count, prototypes, form):
    stand_in(monkeypatch, "10.3.0")  # engines of 8.6 that take bytes are refused
    original = onnx.load(network(tmp_path / "b.onnx", shape=shape, prototypes=prototypes, quantized=True))
    file = tmp_path / "a.onnx"
    onnx.save(set_metadata(take_bytes(original, form), {**metadata_of(original), **form.metadata()}), file)
    sentence = check_engine.check_engine(engine_of(file, **options), file, CPU, count)
    assert f"{count} images: boxes differ by up to 0 px" in sentence
    assert float(sentence.split()[-2]) > 10  # pixels from image to image


def predictions(scores: float, coefficients: float, boxes: float = 100.0) -> Prediction:
    """Of three images: boxes of some pixels, two classes, one mask."""
    rows = torch.tensor([boxes] * 4 + [scores] * 2 + [coefficients]).view(7, 1)
    raw = torch.rand(3, 7, 50, generator=torch.Generator().manual_seed(0)) * rows
    return Prediction(raw, torch.ones(3, 1, 8, 8))


RIGHT = predictions(1, 1)


@pytest.mark.parametrize(
    ("engine", "file", "problem"),
    [
        (Prediction(RIGHT.raw[[0, 0, 0]], RIGHT.prototypes), RIGHT, "for 2 of 3 images"),  # a wrong stride of the batch
        (Prediction(RIGHT.raw[:, [0, 1, 2, 3, 5, 4, 6]], RIGHT.prototypes), RIGHT, "scores differ"),
        (predictions(math.nan, 1), RIGHT, "scores differ up to inf times"),
        (predictions(1, -2), RIGHT, "for 3 of 3 images its results are not those of ONNX Runtime: coeffi"),
        (predictions(0, 1), predictions(1e-7, 1), ""),  # scores where nothing is found say nothing
        (predictions(0, 1), predictions(0, 1), ""),
        (predictions(1, 1, 0.4), predictions(1, 1, 0.2), ""),  # of an untrained network
        (RIGHT, predictions(1, 1, math.nan), ""),
        (RIGHT, RIGHT, ""),
    ],
)
def test_what_says_something_is_compared(engine, file, problem):
    sentence, found = check_engine.engine_differences(engine, file)
    assert problem in found if problem else found == ""
    assert sentence.startswith("not compared") == (file.boxes.max().isnan() or file.boxes.max() < 1)


def test_what_onnx_runtime_does_not_run_is_not_held_against_the_engine(tmp_path):
    engine = engine_of(network(tmp_path / "a.onnx"))
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, tmp_path / "b.onnx")
    assert "does not run the file: " in check_engine.check_engine(engine, tmp_path / "b.onnx", CPU, 4)


def test_the_program_compares_after_building(tmp_path, capsys, monkeypatch):
    file, wrong = network(tmp_path / "a.onnx"), network(tmp_path / "b.onnx", swapped=True)
    for words, last in (((), "the engine beside ONNX Runtime, 4 images: "), (("--check", "0"), "engine: ")):
        assert build_engine.run([str(file), *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    monkeypatch.setattr(
        "utils.trt.tune.build_or_tune", lambda onnx, engine, config: build(wrong, engine, BuildConfig(progress=False))
    )
    assert build_engine.run([str(file)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert f"{file} computes: for 4 of 4 images" in errors[0]
