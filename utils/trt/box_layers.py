"""Which layers compute boxes: these stay in FP32 where TensorRT chooses precisions by itself.

FP16 has steps of half a pixel from 512 pixels on, and of an eighth from 128 on. TensorRT 8.6.0 took it for boxes in
front of its NMS plugin: mask AP of the demo's engine moved by 0.005, by how upstream crops masks to boxes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

# Results that are no floats, by their index; of operators that are not here all are floats.
NOT_FLOAT = {
    "TopK": {1}, "EfficientNMS_TRT": {0, 3}, "NonMaxSuppression": {0}, "ArgMax": {0}, "Shape": {0},
    "Less": {0}, "LessOrEqual": {0}, "Greater": {0}, "GreaterOrEqual": {0}, "Equal": {0},
}  # fmt: skip
# Behind these stand masks and scores: products with prototypes, which are large and need no such precision.
BEYOND = frozenset({"MatMul"})
SIDES = 4  # of a box: DFL's convolution gives one or four numbers an anchor, those of a network many more


def box_layers(model: Any) -> frozenset[str]:
    """Names of a graph's nodes from DFL's softmax over distances on to the boxes that come out of the file.

    Args:
        model: an onnx.ModelProto whose boxes are decoded from distributions (DFL, Li et al., Generalized Focal Loss,
            2020). Any other softmax, such as one of attention, does not count: convolutions of features follow it.
    """
    consumers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            consumers[name].append(node)
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "Softmax" and (names := _behind(node, consumers, weights)) is not None:
            found |= names
    return frozenset(found)


def _behind(softmax: Any, consumers: dict[str, list[Any]], weights: dict[str, list[int]]) -> set[str] | None:
    """The softmax and the nodes that compute with floats from it; None if features of a network come of it."""
    found, queue = {softmax.name}, deque([softmax])
    while queue:
        node = queue.popleft()
        whole = NOT_FLOAT.get(node.op_type, set())
        for name in (name for index, name in enumerate(node.output) if index not in whole):
            for consumer in consumers[name]:
                if consumer.op_type == "QuantizeLinear" or weights.get(_weight(consumer), [0])[0] > SIDES:
                    return None
                if consumer.op_type not in BEYOND and consumer.name not in found:
                    found.add(consumer.name)
                    queue.append(consumer)
    return found


def _weight(node: Any) -> str:
    return str(node.input[1]) if node.op_type == "Conv" else ""
