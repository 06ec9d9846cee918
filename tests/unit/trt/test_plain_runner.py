"""Engines without torch: cuda-python's functions (a stand-in), and the same results as the runner on torch."""

from __future__ import annotations

import importlib.util
import sys

import fake_cuda_python
import numpy as np
import pytest
import torch
from one_conv import reference, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import stand_in

from utils.core.errors import DependencyError, InputError, QatError
from utils.trt import cuda_runtime
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.cuda_runtime import CudaRuntime
from utils.trt.plain_runner import PlainRunner
from utils.trt.runner import TensorRTRunner


def put_in_place(monkeypatch, module, name="cuda.bindings.runtime"):
    monkeypatch.setattr(cuda_runtime, "installed", lambda: name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def cuda(monkeypatch):
    return put_in_place(monkeypatch, fake_cuda_python.make())


@pytest.fixture
def api(monkeypatch):
    return stand_in(monkeypatch)


def engine(folder, api, **options):
    sizes = {"batch": (1, 2, 4), "height": (32, 64, 96), "width": (32, 64, 96)}
    file = write_onnx(folder / "a.onnx", **options)
    return build(file, folder / "a.engine", BuildConfig(progress=False, **sizes), api).path


# the runtime


def test_what_is_uploaded_comes_back(cuda):
    runtime, values = CudaRuntime(), np.arange(12, dtype=np.int16).reshape(3, 4)
    address = runtime.allocate(values.nbytes)
    back = np.full_like(values, -1)
    runtime.download(address, back)
    assert not back.any()  # fresh memory is 0
    runtime.upload(values, address)
    runtime.download(address, back)
    runtime.synchronize()
    assert (back == values).all()
    assert (runtime.gpu.name, runtime.gpu.architecture, runtime.gpu.free) == ("Fake GPU", "SM89", 1 << 24)
    runtime.close()
    assert cuda.blocks == {}
    assert cuda.calls[-2:] == ["synchronize", "destroy"]


def test_failures_say_which_function_and_why(cuda):
    runtime = CudaRuntime()
    with pytest.raises(QatError, match="CUDA's cudaMalloc failed: it says NO_MEMORY"):
        runtime.allocate(1 << 25)
    with pytest.raises(QatError, match="CUDA's cudaMemcpyAsync failed: it says INVALID"):
        runtime.upload(np.zeros(9, np.uint8), runtime.allocate(8))
    with pytest.raises(ValueError, match="contiguous"):
        runtime.upload(np.zeros((4, 4), np.uint8).T[1:], runtime.allocate(16))


@pytest.mark.parametrize(("devices", "number", "message"), [(0, 0, "it says NO_DEVICE"), (1, 1, "CUDA sees 1 GPUs")])
def test_a_gpu_that_is_not_there(devices, number, message, monkeypatch):
    put_in_place(monkeypatch, fake_cuda_python.make(devices))
    with pytest.raises(InputError, match=message):
        CudaRuntime(number)


def test_cuda_python_is_looked_for_under_both_names(monkeypatch):
    there = "cuda.cudart"

    def find_spec(name):
        if name != there:
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert cuda_runtime.installed() == "cuda.cudart"
    there = "none"
    assert cuda_runtime.installed() is None
    with pytest.raises(DependencyError, match="needs torch or cuda-python"):
        CudaRuntime()


def test_the_stand_in_has_the_names_of_cuda_python():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    names = {name for name in vars(fake_cuda_python.make()) if name.startswith("cuda")}
    assert len(names) >= 12
    assert {name for name in names if not hasattr(runtime, name)} == set()
    kinds = fake_cuda_python.make().cudaMemcpyKind
    assert all(int(getattr(runtime.cudaMemcpyKind, kind.name)) == kind for kind in kinds)
    assert isinstance(runtime.cudaGetDeviceCount(), tuple)  # works without a GPU, and says so


# the runner


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["fp32", "fp16"])
def test_it_gives_what_the_runner_on_torch_gives(dtype, tmp_path, cuda, api):
    path, kind = engine(tmp_path, api, dtype=dtype), "float32" if dtype == TensorProto.FLOAT else "float16"
    rng = np.random.default_rng(1)
    with PlainRunner(path, api=api) as plain, TensorRTRunner(path, "cpu", api=api) as usual:
        assert (plain.inputs, plain.outputs, plain.metadata) == (usual.inputs, usual.outputs, usual.metadata)
        assert (plain.limits, plain.names, plain.stride) == (usual.limits, usual.names, usual.stride)
        for shape in ((1, 3, 64, 64), (4, 3, 32, 96), (2, 3, 64, 64)):  # memory grows, and is used again
            images = rng.random(shape).astype(kind)
            found = plain.infer({"images": images})["output0"]
            expected = usual.infer({"images": torch.from_numpy(images)})["output0"].numpy()
            assert found.dtype == kind
            np.testing.assert_array_equal(found, expected)
            close = 1e-5 if kind == "float32" else 0.05
            np.testing.assert_allclose(found, reference(images.astype(np.float32)), atol=close)
    assert cuda.blocks == {}


def test_results_stay_when_the_next_ones_come(tmp_path, cuda, api):
    with PlainRunner(engine(tmp_path, api), api=api) as plain:
        images = np.random.default_rng(2).random((2, 1, 3, 64, 64)).astype(np.float32)
        first = plain.infer({"images": images[0]})["output0"]
        kept = first.copy()
        plain.infer({"images": images[1]})
        np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (np.zeros((1, 3, 64, 64), np.float64), "input images is float64"),
        (np.zeros((8, 3, 64, 64), np.float32), r"takes images from \[1, 3, 32, 32\] to \[4, 3, 96, 96\]"),
        (np.zeros((3, 64, 64), np.float32), "input images is float32"),
    ],
)
def test_feeds_that_do_not_fit_are_one_line(feed, message, tmp_path, cuda, api):
    with PlainRunner(engine(tmp_path, api), api=api) as plain, pytest.raises(InputError, match=message):
        plain.infer({"images": feed})


def test_a_closed_one_says_so(tmp_path, cuda, api):
    plain = PlainRunner(engine(tmp_path, api), api=api)
    plain.close()
    with pytest.raises(QatError, match="is closed"):
        plain.infer({"images": np.zeros((1, 3, 64, 64), np.float32)})
