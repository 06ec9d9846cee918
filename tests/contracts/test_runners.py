"""What every runner does alike, and what is each one's own.

The network is a 1×1 convolution, whose result NumPy computes again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from models.quantize.errors import DependencyError, InputError, QatError
from utils.engine import open_runner
from utils.engine.onnxruntime_runner import OnnxRuntimeRunner
from utils.engine.runner import Runner, TensorSpec
from utils.engine.torch_runner import TorchRunner

NAMES = {0: "cat", 1: "dog"}
WEIGHT = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def reference(images):
    return np.einsum("oc,bchw->bohw", WEIGHT, images).reshape(len(images), 6, -1)


class OneConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.stride = ["cat", "dog"], torch.tensor([8.0, 16.0])
        self.conv = nn.Conv2d(3, 6, 1, bias=False)
        self.conv.weight.data = torch.from_numpy(WEIGHT)[..., None, None]

    def forward(self, images):
        raw = self.conv(images)
        return raw.flatten(2), [raw]  # as upstream: predictions first, feature maps beside


def write_onnx(path, shape=("batch", 3, "height", "width"), dtype=TensorProto.FLOAT, extra_output=False, metadata=None):
    weight = numpy_helper.from_array(WEIGHT[..., None, None].astype(helper.tensor_dtype_to_np_dtype(dtype)), "weight")
    target = numpy_helper.from_array(np.array([0, 6, -1], np.int64), "target")
    nodes = [helper.make_node("Conv", ["images", "weight"], ["raw"]),
             helper.make_node("Reshape", ["raw", "target"], ["output0"])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("output0", dtype, [shape[0], 6, "anchors"])]
    if extra_output:
        outputs.append(helper.make_tensor_value_info("raw", dtype, [shape[0], 6, *shape[2:]]))
    graph = helper.make_graph(nodes, "one_conv", [helper.make_tensor_value_info("images", dtype, shape)], outputs,
                              [weight, target])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    metadata = {"names": json.dumps(NAMES), "stride": "32", "imgsz": "[64, 96]"} if metadata is None else metadata
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    return path


@pytest.fixture(params=["torch", "onnxruntime"])
def runner(request, tmp_path):
    if request.param == "torch":
        made: Runner = TorchRunner(OneConv(), "cpu")
    else:
        made = open_runner(write_onnx(tmp_path / "a.onnx"))
    with made:
        yield made


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class TestEveryRunner:
    def test_says_what_it_takes_and_gives(self, runner):
        assert runner.inputs == (TensorSpec("images", (None, 3, None, None), "float32"),)
        assert runner.outputs == (TensorSpec("output0", (None, 6, None), "float32"),)
        assert runner.names == NAMES
        assert runner.stride == 32
        assert runner.device == torch.device("cpu")
        assert "CPU" in runner.description

    @pytest.mark.parametrize("shape", [(1, 3, 4, 5), (3, 3, 8, 8)])
    def test_agrees_with_numpy(self, runner, shape):
        feed = images(*shape)
        result = runner.infer({"images": feed})
        assert set(result) == {"output0"}
        assert result["output0"].device == runner.device
        np.testing.assert_allclose(result["output0"].numpy(), reference(feed.numpy()), atol=1e-5)

    def test_takes_a_view_that_is_not_contiguous(self, runner):
        feed = images(2, 4, 4, 3).permute(0, 3, 1, 2)
        np.testing.assert_allclose(runner.infer({"images": feed})["output0"], reference(feed.numpy()), atol=1e-5)

    def test_needs_no_gradient(self, runner):
        assert not runner.infer({"images": images(1, 3, 2, 2).requires_grad_()})["output0"].requires_grad

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


@pytest.mark.parametrize("suffix", [".engine", ".plan"])
def test_an_engine_without_tensorrt_says_what_to_install(tmp_path, monkeypatch, suffix):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorrt" else find(name, *a))
    path = Path(tmp_path / f"a{suffix}")
    path.write_bytes(b"engine")
    with pytest.raises(DependencyError, match=r"install_dependencies\.sh --tensorrt"):
        open_runner(path)


def test_onnx_runtime_that_is_not_installed(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DependencyError, match="pip install onnxruntime"):
        OnnxRuntimeRunner(tmp_path / "a.onnx")
