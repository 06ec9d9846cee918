"""What every runner does alike, and what is each one's own.

The network is a 1×1 convolution, whose result NumPy computes again.
"""

from dataclasses import replace

import cv2
import numpy as np
import onnx
import pytest
import torch
from one_conv import METADATA, NAMES, WEIGHT, reference, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import stand_in
from torch import nn
from triton_stand_in import serving

from utils.core.device import device_name
from utils.core.errors import InputError, QatError
from utils.core.input_spec import FLOATS, InputSpec
from utils.core.tasks import SEGMENT
from utils.jobs.model_repository import make
from utils.jobs.open import open_runner
from utils.runners import onnxrt
from utils.runners.base import TensorSpec, as_feed
from utils.runners.pytorch import TorchRunner
from utils.serving.options import ServingOptions
from utils.serving.runner import TritonRunner
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_file import OnnxFile
from utils.trt.runner import TensorRTRunner


class OneConv(nn.Module):
    """One class, one mask coefficient, and a prototype, as upstream's segment heads give them."""

    def __init__(self):
        super().__init__()
        self.names, self.nm, self.stride = ["cat"], 1, torch.tensor([8.0, 16.0])
        self.conv = nn.Conv2d(3, 6, 1, bias=False)
        self.conv.weight.data = torch.from_numpy(WEIGHT)[..., None, None]

    def forward(self, images):
        raw = self.conv(images)
        return raw.flatten(2), ([raw], raw[:, 5:].flatten(2), raw[:, 5:])


def build_engine(folder, api=None, **more):
    """A float32 engine of the same network for any batch up to 4 and sizes up to 64."""
    about = {key: value for key, value in METADATA.items() if key != "stride"}  # the sizes here are no multiples of it
    file = write_onnx(folder / "a.onnx", metadata=about, **more)
    config = BuildConfig(batch=(1, 2, 4), height=(1, 8, 64), width=(1, 8, 64), precision="fp32", progress=False)
    engine = folder / "a.engine"
    build(file, engine, config, api)
    return engine


def stand_in_runner(folder, api, **more):
    return TensorRTRunner(build_engine(folder, api, **more), "cpu", api=api)


@pytest.fixture(scope="session")
def engine_on_gpu(tmp_path_factory):
    """The engine, built once: a builder takes seconds to start."""
    return build_engine(tmp_path_factory.mktemp("engine"), prototypes=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    file = write_onnx(folder / "a.onnx", prototypes=True, metadata={**METADATA, "names": '["cat"]'})
    make(ServingOptions(file=file, output=folder / "models", name="segment", no_nms=True))
    with serving(folder / "models") as found:
        yield found


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
          pytest.mark.skipif(tensorrt_api.installed_module() is None, reason="TensorRT is not installed")]  # fmt: skip
EVERY = ["torch", "onnxruntime", "openvino", "triton", "tensorrt stand-in",
         pytest.param("tensorrt", marks=ON_GPU)]  # fmt: skip


