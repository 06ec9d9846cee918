"""An engine as an image: its layers and tensors, coloured by precision, drawn by graphviz."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from utils.core.errors import DependencyError, QatError
from utils.core.files import atomic_path
from utils.trt.inspector import Layer
from utils.trt.layer_report import short

# By precision; layers that only change a tensor's form have their own colour. Text on all of them is dark.
COLOURS = {"INT8": "#9BD8B4", "FP8": "#C5E8A5", "FP16": "#F6D186", "BF16": "#F6D186", "FP32": "#F0A08C"}
REFORMAT, OTHER = "#CBB5E2", "#E4E7EB"
HOT = 0.03  # share of the time from which on a layer is framed


def dot(layers: Sequence[Layer], title: str) -> str:
    """The graph in graphviz's language; a layer is labelled with its name, kernel and time."""
    total = sum(layer.ms or 0.0 for layer in layers)
    lines = [
        "digraph engine {",
        f'  graph [rankdir=TB, nodesep=0.2, ranksep=0.3, label="{_escape(title)}", labelloc=t, fontname="sans-serif"];',
        '  node [shape=box, style="filled,rounded", color="#9AA5B1", fontname="sans-serif", fontsize=10];',
        '  edge [color="#52606D", fontname="sans-serif", fontsize=8];',
        *_legend(),
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
    command = [program(), "-Tsvg"]
    with atomic_path(path) as temporary:
        command += ["-o", str(temporary)]
        done = subprocess.run(
            command, input=dot(layers, title), encoding="utf-8", errors="replace", capture_output=True, check=False
        )
        if done.returncode:
            raise QatError(f"graphviz could not draw {path}: {' '.join(done.stderr.split())[:300]}")
    return path


def program() -> str:
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
    hot = ', color="#102A43", penwidth=2.5' if layer.ms and total and layer.ms / total >= HOT else ""
    label = f"{_escape(short(layer.name, 70))}\\n{_escape(layer.type)}, {what}{time}"
    return f'label="{label}", fillcolor="{colour}", tooltip="{_escape(layer.name)} | {_escape(layer.tactic)}"{hot}'


def _legend() -> list[str]:
    entries = [*((name, colour) for name, colour in COLOURS.items() if name not in ("FP8", "BF16")),
               ("copy, cast, (re)quantize", REFORMAT), ("other", OTHER)]  # fmt: skip
    nodes = [f'    l{i} [label="{name}", fillcolor="{colour}"];' for i, (name, colour) in enumerate(entries)]
    return ["  subgraph cluster_legend {", '    label="precision"; fontsize=10; color="#E4E7EB";', *nodes, "  }"]


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"')
