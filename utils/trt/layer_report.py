"""An engine in words, and drawn: its layers, how much of it is INT8, what reformatting costs, and what that means."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from utils.core.errors import DependencyError, InputError, QatError
from utils.core.files import atomic_path, write_text
from utils.core.text import Column, aligned
from utils.trt import inspector
from utils.trt.inspector import PRECISIONS, Layer, Summary

if TYPE_CHECKING:
    from utils.trt.runner import Execution

COLUMNS = (Column("", left=True, width=14), Column("layers", width=8), Column("share", width=8), Column("ms", width=10),
           Column("share", width=8))  # fmt: skip
MOSTLY = 0.5  # below this share of the layers, or of the time, an engine is not called an INT8 engine
# By precision; layers that only change a tensor's form have their own colour. Text on all of them is dark.
COLOURS = {"INT8": "#9BD8B4", "FP8": "#C5E8A5", "FP16": "#F6D186", "BF16": "#F6D186", "FP32": "#F0A08C"}
REFORMAT, OTHER = "#CBB5E2", "#E4E7EB"


def layers_of(execution: Execution, runs: int = 20) -> list[Layer]:
    """The layers of an engine on its present shapes, with their milliseconds where TensorRT measures them."""
    return inspector.with_times(inspector.parse(execution.information()), execution.layer_times(runs))


def rows(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """One entry for each layer that runs something, in order, as it is stored in `ENGINE.layers.json`.

    `ms` is None where nothing was measured, `share` a fraction of all layers' time; `inputs` and `outputs` say type and
    format.
    """
    total = sum(layer.ms or 0.0 for layer in layers)
    return [
        {
            "name": layer.name,
            "type": layer.type,
            "kind": layer.kind,
            "precision": layer.precision,
            "ms": layer.ms,
            "share": (layer.ms or 0.0) / total if total else None,
            "tactic": layer.tactic,
            "inputs": [_tensor(tensor) for tensor in layer.inputs],
            "outputs": [_tensor(tensor) for tensor in layer.outputs],
        }
        for layer in layers
        if layer.kind != "idle"
    ]


def _tensor(tensor: inspector.Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "type": tensor.dtype, "format": tensor.format}


def save(layers: Sequence[Layer], path: Path) -> Path:
    """Write `rows` as JSON."""
    write_text(path, json.dumps(rows(layers), indent=1) + "\n")
    return path


def from_rows(content: Sequence[Mapping[str, Any]]) -> list[Layer]:
    """The layers that `rows` described.

    Raises:
        InputError: they are described differently.
    """
    try:
        return [
            Layer(row["name"], row["type"], row["kind"], row["precision"], _tensors(row["inputs"]),
                  _tensors(row["outputs"]), row["tactic"], row["ms"])
            for row in content
        ]  # fmt: skip
    except (KeyError, TypeError) as error:
        raise InputError(f"these are no layers as inspect_engine.py writes them: {error!r}") from error


def _tensors(content: Sequence[Mapping[str, Any]]) -> tuple[inspector.Tensor, ...]:
    return tuple(inspector.Tensor(row["name"], tuple(row["shape"]), row["type"], row["format"]) for row in content)


def text(summary: Summary, title: str, precision: str = "") -> list[str]:
    """The report's lines: shares by precision, reformatting, the slowest layers, and what that means.

    Args:
        precision: that the engine was built for, such as 'int8'.
    """
    computing = sum(summary.counts.values())
    rows = [
        (name, str(summary.counts[name]), f"{summary.counts[name] / computing:.0%}",
         *_time(summary.ms, name, summary.total_ms))
        for name in PRECISIONS if name in summary.counts
    ]  # fmt: skip
    rows += [
        (kind, str(count), "", *_time(summary.reformat_ms, kind, summary.total_ms))
        for kind, count in summary.reformats.items()
    ]
    lines = [title, "", *aligned(COLUMNS, rows, gap="")]
    coverage = f"INT8 coverage: {summary.int8_layers:.0%} of {computing} computing layers"
    if summary.int8_time is not None:
        coverage += f", {summary.int8_time:.0%} of {summary.total_ms:.3f} ms (each layer measured by itself)"
    lines += ["", coverage]
    if summary.slowest:
        lines += ["", "Slowest layers:"]
        lines += [f"  {layer.ms:8.4f} ms  {_share(layer.ms, summary.total_ms):>4}  {layer.precision or layer.kind:<10}"
                  f"  {short(layer.name)}" for layer in summary.slowest]  # fmt: skip
    found = advice(summary, precision)
    return [*lines, *(["", *found] if found else [])]


def advice(summary: Summary, precision: str) -> list[str]:
    """Sentences on what stands in INT8's way, for an engine that was built for `precision`."""
    found = []
    low_time = summary.int8_time is not None and summary.int8_time < MOSTLY
    if precision == "int8" and (summary.int8_layers < MOSTLY or low_time):
        time = "" if summary.int8_time is None else f" and {summary.int8_time:.0%} of the time"
        found.append(
            f"This engine was built for INT8 and is mostly not INT8: {summary.int8_layers:.0%} of its layers{time}. "
            "Look at the slowest layers: those without INT8 have no Q/DQ in front, or TensorRT found them faster so."
        )
    spent = sum((summary.reformat_ms or {}).values())
    if summary.total_ms and spent > 0.15 * summary.total_ms:
        found.append(
            f"{spent / summary.total_ms:.0%} of the time only changes the form of tensors (copy, cast, requantize): "
            "tensors that meet in a Concat or Add do not share one scale, or change their layout."
        )
    return found


