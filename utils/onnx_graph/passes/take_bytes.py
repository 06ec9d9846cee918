"""The forms in which a file takes images, put in front of a graph that takes floats; pure, as all passes.

    float   images [B, 3, H, W] FP32 in 0..1, as it is traced
    uint8   images [B, 3, H, W] or [B, H, W, 3], bytes: the graph begins with a Cast and, for NHWC, a Transpose. A
            QuantizeLinear that reads the images divides by 255 with its scale; other nodes read them after a Mul

Only a Cast to FP32 reads a byte input: TensorRT converts network inputs of UINT8 to floats and to nothing else
("DataType" in its API reference). TensorRT 8.6.0 fuses a Mul between that Cast and a QuantizeLinear with the quantizer,
and loses the factor (docs/verify.md); so no Mul stands there.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper

from utils.core.input_spec import InputSpec
from utils.onnx_graph.view import BRIGHTEST, QUANTIZE, GraphView, pure, rename_inputs, set_nodes, store

TO_NCHW = [0, 3, 1, 2]


@pure
def take_bytes(model: ModelProto, form: InputSpec) -> None:
    """Let a graph take bytes in the layout of `form`; if `form` is floats, leave the graph as it is."""
    if form.kind != "uint8":
        return
    value = model.graph.input[0]
    name = value.name
    view = GraphView(model)
    nodes = [helper.make_node("Cast", [name], [f"{name}/float"], f"/{name}/Cast", to=TensorProto.FLOAT)]
    if form.layout == "nhwc":
        result = f"{name}/nchw"
        nodes.append(helper.make_node("Transpose", [f"{name}/float"], [result], f"/{name}/Transpose", perm=TO_NCHW))
    values = nodes[-1].output[0]
    scaled = f"{name}/scaled"
    for node in view.consumers(name):
        scale = view.array(node.input[1]) if node.op_type == QUANTIZE else None
        if scale is not None and scale.dtype == np.float32:  # its DequantizeLinear keeps the scale
            node.input[1] = store(model, f"{node.output[0]}/scale_of_bytes", scale * np.float32(BRIGHTEST))
            rename_inputs(node, {name: values})
        elif node.op_type == "Shape":
            rename_inputs(node, {name: values})
        else:  # also a Cast in front of FP16 scales, since 255 times such a scale would be rounded
            rename_inputs(node, {name: scaled})
    if any(scaled in node.input for node in model.graph.node):
        factor = store(model, f"{name}/factor", np.array(1 / BRIGHTEST, np.float32))
        nodes.append(helper.make_node("Mul", [values, factor], [scaled], name=f"/{name}/Mul"))
    set_nodes(model, [*nodes, *model.graph.node])
    kind = value.type.tensor_type
    kind.elem_type = TensorProto.UINT8
    dims = [type(dim).FromString(dim.SerializeToString()) for dim in kind.shape.dim]
    del kind.shape.dim[:]
    kind.shape.dim.extend(form.own(dims))
