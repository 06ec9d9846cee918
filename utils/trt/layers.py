"""An engine's layers, from TensorRT's inspector and profiler: precision, formats, times; as a report and drawn.

    inspect_engine(Path("yolov9-c-int8.engine"), draw=True)
    summary = summarize(layers_of(execution))

Reads the JSON of 8.6 to 10 (`Bindings`, `Format/Datatype`) and of 11 (`I/O Tensors`, type and format apart).
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from utils.core.errors import DependencyError, InputError, QatError
from utils.core.files import atomic_path, write_text
from utils.core.text import aligned
from utils.trt import tensorrt_api

if TYPE_CHECKING:
    from utils.trt.runner import Execution

logger = logging.getLogger(__name__)

# Types of layers, which versions capitalise differently: those that run nothing, and that change a tensor's form alone
IDLE = ("constant", "noop", "signal", "wait", "signal_wait", "shape_call")
REFORMATS = ("reformat", "cast", "quantize", "dequantize")
PRECISIONS = ("INT8", "FP8", "FP16", "BF16", "FP32", "other")
TYPES = {
    "int8": "INT8", "fp8": "FP8", "half": "FP16", "fp16": "FP16", "bf16": "BF16", "bfloat16": "BF16", "float": "FP32",
    "fp32": "FP32", "int32": "INT32", "int64": "INT64", "bool": "BOOL", "uint8": "UINT8",
}  # fmt: skip
TITLES, WIDTHS = ("", "layers", "share", "ms", "share"), (14, 8, 8, 10, 8)
MOSTLY = 0.5  # below this share of the layers, or of the time, an engine is not called an INT8 engine
# By precision; layers that only change a tensor's form have their own colour. Text on all of them is dark.
COLOURS = {"INT8": "#9BD8B4", "FP8": "#C5E8A5", "FP16": "#F6D186", "BF16": "#F6D186", "FP32": "#F0A08C"}
REFORMAT, OTHER = "#CBB5E2", "#E4E7EB"


@dataclass(frozen=True)
class LayerTensor:
    """An input or output of a layer: `type` such as 'INT8', `format` as TensorRT words it."""

    name: str
    shape: tuple[int, ...]
    type: str
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
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    tactic: str = ""
    ms: float | None = None

    @property
    def reformats(self) -> bool:
        """Whether it computes nothing, but takes time."""
        return self.kind not in ("compute", "idle")


def inspect_engine(engine: Path, *, batch: int | None = None, draw: bool = False, device: str = "") -> None:
    """Report on an engine's layers; writes `ENGINE.layers.json`, and `ENGINE.svg` if it is to be drawn.

    Args:
        batch: images, the profile's opt batch if None.

    Raises:
        InputError: the engine cannot be loaded, or the batch is outside its profile.
        DependencyError: TensorRT is not installed, or graphviz is needed and not there.
    """
    from utils.trt.runner import Execution

    execution = Execution(engine, tensorrt_api.load_tensorrt(), tensorrt_api.use_device(device))
    try:
        shapes = {spec.name: execution.profiles[spec.name][1] for spec in execution.inputs}
        if batch is not None:
            shapes = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
        execution.set_shapes(shapes)
        shape = "x".join(map(str, execution.buffers[execution.inputs[0].name].shape))
        layers, streams, api = layers_of(execution), execution.streams, execution.api.name
        gpu, precision = tensorrt_api.gpu(execution.device.index), execution.note.precision
    finally:
        execution.close()
    title = f"{engine.name}: {shape}, {api}, {gpu.name if gpu else 'no GPU'}"
    record, image = engine.with_suffix(".layers.json"), engine.with_suffix(".svg")
    summary = summarize(layers)
    logger.info("%s", "\n".join(report_lines(summary, title, precision)))
    write_text(record, layers_json(layers))
    if draw:
        with atomic_path(image) as temporary:
            done = subprocess.run(
                [graphviz(), "-Tsvg", "-o", str(temporary)], input=dot(layers, title), encoding="utf-8",
                errors="replace", capture_output=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise QatError(f"graphviz could not draw {image}: {' '.join(done.stderr.split())[:300]}")
    logger.info("layers: %s", ", ".join(map(str, [record, *[image] * draw])))
    if summary.total_ms is None:
        why = f"{api} measures no layers"
        if streams:
            why = (
                f"this engine has auxiliary streams ({streams}), and {api} measured no layer of it; an engine built "
                "with --max-aux-streams 0 shows them"
            )
        logger.info("no times: %s", why)


def layers_of(execution: Execution, runs: int = 20) -> list[Layer]:
    """The layers of an engine on its present shapes, with their mean milliseconds where TensorRT measures them.

    Raises:
        InputError: the engine was built without details of its layers.
    """
    layers, times = parse_layers(execution.information()), execution.layer_times(runs)
    return [replace(layer, ms=times.get(layer.name, 0.0 if layer.kind == "idle" else None)) for layer in layers]


def parse_layers(text: str) -> list[Layer]:
    """The layers in an inspector's JSON, in order, without times.

    Raises:
        InputError: it is no such JSON, or the engine was built without details.
    """
    try:
        entries = json.loads(text, strict=False)["Layers"]  # 8.6 writes raw control characters
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is no JSON of TensorRT's engine inspector: {type(error).__name__}: {error}") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError("the engine holds only names of layers; build it with detailed profiling verbosity")
    layers = []
    for entry in entries:
        inputs, outputs = (tuple(map(_tensor, entry.get(side, []))) for side in ("Inputs", "Outputs"))
        name, layer_type, tactic = (str(entry.get(key, "")) for key in ("Name", "LayerType", "TacticName"))
        kind = _kind(layer_type.lower(), entry.get("Origin"), inputs, outputs)
        precision = ""
        if kind == "compute":
            types, weights = {tensor.type for tensor in inputs or outputs}, entry.get("Weights")
            if isinstance(weights, dict) and _type(str(weights.get("Type", ""))) == "INT8":
                types = {"INT8"}
            precision = next((known for known in PRECISIONS if known in types), "other")
        layers.append(Layer(name, layer_type, kind, precision, inputs, outputs, tactic))
    return layers


def _tensor(entry: Mapping[str, Any]) -> LayerTensor:
    both = str(entry.get("Format/Datatype", ""))
    tensor_type = str(entry.get("DataType", entry.get("Datatype", ""))) or both
    layout = str(entry.get("Format", "")) or both
    shape = tuple(int(size) for size in entry.get("Dimensions", []))
    return LayerTensor(str(entry.get("Name", "")), shape, _type(tensor_type) or _type(layout), layout)


def _type(text: str) -> str:
    words = re.findall(r"[a-z]+\d*", text.lower())
    return next((TYPES[word] for word in words if word in TYPES), "")


def _kind(layer_type: str, origin: Any, inputs: Sequence[LayerTensor], outputs: Sequence[LayerTensor]) -> str:
    if layer_type in IDLE:
        return "idle"
    if layer_type not in REFORMATS or not inputs or not outputs:
        return "compute"
    before, after = inputs[0].type, outputs[0].type
    if before == after == "INT8":
        return "requantize" if origin == "QDQ" else "copy"
    if "INT8" in (before, after):
        return "quantize" if after == "INT8" else "dequantize"
    return "copy" if before == after else "cast"


@dataclass(frozen=True)
class LayerSummary:
    """What an engine consists of.

    Attributes:
        computing: precision → how many layers compute in it, and their milliseconds.
        reformats: kind → how many layers only change a tensor's form, and their milliseconds.
        total_ms: of all layers; None where no layer was measured, and then all milliseconds are 0.
        slowest: the ten layers that take longest.
    """

    computing: dict[str, tuple[int, float]]
    reformats: dict[str, tuple[int, float]]
    total_ms: float | None
    slowest: tuple[Layer, ...] = field(default=(), repr=False)

    @property
    def int8_layers(self) -> float:
        """INT8's share of the computing layers, 0 to 1."""
        return self.computing.get("INT8", (0,))[0] / max(sum(count for count, _ in self.computing.values()), 1)

    @property
    def int8_time(self) -> float | None:
        """INT8's share of the time of all layers, 0 to 1."""
        return self.computing.get("INT8", (0, 0.0))[1] / self.total_ms if self.total_ms else None


