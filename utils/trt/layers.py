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
from contextlib import closing
from dataclasses import asdict, dataclass, replace
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

# Types of layers, in lower case, since versions differ in it: those that run nothing, and those that only change a
# tensor's form
IDLE = ("constant", "noop", "signal", "wait", "signal_wait", "shape_call")
REFORMATS = ("reformat", "cast", "quantize", "dequantize")
PRECISIONS = ("INT8", "FP8", "FP16", "BF16", "FP32", "other")
TYPES = {
    "int8": "INT8",
    "fp8": "FP8",
    "half": "FP16",
    "fp16": "FP16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "float": "FP32",
    "fp32": "FP32",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
    "uint8": "UINT8",
}
TITLES = ("", "layers", "share", "ms", "share")
MOSTLY = 0.5  # below this share of the layers, or of the time, an engine is not called an INT8 engine
MUCH = 0.15  # of the time, for layers that compute nothing
# By precision; layers that only change a tensor's form have their own colour. Text on all of them is dark.
COLOURS = {"INT8": "#9BD8B4", "FP8": "#C5E8A5", "FP16": "#F6D186", "BF16": "#F6D186", "FP32": "#F0A08C"}
REFORMAT, OTHER = "#CBB5E2", "#E4E7EB"
FONT = "sans-serif"


@dataclass(frozen=True)
class LayerTensor:
    """An input or output of a layer: `type` such as 'INT8', `format` as TensorRT words it."""

    name: str
    shape: tuple[int, ...]
    type: str
    format: str


@dataclass(frozen=True)
class Layer:
    """A layer of an engine."""

    name: str
    type: str  # TensorRT's, such as 'CaskConvolution'
    # 'compute', 'idle', or a change of a tensor's form: 'quantize', 'dequantize', 'requantize', 'cast', 'copy' (to
    # another place or layout at the same type)
    kind: str
    precision: str  # of a computing layer: the narrowest type that it computes from
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    tactic: str = ""  # name of the kernel, '' if it is not known
    ms: float | None = None  # milliseconds, None if it was not measured

    @property
    def reformats(self) -> bool:
        """Return whether it computes nothing, but takes time."""
        return self.kind not in ("compute", "idle")


def inspect_engine(engine: Path, *, batch: int | None = None, draw: bool = False, device: str = "") -> None:
    """Report on an engine's layers; writes `ENGINE.layers.json`, and `ENGINE.svg` if it is to be drawn.

    The JSON has the fields of each `Layer` that runs something, and `share`, its fraction of all layers' time.

    Args:
        batch: images, the profile's opt batch if None.

    Raises:
        InputError: the engine cannot be loaded, or the batch is outside its profile.
        DependencyError: TensorRT is not installed, or graphviz is needed and not there.
    """
    from utils.trt.runner import Execution

    with closing(Execution(engine, tensorrt_api.load_tensorrt(), tensorrt_api.use_device(device))) as execution:
        opt = {name: shapes[1] for name, shapes in execution.profiles.items()}
        execution.set_shapes({name: (batch or shape[0], *shape[1:]) for name, shape in opt.items()})
        shape = "x".join(map(str, execution.buffers[execution.inputs[0].name].shape))
        layers = layers_of(execution)
        streams = execution.streams
        api = execution.api.name
    gpu = tensorrt_api.gpu(execution.device.index)
    title = f"{engine.name}: {shape}, {api}, {gpu.name if gpu else 'no GPU'}"
    summary = report_layers(layers, title, engine, precision=execution.note.precision, draw=draw)
    if summary.total_ms is None:
        remedy = ""
        if streams:
            remedy = f" of an engine with auxiliary streams ({streams}); --max-aux-streams 0 builds one without"
        logger.info("no times: %s measured no layers%s", api, remedy)


