"""Drawing without torch finds what drawing with torch finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torchvision
from known_images import MIXED, KnowingModel, export_answers, write_set
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import DependencyError, InputError
from utils.core.input_form import InputForm
from utils.core.tasks import DETECTIONS
from utils.evaluation import plain_detector
from utils.evaluation.letterbox import Letterbox
from utils.evaluation.plain_detector import PlainDetector, suppressed
from utils.jobs import dependencies
from utils.jobs.plain_artist import PlainArtist, open_plain
from utils.jobs.visualize import Artist
from utils.runners import feeds
from utils.runners.base import Runner, TensorSpec
from utils.runners.pytorch import TorchRunner
from utils.trt import cuda_runtime
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests/support"
NAMES = ("cat", "dog", "owl")
WHOLE = Letterbox((64, 96), (1.0, 1.0), (0.0, 0.0))


class Given(Runner):
    """A network that gives the same arrays whatever it is fed with; `fed` is what that was."""

    def __init__(self, outputs, metadata=None, shape=(None, 3, 64, 96), dtype="float32"):
        specs = [TensorSpec(name, (None, *value.shape[1:]), str(value.dtype)) for name, value in outputs.items()]
        super().__init__([TensorSpec("images", shape, dtype)], specs, metadata or {}, "a test", "a test")
        self.given = outputs

    def _to_device(self, name, feed):
        return feed

    def _infer(self, feeds):
        self.fed = feeds["images"]
        return self.given

    def _close(self):
        pass


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    samples = write_set(tmp_path_factory.mktemp("known"), 8, MIXED)
    return samples, KnowingModel(samples, NAMES, 64)


class InNumpy(Given):
    """A PyTorch network for NumPy arrays."""

    def __init__(self, model):
        runner = TorchRunner(model, "cpu")
        Runner.__init__(self, runner.inputs, runner.outputs, runner.metadata, "a test", "a test")
        self.runner = runner

    def _infer(self, feeds):
        found = self.runner.infer({name: torch.from_numpy(feed) for name, feed in feeds.items()})
        return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("thresholds", [(0.5, 1.0, 300), (0.25, 0.45, 300), (0.01, 0.6, 3)])
def test_it_finds_what_torch_finds(thresholds, known):
    samples, model = known
    settings = dict(zip(("conf_thres", "iou_thres", "max_det"), thresholds, strict=True))
    plain = PlainArtist(InNumpy(model), imgsz=64, **settings)
    usual = Artist(TorchRunner(model, "cpu"), imgsz=64, **settings)
    count = 0
    for sample in samples:
        image = cv2.imread(str(sample.path))
        found, expected = plain.find(image), usual.find(image).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-3)
        count += len(found)
    assert count >= 8
    assert plain.milliseconds()["preprocess, inference and nms"] > 0


def test_suppression_is_torchvisions():
    rng = np.random.default_rng(0)
    corner, size = rng.random((400, 2)) * 60, rng.random((400, 2)) * 30
    boxes = np.concatenate([corner, corner + size], 1).astype(np.float32)
    scores = torch.linspace(1, 0, 400)
    for threshold in (0.1, 0.45, 0.7, 1.0):
        expected = torchvision.ops.nms(torch.from_numpy(boxes), scores, threshold).numpy()
        np.testing.assert_array_equal(suppressed(boxes, threshold), expected)
        np.testing.assert_array_equal(suppressed(boxes, threshold, 5), expected[:5])
    assert suppressed(boxes[:0], 0.5).shape == (0,)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (InputForm(), "float32"), (InputForm(), "float16"), (InputForm("uint8"), "uint8"),
        (InputForm("uint8", "nhwc"), "uint8"), (InputForm("int8", "nchw", 0.00788116455078125), "int8"),
        (InputForm("int8", "nchw", 0.0050201416015625), "int8"),
    ],
    ids=str,
)  # fmt: skip
def test_images_take_the_forms_that_torch_gives_them(form, dtype):
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    expected = feeds.as_feed(torch.from_numpy(image.transpose(2, 0, 1).copy())[None], form, dtype).numpy()
    found = plain_detector.as_feed(image, form, dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_a_network_with_nms_inside():
    """Places behind the count are rubbish; the best comes first, and a box of two classes is drawn once."""
    boxes = np.array([[[0, 0, 9, 9], [20, 20, 40, 40], [20, 20, 40, 41], [1, 1, 2, 2]]], np.float32)
    arrays = (np.array([[3]], np.int32), boxes, np.array([[0.3, 0.6, 0.9, 0.99]], np.float32),
              np.array([[2, 0, 1, 0]], np.int32))  # fmt: skip
    detector = PlainDetector(Given(dict(zip(DETECTIONS, arrays, strict=True))), 0.25, 0.45, 300)
    found = detector(np.zeros((64, 96, 3), np.uint8), WHOLE)
    np.testing.assert_allclose(found, [[20, 20, 40, 41, 0.9, 1], [0, 0, 9, 9, 0.3, 2]], atol=1e-6)


def test_coefficients_of_masks_are_no_classes_and_a_static_batch_is_filled_up():
    raw = np.zeros((4, 4 + 2 + 3, 5), np.float32)
    raw[:, :4, 1] = [30, 30, 20, 10]
    raw[:, 5, 1], raw[:, 6:, :] = 0.8, 5.0
    outputs = {"output0": raw, "output1": np.zeros((4, 3, 16, 24), np.float32)}
    runner = Given(outputs, {"task": "segment"}, shape=(4, 3, 64, 96))
    runner.outputs = tuple(TensorSpec(name, value.shape, "float32") for name, value in outputs.items())
    found = PlainDetector(runner, 0.25, 0.45, 300)(np.full((64, 96, 3), 51, np.uint8), WHOLE)
    np.testing.assert_allclose(found, [[20, 25, 40, 35, 0.8, 1]], atol=1e-6)
    assert runner.fed.shape == (4, 3, 64, 96)
    np.testing.assert_allclose(runner.fed, 0.2, atol=1e-7)


def test_files_for_deepstream_and_devices_that_are_no_gpu_are_refused():
    with pytest.raises(InputError, match="DeepStream's form"):
        PlainDetector(Given({"output0": np.zeros((1, 6, 5), np.float32)}, {"form": "deepstream"}), 0.2, 0.4, 3)
    with pytest.raises(InputError, match="--device cpu: without torch only engines run"):
        open_plain("a.engine", "cpu")


@pytest.mark.parametrize(
    ("path", "torch_there", "cuda_there", "said"),
    [
        ("a.engine", True, False, ""),
        ("a.engine", False, True, ""),
        ("a.engine", False, False, "torch or cuda-python, and neither is installed: pip install cuda-python"),
        ("a.onnx", False, True, "this needs torch, which is not installed"),
    ],
)
def test_what_is_missing_is_said_before_any_work(path, torch_there, cuda_there, said, monkeypatch):
    real = dependencies.importlib.util.find_spec
    hidden = () if torch_there else ("torch",)
    monkeypatch.setattr(dependencies.importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    monkeypatch.setattr(cuda_runtime, "installed", lambda: "cuda.bindings.runtime" if cuda_there else None)
    monkeypatch.setattr(dependencies, "need_tensorrt", lambda: None)
    if said:
        with pytest.raises(DependencyError, match=said):
            dependencies.need_to_draw(path)
    else:
        dependencies.need_to_draw(path)


WITHOUT_TORCH = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision", "PIL", "matplotlib", "pandas", "scipy", "requests", "yaml"):
            raise ModuleNotFoundError(name, name=name)
real = __import__("importlib.util").util.find_spec
__import__("importlib.util").util.find_spec = lambda name, *more: None if name == "torch" else real(name, *more)
sys.meta_path.insert(0, Hidden())
sys.path[:0] = [{root!r}, {support!r}]
import fake_cuda_python, fake_tensorrt
sys.modules["cuda.bindings.runtime"] = fake_cuda_python.make()
sys.modules["tensorrt"] = fake_tensorrt.make("8.6.0", "Fake GPU")
sys.modules["tensorrt"].__spec__ = sys.__spec__
from utils.trt import cuda_runtime
cuda_runtime.installed = lambda: "cuda.bindings.runtime"
import val_trt
from utils.cli import run_program
code = run_program(val_trt.make_parser(), val_trt.main, sys.argv[1:])
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "torchvision")))
sys.exit(code)
"""


