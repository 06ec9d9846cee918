"""The forms in which a file takes images, put in front of a graph that takes floats; pure, as all passes.

    float   images [B, 3, H, W] FP32 in 0..1, as it is traced
    uint8   images [B, 3, H, W] or [B, H, W, 3], bytes: Cast and Transpose stand in front; 1/255 is in the scale of the
            QuantizeLinear that reads them, and in a Mul for what else does

Only a Cast to FP32 reads a byte input: TensorRT converts network inputs of UINT8 to floats and to nothing else
("DataType" in its API reference). Of a Mul between that Cast and a QuantizeLinear TensorRT 8.6.0 makes one kernel with
the quantizer, in which the factor is lost (docs/export.md); so there is none.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from utils.core.input_spec import InputSpec
from utils.onnx_graph.view import BRIGHTEST, QUANTIZE, GraphView, pure, rename_inputs, set_nodes

TO_NCHW = [0, 3, 1, 2]


@pure
def take_bytes(model: ModelProto, form: InputSpec) -> None:
    """Let a graph take bytes, in the form's layout, where that is the form."""
    if form.kind != "uint8":
        return
    value = model.graph.input[0]
    name = value.name
    view = GraphView(model)
    nodes = [_node("Cast", name, f"{name}/float", to=TensorProto.FLOAT)]
    if form.layout == "nhwc":
        nodes.append(_node("Transpose", nodes[-1].output[0], f"{name}/nchw", perm=TO_NCHW))
    values, scaled, factor = nodes[-1].output[0], f"{name}/scaled", f"{name}/factor"
    for node in (node for node in model.graph.node if name in node.input):
        scale = view.array(node.input[1]) if node.op_type == QUANTIZE else None
        if scale is not None and scale.dtype == np.float32:  # its DequantizeLinear keeps the scale
            node.input[1] = f"{node.output[0]}/scale_of_bytes"
            model.graph.initializer.append(numpy_helper.from_array(scale * np.float32(BRIGHTEST), node.input[1]))
            rename_inputs(node, {name: values})
        else:  # also a Cast in front of FP16 scales, of which 255 times as much would be rounded
            rename_inputs(node, {name: values if node.op_type == "Shape" else scaled})
    if any(scaled in node.input for node in model.graph.node):
        nodes.append(helper.make_node("Mul", [values, factor], [scaled], name=f"/{name}/Mul"))
        model.graph.initializer.append(numpy_helper.from_array(np.array(1 / BRIGHTEST, np.float32), factor))
    set_nodes(model, [*nodes, *model.graph.node])
    kind = value.type.tensor_type
    kind.elem_type = TensorProto.UINT8
    dims = [type(dim).FromString(dim.SerializeToString()) for dim in kind.shape.dim]
    del kind.shape.dim[:]
    kind.shape.dim.extend(form.own(dims))


def _node(kind: str, source: str, result: str, **attributes: object) -> NodeProto:
    return helper.make_node(kind, [source], [result], name=f"/{source}/{kind}", **attributes)
