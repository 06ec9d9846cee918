"""What an engine is made of: layers with precision, formats and times, from TensorRT's inspector and profiler.

    layers = with_times(parse(execution.information()), execution.layer_times())
    found = summarize(layers)

Reads the JSON of 8.6 to 10 (`Bindings`, `Format/Datatype`) and of 11 (`I/O Tensors`, type and format apart).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import read_text

# Types of layers, which versions capitalise differently: those that run nothing, and that change a tensor's form alone
IDLE = ("constant", "noop", "signal", "wait", "signal_wait", "shape_call")
FORMS = ("reformat", "cast", "quantize", "dequantize")
PRECISIONS = ("INT8", "FP8", "FP16", "BF16", "FP32", "other")
_TYPES = {
    "int8": "INT8", "fp8": "FP8", "half": "FP16", "fp16": "FP16", "bf16": "BF16", "bfloat16": "BF16", "float": "FP32",
    "fp32": "FP32", "int32": "INT32", "int64": "INT64", "bool": "BOOL", "uint8": "UINT8",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """An input or output of a layer: `dtype` such as 'INT8', `format` as TensorRT words it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str


@dataclass(frozen=True)
class Layer:
    """A layer of an engine.

    Attributes:
        type: TensorRT's, such as 'CaskConvolution'.
        kind: 'compute', 'idle', or what only changes a tensor's form: 'quantize', 'dequantize', 'requantize', 'cast',
            'copy' (to another place or layout, at the same type).
        precision: of a computing layer: the narrowest type that it computes from.
        tactic: name of the kernel, '' if TensorRT does not say.
        ms: milliseconds, None if it was not measured.
    """

    name: str
    type: str
    kind: str
    precision: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    tactic: str = ""
    ms: float | None = None

    @property
    def reformats(self) -> bool:
        """Whether it computes nothing, but takes time."""
        return self.kind not in ("compute", "idle")


def read(path: Path) -> str:
    """The text of a file with an inspector's JSON; bytes that are no UTF-8 (8.6) are replaced."""
    return read_text(path, "expected the inspector's JSON", errors="replace")


def parse(text: str) -> list[Layer]:
    """The layers in an inspector's JSON, in order.

    Raises:
        InputError: it is no such JSON, or the engine was built without details.
    """
    try:
        content = json.loads(text, strict=False)  # 8.6 writes raw control characters
        entries = content["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is no JSON of TensorRT's engine inspector: {type(error).__name__}: {error}") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError("the engine holds only names of layers; build it with detailed profiling verbosity")
    return [_layer(entry) for entry in entries]


def with_times(layers: Sequence[Layer], times: Mapping[str, float]) -> list[Layer]:
    """The layers with their milliseconds from a profile, by name."""
    return [replace(layer, ms=times.get(layer.name, 0.0 if layer.kind == "idle" else None)) for layer in layers]


def _layer(entry: Mapping[str, Any]) -> Layer:
    inputs = tuple(_tensor(item) for item in entry.get("Inputs", []))
    outputs = tuple(_tensor(item) for item in entry.get("Outputs", []))
    kind = _kind(str(entry.get("LayerType", "")), entry, inputs, outputs)
    precision = _precision(inputs or outputs, entry) if kind == "compute" else ""
    return Layer(
        name=str(entry.get("Name", "")),
        type=str(entry.get("LayerType", "")),
        kind=kind,
        precision=precision,
        inputs=inputs,
        outputs=outputs,
        tactic=str(entry.get("TacticName", "")),
    )


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    both = str(entry.get("Format/Datatype", ""))
    dtype = str(entry.get("DataType", entry.get("Datatype", ""))) or both
    layout = str(entry.get("Format", "")) or both
    shape = tuple(int(size) for size in entry.get("Dimensions", []))
    return Tensor(str(entry.get("Name", "")), shape, _type(dtype) or _type(layout), layout)


def _type(text: str) -> str:
    words = re.findall(r"[a-z]+\d*", text.lower())
    return next((_TYPES[word] for word in words if word in _TYPES), "")


def _kind(kind: str, entry: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    if kind.lower() in IDLE:
        return "idle"
    if kind.lower() not in FORMS or not inputs or not outputs:
        return "compute"
    before, after = inputs[0].dtype, outputs[0].dtype
    if before == after == "INT8":
        return "requantize" if entry.get("Origin") == "QDQ" else "copy"
    if "INT8" in (before, after):
        return "quantize" if after == "INT8" else "dequantize"
    return "copy" if before == after else "cast"


def _precision(tensors: Iterable[Tensor], entry: Mapping[str, Any]) -> str:
    types = {tensor.dtype for tensor in tensors}
    weights = entry.get("Weights")
    if isinstance(weights, dict) and _type(str(weights.get("Type", ""))) == "INT8":
        return "INT8"
    return next((name for name in PRECISIONS if name in types), "other")


@dataclass(frozen=True)
class Summary:
    """What an engine consists of: layers by precision and kind, and their times.

    Attributes:
        counts: computing layers by precision.
        ms: milliseconds by precision, of computing layers; None without a profile.
        reformats, reformat_ms: by kind, the layers that only change a tensor's form.
        total_ms: of all layers.
        slowest: the ten layers that take longest.
    """

    counts: dict[str, int]
    ms: dict[str, float] | None
    reformats: dict[str, int]
    reformat_ms: dict[str, float] | None
    total_ms: float | None
    slowest: tuple[Layer, ...] = field(default=(), repr=False)

    @property
    def int8_layers(self) -> float:
        """INT8's share of the computing layers, 0 to 1."""
        return self.counts.get("INT8", 0) / max(sum(self.counts.values()), 1)

    @property
    def int8_time(self) -> float | None:
        """INT8's share of the time of all layers, 0 to 1."""
        if self.ms is None or not self.total_ms:
            return None
        return self.ms.get("INT8", 0.0) / self.total_ms


def summarize(layers: Sequence[Layer]) -> Summary:
    """Counts and times by precision and by kind."""
    computing = [layer for layer in layers if layer.kind == "compute"]
    forms = [layer for layer in layers if layer.reformats]
    timed = any(layer.ms is not None and layer.kind != "idle" for layer in layers)
    ordered = sorted((layer for layer in layers if layer.ms), key=lambda layer: -(layer.ms or 0))
    return Summary(
        counts=dict(Counter(layer.precision for layer in computing)),
        ms=_sums((layer.precision, layer.ms) for layer in computing) if timed else None,
        reformats=dict(Counter(layer.kind for layer in forms)),
        reformat_ms=_sums((layer.kind, layer.ms) for layer in forms) if timed else None,
        total_ms=sum(layer.ms or 0.0 for layer in layers) if timed else None,
        slowest=tuple(ordered[:10]),
    )


def _sums(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for key, value in pairs:
        total[key] = total.get(key, 0.0) + (value or 0.0)
    return total