def report_layers(
    layers: Sequence[Layer], title: str, network: Path, *, precision: str = "", draw: bool = False
) -> LayerSummary:
    """Print a report on layers, and write `NETWORK.layers.json`, and `NETWORK.svg` if it is to be drawn.

    `precision` is the one that the network was built for, such as 'int8'; see `advice`.
    """
    summary = summarize(layers)
    logger.info("%s", "\n".join(report_lines(summary, title, precision)))
    total = _total_ms(layers)
    entries = []
    for layer in layers:
        if layer.kind != "idle":
            share = (layer.ms or 0.0) / total if total else None
            entries.append({**asdict(layer), "share": share})
    files = [network.with_suffix(".layers.json")]
    write_text(files[0], json.dumps(entries, indent=1) + "\n")
    if draw:
        picture = network.with_suffix(".svg")
        _draw(dot(layers, title), picture)
        files.append(picture)
    logger.info("layers: %s", ", ".join(map(str, files)))
    return summary


def _draw(text: str, path: Path) -> None:
    """Draw a graph in graphviz's language as SVG; `QatError` if graphviz fails."""
    with atomic_path(path) as temporary:
        command = [graphviz(), "-Tsvg", "-o", str(temporary)]
        process = subprocess.run(command, input=text.encode(errors="replace"), stderr=subprocess.PIPE, check=False)
        if process.returncode:
            reason = " ".join(process.stderr.decode(errors="replace").split())
            raise QatError(f"graphviz could not draw {path}: {reason}")


def layers_of(execution: Execution, runs: int = 20) -> list[Layer]:
    """The layers of an engine on its present shapes, with their mean milliseconds; raises as `parse_layers`."""
    layers = parse_layers(execution.information())
    times = execution.layer_times(runs)
    timed = []
    for layer in layers:
        default = 0.0 if layer.kind == "idle" else None
        timed.append(replace(layer, ms=times.get(layer.name, default)))
    return timed


def parse_layers(text: str) -> list[Layer]:
    """The layers in an inspector's JSON, in order, without times; `InputError` if it holds no details of them."""
    try:
        entries = json.loads(text, strict=False)["Layers"]  # 8.6 writes raw control characters
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"not JSON of TensorRT's engine inspector: {type(error).__name__}: {error}") from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError("the engine holds only names of layers; build it with detailed profiling verbosity")
    return [_layer(entry) for entry in entries]


def _layer(entry: Mapping[str, Any]) -> Layer:
    """A layer of the inspector's JSON."""
    inputs = tuple(_tensor(tensor) for tensor in entry.get("Inputs", []))
    outputs = tuple(_tensor(tensor) for tensor in entry.get("Outputs", []))
    layer_type = str(entry.get("LayerType", ""))
    precision = ""
    if layer_type.lower() in IDLE:
        kind = "idle"
    elif layer_type.lower() in REFORMATS and inputs and outputs:
        kind = _kind_of_reformat(inputs[0].type, outputs[0].type, entry.get("Origin") == "QDQ")
    else:
        kind = "compute"
        types = {tensor.type for tensor in inputs or outputs}
        precision = next((name for name in PRECISIONS if name in types), "other")
    return Layer(
        name=str(entry.get("Name", "")),
        type=layer_type,
        kind=kind,
        precision=precision,
        inputs=inputs,
        outputs=outputs,
        tactic=str(entry.get("TacticName", "")),
    )


def _kind_of_reformat(before: str, after: str, is_quantizer: bool) -> str:
    """Kind of a layer that only changes a tensor's form, by the types before and after it."""
    if before == after:
        return "requantize" if after == "INT8" and is_quantizer else "copy"
    if after == "INT8":
        return "quantize"
    if before == "INT8":
        return "dequantize"
    return "cast"


def _tensor(entry: Mapping[str, Any]) -> LayerTensor:
    """A tensor of the inspector's JSON."""
    format_and_type = entry.get("Format/Datatype", "")
    layout = str(entry.get("Format", format_and_type))
    type_text = str(entry.get("DataType", entry.get("Datatype", format_and_type)))
    return LayerTensor(
        name=str(entry.get("Name", "")),
        shape=tuple(int(size) for size in entry.get("Dimensions", [])),
        type=_type(type_text) or _type(layout),
        format=layout,
    )


