"""What is said about an engine: coverage, reformatting, advice, an image; of a recorded 8.6 engine and a stand-in."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.cli import run_program
from utils.core.errors import DependencyError, QatError
from utils.trt import inspector, layer_report
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.context import Execution
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "tests/data/inspector-8.6.json"
sys.path.append(str(ROOT / "scripts"))
import inspect_engine  # noqa: E402


@pytest.fixture
def layers():
    """The recorded layers, the n-th of which took n microseconds."""
    found = inspector.parse(inspector.read(RECORD))
    return inspector.with_times(found, {layer.name: index / 1000 for index, layer in enumerate(found)})


def summary(counts, ms=None, reformat_ms=None):
    total = None if ms is None else sum(ms.values()) + sum((reformat_ms or {}).values())
    return inspector.Summary(counts, ms, {}, reformat_ms, total)


def test_rows_are_all_layers_that_run(layers):
    rows = layer_report.rows(layers)
    assert [row["name"] for row in rows] == [layer.name for layer in layers if layer.kind != "idle"]
    timed = [row for row in rows if row["ms"]]
    assert sum(row["share"] for row in timed) == pytest.approx(1 - sum(la.ms for la in layers if la.kind == "idle")
                                                               / sum(la.ms for la in layers))  # fmt: skip
    row = next(row for row in rows if row["type"] == "CaskConvolution")
    assert row["precision"] == "INT8"
    assert row["inputs"][0]["type"] == "INT8"
    assert row["inputs"][0]["shape"] == [8, 3, 640, 640]


def test_the_report_names_shares_and_the_slowest(layers):
    found = inspector.summarize(layers)
    lines = layer_report.text(found, "title", "int8")
    assert lines[0] == "title"
    (int8,) = (line for line in lines if line.startswith("INT8  "))
    count, share, ms, time = int8.split()[1:]
    assert (count, share) == ("5", "38%")
    assert (float(ms), time) == (pytest.approx(found.ms["INT8"], abs=1e-4), f"{found.int8_time:.0%}")
    assert any(line.startswith("INT8 coverage: 38% of 13 computing layers, ") for line in lines)
    slowest = [float(line.split()[0]) for line in lines if re.match(r" +[0-9.]+ ms  ", line)]
    assert slowest == sorted(slowest, reverse=True)
    assert len(slowest) == 10
    assert any(re.match(r"copy +6 ", line) for line in lines)


def test_a_report_without_times():
    lines = layer_report.text(inspector.summarize(inspector.parse(inspector.read(RECORD))), "t", "int8")
    assert "INT8 coverage: 38% of 13 computing layers" in lines
    assert not any(" ms" in line for line in lines[3:])


@pytest.mark.parametrize(
    ("found", "precision", "says"),
    [
        (summary({"INT8": 9, "FP16": 1}, {"INT8": 0.9, "FP16": 0.1}), "int8", ""),
        (summary({"INT8": 2, "FP16": 8}), "int8", "mostly not INT8: 20% of its layers. Look"),
        (summary({"INT8": 9, "FP16": 1}, {"INT8": 0.1, "FP16": 0.9}), "int8", "90% of its layers and 10% of the time"),
        (summary({"FP16": 10}, {"FP16": 1.0}), "fp16", ""),
        (summary({"INT8": 9}, {"INT8": 0.8}, {"copy": 0.2}), "int8", "20% of the time only changes the form"),
    ],
)  # fmt: skip
def test_advice(found, precision, says):
    sentences = layer_report.advice(found, precision)
    assert len(sentences) == bool(says)
    assert says in " ".join(sentences)


def test_int8_that_is_not_faster():
    assert layer_report.not_faster("c", 4.0, 4.5) == ""
    assert "c: INT8 is not faster than FP16 here, 4.960 ms against 4.540 ms (0.92x)" in layer_report.not_faster(
        "c", 4.96, 4.54
    )


# the image


def test_every_layer_is_drawn_and_connected(layers):
    text = layer_report.dot(layers, 'a "title"')
    shown = [layer for layer in layers if layer.kind != "idle"]
    nodes = re.findall(r'^  n(\d+) \[label="(.*?)", fillcolor="(#\w+)"', text, re.MULTILINE)
    assert len(nodes) == len(shown)
    for (_, label, colour), layer in zip(nodes, shown, strict=True):
        expected = layer_report.REFORMAT if layer.reformats else layer_report.COLOURS.get(layer.precision)
        assert colour == expected
        assert f"{layer.ms:.4f} ms" in label
    sources = {tensor.name for layer in layers for tensor in layer.outputs}
    fed_by_layers = sum(any(t.name in sources for t in layer.inputs) for layer in shown)
    assert len(set(re.findall(r"-> n(\d+) ", text))) >= fed_by_layers
    assert 'label="images", shape=ellipse' in text
    assert '"a \\"title\\""' in text


def test_what_runs_nothing_is_no_gap_in_the_image():
    def layer(name, kind, before, after):
        ends = {side: [{"Name": tensor, "Dimensions": [1], "Format/Datatype": "Row major linear FP16"}]
                for side, tensor in (("Inputs", before), ("Outputs", after))}  # fmt: skip
        return {"Name": name, "LayerType": kind, **ends}

    entries = [layer("a", "Shuffle", "in", "x"), layer("nothing", "NoOp", "x", "y"), layer("b", "Shuffle", "y", "z")]
    text = layer_report.dot(inspector.parse(json.dumps({"Layers": entries})), "t")
    assert "  n0 -> n2 [" in text
    assert "nothing" not in text


def test_graphviz_is_called_and_its_failure_told(layers, tmp_path, monkeypatch):
    """On a stand-in for `dot`: what it reads is what `dot` gives."""
    program = tmp_path / "bin/dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1 $2" = "-Tsvg -o" ] || exit 9\ncat > "$3"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    path = layer_report.draw(layers, "t", tmp_path / "a.svg")
    assert path.read_text() == layer_report.dot(layers, "t")
    program.write_text("#!/bin/sh\necho 'syntax error' >&2\nexit 1\n")
    with pytest.raises(QatError, match=r"could not draw .*b.svg: syntax error"):
        layer_report.draw(layers, "t", tmp_path / "b.svg")
    assert not list(tmp_path.glob("*b*svg"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError, match=r"install_dependencies.sh --trex"):
        layer_report.draw(layers, "t", tmp_path / "b.svg")


@pytest.mark.skipif(which("dot") is None, reason="graphviz is not installed (install_dependencies.sh --trex)")
def test_graphviz_reads_it(layers, tmp_path):
    svg = layer_report.draw(layers, "t", tmp_path / "a.svg").read_text()
    assert svg.count('class="node"') >= sum(layer.kind != "idle" for layer in layers)
    done = subprocess.run(["dot", "-Tcanon"], input=layer_report.dot(layers, "t"), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


# the program


def test_inspecting_an_engine(tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch)
    config = BuildConfig(batch=(1, 2, 4), height=(32, 32, 32), width=(32, 32, 32), progress=False)
    engine = build(write_onnx(tmp_path / "a.onnx"), tmp_path / "a.engine", config).path
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(engine), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "a.engine: 2x3x32x32, TensorRT 8.6.0, Fake GPU" in out
    assert "INT8 coverage: 0% of 2 computing layers, 0% of 1.000 ms" in out
    rows = json.loads((tmp_path / "a.layers.json").read_text())
    assert [(row["name"], row["ms"]) for row in rows] == [("raw", 0.5), ("output0", 0.5)]
    words = [str(engine), "--device", "cpu", "--batch-size", "9"]
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, words) == 2
    assert "takes images from [1, 3, 32, 32] to [4, 3, 32, 32], not [9, 3, 32, 32]" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, words[:3]) == 2
    assert "--device cpu: engines are built and run on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("streams", [0, 3])
def test_an_engine_whose_layers_are_not_measured(streams, tmp_path, monkeypatch, capsys):
    """As 8.6.0 does with auxiliary streams, and TensorRT-RTX always."""
    stand_in(monkeypatch)
    monkeypatch.setattr(Execution, "layer_times", lambda execution, runs: {})
    shapes = {"batch": (1, 2, 4), "height": (32, 32, 32), "width": (32, 32, 32)}
    config = BuildConfig(**shapes, progress=False, max_aux_streams=streams)
    engine = build(write_onnx(tmp_path / "a.onnx"), tmp_path / "a.engine", config).path
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(engine), "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("no times: ")
    assert ("this engine has auxiliary streams (3)" in said) == ("--max-aux-streams 0" in said) == bool(streams)


def test_what_was_written_can_be_looked_at_again(tmp_path, capsys):
    saved = tmp_path / "c.v2.layers.json"
    layers = [replace(layer, ms=index / 1000) for index, layer in enumerate(inspector.parse(inspector.read(RECORD)))]
    layer_report.save(layers, saved)
    EngineNote(precision="int8").save(tmp_path / "c.v2.engine")
    EngineNote(precision="fp16").save(tmp_path / "c.engine")
    content = saved.read_bytes()
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(saved)]) == 0
    out = capsys.readouterr().out
    expected = layer_report.text(inspector.summarize([one for one in layers if one.kind != "idle"]), "", "int8")
    assert "\n".join(expected[1:]) in out
    assert saved.read_bytes() == content
    for broken in ("[1, 2]", "[", '[{"name": "a"}]'):
        saved.write_text(broken)
        assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(saved)]) == 2
        assert f"error: {saved}: " in capsys.readouterr().err


def test_inspecting_a_record_needs_no_tensorrt(tmp_path, capsys):
    record = tmp_path / "c.json"
    record.write_bytes(RECORD.read_bytes())
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(record)]) == 0
    assert "INT8 coverage: 38% of 13 computing layers" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "c.layers.json").read_text())) == 27
    record.write_text("{}")
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(record)]) == 2
    assert "no JSON of TensorRT's engine inspector" in capsys.readouterr().err
    assert run_program(inspect_engine.make_parser(), inspect_engine.main, [str(tmp_path / "none.engine")]) == 2
