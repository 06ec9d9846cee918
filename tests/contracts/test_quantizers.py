"""One contract for the quantizers of all libraries, against plain NumPy and ONNX Runtime."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from models.quantize import backend
from models.quantize.fake_quantize import float16_scale, put_scale
from models.quantize.recipe import QUANTIZERS

pytestmark = pytest.mark.parametrize("library", QUANTIZERS)
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


def test_values_per_tensor_and_per_channel(library):
    one = backend.create(None, library)
    backend.set_amax(one, torch.tensor(1.5))
    np.testing.assert_allclose(one(X).numpy(), reference(X.numpy(), np.float32(1.5)), atol=1e-6)
    each = backend.create(4, library)
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    amax = weight.abs().amax((1, 2, 3), keepdim=True)
    backend.set_amax(each, amax)
    np.testing.assert_allclose(each(weight).numpy(), reference(weight.numpy(), amax.numpy()), atol=1e-6)


def test_scales_are_float16_numbers_not_below_what_was_asked_for(library):
    asked = torch.cat([torch.logspace(-4, 5, 400), torch.tensor([backend.SMALLEST_AMAX, 127.0, 1.0])])
    quantizer = backend.create(len(asked), library)
    backend.set_amax(quantizer, asked.reshape(-1, 1, 1, 1))
    amax = backend.get_amax(quantizer).flatten()
    np.testing.assert_array_equal(amax.numpy() / np.float32(127), half_scale(asked.numpy()))
    assert bool((amax >= asked * (1 - 1e-6)).all())
    assert bool((amax <= asked * 1.001 + 127 * 2**-24).all())
    backend.set_amax(quantizer, amax.reshape(-1, 1, 1, 1))
    assert torch.equal(backend.get_amax(quantizer).flatten(), amax)  # set again, it stays


def test_gradient_passes_where_the_value_is_in_range(library):
    quantizer = backend.create(None, library)
    backend.set_amax(quantizer, torch.tensor(1.0))
    x = torch.tensor([-3.0, -0.5, 0.0, 0.7, 1.4], requires_grad=True)
    quantizer(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_without_gradients_the_same_bits_in_less_time(library):
    g = torch.Generator().manual_seed(2)
    weight, wide = torch.randn(8, 3, 5, 5, generator=g), torch.randn(100_000, generator=g) * 4
    wide[:255] = (torch.arange(255) - 127.5) * (2.3 / 127)  # right between two levels
    for x, amax in ((wide, torch.tensor(2.3)), (weight, weight.abs().amax((1, 2, 3), keepdim=True))):
        quantizer = backend.create(None if amax.dim() == 0 else 8, library)
        backend.set_amax(quantizer, amax)
        with torch.no_grad():
            without = quantizer(x)
        with torch.enable_grad():
            assert torch.equal(without, quantizer(x.clone().requires_grad_()))


def test_off_it_returns_its_input_itself(library):
    quantizer = backend.create(None, library)
    backend.enable(quantizer, False)
    assert quantizer(X) is X
    backend.enable(quantizer)
    assert quantizer(X) is not X


def test_half_precision_is_rounded_in_full_precision(library):
    quantizer = backend.create(None, library)
    backend.set_amax(quantizer, torch.tensor(1.5))
    assert torch.equal(quantizer(X.half()), quantizer(X.half().float()))


def test_zero_amax_becomes_a_positive_scale_and_nan_is_refused(library):
    quantizer = backend.create(2, library)
    backend.set_amax(quantizer, torch.zeros(2, 1, 1, 1))
    assert (backend.get_amax(quantizer) > 0).all()
    with pytest.raises(ValueError, match="not finite"):
        backend.set_amax(quantizer, torch.full((2, 1, 1, 1), float("nan")))


def test_state_is_one_buffer_that_loads_back(library):
    source, target = backend.create(3, library), backend.create(3, library)
    backend.set_amax(source, torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1))
    assert list(source.state_dict()) == ["_amax"]
    target.load_state_dict(source.state_dict())
    assert torch.equal(backend.get_amax(target), backend.get_amax(source))
    assert list(backend.quantizers(source)) == [("", source)]


def test_the_same_bits_as_the_others_and_the_same_state(library):
    ours, others = backend.create(4, library), backend.create(4)
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(3))
    for quantizer in (ours, others):
        backend.set_amax(quantizer, weight.abs().amax((1, 2, 3), keepdim=True) * 0.9)
    results = []
    for quantizer in (ours, others):
        x = weight.clone().requires_grad_()
        y = quantizer(x)
        (y * weight).sum().backward()
        results.append((y.detach(), x.grad, quantizer.state_dict()["_amax"]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_scale_that_is_put_in_gets_its_gradient_and_is_no_state(library):
    quantizer = backend.create(None, library)
    backend.set_amax(quantizer, torch.tensor(2.0))
    scale = float16_scale(torch.tensor(1.5 / 127)).requires_grad_()
    x = torch.tensor([0.5 / 127, 3.0], requires_grad=True)
    put_scale(quantizer, scale)
    y = quantizer(x)
    y.sum().backward()
    step = float(scale.detach())
    np.testing.assert_allclose(y.tolist(), [0.0, 127 * step], rtol=1e-6)  # the first is below half a step
    assert x.grad.tolist() == [1, 0]
    np.testing.assert_allclose(float(scale.grad), 0.0 - 0.5 / 127 / step + 127, rtol=1e-6)
    assert list(quantizer.state_dict()) == ["_amax"]
    put_scale(quantizer, None)
    assert float(quantizer(x.detach())[1]) == float(backend.get_amax(quantizer))  # 2.0 again


def test_exported_graph_is_native_and_computes_the_same(library):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 3, 3, bias=False)
            self.inputs, self.weights = backend.create(None, library), backend.create(3, library)
            backend.set_amax(self.inputs, torch.tensor(1.5))
            backend.set_amax(self.weights, self.conv.weight.detach().abs().amax((1, 2, 3), keepdim=True))

        def forward(self, x):
            return nn.functional.conv2d(self.inputs(x), self.weights(self.conv.weight))

    torch.manual_seed(0)
    net, file = Net().eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (X,), file, dynamo=False, opset_version=17, input_names=["x"])
    graph = onnx.load_from_string(file.getvalue())
    kinds = [node.op_type for node in graph.graph.node if node.op_type != "Constant"]
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 2
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"x": X.numpy()})[0], net(X).numpy(), atol=1e-5)
