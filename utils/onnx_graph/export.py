"""Torch network → ONNX file, with a Q/DQ pair where the network has a quantizer.

The network is traced with torch's TorchScript exporter, in which quantizers write native QuantizeLinear and
DequantizeLinear.
Input `images` `[B, 3, H, W]` float32 in 0..1, or as `passes/take_bytes.py` has it; output `output0`
`[B, 4 + classes, anchors]`: boxes as centre, width and height in pixels of the input, then scores in 0..1. With masks,
their coefficients are further rows, and `output1` `[B, coefficients, h, w]` has the prototypes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import torch
from onnx import ModelProto, ValueInfoProto
from torch import nn

from utils.core.errors import InputError, QatError
from utils.core.files import atomic_path
from utils.core.input_spec import channels_of
from utils.core.logging import log_level
from utils.core.output_form import FORM_KEY
from utils.core.tasks import DETECT, IMAGES, SEGMENT, predicted
from utils.onnx_graph.export_config import Dynamic, ExportConfig
from utils.onnx_graph.output_formats import OutputFormat
from utils.onnx_graph.passes import run_passes
from utils.onnx_graph.passes.for_openvino import TARGET_KEY
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.qdq_view import FLOAT_MODULES, Provenance, provenance_of, without_provenance
from utils.onnx_graph.verify import GraphReport, verify
from utils.onnx_graph.view import set_metadata

AXES: dict[Dynamic, dict[str, dict[int, str]]] = {
    "none": {},
    "batch": {IMAGES: {0: "batch"}, DETECT.prediction: {0: "batch"}, SEGMENT.prototypes: {0: "batch"}},
    "all": {
        IMAGES: {0: "batch", 2: "height", 3: "width"},
        DETECT.prediction: {0: "batch", 2: "anchors"},
        SEGMENT.prototypes: {0: "batch", 2: "mask_height", 3: "mask_width"},
    },
}


@dataclass(frozen=True)
class ExportResult:
    """Description of a written file."""

    path: Path
    size_bytes: int
    opset: int
    inputs: dict[str, tuple[int | str, ...]]  # name → shape; a dynamic axis is its name
    outputs: dict[str, tuple[int | str, ...]]
    report: GraphReport | None  # the verifier's, None for an FP32 network
    quantizers: Mapping[str, Provenance]  # the activation quantizers by name, and where they come from


def export_forms(
    model: nn.Module, config: ExportConfig, files: Mapping[Path, OutputFormat], properties: Mapping[str, str]
) -> list[ExportResult]:
    """Write a network of upstream's, float or quantized, as ONNX files of several forms, from one trace.

    The network is left exactly as it was, also on errors. A file appears under its name only when it is whole.

    Args:
        model: evaluated in float32 on its own device; fused.
        files: what to write, and in which form.
        properties: for the files, beside those that follow from `config` (imgsz, batch, dynamic, typing, opset) and
            from the placement (float_modules).

    Raises:
        InputError: the image size does not fit the network, or the opset does not suit the typing.
        QatError: the exported graph is not valid.
    """
    plan: Any = getattr(model, "quantization_plan", None)
    quantized = plan is not None
    config = config.resolved(quantized)
    stride = int(model.stride.max())
    if any(size % stride for size in config.imgsz):
        raise InputError(
            f"--imgsz {config.imgsz[0]} {config.imgsz[1]}: both must be multiples of {stride}, the model's stride"
        )
    graph = run_passes(trace(model, config), config)
    quantizers = provenance_of(graph) if quantized else {}
    entries = dict(properties)
    if quantized:
        entries[FLOAT_MODULES] = json.dumps(list(plan.float_convolutions))
    if quantized and config.for_openvino:
        entries[TARGET_KEY] = config.target
    entries["imgsz"] = json.dumps(list(config.imgsz))
    entries["batch"] = str(config.batch_size)
    entries["dynamic"] = config.dynamic
    entries["typing"] = config.typing
    entries["opset"] = str(config.opset)
    graph = set_metadata(without_provenance(graph), entries)
    images = replace(config.input, channels=channels_of(model))
    results = []
    for path, form in files.items():
        written = take_bytes(form.attach(graph), images)
        written = _checked(set_metadata(written, {FORM_KEY: form.name, **images.metadata()}))
        report = verify(written) if quantized else None
        with atomic_path(path) as temporary:
            onnx.save(written, temporary)
        result = ExportResult(
            path=path,
            size_bytes=path.stat().st_size,
            opset=written.opset_import[0].version,
            inputs=_shapes(written.graph.input),
            outputs=_shapes(written.graph.output),
            report=report,
            quantizers=quantizers,
        )
        results.append(result)
    return results


def _checked(model: ModelProto) -> ModelProto:
    """The model with the shapes that ONNX infers.

    Raises:
        QatError: it is not valid ONNX.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = str(error).splitlines()[0]
        raise QatError(f"the exported graph is not valid ONNX, please report this: {reason}") from error


def _shapes(values: Iterable[ValueInfoProto]) -> dict[str, tuple[int | str, ...]]:
    """Name of each input or output → its shape; a dynamic axis is its name."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for value in values:
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(dim.dim_param or dim.dim_value for dim in dims)
    return shapes


def trace(model: Any, config: ExportConfig) -> ModelProto:
    """The graph of a copy of the network, as torch writes it.

    Its head returns predictions only, and no operations are merged: `number_quantizers` counts each call of a
    quantizer, and `merge_quantizers` merges afterwards. Torch's exporter has no option for that.

    Raises:
        QatError: torch cannot export the network.
    """
    model = copy.deepcopy(model).eval()
    head: Any = model.model[-1]
    head.export = True
    head.inplace = config.inplace
    head.dynamic = config.dynamic == "all"
    head.shape = None  # forget cached anchors
    device = next(model.parameters()).device
    images = torch.zeros(config.batch_size, channels_of(model), *config.imgsz, device=device)
    buffer = io.BytesIO()
    common_subexpressions = patch.object(torch._C, "_jit_pass_cse", lambda _graph: False)  # nothing was changed
    with torch.no_grad(), _quiet(), common_subexpressions:
        results = predicted(model(images))  # the head computes its anchors for this size: constants in the trace
        names = [IMAGES, DETECT.prediction, SEGMENT.prototypes][: 1 + len(results)]
        axes = {name: axes for name, axes in AXES[config.dynamic].items() if name in names}
        try:
            torch.onnx.export(
                model,
                (images,),
                buffer,
                dynamo=False,
                opset_version=config.opset,
                input_names=names[:1],
                output_names=names[1:],
                dynamic_axes=axes or None,
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise QatError(f"torch {torch.__version__} cannot export this model: {reason}") from error
    graph = onnx.load_from_string(buffer.getvalue())
    for output, result in zip(graph.graph.output, results, strict=True):
        # torch does not see it where shapes are dynamic
        output.type.tensor_type.shape.dim[1].dim_value = result.shape[1]
    return graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what only the exporter's authors can act on: tracing notes, its own deprecation, its log."""
    with log_level("torch.onnx", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module=r"torch\.onnx")
        yield
