"""What onnxslim finds besides, on demand (`--simplify`)."""

from __future__ import annotations

from onnx import ModelProto

from utils.core.errors import DependencyError, QatError
from utils.core.text import plural
from utils.onnx_graph.qdq_view import without_provenance
from utils.onnx_graph.view import QUANTIZE


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
        raise QatError(
            f"onnxslim {onnxslim.__version__} left {after} of {plural(before, 'quantizer')}; drop --simplify"
        )
    notes = {node.output[0]: node.doc_string for node in model.graph.node if node.doc_string}
    for node in result.graph.node:
        node.doc_string = notes.get(node.output[0], "")
    return result
