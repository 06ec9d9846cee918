"""Images → what networks take: beside NumPy, and for INT8 beside ONNX Runtime's QuantizeLinear."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from utils.core.input_form import FLOATS, InputForm
from utils.runners.feeds import as_feed

SCALES = [float(np.float16(amax / 127)) for amax in (1, 0.9961, 0.999, 0.7, 0.31, 2, 0.05)]


def every_pixel() -> torch.Tensor:
    """Each value in each channel, `[2, 3, 16, 16]`, in another order."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(256, generator=generator) for _ in range(6)]).view(2, 3, 16, 16).byte()


def quantize_linear(images: np.ndarray, scale: float) -> np.ndarray:
    value = helper.make_tensor
    tensors = [value("scale", TensorProto.FLOAT, [], [scale]), value("zero", TensorProto.INT8, [], [0])]
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])], "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.INT8, None)], tensors,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": images})[0]


@pytest.mark.parametrize("scale", SCALES)
def test_integers_are_those_of_the_quantizer_that_was_taken_out(scale):
    images = every_pixel()
    expected = quantize_linear(images.numpy().astype(np.float32) / np.float32(255), scale)
    found = as_feed(images, InputForm("int8", scale=scale), "int8")
    assert found.dtype == torch.int8
    np.testing.assert_array_equal(found.numpy(), expected)
    assert (expected.max() == 127) == (scale <= SCALES[0])  # some are clipped


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_are_fractions_of_255(dtype):
    images = every_pixel()
    expected = (images.numpy().astype(np.float64) / 255).astype(dtype)
    found = as_feed(images, FLOATS, dtype)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2**-23 if dtype == "float32" else 2**-10)
    assert str(found.dtype) == f"torch.{dtype}"


def test_bytes_stay_bytes():
    images = every_pixel()
    assert as_feed(images, InputForm("uint8"), "uint8") is images
    last = as_feed(images, InputForm("uint8", "nhwc"), "uint8")
    np.testing.assert_array_equal(last.numpy(), images.numpy().transpose(0, 2, 3, 1))
