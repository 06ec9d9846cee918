"""The passes that make the exported graph of what torch writes, in the order in which they run.

Each is a pure function, ModelProto in and out, with the reason for it; larger ones have a file of their name. None of
them changes what the graph computes, except that `round_weights` settles how weights between two quantized values are
rounded, and `to_half` computes in FP16. The pass `number_quantizers` is in `qdq_view.py`. Each file that is written
also goes through passes of `output_formats.py` (NMS, DeepStream) and `take_bytes.py` (images as bytes), and a file for
OpenVINO through those of `for_openvino.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from onnx import ModelProto

from utils.onnx_graph.passes.align_channels import align_channels
from utils.onnx_graph.passes.decode_boxes import decode_boxes, separate_predictions
from utils.onnx_graph.passes.fold_constants import fold_constants, remove_identities, simplify
from utils.onnx_graph.passes.for_openvino import drop_repeated_quantizers, offset_activations
from utils.onnx_graph.passes.int8_kernels import convolve_pools, dense_groups, separate_first
from utils.onnx_graph.passes.quantizers import (
    merge_quantizers,
    name_quantizers,
    round_weights,
    share_scales,
    store_int8_weights,
)
from utils.onnx_graph.passes.separate_parts import separate_parts
from utils.onnx_graph.passes.to_half import to_half
from utils.onnx_graph.qdq_view import number_quantizers
from utils.onnx_graph.view import drop_unused, pure

if TYPE_CHECKING:
    from utils.onnx_graph.export_config import ExportConfig

remove_unused = pure(drop_unused)


def wanted_passes(config: ExportConfig) -> list[Callable[[ModelProto], ModelProto]]:
    """The passes of an export, in order."""
    passes: list[Callable[[ModelProto], ModelProto]] = []
    # torch's graph in fewer nodes
    passes += [fold_constants, remove_identities]
    # one quantizer a tensor, one initializer a scale
    passes += [share_scales, round_weights, number_quantizers, merge_quantizers]
    # the head
    passes += [separate_predictions, decode_boxes, dense_groups]
    # names
    passes += [name_quantizers, remove_unused]
    if config.simplify:  # onnxslim takes the names away again
        passes += [simplify, name_quantizers, remove_unused]
    # fast kernels of TensorRT
    if config.for_int8_kernels and not config.for_openvino:
        passes.append(separate_parts)
        if config.floats == "FP32":  # measured for TensorRT 8.6
            passes.append(separate_first)
        passes += [align_channels, convolve_pools]  # in this order: a convolution's parts may need whole blocks
    # types in which values are stored
    if config.for_openvino:
        passes += [offset_activations, drop_repeated_quantizers]
    if config.floats == "FP16":
        passes.append(to_half)
    if config.int8_weights:
        passes.append(store_int8_weights)
    return passes


def run_passes(model: ModelProto, config: ExportConfig) -> ModelProto:
    """The graph after the passes that an export wants."""
    for step in wanted_passes(config):
        model = step(model)
    return model
