"""What every runner does alike, and what is each one's own.

The network is a 1×1 convolution, whose result NumPy computes again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from one_conv import METADATA, NAMES, WEIGHT, reference, write_onnx
from onnx import TensorProto, numpy_helper
from tensorrt_stand_in import stand_in
from torch import nn
from triton_stand_in import Server, serving

from utils.core.device import device_name
from utils.core.errors import DependencyError, InputError, QatError
from utils.core.tasks import DETECT, SEGMENT
from utils.jobs.model_repository import make
from utils.jobs.open import open_runner
from utils.runners.base import Runner, TensorSpec
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.runners.pytorch import TorchRunner
from utils.serving.options import ServingOptions
from utils.serving.runner import TritonRunner
from utils.trt import onnx_summary, tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.engine_file import EngineNote
from utils.trt.runner import TensorRTRunner


class OneConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.stride = ["cat", "dog"], torch.tensor([8.0, 16.0])
        self.conv = nn.Conv2d(3, 6, 1, bias=False)
        self.conv.weight.data = torch.from_numpy(WEIGHT)[..., None, None]

    def forward(self, images):
        raw = self.conv(images)
        return raw.flatten(2), [raw]  # as upstream: predictions first, feature maps beside


class OneConvWithPrototypes(OneConv):
    """One class, one mask coefficient, and a prototype, as upstream's segment heads give them."""

    def __init__(self):
        super().__init__()
        self.names, self.nm = ["cat"], 1

    def forward(self, images):
        raw = self.conv(images)
        return raw.flatten(2), ([raw], raw[:, 5:].flatten(2), raw[:, 5:])


def build_engine(folder, api=None, **more):
    """A float32 engine of the same network for any batch up to 4 and sizes up to 64."""
    about = {key: value for key, value in METADATA.items() if key != "stride"}  # the sizes here are no multiples of it
    file = write_onnx(folder / "a.onnx", metadata=about, **more)
    config = BuildConfig(batch=(1, 2, 4), height=(1, 8, 64), width=(1, 8, 64), precision="fp32", progress=False)
    return build(file, folder / "a.engine", config, api).path


def stand_in_runner(folder, api):
    return TensorRTRunner(build_engine(folder, api), "cpu", api=api)


@pytest.fixture(scope="session")
def engine_on_gpu(tmp_path_factory):
    """The engine, built once: a builder takes seconds to start."""
    return build_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server with the network as `detect`, and with its second output as `segment`."""
    folder = tmp_path_factory.mktemp("server")
    one = {**METADATA, "names": '["cat"]'}
    with_masks = write_onnx(folder / "b.onnx", prototypes=True, metadata=one)
    make(ServingOptions(file=write_onnx(folder / "a.onnx"), output=folder / "models", name="detect", no_nms=True))
    make(ServingOptions(file=with_masks, output=folder / "models", name="segment", no_nms=True))
    with serving(folder / "models") as found:
        yield found


def asked(server: Server, model: str, param: str) -> TritonRunner:
    way = param.removeprefix("triton ")
    return TritonRunner(model, way, getattr(server, way))


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
          pytest.mark.skipif(tensorrt_api.installed() is None, reason="TensorRT is not installed")]  # fmt: skip


EVERY = ["torch", "onnxruntime", "triton http", "triton grpc", "tensorrt stand-in",
         pytest.param("tensorrt", marks=ON_GPU)]  # fmt: skip


@pytest.fixture(params=EVERY)
def runner(request, tmp_path, monkeypatch):
    """The stand-in has TensorRT's interface, and checks and computes on the CPU what the runner tells it."""
    if request.param == "torch":
        made: Runner = TorchRunner(OneConv(), "cpu")
    elif request.param == "onnxruntime":
        made = open_runner(write_onnx(tmp_path / "a.onnx"))
    elif request.param.startswith("triton"):
        made = asked(request.getfixturevalue("server"), "detect", request.param)
    elif request.param == "tensorrt":
        made = open_runner(request.getfixturevalue("engine_on_gpu"), "cuda")
    else:
        made = stand_in_runner(tmp_path, stand_in(monkeypatch))
    with made:
        yield made


@pytest.fixture(scope="session")
def segment_engine_on_gpu(tmp_path_factory):
    return build_engine(tmp_path_factory.mktemp("engine"), prototypes=True)


