"""Each activation quantizer says which of torch's calls it is: passes drop some, and comparisons need to know."""

from __future__ import annotations

from onnx import ModelProto

from utils.onnx_graph.provenance import annotate
from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import pure


@pure
def number_quantizers(model: ModelProto) -> None:
    """Write into each activation quantizer which one it is: torch calls them in this order, and passes drop some."""
    for node in model.graph.node:
        node.ClearField("doc_string")  # torch's
    for number, node in enumerate(QdqGraph(model).activations):
        annotate(node, call=number)
