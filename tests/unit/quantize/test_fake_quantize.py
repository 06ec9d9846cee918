"""The quantizer against NumPy, ONNX Runtime, and its gradients against elementwise autograd in float64."""

import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from packaging.version import Version
from qdq_graph import results
from rounding_gradients import MOST, case, compare
from torch import nn

from models.quantize.fake_quantize import (
    SMALLEST_AMAX,
    TensorQuantizer,
    fake_quantize,
    float16_scale,
    trained_fake_quantize,
)
from models.quantize.modules import QuantConv2d, QuantPoint

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)) * 2


def half_scale(amax: np.ndarray) -> np.ndarray:
    """The smallest float16 number that is not below amax / 127, as float32."""
    exact = (amax / np.float32(127)).astype(np.float32)
    half = exact.astype(np.float16)
    above = np.nextafter(half, np.float16(np.inf))
    return np.where(half.astype(np.float32) < exact, above, half).astype(np.float32)


def reference(x: np.ndarray, amax: np.ndarray) -> np.ndarray:
    scale = half_scale(amax)
    return np.clip(np.rint(x / scale), -128, 127) * scale


def test_values_per_tensor_and_per_channel():
    one = TensorQuantizer()
    one.set_amax(torch.tensor(1.5))
    np.testing.assert_allclose(one(X).numpy(), reference(X.numpy(), np.float32(1.5)), atol=1e-6)
    assert torch.equal(one(X.half()), one(X.half().float()))
    one.on = False
    assert one(X) is X
    each = TensorQuantizer(4)
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    amax = weight.abs().amax((1, 2, 3), keepdim=True)
    each.set_weight_amax(weight)
    np.testing.assert_allclose(each(weight).numpy(), reference(weight.numpy(), amax.numpy()), atol=1e-6)
    with torch.no_grad():  # computed otherwise
        found = one(X), each(weight)
    assert all(map(torch.equal, found, (one(X), each(weight))))


def test_scales_are_float16_numbers_not_below_what_was_asked_for():
    asked = torch.cat([torch.logspace(-4, 5, 400), torch.tensor([SMALLEST_AMAX, 127.0, 1.0])])
    quantizer = TensorQuantizer(len(asked))
    quantizer.set_amax(asked.reshape(-1, 1, 1, 1))
    amax = quantizer.amax.flatten()
    np.testing.assert_array_equal(amax.numpy() / np.float32(127), half_scale(asked.numpy()))
    assert bool((amax >= asked * (1 - 1e-6)).all())
    assert bool((amax <= asked * 1.001 + 127 * 2**-24).all())
    quantizer.set_amax(amax.reshape(-1, 1, 1, 1))
    assert torch.equal(quantizer.amax.flatten(), amax)  # set again, it stays
    quantizer = TensorQuantizer(2)
    quantizer.set_amax(torch.zeros(2, 1, 1, 1))
    assert (quantizer.amax > 0).all(), "also for zeros"
    with pytest.raises(ValueError, match="not finite"):
        quantizer.set_amax(torch.full((2, 1, 1, 1), float("nan")))


def test_a_scale_that_is_put_in_gets_its_gradient_and_is_no_state():
    quantizer = TensorQuantizer()
    quantizer.set_amax(torch.tensor(2.0))
    scale = float16_scale(torch.tensor(1.5 / 127)).requires_grad_()
    x = torch.tensor([0.5 / 127, 3.0], requires_grad=True)
    quantizer.trained_scale = scale
    y = quantizer(x)
    y.sum().backward()
    step = float(scale.detach())
    np.testing.assert_allclose(y.tolist(), [0.0, 127 * step], rtol=1e-6)  # the first is below half a step
    assert x.grad.tolist() == [1, 0]
    np.testing.assert_allclose(float(scale.grad), 0.0 - 0.5 / 127 / step + 127, rtol=1e-6)
    assert list(quantizer.state_dict()) == ["_amax"]
    quantizer.trained_scale = None
    assert float(quantizer(x.detach())[1]) == float(quantizer.amax)  # 2.0 again


def test_exported_graph_is_native_and_computes_the_same():
    torch.manual_seed(0)
    conv, weight, image = nn.Conv2d(4, 3, 3), TensorQuantizer(3), TensorQuantizer()
    weight.set_weight_amax(conv.weight)
    image.set_amax(torch.tensor(1.5))
    net, file = QuantConv2d.from_float(conv, weight), io.BytesIO()
    net.input_point = QuantPoint(image)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (X,), file, dynamo=False, opset_version=17, input_names=["x"], output_names=["y"])
    graph = onnx.load_from_string(file.getvalue())
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 2
    with torch.no_grad():
        np.testing.assert_allclose(results(graph, x=X.numpy())["y"], net(X).numpy(), atol=1e-5)


# gradients with a trained scale

SHAPES = [((2, 5, 7, 9), False), ((1000,), False), ((6, 3, 3, 3), True), ((4, 1, 1, 1), True), ((1, 2, 3, 3), True)]


@pytest.mark.parametrize(("shape", "per_channel"), SHAPES)
def test_gradients(shape, per_channel):
    compare(trained_fake_quantize, case(shape, per_channel=per_channel))


def test_the_result_is_what_it_is_outside_of_training():
    given = case((6, 3, 3, 3), per_channel=True)
    assert torch.equal(trained_fake_quantize(given.x, given.scale), fake_quantize(given.x, given.scale * MOST))


def test_half_precision_stays_half_precision_and_empty_stays_empty():
    given = case((3, 50)).to(dtype=torch.float16)
    assert compare(trained_fake_quantize, given).dtype == torch.float16
    x, scale = torch.zeros(0, 3, 2, 2, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    trained_fake_quantize(x, scale).sum().backward()
    assert (x.grad.numel(), float(scale.grad)) == (0, 0.0)


@pytest.mark.parametrize("factor", [1.01, -1, 0])
def test_the_comparison_sees_a_wrong_gradient(factor):
    def wrong(x, scale):  # the same result
        return trained_fake_quantize(x, scale * factor - (scale * (factor - 1)).detach())

    with pytest.raises(AssertionError):
        compare(wrong, case((6, 3, 3, 3), per_channel=True))


# the Triton kernels without a GPU: Triton's interpreter runs the tests that a GPU runs

ROOT = Path(__file__).resolve().parents[3]
TESTS = "tests/gpu/test_fused_fake_quantize.py"


def why_not() -> str:
    """Why the interpreter cannot run the kernels here, or ''."""
    if importlib.util.find_spec("triton") is None:
        return "Triton comes with torch for CUDA"
    found = importlib.metadata.version("triton")
    old = Version(found) < Version("3.1")
    return f"the interpreter of Triton {found} takes no range in a function that a kernel calls" if old else ""


@pytest.mark.skipif(why_not() != "", reason=why_not())
def test_the_kernels_compute_what_they_should():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                            text=True, timeout=280)  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout


def test_they_are_imported_where_they_are_used_only():
    code = "import sys, models.quantize.modules; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