@pytest.fixture(params=EVERY)
def segment_runner(request, tmp_path, monkeypatch):
    """The same network with a second output."""
    if request.param == "torch":
        made: Runner = TorchRunner(OneConvWithPrototypes(), "cpu")
    elif request.param == "onnxruntime":
        made = open_runner(write_onnx(tmp_path / "a.onnx", prototypes=True))
    elif request.param.startswith("triton"):
        made = asked(request.getfixturevalue("server"), "segment", request.param)
    elif request.param == "tensorrt":
        made = open_runner(request.getfixturevalue("segment_engine_on_gpu"), "cuda")
    else:
        api = stand_in(monkeypatch)
        made = TensorRTRunner(build_engine(tmp_path, api, prototypes=True), "cpu", api=api)
    with made:
        yield made


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class TestEveryRunner:
    def test_says_what_it_takes_and_gives(self, runner):
        assert runner.inputs == (TensorSpec("images", (None, 3, None, None), "float32"),)
        assert runner.outputs == (TensorSpec("output0", (None, 6, None), "float32"),)
        assert runner.task is DETECT
        assert runner.names == NAMES
        assert runner.stride == 32
        assert device_name(runner.device) in runner.description

    @pytest.mark.parametrize("shape", [(1, 3, 4, 5), (3, 3, 8, 8)])
    def test_agrees_with_numpy(self, runner, shape):
        feed = images(*shape)
        result = runner.infer({"images": feed})
        assert set(result) == {"output0"}
        assert result["output0"].device == runner.device
        np.testing.assert_allclose(result["output0"].cpu(), reference(feed.numpy()), atol=1e-5)

    def test_takes_a_view_that_is_not_contiguous(self, runner):
        feed = images(2, 4, 4, 3).permute(0, 3, 1, 2)
        np.testing.assert_allclose(runner.infer({"images": feed})["output0"].cpu(), reference(feed.numpy()), atol=1e-5)

    def test_needs_no_gradient(self, runner):
        assert not runner.infer({"images": images(1, 3, 2, 2).requires_grad_()})["output0"].requires_grad

    def test_runs_in_and_out_of_inference_mode(self, runner):
        feed = images(2, 3, 4, 4)
        with torch.inference_mode():
            runner.infer({"images": feed})
            first = runner.infer({"images": feed.clone()})["output0"].cpu().clone()
        assert torch.equal(runner.infer({"images": feed})["output0"].cpu(), first)

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({}, r"received inputs \[\]; the network takes images float32 \[any, 3, any, any\]"),
            ({"image": images(1, 3, 4, 4)}, r"received inputs \['image'\]"),
            ({"images": images(1, 3, 4, 4).half()}, r"input images is float16 \[1, 3, 4, 4\]; the network takes"),
            ({"images": images(1, 4, 4, 4)}, r"input images is float32 \[1, 4, 4, 4\]"),
            ({"images": images(3, 4, 4)}, r"input images is float32 \[3, 4, 4\]"),
        ],
    )
    def test_says_what_it_received_and_expected(self, runner, feeds, message):
        with pytest.raises(InputError, match=message):
            runner.infer(feeds)

    def test_a_closed_runner_says_so(self, runner):
        with runner as same:
            assert same is runner
        runner.close()  # twice is fine
        with pytest.raises(QatError, match="is closed; open the file again"):
            runner.infer({"images": images(1, 3, 4, 4)})
        with pytest.raises(QatError, match="is closed"), runner:
            pass


class TestEveryRunnerOfMasks:
    def test_says_what_it_gives(self, segment_runner):
        assert segment_runner.task is SEGMENT
        assert segment_runner.outputs == (
            TensorSpec("output0", (None, 6, None), "float32"), TensorSpec("output1", (None, 1, None, None), "float32"),
        )  # fmt: skip

    @pytest.mark.parametrize("shape", [(1, 3, 4, 5), (3, 3, 8, 8)])
    def test_both_outputs_agree_with_numpy(self, segment_runner, shape):
        feed = images(*shape)
        result = segment_runner.infer({"images": feed})
        assert list(result) == ["output0", "output1"]
        expected = reference(feed.numpy())
        np.testing.assert_allclose(result["output0"].cpu(), expected, atol=1e-5)
        np.testing.assert_allclose(result["output1"].cpu().flatten(2), expected[:, 5:], atol=1e-5)


# PyTorch


def test_torch_runner_leaves_the_network_as_it_was():
    model = OneConv().train()
    with TorchRunner(model, "cpu") as runner:
        assert not model.training
        runner.infer({"images": images(1, 3, 2, 2)})
    assert model.training
    with pytest.raises(InputError, match="half precision needs a CUDA device, this is cpu"):
        TorchRunner(model, "cpu", half=True)


