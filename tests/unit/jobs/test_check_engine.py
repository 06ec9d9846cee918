"""An engine beside ONNX Runtime: results of the image are right, those of another one, or of nothing, are told."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from one_conv import WEIGHT, write_onnx
from onnx import helper, numpy_helper
from tensorrt_stand_in import stand_in

from utils.core.errors import QatError
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


def network(path: Path, kind: str = "right", shape=STATIC, **others) -> Path:
    """Boxes of some hundred pixels and scores that follow from the image; or what a wrong engine could compute."""
    write_onnx(path, shape, **others)
    model = onnx.load(path)
    weight = WEIGHT * np.array([[100]] * 4 + [[0.1]] * 2, np.float32)
    if kind == "another row":  # boxes are right, scores are not
        weight[4:] = weight[[5, 4]]
    elif kind == "not a number":
        weight[5, 2] = np.nan
    for tensor in model.graph.initializer:
        if tensor.name == "weight":
            tensor.CopyFrom(numpy_helper.from_array(weight[..., None, None], "weight"))
    if kind == "first image":  # as with a wrong stride from image to image
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape[0], np.int64), "first"))
        (conv,) = (node for node in model.graph.node if node.op_type == "Conv")
        conv.output[0] = "each"
        place = list(model.graph.node).index(conv) + 1
        model.graph.node.insert(place, helper.make_node("Gather", ["each", "first"], ["raw"], axis=0))
    if kind == "negative prototypes":
        (part,) = (node for node in model.graph.node if node.op_type == "Slice")
        part.input[0] = "negative"
        model.graph.node.insert(list(model.graph.node).index(part), helper.make_node("Neg", ["raw"], ["negative"]))
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
@pytest.mark.parametrize("prototypes", [False, True])
@pytest.mark.parametrize("form", [FLOATS, InputSpec("uint8", "nhwc")])
def test_a_right_engine(tmp_path, monkeypatch, shape, options, count, prototypes, form):
    stand_in(monkeypatch, "10.3.0")  # engines of 8.6 that take bytes are refused
    original = onnx.load(network(tmp_path / "b.onnx", shape=shape, prototypes=prototypes, quantized=True))
    about = {**metadata_of(original), **form.metadata()}
    file = tmp_path / "a.onnx"
    onnx.save(set_metadata(take_bytes(original, form), about), file)
    found = check_engine.check_engine(engine_of(file, **options), file, CPU, count)
    start = f"the engine beside ONNX Runtime, {count} images: boxes differ by up to 0 px on average, and from image to "
    assert found.startswith(start)
    assert float(found.split()[-2]) > 10


@pytest.mark.parametrize(
    ("kind", "prototypes", "words"),
    [
        ("first image", False, "for 3 of 4 images its results are not those of ONNX Runtime: "),
        ("another row", False, "for 4 of 4 images its results are not those of ONNX Runtime: scores "),
        ("not a number", False, "scores differ up to inf times"),
        ("negative prototypes", True, "prototypes differ up to "),
    ],
)
def test_an_engine_that_computes_something_else(tmp_path, kind, prototypes, words):
    engine = engine_of(network(tmp_path / "b.onnx", kind, prototypes=prototypes))
    with pytest.raises(QatError) as caught:
        check_engine.check_engine(engine, network(tmp_path / "a.onnx", prototypes=prototypes), CPU, 4)
    assert caught.value.exit_code == 1
    assert words in str(caught.value)


def predictions(scores: float, coefficients: float, boxes: float = 100.0) -> Prediction:
    """Of three images: boxes of some pixels, two classes, one mask."""
    rows = torch.tensor([boxes] * 4 + [scores] * 2 + [coefficients]).view(7, 1)
    raw = torch.rand(3, 7, 50, generator=torch.Generator().manual_seed(0)) * rows
    return Prediction(raw, torch.ones(3, 1, 8, 8))


@pytest.mark.parametrize(
    ("engine", "file", "problem"),
    [
        (predictions(1, -2), predictions(1, 1), "for 3 of 3 images its results are not those of ONNX Runtime: coeffi"),
        (predictions(0, 1), predictions(1e-7, 1), ""),  # scores where nothing is found say nothing
        (predictions(0, 1), predictions(0, 1), ""),
        (predictions(1, 1, 0.4), predictions(1, 1, 0.2), ""),  # of an untrained network
        (predictions(1, 1), predictions(1, 1, math.nan), ""),
    ],
)
def test_what_says_something_is_compared(engine, file, problem):
    sentence, found = check_engine.engine_differences(engine, file)
    assert found[: len(problem) or None] == problem
    assert sentence.startswith("not compared") == (file.boxes.max().isnan() or file.boxes.max() < 1)


def test_what_onnx_runtime_does_not_run_is_not_held_against_the_engine(tmp_path):
    engine = engine_of(network(tmp_path / "a.onnx"))
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, tmp_path / "b.onnx")
    found = check_engine.check_engine(engine, tmp_path / "b.onnx", CPU, 4)
    assert "does not run the file: " in found
    assert "\n" not in found


def program(capsys, *words) -> tuple[int, list[str], list[str]]:
    code = build_engine.run([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out.splitlines(), [line for line in said.err.splitlines() if line.startswith("error")]


def test_the_program_compares_after_building(tmp_path, capsys):
    file = network(tmp_path / "a.onnx")
    code, out, err = program(capsys, file)
    assert (code, err) == (0, [])
    assert out[-1].startswith("the engine beside ONNX Runtime, 4 images: ")
    code, out, err = program(capsys, file, "--check", 0)
    assert (code, out[-1], err) == (0, f"engine: {tmp_path / 'a.engine'}", [])


def test_the_program_says_that_an_engine_is_wrong(tmp_path, capsys, monkeypatch):
    wrong = network(tmp_path / "b.onnx", "first image")
    monkeypatch.setattr(
        "utils.trt.tune.build_or_tune", lambda onnx, engine, config: build(wrong, engine, BuildConfig(progress=False))
    )
    code, _, err = program(capsys, network(tmp_path / "a.onnx"))
    assert code == 1
    assert len(err) == 1
    assert err[0].startswith(
        f"error: {tmp_path / 'a.engine'} does not compute what {tmp_path / 'a.onnx'} computes: for 3"
    )
    assert "before you use it" in err[0]