def test_val_trt_draws_where_torch_is_not_installed(tmp_path, known, monkeypatch):
    samples, model = known
    file = export_answers(model, tmp_path / "a.onnx")
    api = stand_in(monkeypatch)
    sizes = {"batch": (1, 2, 4), "height": (64, 64, 64), "width": (64, 64, 64)}
    build(file, tmp_path / "a.engine", BuildConfig(progress=False, **sizes), api)
    assert GPU.name == "Fake GPU"
    note = json.loads((tmp_path / "a.engine.json").read_text())
    assert note["gpu"] == GPU.name
    words = ["--engine-file", tmp_path / "a.engine", "--source", samples[0].path.parent, "--project", tmp_path / "runs"]
    script = WITHOUT_TORCH.format(root=str(ROOT), support=str(SUPPORT))
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "[]"  # nothing of torch
    drawn = sorted((tmp_path / "runs/exp").iterdir())
    assert [path.name for path in drawn] == sorted(sample.path.name for sample in samples)
    expected = Artist(TorchRunner(model, "cpu"), imgsz=64)
    for sample in samples:
        image = cv2.imread(str(sample.path))
        wanted, count = expected.draw(image)
        assert f"{sample.path.name}: {count} objects" in done.stdout
        np.testing.assert_array_equal(cv2.imread(str(tmp_path / "runs/exp" / sample.path.name)), wanted)