def test_torch_runner_of_a_network_without_names():
    model = OneConv()
    del model.names
    runner = TorchRunner(model, "cpu")
    assert runner.names is None
    assert runner.outputs[0].shape == (None, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_torch_runner_in_half_precision():
    model = OneConv()
    with TorchRunner(model, "cuda", half=True) as runner:
        result = runner.infer({"images": images(2, 3, 4, 4).half()})["output0"]
    assert result.dtype == torch.float16
    assert result.device.type == "cuda"
    assert model.conv.weight.dtype == torch.float32  # a copy was converted
    np.testing.assert_allclose(result.cpu().float(), reference(images(2, 3, 4, 4).numpy()), atol=1e-2)


# ONNX Runtime


def test_fixed_sizes(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "a.onnx", (2, 3, 4, 8)))
    assert runner.inputs[0].shape == (2, 3, 4, 8)
    assert runner.outputs[0].shape == (2, 6, 32)
    assert runner.infer({"images": images(2, 3, 4, 8)})["output0"].shape == (2, 6, 32)
    with pytest.raises(InputError, match=r"is float32 \[1, 3, 4, 8\]; the network takes images float32 \[2, 3, 4, 8\]"):
        runner.infer({"images": images(1, 3, 4, 8)})


def test_float16_input_and_several_outputs(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "a.onnx", dtype=TensorProto.FLOAT16, extra_output=True))
    assert [spec.name for spec in runner.outputs] == ["output0", "raw"]
    feed = images(2, 3, 4, 4).half()
    result = runner.infer({"images": feed})
    assert {tensor.dtype for tensor in result.values()} == {torch.float16}
    np.testing.assert_allclose(result["output0"].float(), reference(feed.float().numpy()), atol=1e-2)
    torch.testing.assert_close(result["raw"].flatten(2), result["output0"])


@pytest.mark.parametrize(
    ("metadata", "names", "stride", "imgsz"),
    [
        ({}, None, 32, None),
        ({"names": "{0: 'cat', 1: 'dog'}", "stride": "64", "imgsz": "320"}, NAMES, 64, (320, 320)),  # upstream
        ({"names": '["cat", "dog"]', "stride": "none", "imgsz": "[64, 96]"}, NAMES, 32, (64, 96)),
        ({"names": "[" * 9999, "stride": "Infinity", "imgsz": "-" * 9999 + "1"}, None, 32, None),
        ({"names": "__import__('os')", "imgsz": "[1, 2, 3]"}, None, 32, None),
    ],
)  # fmt: skip
def test_metadata_of_several_writers(tmp_path, metadata, names, stride, imgsz):
    runner = open_runner(write_onnx(tmp_path / "a.onnx", metadata=metadata))
    assert (runner.names, runner.stride, runner.imgsz) == (names, stride, imgsz)
    assert runner.metadata == metadata


def test_threads_are_told(tmp_path):
    assert OnnxRuntimeRunner(write_onnx(tmp_path / "a.onnx"), threads=1).description.endswith("CPU, 1 threads")


def test_a_network_that_fails_while_running_is_one_line(tmp_path):
    """Declared for any size, but its reshape only fits 4×4."""
    path = write_onnx(tmp_path / "a.onnx")
    model = onnx.load(path)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array([1, 6, 16], np.int64), "target"))
    onnx.save(model, path)
    with pytest.raises(InputError, match=r"a\.onnx does not run on images \[1, 3, 8, 8\]: ") as caught:
        open_runner(path).infer({"images": images(1, 3, 8, 8)})
    assert "\n" not in str(caught.value)


# TensorRT


def test_graphs_are_replayed_where_shapes_repeat(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    with stand_in_runner(tmp_path, api) as runner:
        assert runner.limits == {"images": ((1, 3, 1, 1), (4, 3, 64, 64))}
        before = len(api.module.calls)
        for shape in ((2, 3, 4, 4), (2, 3, 4, 4), (2, 3, 4, 4), (1, 3, 4, 4), (2, 3, 4, 4)):
            feed = images(*shape) * sum(shape)
            np.testing.assert_allclose(runner.infer({"images": feed})["output0"], reference(feed.numpy()), atol=1e-4)
        # run; run, captured (a replay enqueues nothing); run; run
        assert len(api.module.calls) - before == 5
        assert runner.times() == {"copy": 1.0, "compute": 1.0}


def test_an_engine_that_cannot_be_captured_runs_on(tmp_path, monkeypatch, caplog):
    from utils.trt.context import Execution

    def refuse(self):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Execution, "graph", refuse)
    with stand_in_runner(tmp_path, stand_in(monkeypatch)) as runner:
        for _ in range(3):
            result = runner.infer({"images": images(2, 3, 4, 4)})["output0"]
            np.testing.assert_allclose(result, reference(images(2, 3, 4, 4).numpy()), atol=1e-5)
    assert caplog.text.count("runs without CUDA graphs: operation not permitted when stream is capturing") == 1


