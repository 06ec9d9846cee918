"""Bytes of weights as they are computed with, in ONNX graphs and networks; and a hash that tells trainings apart."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from small_networks import detector

from models.quantize import calibration, placement
from models.quantize.modules import quantized_weights, weight_bytes
from models.quantize.recipe import Calibration, Recipe
from utils.core.weights import onnx_weight_bytes
from utils.upstream.network import hash_of_weights


def graph(kind: str) -> onnx.ModelProto:
    """A convolution with 4 * 3 * 9 weights and 4 biases; what else there is does not count."""
    weights = np.ones((4, 3, 3, 3), np.float32)
    stored = {"bias": np.ones(4, np.float32), "other": np.ones(1000, np.float32), "scale": np.float32(1)}
    nodes, weight = [], "w"
    if kind == "half":
        weights, stored["bias"] = weights.astype(np.float16), stored["bias"].astype(np.float16)
    if kind == "int8 stored":
        weights = weights.astype(np.int8)
    stored["w"] = weights
    if kind == "weak":
        nodes.append(helper.make_node("QuantizeLinear", ["w", "scale"], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "scale"], ["dq"]))
        weight = "dq"
    if kind == "int8 stored":
        nodes.append(helper.make_node("DequantizeLinear", ["w", "scale"], ["dq"]))
        weight = "dq"
    nodes.append(helper.make_node("Conv", ["x", weight, "bias"], ["y"]))
    nodes.append(helper.make_node("Mul", ["y", "other"], ["z"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "z")]
    constants = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    return helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], constants))


@pytest.mark.parametrize(
    ("kind", "float_bytes", "expected"),
    [
        ("plain", None, 4 * 108 + 4 * 4),
        ("plain", 2, 2 * 108 + 2 * 4),
        ("half", None, 2 * 108 + 2 * 4),
        ("weak", None, 108 + 4 * 4),
        ("weak", 2, 108 + 2 * 4),
        ("int8 stored", None, 108 + 4 * 4),
    ],
)
def test_weights_of_a_graph(kind, float_bytes, expected):
    assert onnx_weight_bytes(graph(kind), float_bytes) == expected


def test_weights_of_a_network_count_one_byte_where_they_are_quantized():
    network = detector()
    parameters = sum(values.numel() for values in network.parameters())
    assert weight_bytes(network) == 4 * parameters
    placement.apply(network, placement.plan(network, Recipe()))
    calibration.calibrate(network, [torch.rand(2, 3, 32, 32)], Calibration(method="max"))
    quantized = sum(convolution.weight.numel() for convolution, _ in quantized_weights(network).values())
    assert 0 < quantized < parameters
    assert weight_bytes(network) == 4 * parameters - 3 * quantized


def test_the_hash_is_that_of_the_weights_and_not_of_how_they_are_stored():
    network = detector()
    first = hash_of_weights(network)
    assert hash_of_weights(detector().half()) == hash_of_weights(detector())
    assert hash_of_weights(network.eval()) == first
    changed = detector()
    next(changed.parameters()).data.flatten()[0] += 0.1
    assert hash_of_weights(changed) != hash_of_weights(detector())
    buffers = detector()
    for name, value in buffers.named_buffers():
        if value.is_floating_point():
            value += 1
            assert hash_of_weights(buffers) != hash_of_weights(detector()), name
            break
