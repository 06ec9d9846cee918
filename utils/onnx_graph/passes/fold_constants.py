"""Passes that reduce the number of nodes of a graph from torch's exporter, which has no subgraphs (If, Loop).

Constants and known sizes become initializers, identities are removed, and on demand onnxslim simplifies the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, OperatorSetIdProto, helper, numpy_helper

from utils.core.errors import DependencyError, QatError
from utils.onnx_graph.qdq_view import without_provenance
from utils.onnx_graph.view import QUANTIZE, GraphView, attribute, pure, rename_inputs, set_nodes, store, with_shapes

# Cheap operators without state; quantizers are not among them, so that weights keep their quantizers.
FOLDABLE = frozenset({
    "Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Identity", "Mul", "Range",
    "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
FOLD_LIMIT = 1 << 22  # elements; a node with a larger result stays, so that the file does not grow


@pure
def fold_constants(model: ModelProto) -> None:
    """Make initializers of Constant nodes, and of tensors that depend on constants and on known dimensions only.

    Torch traces `chunk` and `view` to arithmetic on Shape. Known dimensions become numbers, so that a Slice has
    constant bounds; dynamic dimensions are still computed by the graph. A node stays if it is not in `FOLDABLE`, if it
    writes an output of the graph, or if its result has more than `FOLD_LIMIT` elements.
    """
    view = GraphView(model)
    shapes = _known_shapes(model)
    initializers = {}
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) <= FOLD_LIMIT:
            initializers[tensor.name] = numpy_helper.to_array(tensor)
    values = dict(initializers)
    remaining = []
    for node in model.graph.node:
        result = _folded(node, view, shapes, values, model.opset_import)
        is_output = not view.outputs.isdisjoint(node.output)
        if result is None or result.size > FOLD_LIMIT or is_output:
            remaining.append(node)
        else:
            values[node.output[0]] = result
    set_nodes(model, remaining)
    used = {name for node in remaining for name in node.input}
    for name, value in values.items():
        if name in used and name not in initializers:
            store(model, name, value)


def _known_shapes(model: ModelProto) -> dict[str, list[int | None]]:
    """Name of each tensor whose rank is known → its dimensions, None for those that are dynamic."""
    shapes: dict[str, list[int | None]] = {}
    for value in with_shapes(model, data_prop=True):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            shapes[value.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    return shapes


def _folded(
    node: NodeProto,
    view: GraphView,
    shapes: Mapping[str, list[int | None]],
    values: Mapping[str, np.ndarray],
    opsets: Sequence[OperatorSetIdProto],
) -> np.ndarray | None:
    """The constant that a node computes; None if it is not known, or not folded, see `FOLDABLE`."""
    if node.op_type == "Constant":
        value = attribute(node, "value")
        return None if value is None else np.asarray(numpy_helper.to_array(value))
    if node.op_type == "Shape" and not node.attribute:
        dims = shapes.get(node.input[0], [None])
        return None if None in dims else np.array(dims, np.int64)
    if node.op_type == "Gather" and node.input[1] in values:
        source = view.producer(node.input[0])
        if source is not None and source.op_type == "Shape" and not source.attribute:
            return _dims_at(shapes.get(source.input[0], []), values[node.input[1]])
    inputs = [name for name in node.input if name]
    if node.op_type not in FOLDABLE or any(name not in values for name in inputs):
        return None
    from onnx.reference import ReferenceEvaluator

    feeds = {name: values[name] for name in inputs}
    function = helper.make_function("fold", "fold", list(feeds), list(node.output), [node], opsets)
    result: np.ndarray = np.asarray(ReferenceEvaluator(function).run(None, feeds, attributes={})[0])
    return result


def _dims_at(dims: list[int | None], index: np.ndarray) -> np.ndarray | None:
    """The dimensions at `index`, int64 in the shape of `index`; None if one of them is not known."""
    sizes = []
    for position in index.flat:
        if not -len(dims) <= position < len(dims):
            return None
        sizes.append(dims[int(position)])
    return None if None in sizes else np.array(sizes, np.int64).reshape(index.shape)


@pure
def remove_identities(model: ModelProto) -> None:
    """Drop Identity nodes, and Splits into one part, so that patterns of other passes match.

    A node that writes an output of the graph stays: outputs keep their names.
    """
    outputs = {value.name for value in model.graph.output}
    renamed: dict[str, str] = {}
    remaining = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        is_identity = node.op_type == "Identity" or (node.op_type == "Split" and len(node.output) == 1)
        if is_identity and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        else:
            remaining.append(node)
    set_nodes(model, remaining)


def simplify(model: ModelProto) -> ModelProto:
    """Simplify a cleaned up graph with onnxslim; its result must have as many quantizers as before.

    Raises:
        DependencyError: onnxslim is not installed.
        QatError: onnxslim folded quantizers away.
    """
    try:
        import onnxslim
    except ModuleNotFoundError as error:
        raise DependencyError("--simplify needs onnxslim; pip install onnxslim, or export without it") from error
    result = onnxslim.slim(without_provenance(model))
    before = len(GraphView(model).of_type(QUANTIZE))
    after = len(GraphView(result).of_type(QUANTIZE))
    if before != after:
        raise QatError(
            f"onnxslim {onnxslim.__version__} changed the number of quantizers from {before} to {after}; "
            "leave --simplify out"
        )
    doc_strings = {node.output[0]: node.doc_string for node in model.graph.node if node.doc_string}
    for node in result.graph.node:
        node.doc_string = doc_strings.get(node.output[0], "")
    return result
