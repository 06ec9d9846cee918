"""Running engines: call order, addresses, graphs, shapes and refusals, on stand-ins that compute with ONNX Runtime."""

from dataclasses import replace

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


def test_engine_of_another_version_or_gpu_or_truncated(tmp_path, monkeypatch):
    stand_in(monkeypatch, "10.3.0")
    path = engine(tmp_path)
    api = stand_in(monkeypatch, "8.6.0")
    with pytest.raises(InputError, match=r"built by TensorRT 10.3.0, and here is TensorRT 8.6.0;"):
        Execution(path, api, CPU)
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
