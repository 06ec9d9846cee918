"""Running engines: call order, addresses, graphs, shapes and refusals, on stand-ins that compute with ONNX Runtime."""

from dataclasses import replace

import fake_tensorrt
import numpy as np
import pytest
import torch
from one_conv import reference, write_onnx
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import InputError
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api

CPU = torch.device("cpu")
FREE = {"shape": ("batch", 3, "h", "w"), "batch": (1, 2, 4), "height": (32, 32, 64), "width": (32, 32, 64)}


def engine(folder, shape=(2, 3, 4, 8), **changes):
    folder.mkdir(exist_ok=True)
    config = BuildConfig(progress=False, **changes)
    engine = folder / "a.engine"
    build(write_onnx(folder / "a.onnx", shape, extra_output=True), engine, config)
    return engine


@pytest.fixture
def execution(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    return lambda **changes: Execution(engine(tmp_path, **changes), api, CPU)


def feed(execution, *shape):
    images = torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    execution.set_shapes({"images": shape})
    execution.buffers["images"].copy_(images)
    return images.numpy()


def check(execution, images, run=None):
    (run or execution.run)()
    np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)


def test_static_engine_runs_at_the_addresses_it_was_given(execution):
    one = execution()
    assert [str(spec) for spec in one.outputs] == ["output0 float32 [2, 6, any]", "raw float32 [2, 6, 4, 8]"]
    images = feed(one, 2, 3, 4, 8)
    check(one, images)
    np.testing.assert_allclose(one.buffers["raw"].flatten(2), reference(images), atol=1e-5)
    one.close()


def test_dynamic_shapes_and_graphs(execution):
    one = execution(**FREE)
    assert one.buffers == {}
    graphs = set()
    for shape in ((2, 3, 32, 64), (1, 3, 64, 32), (4, 3, 64, 64), (2, 3, 32, 64)):
        images = feed(one, *shape)
        graph = one.graph()
        one.buffers["output0"].zero_()
        check(one, images, graph.replay)
        assert one.graph() is graph
        graphs.add(graph)
    assert len(graphs) == 4  # a graph belongs to its shapes
    for shape in ((5, 3, 32, 32), (1, 3, 96, 32), (1, 3, 32)):
        with pytest.raises(InputError, match=r"from \[1, 3, 32, 32\] to \[4, 3, 64, 64\]"):
            one.set_shapes({"images": shape})


@pytest.mark.parametrize("streams", [0, 3, 31])
def test_auxiliary_streams_are_torchs(execution, streams):
    """The stand-in refuses to capture an engine with streams of its own, and auxiliary ones that are not different."""
    one = execution(max_aux_streams=streams)
    images = feed(one, 2, 3, 4, 8)
    one.layer_times(runs=1)  # which starts a fresh context
    check(one, images, one.graph().replay)


def test_layer_times_are_means_without_warming_up(execution):
    one = execution()
    before = len(one.api.module.calls)
    assert one.layer_times(runs=4) == {"raw": 0.5, "output0": 0.5}
    assert len(one.api.module.calls) == before + 7
    delattr(one.api.module, "IProfiler")
    assert one.layer_times() == {}


@pytest.mark.parametrize("version", ["8.6.0", "10.3.0"])
def test_the_lean_runtime_runs_version_compatible_engines(tmp_path, monkeypatch, version):
    stand_in(monkeypatch, version)
    paths = [engine(tmp_path, version_compatible=True), engine(tmp_path / "plain")]
    api = Api(fake_tensorrt.make(version, lean=True))
    one = Execution(paths[0], api, CPU)
    check(one, feed(one, 2, 3, 4, 8))
    with pytest.raises(InputError, match="lean runtime"):
        one.information()
    with pytest.raises(InputError, match=f"build it again from .*--version-compatible, tensorrt_lean {version} would"):
        Execution(paths[1], api, CPU)
    with pytest.raises(InputError, match="builds no engines"):
        build(tmp_path / "a.onnx", tmp_path / "b.engine", BuildConfig(), api)