@pytest.fixture(params=EVERY)
def runner(request, tmp_path, monkeypatch):
    """A runner of the network with both outputs.

    The stand-in has TensorRT's interface, and checks and computes on the CPU what the runner tells it.
    """
    kind, _, stands_in = request.param.partition(" ")
    if kind == "torch":
        made = TorchRunner(OneConv(), "cpu")
    elif kind == "onnxruntime":
        made = open_runner(write_onnx(tmp_path / "a.onnx", prototypes=True))
    elif kind == "openvino":
        made = open_runner(write_onnx(tmp_path / "a.onnx", prototypes=True), openvino="CPU")
    elif kind == "triton":
        made = TritonRunner("segment", request.getfixturevalue("server"))
    elif stands_in:
        made = stand_in_runner(tmp_path, stand_in(monkeypatch), prototypes=True)
    else:
        made = open_runner(request.getfixturevalue("engine_on_gpu"), "cuda")
    with made:
        yield made


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class TestEveryRunner:
    def test_says_what_it_takes_and_gives(self, runner):
        assert runner.inputs == (TensorSpec("images", (None, 3, None, None), "float32"),)
        assert runner.outputs == (
            TensorSpec("output0", (None, 6, None), "float32"), TensorSpec("output1", (None, 1, None, None), "float32"),
        )  # fmt: skip
        assert runner.task is SEGMENT
        assert runner.stride == 32
        assert device_name(runner.device) in runner.description

    @pytest.mark.parametrize("shape", [(1, 3, 4, 5), (3, 3, 8, 8), "view"])
    def test_agrees_with_numpy_in_and_out_of_inference_mode(self, runner, shape):
        """Also of a view that is not contiguous, and without a gradient."""
        feed = images(2, 4, 4, 3).permute(0, 3, 1, 2) if shape == "view" else images(*shape).requires_grad_()
        result = {name: value.cpu() for name, value in runner.infer({"images": feed}).items()}
        assert list(result) == ["output0", "output1"]
        assert not result["output0"].requires_grad
        expected = reference(feed.detach().numpy())
        np.testing.assert_allclose(result["output0"], expected, atol=1e-5)
        np.testing.assert_allclose(result["output1"].flatten(2), expected[:, 5:], atol=1e-5)
        with torch.inference_mode():
            again = runner.infer({"images": feed.detach().clone()})["output0"]
        assert again.device == runner.device
        assert torch.equal(again.cpu(), result["output0"])

    @pytest.mark.parametrize(
        ("feeds", "message"),
        [
            ({}, r"received inputs \[\]; the model takes images float32 \[any, 3, any, any\]"),
            ({"image": images(1, 3, 4, 4)}, r"received inputs \['image'\]"),
            ({"images": images(1, 3, 4, 4).half()}, r"input images is float16 \[1, 3, 4, 4\]; the model takes"),
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


# images → what networks take


def every_pixel():
    """Each value in each channel, `[2, 3, 16, 16]`, in another order."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(256, generator=generator) for _ in range(6)]).view(2, 3, 16, 16).byte()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_are_fractions_of_255(dtype):
    images = every_pixel()
    expected = (images.numpy().astype(np.float64) / 255).astype(dtype)
    found = as_feed(images, FLOATS, dtype)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2**-23 if dtype == "float32" else 2**-10)
    assert str(found.dtype) == f"torch.{dtype}"


def test_bytes_stay_bytes():
    images = every_pixel()
    assert as_feed(images, InputSpec("uint8"), "uint8") is images
    last = as_feed(images, InputSpec("uint8", "nhwc"), "uint8")
    np.testing.assert_array_equal(last.numpy(), images.numpy().transpose(0, 2, 3, 1))


@pytest.mark.parametrize("grey", [True, False])
def test_a_network_of_one_channel_gets_opencvs_grey(grey):
    """The same grey as OpenCV's to the last bit; grey pictures stay what they are."""
    images = every_pixel()[:, :1].repeat(1, 3, 1, 1) if grey else torch.randint(256, (2, 3, 256, 256)).byte()
    expected = np.stack([cv2.cvtColor(image.numpy().transpose(1, 2, 0), cv2.COLOR_RGB2GRAY) for image in images])
    found = as_feed(images, InputSpec("uint8", "nhwc", 1), "uint8")
    np.testing.assert_array_equal(found.numpy(), expected[..., None])
    floats = as_feed(images, InputSpec(channels=1), "float32")[:, 0]
    np.testing.assert_array_equal(floats.numpy(), expected / np.float32(255))
    if grey:
        assert torch.equal(found[..., 0], images[:, 0])


# PyTorch


def test_torch_runner_leaves_the_network_as_it_was():
    model = OneConv().train()
    with TorchRunner(model, "cpu") as runner:
        assert not model.training
        runner.infer({"images": images(1, 3, 2, 2)})
    assert model.training


# ONNX Runtime


def test_fixed_sizes(tmp_path):
    runner = open_runner(write_onnx(tmp_path / "a.onnx", (2, 3, 4, 8)))
    assert runner.infer({"images": images(2, 3, 4, 8)})["output0"].shape == runner.outputs[0].shape == (2, 6, 32)
    with pytest.raises(InputError, match=r"is float32 \[1, 3, 4, 8\]; the model takes images float32 \[2, 3, 4, 8\]"):
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


@pytest.mark.parametrize(("first", "typing", "warned"), [("99", "strong", 1), ("99", "weak", 0), ("1.16", "strong", 0)])
def test_a_release_that_computes_other_values_from_fp16_scales_is_said(
    first, typing, warned, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(onnxrt, "FP16_SCALES", onnxrt.Version(first))
    file = write_onnx(tmp_path / "a.onnx", quantized=True, metadata={**METADATA, "typing": typing, "kind": "ptq"})
    with open_runner(file):
        assert len(caplog.messages) == warned == sum("--typing weak" in message for message in caplog.messages)


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


def test_an_engine_that_cannot_be_captured_runs_on(tmp_path, monkeypatch, caplog):
    from utils.trt.runner import Execution

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
    replace(note, data_dependent=OnnxFile.of_model(model, path).data_dependent).save(path)
    with TensorRTRunner(path, "cpu", api=api) as runner:
        before = len(api.module.calls)
        for number in range(1, 5):
            feed = images(2, 3, 4, 4) * number
            np.testing.assert_allclose(runner.infer({"images": feed})["output0"], reference(feed.numpy()), atol=1e-4)
        enqueued = len(api.module.calls) - before
    assert enqueued == (3 if operator == "Identity" else 4)  # captured at the second run, and replayed from then on


# open_runner


def test_cuda_without_its_provider_falls_back_and_says_so(tmp_path, caplog):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    runner = open_runner(write_onnx(tmp_path / "a.onnx"), "cuda:0")
    assert runner.device == torch.device("cpu")
    assert "CUDA provider" in caplog.text
