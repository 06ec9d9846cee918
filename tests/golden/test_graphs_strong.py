"""Exported graphs, strongly typed: operators, attributes, constants, wiring, inputs and outputs, as 1.0 wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from golden_graphs import FORMS, check_graphs
from graph_signature import signature
from known_networks import DEMO, DETECTORS, quantized

from utils.onnx_graph.export import ExportConfig, export_forms


@pytest.mark.parametrize("name", [*DEMO, *DETECTORS])
def test_graphs_are_those_of_1_0(name, tmp_path, monkeypatch):
    check_graphs(name, "strong", tmp_path, monkeypatch)


def test_another_attribute_constant_or_wire_is_another_signature(tmp_path: Path) -> None:
    """The comparator itself: each of these changes what is computed."""
    config = ExportConfig(imgsz=(64, 64))
    export_forms(quantized("demo"), config, {tmp_path / "a.onnx": FORMS["plain"]}, {})
    graph = onnx.load(tmp_path / "a.onnx")
    seen = {json.dumps(signature(graph))}
    for change in (_attribute, _constant, _wire, _output):
        other = onnx.ModelProto.FromString(graph.SerializeToString())
        change(other.graph)
        seen.add(json.dumps(signature(other)))
    assert len(seen) == 5
    renamed = onnx.ModelProto.FromString(graph.SerializeToString())
    old = renamed.graph.node[0].output[0]
    renamed.graph.node[0].output[0] = "another_name"
    for node in renamed.graph.node:
        node.input[:] = ["another_name" if name == old else name for name in node.input]
    assert json.dumps(signature(renamed)) in seen


def _attribute(graph: onnx.GraphProto) -> None:
    pads = next(one for node in graph.node if node.op_type == "Conv" for one in node.attribute if one.name == "pads")
    pads.ints[0] += 1


def _constant(graph: onnx.GraphProto) -> None:
    weight = next(one for one in graph.initializer if len(one.dims) == 4)
    weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]


def _wire(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Concat")
    node.input[0], node.input[1] = node.input[1], node.input[0]


def _output(graph: onnx.GraphProto) -> None:
    graph.output[0].name = graph.output[0].name + "x"
    node = next(node for node in graph.node if graph.output[0].name[:-1] in node.output)
    node.output[0] = graph.output[0].name
