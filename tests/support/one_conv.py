"""An ONNX file of one 1×1 convolution, which NumPy computes again; float or with Q/DQ, in FP32 or FP16."""

import json

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NAMES = {0: "cat", 1: "dog"}
METADATA = {"names": json.dumps(NAMES), "stride": "32", "imgsz": "[64, 96]"}
WEIGHT = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def reference(images):
    """What the network gives: `[B, 6, H * W]`."""
    return np.einsum("oc,bchw->bohw", WEIGHT, images).reshape(len(images), 6, -1)


def write_onnx(
    path, shape=("batch", 3, "height", "width"), dtype=TensorProto.FLOAT, *, extra_output=False, metadata=None,
    quantized=False, opset=17, prototypes=False,
):  # fmt: skip
    """Write the file; `quantized` puts Q/DQ with scales of `dtype` in front of the convolution.

    With `prototypes` the last row is also a second output, as of a segmentation network with one of them.
    """
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    stored = [numpy_helper.from_array(WEIGHT[..., None, None].astype(kind), "weight"),
              numpy_helper.from_array(np.array([0, 6, -1], np.int64), "target")]  # fmt: skip
    nodes, source = [], "images"
    if quantized:
        stored += [numpy_helper.from_array(np.array(0.01, kind), "scale"), numpy_helper.from_array(np.int8(0), "zero")]
        nodes = [helper.make_node("QuantizeLinear", ["images", "scale", "zero"], ["levels"]),
                 helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["rounded"])]  # fmt: skip
        source = "rounded"
    nodes += [helper.make_node("Conv", [source, "weight"], ["raw"]),
              helper.make_node("Reshape", ["raw", "target"], ["output0"])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("output0", dtype, [shape[0], 6, "anchors"])]
    if extra_output:
        outputs.append(helper.make_tensor_value_info("raw", dtype, [shape[0], 6, *shape[2:]]))
    if prototypes:
        stored += [numpy_helper.from_array(np.array([number], np.int64), name)
                   for name, number in (("start", 5), ("end", 6), ("axis", 1))]  # fmt: skip
        nodes.append(helper.make_node("Slice", ["raw", "start", "end", "axis"], ["output1"]))
        outputs.append(helper.make_tensor_value_info("output1", dtype, [shape[0], 1, *shape[2:]]))
    inputs = [helper.make_tensor_value_info("images", dtype, shape)]
    graph = helper.make_graph(nodes, "one_conv", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    for key, value in (METADATA if metadata is None else metadata).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    return path