def summarize(layers: Sequence[Layer]) -> LayerSummary:
    """Counts and times by precision and by kind."""
    groups: dict[bool, dict[str, tuple[int, float]]] = {True: {}, False: {}}  # of reformats, and of what computes
    for layer in layers:
        if layer.kind != "idle":
            group, key = groups[layer.reformats], layer.kind if layer.reformats else layer.precision
            count, ms = group.get(key, (0, 0.0))
            group[key] = (count + 1, ms + (layer.ms or 0.0))
    timed = any(layer.ms is not None and layer.kind != "idle" for layer in layers)
    return LayerSummary(
        computing=groups[False],
        reformats=groups[True],
        total_ms=sum(layer.ms or 0.0 for layer in layers) if timed else None,
        slowest=tuple(sorted((layer for layer in layers if layer.ms), key=lambda layer: -(layer.ms or 0))[:10]),
    )


def layers_json(layers: Sequence[Layer]) -> str:
    """The content of `ENGINE.layers.json`: an entry for each layer that runs something, in order.

    The keys are the fields of `Layer`, and `share`, a fraction of all layers' time, null where nothing was measured.
    """
    total = sum(layer.ms or 0.0 for layer in layers)
    running = [layer for layer in layers if layer.kind != "idle"]
    entries = [{**asdict(layer), "share": (layer.ms or 0.0) / total if total else None} for layer in running]
    return json.dumps(entries, indent=1) + "\n"


