"""General passes over ONNX graphs. Each is pure: it takes a ModelProto, leaves it alone and returns a new one.

None of them changes what the graph computes. Those that deal with quantizers are in `qdq_passes.py`; `CLEAN_UP` is the
order in which the exporter runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.core.errors import DependencyError, QatError
from utils.onnx_graph import decoding, int8_kernels, qdq_passes
from utils.onnx_graph.view import (
    QUANTIZE,
    GraphView,
    attribute,
    drop_unused,
    opset_of,
    pure,
    rename_inputs,
    set_nodes,
    with_shapes,
)

# Cheap operators without state; quantizers are not among them, so that weights keep theirs.
FOLDABLE = frozenset({
    "Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Identity", "Mul", "Range",
    "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
FOLD_LIMIT = 1 << 22  # elements; larger results stay computed, so that the file does not grow


@pure
def constants_to_initializers(model: ModelProto) -> None:
    """Turn Constant nodes into initializers, under the same tensor name."""
    kept = []
    for node in model.graph.node:
        value = attribute(node, "value") if node.op_type == "Constant" else None
        if value is None:
            kept.append(node)
        else:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
    set_nodes(model, kept)


@pure
def fold_constants(model: ModelProto) -> None:
    """Compute what depends on constants and on known dimensions only.

    Torch traces `chunk` and `view` to arithmetic on Shape. Known dimensions become numbers, so that a Slice has
    constant bounds; dimensions that are dynamic stay computed. Results above `FOLD_LIMIT` elements stay computed too.
    """
    shapes = _known_shapes(model)
    view = GraphView(model)
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if np.prod(t.dims) <= FOLD_LIMIT}
    stored, kept = set(values), []
    for node in model.graph.node:
        result = _folded(node, view, shapes, values, opset_of(model))
        if result is None or set(node.output) & view.outputs or result.size > FOLD_LIMIT:
            kept.append(node)
        else:
            values[node.output[0]] = result
    set_nodes(model, kept)
    used = {name for node in kept for name in node.input}
    for name in (name for name in values if name in used and name not in stored):
        model.graph.initializer.append(numpy_helper.from_array(values[name], name))


def _known_shapes(model: ModelProto) -> dict[str, list[int | None]]:
    """Shapes that inference finds; a dynamic dimension is None."""
    inferred = with_shapes(model, data_prop=True)
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in [*inferred.value_info, *inferred.input, *inferred.output]
        if value.type.tensor_type.HasField("shape")
    }


def _folded(
    node: NodeProto,
    view: GraphView,
    shapes: Mapping[str, list[int | None]],
    values: Mapping[str, np.ndarray],
    opset: int,
) -> np.ndarray | None:
    """The constant that a node computes, None if it cannot be known."""
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
    return _evaluate(node, values, opset)


def _evaluate(node: NodeProto, values: Mapping[str, np.ndarray], opset: int) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    feeds = {name: values[name] for name in node.input if name}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "fold", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])


@pure
def remove_identities(model: ModelProto) -> None:
    """Drop Identity nodes, and Splits into one part; one that writes a graph output stays: outputs keep their names."""
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


@pure
def separate_predictions(model: ModelProto) -> None:
    """Join the levels' boxes and scores apart, instead of joining all first and splitting them again.

    Upstream's head computes Concat(boxes, scores) a level → Reshape → Concat of levels → Split. On a GPU each of these
    is a copy of everything; taken apart, boxes and scores are copied once.
    """
    view = GraphView(model)
    for split in [node for node in model.graph.node if node.op_type == "Split" and len(node.output) == 2]:
        levels = _levels(split, view)
        sizes = view.array(split.input[1]) if levels else None
        if sizes is None:
            continue
        nodes: list[NodeProto] = []
        for part, output in enumerate(split.output):
            parts = []
            for reshape, pair in levels:
                name = f"{reshape.name}/{('boxes', 'scores')[part]}"
                shape = np.array([0, sizes[part], -1], np.int64)  # 0: the batch as it is
                model.graph.initializer.append(numpy_helper.from_array(shape, f"{name}/shape"))
                nodes.append(
                    helper.make_node("Reshape", [pair.input[part], f"{name}/shape"], [f"{name}/result"], name=name)
                )
                parts.append(f"{name}/result")
            nodes.append(helper.make_node("Concat", parts, [output], name=f"{split.name}/{part}", axis=2))
        position = list(model.graph.node).index(split)
        set_nodes(model, [*model.graph.node[:position], *nodes, *model.graph.node[position + 1 :]])
        drop_unused(model)
        return


def _levels(split: NodeProto, view: GraphView) -> list[tuple[NodeProto, NodeProto]]:
    """Each level's Reshape and the Concat of boxes and scores before it; empty if the Split reads something else."""
    joined = view.producer(split.input[0])
    if joined is None or joined.op_type != "Concat" or len(view.consumers(joined.output[0])) > 1:
        return []
    if len(split.input) < 2 or view.array(split.input[1]) is None or attribute(split, "axis", 0) != 1:
        return []
    levels = []
    for name in joined.input:
        reshape = view.producer(name)
        pair = view.producer(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
        if reshape is None or pair is None or pair.op_type != "Concat" or len(pair.input) != 2:
            return []
        levels.append((reshape, pair))
    return levels


@pure
def remove_unused(model: ModelProto) -> None:
    """Drop nodes, initializers and shape records that nothing reads."""
    drop_unused(model)


@pure
def set_metadata(model: ModelProto, entries: Mapping[str, str]) -> None:
    """Write key/value properties into the file, in place of those with the same key."""
    kept = {entry.key: entry.value for entry in model.metadata_props} | dict(entries)
    del model.metadata_props[:]
    helper.set_model_props(model, kept)


def simplify(model: ModelProto) -> ModelProto:
    """Simplify a cleaned up graph with onnxslim (`--simplify`); its result must have as many quantizers.

    Raises:
        DependencyError: onnxslim is not installed.
        QatError: onnxslim folded quantizers away.
    """
    try:
        import onnxslim
    except ModuleNotFoundError as error:
        raise DependencyError("--simplify needs onnxslim; pip install onnxslim, or export without it") from error
    copy = ModelProto()
    copy.CopyFrom(model)
    result = onnxslim.slim(copy)
    before, after = (sum(node.op_type == QUANTIZE for node in m.graph.node) for m in (model, result))
    if before != after:
        raise QatError(f"onnxslim {onnxslim.__version__} left {after} of {before} quantizers; drop --simplify")
    return result


CLEAN_UP: tuple[Callable[[ModelProto], ModelProto], ...] = (
    constants_to_initializers,
    fold_constants,
    remove_identities,
    qdq_passes.scalar_scales,
    qdq_passes.round_weights,
    qdq_passes.number_quantizers,
    qdq_passes.merge_quantizers,
    qdq_passes.share_scales,
    separate_predictions,
    decoding.decode_in_few_steps,
    int8_kernels.dense_groups,
    qdq_passes.name_quantizers,
    remove_unused,
)


def clean_up(model: ModelProto) -> ModelProto:
    """Run every pass of `CLEAN_UP` in order."""
    for step in CLEAN_UP:
        model = step(model)
    return model
