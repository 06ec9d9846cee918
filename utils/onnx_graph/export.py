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
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import onnx
import torch
from onnx import ModelProto, ValueInfoProto
from torch import nn

from utils.core.errors import InputError, QatError
from utils.core.files import atomic_path, wanted_typing
from utils.core.input_spec import FLOATS, InputSpec, channels_of
from utils.core.logging import log_level
from utils.core.output_form import FORM_KEY
from utils.core.tasks import DETECT, IMAGES, SEGMENT, predicted
from utils.onnx_graph.output_formats import OutputFormat
from utils.onnx_graph.passes import run_passes
from utils.onnx_graph.passes.for_openvino import TARGET_KEY, Target
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.qdq_view import FLOAT_MODULES, Provenance, provenance_of, without_provenance
from utils.onnx_graph.verify import GraphReport, verify
from utils.onnx_graph.view import set_metadata

OPSETS = range(13, 21)  # quantization per output channel came with 13; torch's exporter ends at 20
Typing = Literal["auto", "weak", "strong"]
TYPINGS: dict[Typing, range] = {  # the operator sets that each may have
    "weak": range(13, 18),  # FP32: TensorRT 8.6 to 10.11 choose the types; 8.6 reads no newer operators
    "strong": range(19, 21),  # FP16 and FP32 as written: TensorRT 10.12 and later; FP16 scales came with 19
}
Dynamic = Literal["none", "batch", "all"]
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
class ExportConfig:
    """Settings of an export.

    The typing is 'weak' (FP32, TensorRT chooses), 'strong' (the float part in FP16 up to DFL, inputs and outputs FP32)
    or 'auto', which `resolved` settles by the opset or else by the installed TensorRT.
    """

    imgsz: tuple[int, int] = (640, 640)  # height and width of the input, pixels
    batch_size: int = 1  # with a dynamic batch only the one that is traced
    dynamic: Dynamic = "none"  # axes: none, the batch, or batch, height and width
    simplify: bool = False  # run onnxslim
    typing: Typing = "weak"
    opset: int | None = None  # None: the last that suits a weakly typed file, the first for a strong quantized one
    inplace: bool = False  # upstream's switch of the same name on the head
    int8_weights: bool = False  # store quantized weights as INT8, see `passes/quantizers.py`
    for_int8_kernels: bool = True  # the layers that INT8 kernels are fastest with, see `passes/__init__.py`
    input: InputSpec = FLOATS  # the form in which the file takes images
    target: Target = "tensorrt"  # what runs a quantized network: others take weakly typed files

    @property
    def half(self) -> bool:
        """Whether the float part is FP16."""
        return self.typing == "strong"

    @property
    def for_openvino(self) -> bool:
        """Whether OpenVINO runs the file, and not TensorRT."""
        return self.target != "tensorrt"

    def resolved(self, quantized: bool) -> ExportConfig:
        """Settle typing and opset for a network.

        'auto' is 'strong' for a quantized network, unless the TensorRT that is installed, or the opset, needs 'weak';
        for a float one it is 'weak', which is FP32.

        Raises:
            InputError: the opset is none of those that suit the typing, or the typing does not suit the target.
        """
        typing = self._resolved_typing(quantized)
        opsets = TYPINGS[typing] if quantized else OPSETS
        if self.opset is not None:
            opset = self.opset
        elif typing == "strong" and quantized:
            opset = opsets[0]
        else:
            opset = 17
        if opset not in opsets:
            raise InputError(
                f"a {typing}ly typed file needs --opset {opsets[0]} to {opsets[-1]}, not {opset}; TensorRT 8.6 and "
                "later read opset 17, and FP16 scales need opset 19"
            )
        return replace(self, typing=typing, opset=opset)

    def _resolved_typing(self, quantized: bool) -> Typing:
        """'weak' or 'strong', see `resolved`."""
        if self.for_openvino:
            if self.typing == "strong":
                raise InputError(
                    f"--target {self.target} writes weakly typed files; leave --typing strong and --half out"
                )
            return "weak"
        if self.typing != "auto":
            return self.typing
        if not quantized:
            return "weak"
        if self.opset is None:
            return default_typing()
        return "strong" if self.opset in TYPINGS["strong"] else "weak"


def default_typing() -> Typing:
    """Typing of a quantized file for the TensorRT on this machine: 'strong' without one, and from 10.12 on."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            return wanted_typing(metadata.version(name))
    return "strong"


@dataclass(frozen=True)
class ExportResult:
    """Description of a written file."""

    path: Path
    size_bytes: int
    opset: int
    inputs: dict[str, tuple[int | str, ...]]  # name → shape; a dynamic axis is its name
    outputs: dict[str, tuple[int | str, ...]]
    report: GraphReport | None  # the verifier's, None for a float network
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
