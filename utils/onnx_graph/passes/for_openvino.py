"""Passes for OpenVINO's CPU kernels: the same values in the form that these kernels take, and weights of 7 bits.

A file for TensorRT has signed activations. OpenVINO reads such a file, and its results are those of the graph on
processors with VNNI. On x86 without VNNI (AVX2, AVX-512 of Skylake) they are wrong in two ways, seen with 2026.4.1:

- A convolution behind a Concat of signed values gives other numbers than the graph; `unsigned_activations` avoids it.
- The products of two neighbouring channels are added in 16 bits, which saturate: 255 * 127 * 2 > 32767. OpenVINO's
  documentation names the way out, weights of 7 bits: `seven_bit_weights`.

TensorRT takes no unsigned Q/DQ, and with VNNI signed activations are faster (docs/openvino.md), so neither pass is part
of another export. The weights of a file for AVX2 are rounded to 7 bits from the float ones, before it is traced.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto

from utils.onnx_graph.export_config import Target
from utils.onnx_graph.view import DEQUANTIZE, QUANTIZE, GraphView, drop_unused, pure, store

TARGET_KEY = "target"  # of the metadata of a quantized file, where it is not for TensorRT
SEVEN_BIT_TARGET: Target = "openvino-avx2"  # the one whose weights are -64..64
MIDDLE = np.uint8(128)  # the zero point of bytes without sign


@pure
def unsigned_activations(model: ModelProto) -> None:
    """Store quantized activations as UINT8 with a zero point of 128 in place of INT8 with 0.

    Every value is the same: `(q + 128) - 128`, and both types end at the same two values.
    """
    view = GraphView(model)
    unsigned: dict[str, str] = {}  # zero point → the one in its place
    for quantizer in view.of_type(QUANTIZE):
        if view.is_constant(quantizer.input[0]):
            continue  # of weights, which stay signed
        readers = [node for node in view.consumers(quantizer.output[0]) if node.op_type == DEQUANTIZE]
        for node in (quantizer, *readers):
            zero_point = view.array(node.input[2])
            if zero_point is None or zero_point.dtype != np.int8:
                continue
            name = node.input[2]
            if name not in unsigned:
                unsigned[name] = store(model, f"{name}/uint8", np.full(zero_point.shape, MIDDLE))
            node.input[2] = unsigned[name]
    del model.graph.value_info[:]  # the types in it are those from before
    drop_unused(model)


@pure
def seven_bit_weights(model: ModelProto) -> None:
    """Quantize weights to -64..64 in place of -127..127, with scales twice as large."""
    view = GraphView(model)
    doubled: dict[str, str] = {}  # scale → the one in its place
    halved: dict[str, str] = {}  # weights that the file holds as INT8 → those in their place
    for node in view.of_type(QUANTIZE, DEQUANTIZE):
        name, scale = node.input[:2]
        weight = name
        quantizer = view.producer(name) if node.op_type == DEQUANTIZE else None
        if quantizer is not None:
            weight = quantizer.input[0]
        if not view.is_constant(weight):
            continue  # of an activation
        if scale not in doubled:
            values = view.constant(scale)
            doubled[scale] = store(model, f"{scale}/7bits", values * values.dtype.type(2))
        node.input[1] = doubled[scale]
        if node.op_type == DEQUANTIZE and view.is_constant(name):
            if name not in halved:
                integers = np.rint(view.constant(name) / 2).astype(np.int8)
                halved[name] = store(model, f"{name}/7bits", integers)
            node.input[0] = halved[name]
    drop_unused(model)
