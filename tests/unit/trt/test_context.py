"""Running and timing engines: call order, addresses, graphs and shapes, on stand-ins that compute with ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_conv import reference, write_onnx
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import InputError
from utils.trt import layer_report, tensorrt_api, timing
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.context import Execution

CPU = torch.device("cpu")


def engine(folder, shape=(2, 3, 4, 8), name="a", **changes):
    config = BuildConfig(progress=False, **changes)
    return build(write_onnx(folder / f"{name}.onnx", shape, extra_output=True), folder / f"{name}.engine", config).path


def feed(execution, *shape):
    images = torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    execution.set_shapes({"images": shape})
    execution.buffers["images"].copy_(images)
    return images.numpy()


def test_static_engine_runs_at_the_addresses_it_was_given(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    execution = Execution(engine(tmp_path), api, CPU)
    assert [str(spec) for spec in execution.outputs] == ["output0 float32 [2, 6, any]", "raw float32 [2, 6, 4, 8]"]
    images = feed(execution, 2, 3, 4, 8)
    execution.run()
    np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)
    np.testing.assert_allclose(execution.buffers["raw"].flatten(2), reference(images), atol=1e-5)
    execution.close()


def test_dynamic_shapes_and_graphs(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    path = engine(tmp_path, ("batch", 3, "h", "w"), batch=(1, 2, 4), height=(32, 32, 64), width=(32, 32, 64))
    execution = Execution(path, api, CPU)
    assert execution.buffers == {}
    for shape in ((2, 3, 32, 64), (1, 3, 64, 32), (4, 3, 64, 64), (2, 3, 32, 64)):
        images = feed(execution, *shape)
        graph = execution.graph()
        execution.buffers["output0"].zero_()
        graph.replay()
        np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)
        assert execution.graph() is graph
    for shape in ((5, 3, 32, 32), (1, 3, 96, 32), (1, 3, 32)):
        with pytest.raises(InputError, match=r"takes images from \[1, 3, 32, 32\] to \[4, 3, 64, 64\], not"):
            execution.set_shapes({"images": shape})


def test_shapes_whose_outputs_found_no_memory_are_set_again(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    execution = Execution(engine(tmp_path, ("batch", 3, 4, 8), batch=(1, 2, 4)), api, CPU)
    view = execution._view
    with monkeypatch.context() as short:
        short.setattr(execution, "_view", lambda spec, shape: view(spec, shape) if spec.name == "images" else 1 // 0)
        with pytest.raises(ZeroDivisionError):
            execution.set_shapes({"images": (2, 3, 4, 8)})
    images = feed(execution, 2, 3, 4, 8)
    execution.run()
    np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)


@pytest.mark.parametrize("streams", [0, 3, 31])
def test_auxiliary_streams_are_torchs(tmp_path, monkeypatch, streams):
    """The stand-in refuses to capture an engine with streams of its own, and auxiliary ones that are not different."""
    api = stand_in(monkeypatch)
    execution = Execution(engine(tmp_path, max_aux_streams=streams), api, CPU)
    for one in (execution, execution.sibling()):
        images = feed(one, 2, 3, 4, 8)
        one.layer_times(runs=1)  # which starts a fresh context
        one.graph().replay()
        np.testing.assert_allclose(one.buffers["output0"], reference(images), atol=1e-5)


def test_layer_times_are_means_without_warming_up(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    execution = Execution(engine(tmp_path), api, CPU)
    before = len(api.module.calls)
    assert execution.layer_times(runs=4) == {"raw": 0.5, "output0": 0.5}
    assert len(api.module.calls) == before + 7
    delattr(api.module, "IProfiler")
    assert execution.layer_times() == {}


def test_layers_of_free_shapes(tmp_path, monkeypatch):
    """As seen with 8.6: a second context has no profile, and formats are known after a run."""
    api = stand_in(monkeypatch)
    path = engine(tmp_path, ("batch", 3, "h", "w"), batch=(1, 2, 4), height=(32, 32, 64), width=(32, 32, 64))
    execution = Execution(path, api, CPU)
    execution.set_shapes({"images": (2, 3, 32, 64)})
    images = feed(execution, 2, 3, 32, 64)
    execution.graph()  # of a context that is gone afterwards
    layers = layer_report.layers_of(execution, runs=2)
    assert [(layer.name, layer.ms, layer.outputs[0].dtype) for layer in layers] == [
        ("raw", 0.5, "FP32"), ("output0", 0.5, "FP32")
    ]  # fmt: skip
    execution.buffers["output0"].zero_()
    execution.graph().replay()
    np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; expected a TensorRT engine"),
        (b"", "Magic tag does not match"),
        (b"no engine", "Magic tag does not match"),
    ],
)
def test_files_that_are_no_engine(tmp_path, monkeypatch, content, message):
    api = stand_in(monkeypatch)
    if content is not None:
        (tmp_path / "a.engine").write_bytes(content)
    with pytest.raises(InputError, match=message):
        Execution(tmp_path / "a.engine", api, CPU)


def test_engine_of_another_version_or_gpu_or_truncated(tmp_path, monkeypatch):
    stand_in(monkeypatch, "10.3.0")
    path = engine(tmp_path)
    api = stand_in(monkeypatch, "8.6.0")
    with pytest.raises(InputError, match=r"was built by TensorRT 10.3.0, and here is TensorRT 8.6.0; build it again"):
        Execution(path, api, CPU)
    path.with_name("a.engine.json").unlink()
    with pytest.raises(InputError, match="not compatible with this version of TensorRT; build it again here from its"):
        Execution(path, api, CPU)
    path = engine(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="Fake GPU cannot load this engine"):
        Execution(path, api, CPU)
    other = tensorrt_api.Gpu("Other GPU", "SM75", 1 << 30)
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: other)
    with pytest.raises(InputError, match=f"was built for {GPU.name}, and here is Other GPU"):
        Execution(path, api, CPU)
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    with pytest.raises(InputError, match="needs an NVIDIA GPU, and torch sees none"):
        Execution(path, api, CPU)


def test_summary_against_numpy():
    values = np.random.default_rng(0).gamma(2.0, size=301)
    found = timing.Summary.of(list(values))
    ordered = np.sort(values)
    assert (found.min, found.max, found.count) == (ordered[0], ordered[-1], 301)
    assert found.mean == pytest.approx(values.mean())
    assert found.median == ordered[150]
    assert [found.p90, found.p95, found.p99] == [ordered[270], ordered[285], ordered[297]]
