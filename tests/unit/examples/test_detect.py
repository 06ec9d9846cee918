"""examples/detect.py and detect.cpp find what `val_trt.py --source` finds, box for box: on stand-ins of TensorRT, and
in OpenVINO."""

import ctypes
import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import cv2
import fake_tensorrt
import numpy as np
import onnx
import pytest
from known_images import MIXED, KnowingModel, export_answers, write_set
from known_masks import KnowingMasks, export_masks, write_outlined_set
from qdq_graph import SIZE, good_graph
from tensorrt_stand_in import stand_in

from utils.core.input_spec import FLOATS, InputSpec
from utils.jobs.open import open_openvino
from utils.jobs.visualize import Artist
from utils.onnx_graph.output_formats import NmsSettings, attach_nms
from utils.onnx_graph.passes.for_openvino import TARGET_KEY, offset_activations, seven_bit_weights
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import set_metadata
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.runner import TensorRTRunner

FILE = Path(__file__).resolve().parents[3] / "examples/detect.py"
NAMES = ("cat", "dog", "owl")


def fake_cuda_runtime():
    """What the example uses of cuda-python; the GPU is this machine's memory, and copies stay in its blocks."""
    kinds, blocks, stream = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2), {}, 1234

    def allocate(count):
        block = ctypes.create_string_buffer(b"\xff" * count, count)  # memory of a GPU is not empty
        blocks[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def copy(to, source, count, kind, at):
        assert at == stream
        assert count <= len(blocks[to if kind == kinds.cudaMemcpyHostToDevice else source])
        ctypes.memmove(to, source, count)
        return (0,)

    return SimpleNamespace(
        __name__="cuda.bindings.runtime", cudaMemcpyKind=kinds, cudaMalloc=allocate, cudaMemcpyAsync=copy,
        cudaSetDevice=lambda device: (device,), cudaStreamCreate=lambda: (0, stream),
        cudaStreamSynchronize=lambda at: (0,), cudaGetErrorString=lambda error: (0, b"an error"),
    )  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    """The example as a module, where these are the TensorRT and the lean runtime that can be imported."""

    def example(tensorrt, lean=None):
        runtime = fake_cuda_runtime()
        bindings = SimpleNamespace(runtime=runtime)
        modules = {"cuda": SimpleNamespace(bindings=bindings), "cuda.bindings": bindings, runtime.__name__: runtime}
        for name, module in {**modules, "tensorrt": tensorrt, "tensorrt_lean": lean}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return SimpleNamespace(**runpy.run_path(str(FILE)))

    return example


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    samples = write_set(tmp_path_factory.mktemp("known"), 8, MIXED)
    return samples, KnowingModel(samples, NAMES, 64)


def engine_of(model, folder, api, *, batch=None, nms=None, form=FLOATS, build_batch=(1, 2, 4), width=64, **built):
    """An engine of the network that knows the images; of a dynamic size unless the batch is static."""
    file = export_answers(model, folder / "a.onnx", batch, None if batch is None else 64, channels=form.channels)
    content = take_bytes(onnx.load(file), form)
    onnx.save(content if nms is None else attach_nms(content, nms), file)
    sizes = {} if batch else {"batch": build_batch, "height": (64,) * 3, "width": (width,) * 3}
    engine = folder / "a.engine"
    build(file, engine, BuildConfig(progress=False, **sizes, **built), api)
    return engine


def samples_and_engine(options, known, folder, api):
    if "masks" not in options:
        return known[0], engine_of(known[1], folder, api, **options)
    samples = write_outlined_set(folder / "set", 8)
    file = export_masks(KnowingMasks(samples, NAMES, 96), folder / "a.onnx")
    build(file, folder / "a.engine", BuildConfig(progress=False), api)
    return samples, folder / "a.engine"


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 4}, {"width": 96}, {"build_batch": (2, 4, 4)}, {"form": InputSpec("uint8")},
     {"form": InputSpec("uint8", "nhwc")}, {"form": InputSpec(channels=1)}, {"form": InputSpec("uint8", "nhwc", 1)},
     {"version_compatible": True},  # loaded by the lean runtime, without TensorRT
     {"strip_weights": True}, {"masks": True}, {"nms": NmsSettings("onnx", topk=20)},
     {"nms": NmsSettings("none", topk=50, conf_thres=0.01), "form": InputSpec("uint8", "nhwc")}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("conf", "iou"), [(0.25, 0.45), (0.02, 0.1)])
