"""Fewer nodes: what depends on constants and known sizes only is an initializer; on demand what onnxslim finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, OperatorSetIdProto, helper, numpy_helper

from utils.core.errors import DependencyError, QatError
from utils.onnx_graph.qdq_view import without_provenance
from utils.onnx_graph.view import QUANTIZE, GraphView, attribute, pure, rename_inputs, set_nodes, store, with_shapes

# Cheap operators without state; quantizers are not among them, so that weights keep theirs.
FOLDABLE = frozenset({
    "Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Identity", "Mul", "Range",
    "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
FOLD_LIMIT = 1 << 22  # elements; larger results stay computed, so that the file does not grow


@pure
def fold_constants(model: ModelProto) -> None:
    """Make initializers of Constant nodes, and of what depends on constants and on known dimensions only.

    Torch traces `chunk` and `view` to arithmetic on Shape. Known dimensions become numbers, so that a Slice has
    constant bounds; dimensions that are dynamic stay computed. Results above `FOLD_LIMIT` elements stay computed too.
    """
    shapes = {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in with_shapes(model, data_prop=True)
        if value.type.tensor_type.HasField("shape")
    }
    view = GraphView(model)
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if np.prod(t.dims) <= FOLD_LIMIT}
    stored, kept = set(values), []
    for node in model.graph.node:
        result = _folded(node, view, shapes, values, model.opset_import)
        if result is None or set(node.output) & view.outputs or result.size > FOLD_LIMIT:
            kept.append(node)
        else:
            values[node.output[0]] = result
    set_nodes(model, kept)
    used = {name for node in kept for name in node.input}
    for name in (name for name in values if name in used and name not in stored):
        store(model, name, values[name])


def _folded(
    node: NodeProto, view: GraphView, shapes: Mapping[str, list[int | None]], values: Mapping[str, np.ndarray],
    opsets: Sequence[OperatorSetIdProto],
) -> np.ndarray | None:  # fmt: skip
    """The constant that a node computes, None if it cannot be known."""
    if node.op_type == "Constant":
        value = attribute(node, "value")
        return None if value is None else numpy_helper.to_array(value)
    if node.op_type == "Shape" and not node.attribute:
        dims = shapes.get(node.input[0], [None])
        return None if None in dims else np.array(dims, np.int64)
    source = view.producer(node.input[0]) if node.op_type == "Gather" else None
    if source is not None and source.op_type == "Shape" and not source.attribute and node.input[1] in values:
        dims = shapes.get(source.input[0], [])
        index = values[node.input[1]]
        picked = [dims[int(i)] if -len(dims) <= i < len(dims) else None for i in index.flat]
        return None if None in picked else np.array(picked, np.int64).reshape(index.shape)
    if node.op_type not in FOLDABLE or not all(name in values for name in node.input if name):
        return None
    from onnx.reference import ReferenceEvaluator

    feeds = {name: values[name] for name in node.input if name}
    function = helper.make_function("fold", "fold", list(feeds), list(node.output), [node], opsets)
    return np.asarray(ReferenceEvaluator(function).run(None, feeds, attributes={})[0])


@pure
def remove_identities(model: ModelProto) -> None:
    """Drop Identity nodes, and Splits into one part, so that patterns of other passes match.

    One that writes a graph output stays: outputs keep their names.
    """
    outputs = {value.name for value in model.graph.output}
    renamed: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        nothing = node.op_type == "Identity" or (node.op_type == "Split" and len(node.output) == 1)
        if nothing and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    set_nodes(model, kept)


def simplify(model: ModelProto) -> ModelProto:
    """Simplify a cleaned up graph with onnxslim; its result must have as many quantizers.

    Raises:
        DependencyError: onnxslim is not installed.
        QatError: onnxslim folded quantizers away.
    """
    try:
        import onnxslim
    except ModuleNotFoundError as error:
        raise DependencyError("--simplify needs onnxslim; pip install onnxslim, or export without it") from error
    result = onnxslim.slim(without_provenance(model))
    before, after = (sum(node.op_type == QUANTIZE for node in m.graph.node) for m in (model, result))
    if before != after:
        raise QatError(f"onnxslim {onnxslim.__version__} left {after} of {before} quantizers; drop --simplify")
    notes = {node.output[0]: node.doc_string for node in model.graph.node if node.doc_string}
    for node in result.graph.node:
        node.doc_string = notes.get(node.output[0], "")
    return result