def _type(text: str) -> str:
    words = re.findall(r"[a-z]+\d*", text.lower())
    return next((TYPES[word] for word in words if word in TYPES), "")


@dataclass(frozen=True)
class LayerSummary:
    """Numbers and times of an engine's layers; all milliseconds are 0 where no layer was measured."""

    computing: dict[str, tuple[int, float]]  # precision → number of layers that compute in it, their milliseconds
    reformats: dict[str, tuple[int, float]]  # kind of change of a tensor's form → number of layers, their milliseconds
    total_ms: float | None  # of all layers; None where no layer was measured
    slowest: tuple[Layer, ...] = ()  # the ten layers that take longest

    @property
    def int8_layers(self) -> float:
        """INT8's share of the computing layers, 0 to 1."""
        total = sum(count for count, _ in self.computing.values())
        int8, _ = self.computing.get("INT8", (0, 0.0))
        return int8 / max(total, 1)

    @property
    def int8_time(self) -> float | None:
        """INT8's share of the time of all layers, 0 to 1."""
        if self.total_ms:
            return self.computing.get("INT8", (0, 0.0))[1] / self.total_ms
        return None


def summarize(layers: Sequence[Layer]) -> LayerSummary:
    """Counts and times by precision and by kind."""
    running = [layer for layer in layers if layer.kind != "idle"]
    computing: dict[str, tuple[int, float]] = {}
    reformats: dict[str, tuple[int, float]] = {}
    for layer in running:
        group = reformats if layer.reformats else computing
        key = layer.kind if layer.reformats else layer.precision
        count, ms = group.get(key, (0, 0.0))
        group[key] = (count + 1, ms + (layer.ms or 0.0))
    is_timed = any(layer.ms is not None for layer in running)
    total = _total_ms(layers) if is_timed else None
    timed = [layer for layer in layers if layer.ms]
    slowest = sorted(timed, key=lambda layer: -(layer.ms or 0))[:10]
    return LayerSummary(computing, reformats, total, tuple(slowest))


def _total_ms(layers: Sequence[Layer]) -> float:
    return sum(layer.ms or 0.0 for layer in layers)


def report_lines(summary: LayerSummary, title: str, precision: str = "") -> list[str]:
    """The report's lines: shares by precision, reformatting, the slowest layers, and `advice`."""

    def times(ms: float) -> tuple[str, str]:
        if summary.total_ms:
            return (f"{ms:.4f}", f"{ms / summary.total_ms:.0%}")
        return ("", "")

    total = sum(count for count, _ in summary.computing.values())
    rows = []
    for name in PRECISIONS:
        if name in summary.computing:
            count, ms = summary.computing[name]
            rows.append((name, str(count), f"{count / total:.0%}", *times(ms)))
    for kind, (count, ms) in summary.reformats.items():
        rows.append((kind, str(count), "", *times(ms)))
    coverage = f"INT8 coverage: {summary.int8_layers:.0%} of {total} computing layers"
    if summary.int8_time is not None:
        coverage += f", {summary.int8_time:.0%} of {summary.total_ms:.3f} ms (each layer measured by itself)"
    lines = [title, "", *aligned(TITLES, rows, [""]), "", coverage]
    if summary.slowest:
        slowest = []
        for layer in summary.slowest:
            slowest.append((*times(layer.ms or 0.0), layer.precision or layer.kind, _short(layer.name, 110)))
        lines += ["", "Slowest layers:", *aligned(("ms", "share", "type", "layer"), slowest, ["type", "layer"])]
    sentences = advice(summary, precision)
    if sentences:
        lines += ["", *sentences]
    return lines