def test_it_finds_what_val_trt_finds(options, conf, iou, known, tmp_path, monkeypatch, load):
    version = "10.3.0" if {"form", "strip_weights"} & set(options) else "8.6.0"  # 8.6 refuses both
    api = stand_in(monkeypatch, version)
    lean = fake_tensorrt.make(version, lean=True) if "version_compatible" in options else None
    detect = load(None if lean else api.module, lean)
    samples, engine = samples_and_engine(options, known, tmp_path, api)
    detector = detect.Detector(engine, conf, iou)
    assert detector.names == dict(enumerate(NAMES))
    count, size = 0, None if "masks" in options else (64, options.get("width", 64))
    with TensorRTRunner(engine, "cpu", api=api) as runner:
        artist = Artist(runner, imgsz=size, conf_thres=conf, iou_thres=iou)
        for sample in samples:
            image = cv2.imread(str(sample.path))
            found, expected = detector(image), artist.detect(image)[0].numpy()[:, :6]
            np.testing.assert_allclose(found, expected, atol=1e-3)
            count += len(found)
    assert count >= 8


def test_a_folder_and_a_video(known, tmp_path, monkeypatch, load):
    api = stand_in(monkeypatch)
    samples, engine = known[0], engine_of(known[1], tmp_path, api)
    video = tmp_path / "a.avi"
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 64))
    for _ in range(3):
        writer.write(np.full((64, 64, 3), 5, np.uint8))
    writer.release()
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    detect, drawn = load(api.module), tmp_path / "drawn"
    for source in (samples[0].path.parent, video, tmp_path / "broken.jpg"):
        monkeypatch.setattr(sys, "argv", ["detect.py", str(engine), str(source), "--output", str(drawn)])
        with (
            pytest.raises(ValueError, match="cannot be read as an image or a video")
            if source.suffix == ".jpg"
            else nullcontext()
        ):
            detect.main()
    assert {path.name for path in drawn.iterdir()} == {*(sample.path.name for sample in samples), "a.mp4"}
    for sample in samples:
        before, after = cv2.imread(str(sample.path)), cv2.imread(str(drawn / sample.path.name))
        assert before.shape == after.shape
        assert (before != after).any() == any(row[5] > 0.25 for row in sample.answers)
    assert cv2.VideoCapture(str(drawn / "a.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 3


# ONNX files, in OpenVINO


def same_detections(file, images, load, conf=0.25, iou=0.45):
    """How many objects the example finds in a file, all of them where our own runner finds them."""
    detector = load(None).OpenVinoDetector(file, conf, iou)
    count = 0
    with open_openvino(file, "CPU") as runner:
        artist = Artist(runner, imgsz=detector.size, conf_thres=conf, iou_thres=iou)
        for image in images:
            found, expected = detector(image), artist.detect(image)[0].numpy()[:, :6]
            np.testing.assert_allclose(found, expected, atol=1e-3)
            count += len(found)
    return count, detector


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 4}, {"form": InputSpec("uint8", "nhwc")}, {"form": InputSpec(channels=1)},
     {"nms": NmsSettings("onnx", topk=20)}],
    ids=str,
)  # fmt: skip
def test_a_float_file_in_openvino(options, known, tmp_path, load):
    pytest.importorskip("openvino")
    form, batch = options.get("form", FLOATS), options.get("batch")
    file = export_answers(known[1], tmp_path / "a.onnx", batch, None if batch is None else 64, channels=form.channels)
    model = set_metadata(take_bytes(onnx.load(file), form), {"imgsz": "[64, 64]", **form.metadata()})
    onnx.save(attach_nms(model, options["nms"]) if "nms" in options else model, file)
    images = [cv2.imread(str(sample.path)) for sample in known[0]]
    count, detector = same_detections(file, images, load)
    assert count >= 8
    assert (detector.size, detector.names) == ((64, 64), dict(enumerate(NAMES)))