@pytest.mark.parametrize("operator", ["NonMaxSuppression", "NonZero", "Identity"])
def test_an_engine_with_results_of_unknown_size_is_not_captured(tmp_path, monkeypatch, operator):
    """With torch before 2.12 a capture that fails is one that never ends."""
    api = stand_in(monkeypatch)
    path = build_engine(tmp_path, api)
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.node.append(onnx.helper.make_node(operator, ["raw"], ["unread"]))
    note = EngineNote.load(path)
    replace(note, data_dependent=onnx_summary.describe(model, path).data_dependent).save(path)
    with TensorRTRunner(path, "cpu", api=api) as runner:
        before = len(api.module.calls)
        for number in range(1, 5):
            feed = images(2, 3, 4, 4) * number
            np.testing.assert_allclose(runner.infer({"images": feed})["output0"], reference(feed.numpy()), atol=1e-4)
        enqueued = len(api.module.calls) - before
    assert enqueued == (3 if operator == "Identity" else 4)  # captured at the second run, and replayed from then on


def test_shapes_outside_the_profile(tmp_path, monkeypatch):
    with stand_in_runner(tmp_path, stand_in(monkeypatch)) as runner:
        with pytest.raises(
            InputError, match=r"takes images from \[1, 3, 1, 1\] to \[4, 3, 64, 64\], not \[5, 3, 4, 4\]"
        ):
            runner.infer({"images": images(5, 3, 4, 4)})
        assert runner.infer({"images": images(4, 3, 4, 4)})["output0"].shape == (4, 6, 16)


def test_an_engine_without_its_note(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    stand_in_runner(tmp_path, api).close()
    (tmp_path / "a.engine.json").unlink()
    with TensorRTRunner(tmp_path / "a.engine", "cpu", api=api) as runner:
        assert (runner.names, runner.metadata, runner.stride) == (None, {}, 32)


# open_runner


def test_cuda_without_its_provider_falls_back_and_says_so(tmp_path, caplog):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    runner = open_runner(write_onnx(tmp_path / "a.onnx"), "cuda:0")
    assert runner.device == torch.device("cpu")
    assert "no CUDA provider" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.onnx", None, "a.onnx does not exist"),
        ("a.onnx", b"", "cannot load .*a.onnx: "),
        ("a.onnx", b"not a graph", "cannot load .*a.onnx: "),
        ("a.xml", b"<x/>", "expected .onnx, .engine, .plan or .pt"),
        ("a.engine", None, "a.engine does not exist"),
    ],
)
def test_files_that_cannot_be_opened(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        open_runner(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_truncated_onnx(tmp_path):
    path = write_onnx(tmp_path / "a.onnx")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="cannot load"):
        open_runner(path)


def test_a_file_with_tensorrts_plugin(tmp_path):
    model = onnx.load(write_onnx(tmp_path / "a.onnx"))
    model.graph.node.append(onnx.helper.make_node("EfficientNMS_TRT", ["output0"], ["num_dets"], domain="TRT"))
    model.opset_import.append(onnx.helper.make_opsetid("TRT", 1))
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(InputError, match=r"cannot load .*a\.onnx: it has a plugin of TensorRT's, .* with --nms onnx$"):
        open_runner(tmp_path / "a.onnx")


@pytest.mark.parametrize("suffix", [".engine", ".plan"])
def test_an_engine_without_tensorrt_says_what_to_install(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(tensorrt_api, "installed", lambda: None)
    path = Path(tmp_path / f"a{suffix}")
    path.write_bytes(b"engine")
    with pytest.raises(DependencyError, match=r"install_dependencies\.sh --tensorrt"):
        open_runner(path)
    monkeypatch.setattr(tensorrt_api, "installed", lambda: "tensorrt")
    with pytest.raises(InputError, match=r"runs on an NVIDIA GPU only, and the device is cpu; the \.onnx"):
        open_runner(path)


def test_onnx_runtime_that_is_not_installed(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DependencyError, match="pip install onnxruntime"):
        OnnxRuntimeRunner(tmp_path / "a.onnx")