def test_weights_come_from_the_onnx_file(tmp_path, monkeypatch):
    api = stand_in(monkeypatch, "10.3.0")
    path, moved = engine(tmp_path, strip_weights=True, version_compatible=True), tmp_path / "elsewhere"
    moved.mkdir()
    path, onnx = moved / path.name, moved / "a.onnx"
    for names in (("a.engine", "a.engine.json"), ("a.onnx",)):  # away from the ONNX file, and with it
        for name in names:
            (tmp_path / name).rename(moved / name)
        one = Execution(path, api, CPU)
        check(one, feed(one, 2, 3, 4, 8))
    with pytest.raises(InputError, match=r"runtime 10\.3\.0 cannot add; build it without --strip-weights"):
        Execution(path, Api(fake_tensorrt.make("10.3.0", lean=True)), CPU)
    monkeypatch.setattr(api.module.OnnxParserRefitter, "refit_from_file", lambda self, path: False)
    with pytest.raises(InputError, match=r"the weights of .*a\.onnx: TensorRT gives no reason"):
        Execution(path, api, CPU)
    for content, named in ((onnx.read_bytes() + b" ", "a.onnx has changed"), (None, "a.onnx has its weights")):
        onnx.unlink() if content is None else onnx.write_bytes(content)
        with pytest.raises(InputError, match=named):
            Execution(path, api, CPU)


@pytest.mark.parametrize(
    ("version", "here", "options", "helps"),
    [
        ("10.9.0", "SM90", {}, "--hardware-compatible ampere+"),
        ("10.9.0", "SM120", {}, "--hardware-compatible ampere+"),
        ("10.9.0", "SM89", {}, "--hardware-compatible same-cc"),
        ("8.6.0", "SM89", {}, "--hardware-compatible ampere+"),
        ("10.9.0", "SM75", {}, ""),
        ("10.9.0", "SM90", {"hardware_compatible": "ampere+"}, ""),
        ("10.9.0", "SM90", {"hardware_compatible": "same-cc"}, "--hardware-compatible ampere+"),
    ],
)
def test_a_refusal_says_what_would_have_helped_on_another_gpu(tmp_path, monkeypatch, version, here, options, helps):
    api = stand_in(monkeypatch, version)
    path = engine(tmp_path, **options)
    path.write_bytes(b"of another GPU")
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: tensorrt_api.Gpu("Other GPU", here, 1 << 30))
    with pytest.raises(InputError, match="Other GPU") as caught:
        Execution(path, api, CPU)
    assert str(caught.value).endswith(f"; built there with {helps}, it would be loaded" if helps else "a.onnx")


def test_engine_of_another_version_or_gpu_or_truncated(tmp_path, monkeypatch):
    stand_in(monkeypatch, "10.3.0")
    path = engine(tmp_path)
    api = stand_in(monkeypatch, "8.6.0")
    with pytest.raises(InputError, match=r"built by TensorRT 10.3.0, and here is TensorRT 8.6.0;"):
        Execution(path, api, CPU)
    for name, options, end in (
        ("TensorRT 10.3.0", {}, "; built with --version-compatible, tensorrt_lean 10.3.0 would load it"),
        (
            "TensorRT 10.3.0",
            {"version_compatible": True},
            "lean 10.3.0 loads it, where TensorRT itself is not installed",
        ),
        ("TensorRT-RTX 1.7.1", {}, "a.onnx"),
    ):
        replace(EngineNote.load(path), api=name, options=options).save(path)
        with pytest.raises(InputError) as caught:
            Execution(path, api, CPU)
        assert str(caught.value).endswith(end)
    path.with_name("a.engine.json").unlink()
    with pytest.raises(InputError, match="not compatible with this version"):
        Execution(path, api, CPU)
    assert ("plugins", "") in api.module.calls  # which an engine of trtexec may have
    path = engine(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    other = tensorrt_api.Gpu("Other GPU", "SM75", 1 << 30)
    for gpu, named in (
        (GPU, "Fake GPU cannot load"),
        (other, f"{GPU.name}, and here is Other GPU"),
        (None, "NVIDIA GPU"),
    ):
        monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None, gpu=gpu: gpu)
        with pytest.raises(InputError, match=named):
            Execution(path, api, CPU)
    replace(EngineNote.load(path), gpu="SM75 SM120").save(path)  # built ahead of time
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: other)
    with pytest.raises(InputError, match="Other GPU cannot load"):
        Execution(path, api, CPU)