@pytest.mark.parametrize(("target", "warned"), [("openvino-avx2", False), (None, True)])
def test_an_int8_file_in_openvino(target, warned, tmp_path, load, monkeypatch, capsys):
    """Weights of 7 bits: sums are exact on each processor, so that results are the same."""
    pytest.importorskip("openvino")
    file, names = tmp_path / "a.onnx", json.dumps({0: "cat", 1: "dog"})
    entries = {"imgsz": f"[{SIZE}, {SIZE}]", "stride": "16", "names": names, "task": "detect"}
    model = set_metadata(seven_bit_weights(offset_activations(good_graph())), entries)
    onnx.save(set_metadata(model, {TARGET_KEY: target} if target else {}), file)
    images = np.random.default_rng(0).integers(0, 256, (12, SIZE, SIZE, 3), np.uint8)
    if target == "openvino-avx2":  # others would be changed in memory by our runner
        assert same_detections(file, images, load, conf=0.05)[0] >= 8
    detect = load(None)
    for lacking in (True, False):
        monkeypatch.setitem(detect.OpenVinoDetector.__init__.__globals__, "lacks_vnni", lambda: lacking)  # noqa: B023
        capsys.readouterr()
        detect.OpenVinoDetector(file)
        said = capsys.readouterr().err
        assert ("--target openvino-avx2" in said, said.count("\n")) == (warned and lacking, int(warned and lacking))


@pytest.mark.parametrize(
    ("machine", "flags", "lacking"),
    [("x86_64", "sse4_2 avx2", True), ("x86_64", "avx2 avx512f avx512_vnni", False), ("AMD64", "avx_vnni", False),
     ("aarch64", "asimd", False), ("x86_64", None, False)],
)  # fmt: skip
def test_a_processor_without_vnni(machine, flags, lacking, tmp_path, load, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert load(None).lacks_vnni(cpuinfo) is lacking


# examples/detect.cpp


OPENCV = subprocess.run(["pkg-config", "--cflags", "--libs", "opencv4"], capture_output=True, text=True, check=False)
needs_opencv = pytest.mark.skipif(OPENCV.returncode != 0, reason="libopencv-dev is not installed")
CPP = FILE.with_suffix(".cpp")


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The C++ example, built with a TensorRT that answers from a recording."""
    target = tmp_path_factory.mktemp("cpp") / "detect"
    headers = FILE.parents[1] / "tests/support/recorded_tensorrt"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", f"-I{headers}", CPP, "-o", target]
    done = run(*command, *OPENCV.stdout.split())
    assert done.returncode == 0, done.stderr
    return target


def record(detector, images, path):
    """What the Python example gave the engine for these images, and what it got: see recorded_tensorrt/NvInfer.h."""
    kinds, records = {"float32": "0", "int32": "3", "uint8": "5"}, []
    for image in images:
        detector(image)
        records += [array.tobytes() for array in detector._host.values()]
    lines = [
        " ".join([name, str(int(name == detector._input)), kinds[str(array.dtype)], *map(str, array.shape)])
        for name, array in detector._host.items()
    ]
    path.write_bytes("\n".join([*lines, "\n"]).encode() + b"".join(records))


@needs_opencv
@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 4}, {"form": InputSpec("uint8", "nhwc")}, {"form": InputSpec(channels=1)},
     {"form": InputSpec("uint8", "nhwc", 1)}, {"nms": NmsSettings("onnx", topk=20)}, {"masks": True}],
    ids=str,
)  # fmt: skip
def test_the_cpp_example_finds_the_same(options, known, program, tmp_path, monkeypatch, load):
    api = stand_in(monkeypatch, "10.3.0")
    samples, engine = samples_and_engine(options, known, tmp_path, api)
    detector = load(api.module).Detector(engine)
    images = {sample.path.name: cv2.imread(str(sample.path)) for sample in samples}
    record(detector, images.values(), tmp_path / "recorded.engine")
    shutil.copy(f"{engine}.json", tmp_path / "recorded.engine.json")
    done = run(program, tmp_path / "recorded.engine", samples[0].path.parent, tmp_path / "drawn")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    count = 0
    for name, image in images.items():
        found = np.array([[*row[3:], row[2], row[1]] for row in rows if row[0] == name], np.float32).reshape(-1, 6)
        np.testing.assert_allclose(found, detector(image), atol=2e-3)
        count += len(found)
    assert count >= 8
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == sorted(images)


@pytest.mark.parametrize("headers", os.environ.get("TENSORRT_INCLUDE", "").split(os.pathsep))
def test_the_cpp_example_compiles_with_nvidias_headers(headers):
    if not headers or OPENCV.returncode:
        pytest.skip("TENSORRT_INCLUDE names no folder of NvInfer.h (CUDA's headers in CPATH), or OpenCV is missing")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-deprecated-declarations", f"-I{headers}", CPP]
    done = run(*command, *OPENCV.stdout.split())
    assert done.returncode == 0, done.stderr
