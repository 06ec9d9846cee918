"""scripts/build_engine.py, its check beside ONNX Runtime, and the shell scripts around engines.

TensorRT is a stand-in, except where RTX is named.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from fork_server import ForkServer
from known_images import SQUARE, KnowingModel, export_answers, write_set
from one_conv import WEIGHT, write_onnx
from onnx import TensorProto, numpy_helper
from tensorrt_stand_in import stand_in

from utils.core.input_spec import FLOATS, InputSpec
from utils.core.tasks import Prediction
from utils.jobs import check_engine
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import metadata_of, set_metadata
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
import build_engine  # noqa: E402

NAMES = ("cat", "dog", "owl")


def run(*words):
    return build_engine.main([str(word) for word in words])


# scripts/build_engine.py


def test_profile_and_options_reach_the_builder(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    file = write_onnx(tmp_path / "a.onnx", quantized=True)
    words = ["--batch-size", 1, 4, 8, "--imgsz", 64, "--workspace", 100, "--tactic-sources-off", "CUBLAS", "CUDNN"]
    assert run(file, *words) == 0
    note = EngineNote.load(tmp_path / "a.engine")
    assert note.profile == {"images": [[1, 3, 64, 64], [4, 3, 64, 64], [8, 3, 64, 64]]}
    calls = dict(api.module.calls)
    assert (calls["build"], calls["workspace"], calls["tactic_sources"]) == (["FP16", "INT8"], 100 << 20, 0b11010)
    assert list(tmp_path.glob("*.timing.cache"))
    output = tmp_path / "other" / "b.engine"
    assert run(file, "--output", output, "--no-timing-cache", "--batch-size", 2) == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["b.engine", "b.engine.json"]


@pytest.mark.parametrize("size", [("32", "64"), ("32x64",), ("32x64", "32x64", "32x64")])
def test_an_engine_of_a_rectangle(tmp_path, monkeypatch, size):
    stand_in(monkeypatch)
    assert run(write_onnx(tmp_path / "a.onnx", quantized=True), "--batch-size", 1, "--imgsz", *size) == 0
    assert EngineNote.load(tmp_path / "a.engine").profile == {"images": [[1, 3, 32, 64]] * 3}


@pytest.mark.parametrize("script", ["generate_trt_engine.sh", "benchmark_trt.sh"])
@pytest.mark.parametrize("size", [(), ("640",), ("384x640",), ("384", "640")])
def test_shell_scripts_pass_rectangles_on(script, size):
    words = [ROOT / "scripts" / script, "a.onnx", *size, "--tune", "3"]
    out = subprocess.run(words, env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True).stdout.split()
    assert out[1 : 2 + len(size) + bool(size)] == ["a.onnx", *(["--imgsz"] * bool(size)), *size]


def test_graph_of_a_new_engine(tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    file = write_onnx(tmp_path / "a.onnx", (1, 3, 8, 8))
    assert run(file, "--generate-graph") == 2
    assert "drawing needs graphviz" in capsys.readouterr().err
    assert not (tmp_path / "a.engine").exists()  # said before the long build
    (tmp_path / "dot").write_text('#!/bin/sh\nwhile read line; do echo "$line"; done > "$3"\n')
    (tmp_path / "dot").chmod(0o755)
    assert run(file, "--generate-graph") == 0
    assert "INT8 coverage: 0% of 2 computing layers" in capsys.readouterr().out
    assert {"a.layers.json", "a.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_ahead_of_time_with_the_real_rtx(tmp_path, monkeypatch, capsys):
    api = tensorrt_api.load_tensorrt("tensorrt_rtx_bindings")
    monkeypatch.setattr(tensorrt_api, "load_tensorrt", lambda name=None: api)
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    file = write_onnx(tmp_path / "a.onnx", dtype=TensorProto.FLOAT16, quantized=True, opset=19)
    words = (file, "--target", "SM89", "SM120", "--batch-size", 1, 2, 4, "--imgsz", 64, "--generate-graph")
    assert run(*words) == 0
    assert EngineNote.load(tmp_path / "a.engine").gpu == "SM89 SM120"
    assert "scripts/inspect_engine.py a.engine --generate-graph" in capsys.readouterr().out


# What run_on_stand_in.py, which stands in the place of the interpreter, and programs import.
WARM = f"""
import sys
sys.path.append({str(ROOT / "tests/support")!r})
import pytest, tensorrt_stand_in, utils.jobs.open
from utils.jobs import evaluate
from utils.trt import runner
"""


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer(ROOT, WARM) as server:
        yield server


@pytest.fixture(scope="module")
def known(fork_server, tmp_path_factory):
    """A folder with data.yaml and answers.onnx, the network that knows its images, and `python` with the stand-in."""
    folder = tmp_path_factory.mktemp("known")
    model = KnowingModel(write_set(folder, 12, SQUARE), NAMES, 64)
    export_answers(model, folder / "answers.onnx", None, 64)
    fork_server.interpreter(folder / "python", ROOT / "tests/support/run_on_stand_in.py")
    return folder


def shell(script, *words, folder, **variables):
    env = {**os.environ, "PYTHON": str(folder / "python"), **variables}
    command = [str(ROOT / "scripts" / script), *map(str, words)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_build_and_evaluate_an_onnx_file(known):
    done = shell("val_trt.sh", "answers.onnx", "data.yaml", "64x64", folder=known, BATCH="1 2 4",
                 VAL_ARGS="--workers 0 --save-txt")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert EngineNote.load(known / "answers.engine").profile["images"][2] == [4, 3, 64, 64]
    (row,) = json.loads((known / "runs/val_trt/exp/report.json").read_text())["rows"]
    assert (row["stage"], row["file"]) == ("TensorRT FP16", "answers.engine")
    assert 0.3 < row["ap"] < 0.9
    assert "TensorRT 8.6.0" in row["measured_on"]
    assert "batch 4, 64x64" in row["measured_on"]  # the profile's largest
    assert (known / "runs/val_trt/exp/labels").is_dir()
    built = (known / "answers.engine").stat().st_mtime_ns
    words = ("val_trt.sh", "answers.onnx", "data.yaml", "64")
    once_more = shell(*words, folder=known, BATCH="1 2 4", VAL_ARGS="--workers 0")
    assert (once_more.returncode, "build the engine: reused" in once_more.stdout) == (1 - 1, False), "64, not 64 64"
    assert (known / "answers.engine").stat().st_mtime_ns > built
    built = (known / "answers.engine").stat().st_mtime_ns
    once_more = shell(*words, folder=known, BATCH="1 2 4", VAL_ARGS="--workers 0")
    assert "build the engine: reused" in once_more.stdout
    assert (known / "answers.engine").stat().st_mtime_ns == built
    (same,) = json.loads((known / "runs/val_trt/exp3/report.json").read_text())["rows"]
    assert same["ap"] == row["ap"]
    again = shell("generate_trt_engine.sh", "answers.onnx", "--check", 0, folder=known)  # at the file's own size
    assert (again.returncode, "answers.engine exists and will be replaced" in again.stdout) == (0, True)


# an engine beside ONNX Runtime: right results, those of another image, and of nothing

STATIC = (4, 3, 64, 64)
CPU = torch.device("cpu")


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


def test_what_onnx_runtime_does_not_run_is_not_held_against_the_engine(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    engine = engine_of(network(tmp_path / "a.onnx"))
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, tmp_path / "b.onnx")
    assert "does not run the file: " in check_engine.check_engine(engine, tmp_path / "b.onnx", CPU, 4)


def test_the_program_compares_after_building(tmp_path, capsys, monkeypatch):
    stand_in(monkeypatch)
    file, wrong = network(tmp_path / "a.onnx"), network(tmp_path / "b.onnx", swapped=True)
    for words, last in (((), "the engine beside ONNX Runtime, 4 images: "), (("--check", "0"), "engine: ")):
        assert run(file, *words) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    other = BuildConfig(progress=False)
    monkeypatch.setattr("utils.trt.tune.build_or_tune", lambda onnx, engine, config: build(wrong, engine, other))
    assert run(file) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert f"{file} computes: for 4 of 4 images" in errors[0]
