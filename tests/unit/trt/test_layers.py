"""What an engine is made of: its layers in the inspector's JSON, the report, the image; of a recorded 8.6 engine."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorrt_stand_in import build_engine, stand_in

from utils.core.errors import DependencyError, InputError, QatError
from utils.trt.layers import (
    COLOURS,
    REFORMAT,
    LayerSummary,
    advice,
    dot,
    inspect_engine,
    parse_layers,
    report_lines,
    summarize,
)
from utils.trt.runner import Execution

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "tests/data/inspector-8.6.json"
OLD = RECORD.read_text()  # 31 layers of gelan-c in INT8, as TensorRT 8.6.0 wrote them
sys.path.append(str(ROOT / "scripts"))
from inspect_engine import run  # noqa: E402


@pytest.fixture
def layers():
    """The recorded layers, the n-th of which took n microseconds."""
    return [replace(layer, ms=index / 1000) for index, layer in enumerate(parse_layers(OLD))]


def as_version_11(text):
    """The same layers in the schema of 11, as its migration guide describes it ("Migrating IEngineInspector Usage")."""
    content = json.loads(text, strict=False)
    for layer in content["Layers"]:
        for tensor in [*layer["Inputs"], *layer["Outputs"]]:
            words = tensor.pop("Format/Datatype")
            kind = next(kind for kind in ("Int8", "FP16", "FP32") if kind in words)
            tensor["Datatype"] = {"FP16": "Half", "FP32": "Float"}.get(kind, kind)
            tensor["Format"] = words.replace(f"{kind} ", "").replace(f" {kind}", "")
    return json.dumps(content)


@pytest.mark.parametrize(
    ("entry", "kind", "precision"),
    [  # type of the layer, types of its first input and output
        ("Reformat Int8 Int8", "copy", ""), ("Reformat Int8 Int8 QDQ", "requantize", ""),
        ("Reformat Float Float QDQ", "copy", ""), ("reformat Float Half", "cast", ""),
        ("Reformat Float Int8", "quantize", ""), ("Reformat Int8 Half", "dequantize", ""),
        ("NoOp Int8 Int8", "idle", ""), ("signal_wait", "idle", ""), ("wait", "idle", ""), ("shape_call", "idle", ""),
        ("Reformat", "compute", "other"), ("Reformat Int8", "compute", "INT8"),
        ("Convolution Half Int8", "compute", "FP16"), ("Convolution Strange", "compute", "other"),
    ],
)  # fmt: skip
def test_kinds_of_layers(entry, kind, precision):
    layer_type, *types = entry.split()
    about = {"Origin": types.pop()} if len(types) > 2 else {}
    tensors = [[{"Name": "a", "Datatype": one}] for one in types] + [[]] * (2 - len(types))
    text = json.dumps({"Layers": [{"LayerType": layer_type, "Inputs": tensors[0], "Outputs": tensors[1], **about}]})
    (layer,) = parse_layers(text)
    assert (layer.kind, layer.precision) == (kind, precision)


@pytest.mark.parametrize("text", ["no JSON", "{}", "3", '{"Layers": ["a"]}'])
def test_what_is_not_of_the_inspector_is_refused(text):
    with pytest.raises(InputError, match="detailed profiling" if "a" in text else "no JSON of TensorRT"):
        parse_layers(text)


@pytest.mark.parametrize("change", [str, as_version_11])
def test_all_schemas_say_the_same(change):
    layers = parse_layers(change(OLD))
    found = summarize(layers)
    assert found.computing == {"INT8": (5, 0), "FP16": (7, 0), "FP32": (1, 0)}
    assert found.reformats == {"quantize": (1, 0), "copy": (6, 0), "dequantize": (4, 0), "cast": (3, 0)}
    assert (found.int8_layers, found.total_ms, found.int8_time) == (5 / 13, None, None)
    first = next(layer for layer in layers if layer.type.lower() == "caskconvolution")
    assert (first.precision, first.inputs[0].shape) == ("INT8", (8, 3, 640, 640))
    assert "tilesize128x64x64" in first.tactic


def test_times_and_shares_and_the_report(layers):
    each = [layer.ms for layer in layers]
    total, int8 = sum(each), sum(layer.ms for layer in layers if layer.precision == "INT8")
    spent = sum(layer.ms for layer in layers if layer.reformats)
    found = summarize(layers)
    assert found.total_ms == pytest.approx(total)
    assert found.computing["INT8"] == (5, pytest.approx(int8))
    assert [layer.ms for layer in found.slowest] == sorted(each, reverse=True)[:10]
    text = "\n".join(report_lines(found, "title", "int8"))
    rows = [line.split() for line in text.splitlines()]
    assert ["INT8", "5", "38%", f"{int8:.4f}", f"{int8 / total:.0%}"] in rows
    assert f"{int8 / total:.0%} of {total:.3f} ms" in text
    slowest = rows[next(i for i, line in enumerate(rows) if line == ["Slowest", "layers:"]) + 2]
    assert slowest[:3] == [f"{each[-1]:.4f}", f"{each[-1] / total:.0%}", layers[-1].precision or layers[-1].kind]
    assert f"mostly not INT8: 38% of its layers and {int8 / total:.0%} of the time" in text
    assert f"{spent / total:.0%} of the time only changes the form" in text


@pytest.mark.parametrize(
    ("int8", "fp16", "copies", "said"),  # layers and milliseconds; of them advice says something from shares on
    [
        ((1, 50.0), (1, 35.0), (1, 15.0), []),
        ((1, 50.0), (1, 34.0), (1, 16.0), ["16% of the time only changes"]),
        ((9, 49.0), (9, 51.0), (0, 0.0), ["mostly not INT8: 50% of its layers and 49% of the time"]),
        ((4, 90.0), (5, 10.0), (0, 0.0), ["mostly not INT8: 44% of its layers and 90% of the time"]),
        ((4, 0.0), (5, 0.0), (9, 0.0), ["mostly not INT8: 44% of its layers. "]),
        ((5, 0.0), (5, 0.0), (9, 0.0), []),
    ],
)
def test_what_is_said_of_an_int8_engine(int8, fp16, copies, said):
    total = int8[1] + fp16[1] + copies[1]
    summary = LayerSummary({"INT8": int8, "FP16": fp16}, {"copy": copies}, total or None)
    sentences = advice(summary, "int8")
    assert [words in sentence for words, sentence in zip(said, sentences, strict=True)] == [True] * len(said)
    assert not [sentence for sentence in advice(summary, "fp16") if "INT8" in sentence]


def test_every_layer_is_drawn_and_connected(layers):
    text = dot(layers, 'a "title"')
    shown = [layer for layer in layers if layer.kind != "idle"]
    total = sum(layer.ms for layer in layers)
    nodes = re.findall(r'^  n(\d+) \[label="(.*?)", fillcolor="(#\w+)"', text, re.MULTILINE)
    assert len(nodes) == len(shown)
    for (_, label, colour), layer in zip(nodes, shown, strict=True):
        assert colour == (REFORMAT if layer.reformats else COLOURS.get(layer.precision))
        assert f"{layer.ms:.4f} ms" in label
        assert f"({layer.ms / total:.1%})" in label
        assert f", {layer.precision or layer.kind}\\n" in label
    sources = {tensor.name for layer in layers for tensor in layer.outputs}
    fed_by_layers = sum(any(t.name in sources for t in layer.inputs) for layer in shown)
    assert len(set(re.findall(r"-> n(\d+) ", text))) >= fed_by_layers
    assert 'label="images", shape="ellipse"' in text
    assert '"a \\"title\\""' in text


@pytest.mark.parametrize("streams", [None, 0, 3])
def test_inspecting_an_engine(tmp_path, monkeypatch, capsys, streams):
    """With times, and without: as 8.6.0 measures with auxiliary streams, and TensorRT-RTX always."""
    stand_in(monkeypatch)
    shapes = {"batch": (1, 2, 4), "height": (32, 32, 32), "width": (32, 32, 32)}
    engine = build_engine(tmp_path, ("b", 3, "h", "w"), **shapes, max_aux_streams=streams)
    if streams is not None:
        monkeypatch.setattr(Execution, "layer_times", lambda execution, runs: {})
    assert run([str(engine), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "a.engine: 2x3x32x32, TensorRT 8.6.0, Fake GPU" in out
    if streams is not None:
        assert out.splitlines()[-1].startswith("no times: ")
        assert ("--max-aux-streams 0" in out) == bool(streams)
        return
    assert "INT8 coverage: 0% of 2 computing layers, 0% of 1.000 ms" in out
    rows = json.loads((tmp_path / "a.layers.json").read_text())
    assert [(row["name"], row["ms"], row["share"]) for row in rows] == [("raw", 0.5, 0.5), ("output0", 0.5, 0.5)]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError, match="graphviz"):
        inspect_engine(engine, draw=True)
    (tmp_path / "dot").write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    (tmp_path / "dot").chmod(0o755)
    with pytest.raises(QatError, match=r"a\.svg: no room$"):
        inspect_engine(engine, draw=True)
    capsys.readouterr()
    assert run([str(engine), "--device", "cpu", "--batch-size", "9"]) == 2
    assert "[9, 3, 32, 32]" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run([str(engine), "--device", "cpu"]) == 2
    assert "--device cpu" in capsys.readouterr().err
