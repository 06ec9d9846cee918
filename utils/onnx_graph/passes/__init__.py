"""The passes that make the exported graph of what torch writes, in the order in which they run.

Each is a pure function, ModelProto in and out, with the reason for it; larger ones have a file of their name. None of
them changes what the graph computes, except that `round_weights` settles how weights between two quantized values are
rounded, and `to_half` computes in FP16. Beside them: `qdq_view.py` (`number_quantizers`); and for each file that is
written `output_formats.py` (NMS, DeepStream) and `take_bytes.py` (images as bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import ModelProto

from utils.onnx_graph.passes.align_channels import align_channels
from utils.onnx_graph.passes.decode_boxes import decode_boxes, separate_predictions
from utils.onnx_graph.passes.fold_constants import fold_constants, remove_identities
from utils.onnx_graph.passes.int8_kernels import convolve_pools, dense_groups, separate_first
from utils.onnx_graph.passes.quantizers import (
    merge_quantizers,
    name_quantizers,
    round_weights,
    share_scales,
    store_int8_weights,
)
from utils.onnx_graph.passes.separate_parts import separate_parts
from utils.onnx_graph.passes.simplify import simplify
from utils.onnx_graph.passes.to_half import to_half
from utils.onnx_graph.qdq_view import number_quantizers
from utils.onnx_graph.view import drop_unused, pure

if TYPE_CHECKING:
    from utils.onnx_graph.export import ExportConfig

remove_unused = pure(drop_unused)


@dataclass(frozen=True)
class Pass:
    """A pass, and of which exports it is part."""

    run: Callable[[ModelProto], ModelProto]
    wanted: Callable[[ExportConfig], bool] = lambda config: True


PASSES = (
    # what torch traces, in few nodes
    Pass(fold_constants),
    Pass(remove_identities),
    # one quantizer a tensor, one initializer a scale
    Pass(share_scales),
    Pass(round_weights),
    Pass(number_quantizers),
    Pass(merge_quantizers),
    # the head
    Pass(separate_predictions),
    Pass(decode_boxes),
    Pass(dense_groups),
    # names, which onnxslim takes away again
    Pass(name_quantizers),
    Pass(remove_unused),
    Pass(simplify, lambda config: config.simplify),
    Pass(name_quantizers, lambda config: config.simplify),
    Pass(remove_unused, lambda config: config.simplify),
    # INT8 kernels of TensorRT: a convolution's parts may need whole blocks, and grouped convolutions get none
    Pass(separate_parts, lambda config: config.for_int8_kernels),
    Pass(separate_first, lambda config: config.for_int8_kernels and not config.half),  # measured for TensorRT 8.6
    Pass(align_channels, lambda config: config.for_int8_kernels),
    Pass(convolve_pools, lambda config: config.for_int8_kernels),
    # how values are stored
    Pass(to_half, lambda config: config.half),
    Pass(store_int8_weights, lambda config: config.int8_weights),
)


def run_passes(model: ModelProto, config: ExportConfig) -> ModelProto:
    """The graph after the passes that an export wants."""
    for step in PASSES:
        if step.wanted(config):
            model = step.run(model)
    return model