def not_faster(name: str, ms: float, fp16_ms: float) -> str:
    """A sentence if an INT8 engine takes no less time than the FP16 one, else ''."""
    if ms < fp16_ms:
        return ""
    return (
        f"{name}: INT8 is not faster than FP16 here, {ms:.3f} ms against {fp16_ms:.3f} ms ({fp16_ms / ms:.2f}x). "
        "Small networks and small batches are bound by starting kernels and by memory, not by arithmetic; "
        "scripts/inspect_engine.py shows which layers take the time."
    )


def short(name: str, limit: int = 110) -> str:
    """A fused layer's name with its middle left out."""
    name = " ".join(name.split())
    return name if len(name) <= limit else f"{name[: limit // 2]} ... {name[-limit // 2 :]}"


def _time(ms: Mapping[str, float] | None, key: str, total: float | None) -> tuple[str, str]:
    return ("", "") if ms is None else (f"{ms.get(key, 0.0):.4f}", _share(ms.get(key), total))


def _share(ms: float | None, total: float | None) -> str:
    return "" if ms is None or not total else f"{ms / total:.0%}"


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
        if layer.kind == "idle":  # what it gives is what it got; a constant has no source
            source |= {t.name: source[i.name] for t in layer.outputs for i in layer.inputs if i.name in source}
            continue
        lines.append(f"  n{index} [{_node(layer, total)}];")
        for tensor in layer.inputs:
            if tensor.name in source:
                what = f"{tensor.dtype} {'x'.join(map(str, tensor.shape))}"
                lines.append(
                    f'  {source[tensor.name]} -> n{index} [label="{what}", tooltip="{_escape(tensor.format)}"];'
                )
        source |= {tensor.name: f"n{index}" for tensor in layer.outputs}
    return "\n".join([*lines, "}"]) + "\n"


def draw(layers: Sequence[Layer], title: str, path: Path) -> Path:
    """Write the graph as SVG.

    Raises:
        DependencyError: graphviz is not installed.
        QatError: it fails.
    """
    command = [graphviz(), "-Tsvg"]
    with atomic_path(path) as temporary:
        command += ["-o", str(temporary)]
        done = subprocess.run(
            command, input=dot(layers, title), encoding="utf-8", errors="replace", capture_output=True, check=False
        )
        if done.returncode:
            raise QatError(f"graphviz could not draw {path}: {' '.join(done.stderr.split())[:300]}")
    return path


def graphviz() -> str:
    """Graphviz' `dot`.

    Raises:
        DependencyError: it is not installed.
    """
    path = which("dot")
    if path is None:
        raise DependencyError(
            "drawing needs graphviz: install_dependencies.sh --trex, where this overlay was cloned, "
            "or apt-get install graphviz"
        )
    return path


def _node(layer: Layer, total: float) -> str:
    colour = REFORMAT if layer.reformats else COLOURS.get(layer.precision, OTHER)
    what = layer.precision or layer.kind
    time = "" if layer.ms is None else f"\\n{layer.ms:.4f} ms"
    if layer.ms and total:
        time += f" ({layer.ms / total:.1%})"
    label = f"{_escape(short(layer.name, 70))}\\n{_escape(layer.type)}, {what}{time}"
    return f'label="{label}", fillcolor="{colour}", tooltip="{_escape(layer.name)} | {_escape(layer.tactic)}"'


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