def advice(summary: LayerSummary, precision: str) -> list[str]:
    """Sentences on obstacles to INT8's speed, for an engine that was built for `precision`, such as 'int8'."""
    sentences = []
    shares = f"{summary.int8_layers:.0%} of its layers"
    is_mostly_int8 = summary.int8_layers >= MOSTLY
    if summary.int8_time is not None:
        shares += f" and {summary.int8_time:.0%} of the time"
        is_mostly_int8 = is_mostly_int8 and summary.int8_time >= MOSTLY
    if precision == "int8" and not is_mostly_int8:
        sentences.append(
            f"This engine was built for INT8 and is mostly not INT8: {shares}. Look at the slowest layers: a layer "
            "without INT8 has no Q/DQ in front, or TensorRT measured that it is faster so."
        )
    spent = sum(ms for _, ms in summary.reformats.values()) / (summary.total_ms or 1.0)
    if spent > MUCH:
        sentences.append(
            f"{spent:.0%} of the time is spent on changing the form of tensors (copy, cast, requantize): tensors that "
            "meet in a Concat or Add do not share one scale, or change their layout."
        )
    return sentences


def dot(layers: Sequence[Layer], title: str) -> str:
    """The graph in graphviz's language; a layer is labelled with its name, kernel and time."""
    total = _total_ms(layers)
    lines = [
        "digraph engine {",
        f"  graph {_attributes(rankdir='TB', nodesep='0.2', ranksep='0.3', label=title, labelloc='t', fontname=FONT)};",
        f"  node {_attributes(shape='box', style='filled,rounded', color='#9AA5B1', fontname=FONT, fontsize='10')};",
        f"  edge {_attributes(color='#52606D', fontname=FONT, fontsize='8')};",
    ]
    source: dict[str, str] = {}  # tensor → node that it comes from
    produced = {tensor.name for layer in layers for tensor in layer.outputs}
    for index, layer in enumerate(layers):
        for tensor in layer.inputs:
            if tensor.name not in produced and tensor.name not in source:
                source[tensor.name] = f"i{index}"
                lines.append(f"  i{index} {_attributes(label=tensor.name, shape='ellipse', fillcolor='white')};")
        sources = [source[tensor.name] for tensor in layer.inputs if tensor.name in source]
        if layer.kind == "idle":  # its outputs are its inputs; a constant has no source
            if sources:
                source |= {tensor.name: sources[-1] for tensor in layer.outputs}
            continue
        lines.append(f"  n{index} {_node_attributes(layer, total)};")
        for tensor in layer.inputs:
            if tensor.name in source:
                label = f"{tensor.type} {'x'.join(map(str, tensor.shape))}"
                attributes = _attributes(label=label, tooltip=tensor.format)
                lines.append(f"  {source[tensor.name]} -> n{index} {attributes};")
        source |= {tensor.name: f"n{index}" for tensor in layer.outputs}
    return "\n".join([*lines, "}"]) + "\n"


def _node_attributes(layer: Layer, total: float) -> str:
    """Attributes of a layer's node; `total` are the milliseconds of all layers."""
    label = f"{_short(layer.name, 70)}\n{layer.type}, {layer.precision or layer.kind}"
    if layer.ms is not None:
        label += f"\n{layer.ms:.4f} ms"
        if total:
            label += f" ({layer.ms / total:.1%})"
    colour = REFORMAT if layer.reformats else COLOURS.get(layer.precision, OTHER)
    return _attributes(label=label, fillcolor=colour, tooltip=f"{layer.name} | {layer.tactic}")


def _attributes(**texts: str) -> str:
    """Attributes in graphviz's language, whose texts are quoted as JSON's are."""
    pairs = [f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()]
    return f"[{', '.join(pairs)}]"


def graphviz() -> str:
    """Graphviz' `dot`; `DependencyError` if it is not installed."""
    path = which("dot")
    if path:
        return path
    raise DependencyError("drawing needs graphviz (apt-get, or the overlay's install_dependencies.sh --trex)")


def _short(name: str, limit: int) -> str:
    """A fused layer's name with its middle left out."""
    name = " ".join(name.split())
    if len(name) <= limit:
        return name
    return f"{name[: limit // 2]} ... {name[-limit // 2 :]}"
