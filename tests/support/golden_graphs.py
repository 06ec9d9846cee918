"""Exports of known networks in every form, and the golden file that says what 1.0 exported.

`UPDATE_GOLDEN=1` writes tests/golden/graphs-weak.json and graphs-strong.json anew; a change there is a change of what
users' engines compute.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from graph_signature import signature
from known_networks import quantized

from utils.core.input_spec import InputSpec
from utils.onnx_graph import export, output_formats
from utils.onnx_graph.export import ExportConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FORMS = {
    "plain": output_formats.plain(),
    "nms": output_formats.end2end(output_formats.NmsSettings()),
    "nms-onnx": output_formats.end2end(output_formats.NmsSettings(kind="onnx", topk=50)),
    "deepstream": output_formats.deepstream(),
}


def check_graphs(name: str, typing: Any, folder: Path, monkeypatch: Any) -> None:
    """Export a network of `known_networks` in every form, and compare with the golden file."""
    model = quantized(name)
    config = ExportConfig(imgsz=(64, 96), typing=typing, dynamic="batch")
    traced = export.trace(model, config.resolved(True))
    monkeypatch.setattr(export, "trace", lambda *_: onnx.ModelProto.FromString(traced.SerializeToString()))
    export.export_forms(model, config, {folder / f"{form}.onnx": made for form, made in FORMS.items()}, {})
    as_bytes = replace(config, input=InputSpec("uint8", "nhwc"))
    export.export_forms(model, as_bytes, {folder / "uint8.onnx": FORMS["plain"]}, {})
    found = {path.stem: signature(onnx.load(path)) for path in sorted(folder.glob("*.onnx"))}
    golden = GOLDEN / f"graphs-{typing}.json"
    known = json.loads(golden.read_text()) if golden.is_file() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        known[name] = found
        golden.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert found == known[name]