def report_lines(summary: LayerSummary, title: str, precision: str = "") -> list[str]:
    """The report's lines: shares by precision, reformatting, the slowest layers, and what that means.

    Args:
        precision: that the engine was built for, such as 'int8'.
    """

    def share(ms: float) -> str:
        return f"{ms / summary.total_ms:.0%}" if summary.total_ms else ""

    def time(ms: float) -> tuple[str, str]:
        return ("", "") if summary.total_ms is None else (f"{ms:.4f}", share(ms))

    total = sum(count for count, _ in summary.computing.values())
    computing = {name: summary.computing[name] for name in PRECISIONS if name in summary.computing}
    rows = [(name, str(count), f"{count / total:.0%}", *time(ms)) for name, (count, ms) in computing.items()]
    rows += [(kind, str(count), "", *time(ms)) for kind, (count, ms) in summary.reformats.items()]
    coverage = f"INT8 coverage: {summary.int8_layers:.0%} of {total} computing layers"
    if summary.int8_time is not None:
        coverage += f", {summary.int8_time:.0%} of {summary.total_ms:.3f} ms (each layer measured by itself)"
    lines = [title, "", *aligned(TITLES, rows, [""], widths=WIDTHS, gap=""), "", coverage]
    if summary.slowest:
        lines += ["", "Slowest layers:"]
        lines += [f"  {layer.ms:8.4f} ms  {share(layer.ms or 0):>4}  {layer.precision or layer.kind:<10}"
                  f"  {_short(layer.name, 110)}" for layer in summary.slowest]  # fmt: skip
    sentences = advice(summary, precision)
    return [*lines, *(["", *sentences] if sentences else [])]


def advice(summary: LayerSummary, precision: str) -> list[str]:
    """Sentences on what stands in INT8's way, for an engine that was built for `precision`."""
    sentences = []
    low_time = summary.int8_time is not None and summary.int8_time < MOSTLY
    if precision == "int8" and (summary.int8_layers < MOSTLY or low_time):
        time = "" if summary.int8_time is None else f" and {summary.int8_time:.0%} of the time"
        sentences.append(
            f"This engine was built for INT8 and is mostly not INT8: {summary.int8_layers:.0%} of its layers{time}. "
            "Look at the slowest layers: those without INT8 have no Q/DQ in front, or TensorRT found them faster so."
        )
    spent = sum(ms for _, ms in summary.reformats.values())
    if summary.total_ms and spent > 0.15 * summary.total_ms:
        sentences.append(
            f"{spent / summary.total_ms:.0%} of the time only changes the form of tensors (copy, cast, requantize): "
            "tensors that meet in a Concat or Add do not share one scale, or change their layout."
        )
    return sentences


def dot(layers: Sequence[Layer], title: str) -> str:
    """The graph in graphviz's language; a layer is labelled with its name, kernel and time."""
    total = sum(layer.ms or 0.0 for layer in layers)
    lines = [
        "digraph engine {",
        f'  graph [rankdir=TB, nodesep=0.2, ranksep=0.3, label="{_escape(title)}", labelloc=t, fontname="sans-serif"];',
        '  node [shape=box, style="filled,rounded", color="#9AA5B1", fontname="sans-serif", fontsize=10];',
        '  edge [color="#52606D", fontname="sans-serif", fontsize=8];',
    ]
    source: dict[str, str] = {}  # tensor → node that it comes from
    produced = {tensor.name for layer in layers for tensor in layer.outputs}
    for index, layer in enumerate(layers):
        for tensor in layer.inputs:
            if tensor.name not in produced | source.keys():
                source[tensor.name] = f"i{index}"
                lines.append(f'  i{index} [label="{_escape(tensor.name)}", shape=ellipse, fillcolor=white];')
        if layer.kind == "idle":  # its outputs are its inputs; a constant has no source
            source |= {t.name: source[i.name] for t in layer.outputs for i in layer.inputs if i.name in source}
            continue
        time = "" if layer.ms is None else f"\\n{layer.ms:.4f} ms"
        time += f" ({layer.ms / total:.1%})" if layer.ms and total else ""
        label = f"{_escape(_short(layer.name, 70))}\\n{_escape(layer.type)}, {layer.precision or layer.kind}{time}"
        colour = REFORMAT if layer.reformats else COLOURS.get(layer.precision, OTHER)
        tooltip = f"{_escape(layer.name)} | {_escape(layer.tactic)}"
        lines.append(f'  n{index} [label="{label}", fillcolor="{colour}", tooltip="{tooltip}"];')
        for tensor in layer.inputs:
            if tensor.name in source:
                what = f"{tensor.type} {'x'.join(map(str, tensor.shape))}"
                lines.append(
                    f'  {source[tensor.name]} -> n{index} [label="{what}", tooltip="{_escape(tensor.format)}"];'
                )
        source |= {tensor.name: f"n{index}" for tensor in layer.outputs}
    return "\n".join([*lines, "}"]) + "\n"


def graphviz() -> str:
    """Graphviz' `dot`.

    Raises:
        DependencyError: it is not installed.
    """
    path = which("dot")
    if path is None:
        raise DependencyError("drawing needs graphviz (apt-get, or the overlay's install_dependencies.sh --trex)")
    return path


def _short(name: str, limit: int) -> str:
    """A fused layer's name with its middle left out."""
    name = " ".join(name.split())
    return name if len(name) <= limit else f"{name[: limit // 2]} ... {name[-limit // 2 :]}"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
