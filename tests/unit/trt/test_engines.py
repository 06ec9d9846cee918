"""Engines: how they run and what they refuse, on stand-ins of TensorRT that compute; and what they are made of."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import fake_tensorrt
import numpy as np
import onnx
import pytest
import torch
from one_conv import METADATA, reference, write_onnx
from tensorrt_stand_in import CPU, GPU, build_engine, stand_in

from utils.core.errors import DependencyError, InputError, QatError
from utils.core.input_spec import FLOATS, InputSpec
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.view import set_metadata
from utils.runners.base import as_feed
from utils.trt import layers as inspector
from utils.trt import tensorrt_api
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.runner import Execution, TensorRTRunner
from utils.trt.tensorrt_api import Api

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))
from inspect_engine import main  # noqa: E402

RAW = {"extra_output": True}
FREE = {"shape": ("batch", 3, "h", "w"), "batch": (1, 2, 4), "height": (32, 32, 64), "width": (32, 32, 64)}


@pytest.fixture
def execution(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    return lambda **changes: Execution(build_engine(tmp_path, file=RAW, **changes), api, CPU)


def feed(execution, *shape):
    images = torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    execution.set_shapes({"images": shape})
    execution.buffers["images"].copy_(images)
    return images.numpy()


def check(execution, images, run=None):
    (run or execution.run)()
    np.testing.assert_allclose(execution.buffers["output0"], reference(images), atol=1e-5)


def test_dynamic_shapes_and_graphs(execution):
    one = execution(**FREE)
    assert one.buffers == {}
    graphs = set()
    for shape in ((2, 3, 32, 64), (1, 3, 64, 32), (4, 3, 64, 64), (2, 3, 32, 64)):
        images = feed(one, *shape)
        graph = one.graph()
        one.buffers["output0"].zero_()
        check(one, images, graph.replay)
        assert one.graph() is graph
        graphs.add(graph)
    assert len(graphs) == 4  # a graph belongs to its shapes
    for shape in ((5, 3, 32, 32), (1, 3, 96, 32), (1, 3, 32)):
        with pytest.raises(InputError, match=r"from \[1, 3, 32, 32\] to \[4, 3, 64, 64\]"):
            one.set_shapes({"images": shape})


@pytest.mark.parametrize("streams", [0, 3, 31, 40])
def test_auxiliary_streams_are_torchs(execution, streams):
    """The stand-in refuses to capture an engine with streams of its own, and auxiliary ones that are not different."""
    one = execution(max_aux_streams=streams)
    images = feed(one, 2, 3, 4, 8)
    one.layer_times(runs=1)  # which starts a fresh context
    check(one, images, one.graph().replay if streams < 32 else one.run)  # torch has no more
    np.testing.assert_allclose(one.buffers["raw"].flatten(2), reference(images), atol=1e-5)
    assert [str(spec) for spec in one.outputs] == ["output0 float32 [2, 6, any]", "raw float32 [2, 6, 4, 8]"]
    one.close()


def test_layer_times_are_means_without_warming_up(execution):
    one = execution()
    before = len(one.api.module.calls)
    assert one.layer_times(runs=4) == {"raw": 0.5, "output0": 0.5}
    assert len(one.api.module.calls) == before + 7
    delattr(one.api.module, "IProfiler")
    assert one.layer_times() == {}


@pytest.mark.parametrize("form", [FLOATS, InputSpec("uint8"), InputSpec("uint8", "nhwc")])
def test_every_form_computes_the_same(tmp_path, monkeypatch, form):
    api, path = stand_in(monkeypatch, "10.7.0"), write_onnx(tmp_path / "a.onnx", (2, 3, 4, 8), quantized=True)
    onnx.save(set_metadata(take_bytes(onnx.load(path), form), {**METADATA, **form.metadata()}), path)
    build(path, tmp_path / "a.engine", BuildConfig(progress=False))
    images = torch.arange(192, dtype=torch.uint8).reshape(2, 3, 4, 8)
    with TensorRTRunner(tmp_path / "a.engine", "cpu", api=api) as runner:
        assert (runner.input_spec, runner.inputs[0].shape) == (form, form.own((2, 3, 4, 8)))
        assert runner.description.endswith(f"INT8, {form.kind} input, {form.layout}" if form != FLOATS else "INT8")
        for feed in (images, images // 2, images):  # without a graph, captured, replayed
            found = runner.infer({"images": as_feed(feed, form, runner.inputs[0].dtype).contiguous()})["output0"]
            levels = np.rint(feed.numpy().astype(np.float32) / np.float32(255) / np.float32(0.01))
            np.testing.assert_allclose(found, reference(levels * np.float32(0.01)), atol=1e-5)


@pytest.mark.parametrize("name", ["images", "output0"])
def test_engines_in_formats_that_are_not_ours(tmp_path, monkeypatch, name):
    """Such as trtexec's --inputIOFormats make, and --input-format of 1.0."""
    api, path = stand_in(monkeypatch), build_engine(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'{"images": "LINEAR"}', b'{"%s": "CHW32"}' % name.encode()))
    with pytest.raises(InputError, match=rf"a\.engine has {name} in format CHW32, which is not supported"):
        Execution(path, api, CPU)


@pytest.mark.parametrize("version", ["8.6.0", "10.3.0"])
def test_the_lean_runtime_runs_version_compatible_engines(tmp_path, monkeypatch, version):
    stand_in(monkeypatch, version)
    paths = [build_engine(tmp_path, file=RAW, version_compatible=True), build_engine(tmp_path / "plain", file=RAW)]
    api = Api(fake_tensorrt.make(version, lean=True))
    one = Execution(paths[0], api, CPU)
    check(one, feed(one, 2, 3, 4, 8))
    with pytest.raises(InputError, match="lean runtime"):
        one.information()
    with pytest.raises(InputError, match=f"build it again from .*lean {version} .*--version-compatible$"):
        Execution(paths[1], api, CPU)
    with pytest.raises(InputError, match="builds no engines"):
        build(tmp_path / "a.onnx", tmp_path / "b.engine", BuildConfig(), api)


def test_weights_come_from_the_onnx_file(tmp_path, monkeypatch):
    api = stand_in(monkeypatch, "10.3.0")
    path, moved = build_engine(tmp_path, file=RAW, strip_weights=True, version_compatible=True), tmp_path / "elsewhere"
    moved.mkdir()
    path, file = moved / path.name, moved / "a.onnx"
    for names in (("a.engine", "a.engine.json"), ("a.onnx",)):  # away from the ONNX file, and with it
        for name in names:
            (tmp_path / name).rename(moved / name)
        one = Execution(path, api, CPU)
        check(one, feed(one, 2, 3, 4, 8))
    with pytest.raises(InputError, match=r"runtime 10\.3\.0 cannot add; build it without --strip-weights"):
        Execution(path, Api(fake_tensorrt.make("10.3.0", lean=True)), CPU)
    monkeypatch.setattr(api.module.OnnxParserRefitter, "refit_from_file", lambda self, path: False)
    with pytest.raises(InputError, match=r"the weights of .*a\.onnx: TensorRT gives no reason"):
        Execution(path, api, CPU)
    for content in (file.read_bytes() + b" ", None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(InputError, match="its weights are in"):
            Execution(path, api, CPU)


def other(architecture):
    return tensorrt_api.Gpu("Other GPU", architecture, 1 << 30)


PORTABLE = "; an engine that is built there with --hardware-compatible {} loads here$"
AMPERE, SAME = PORTABLE.format(r"ampere\+"), PORTABLE.format("same-cc")
BY_10 = "TensorRT 10.3.0, but this machine has TensorRT 8.6.0; build it again here from .*a.onnx; tensorrt_lean 10.3.0"


@pytest.mark.parametrize(
    ("version", "note", "here", "said"),
    [
        ("8.6.0", {"api": "TensorRT 10.3.0"}, GPU, f"{BY_10} loads engines that are built with --version-compatible$"),
        ("8.6.0", {"api": "TensorRT-RTX 1.7.1"}, GPU, "built by TensorRT-RTX 1.7.1, .*a.onnx$"),
        ("8.6.0", {}, GPU, "on Fake GPU cannot load this engine: .* from .*a.onnx$"),
        ("8.6.0", {"gpu": "SM75 SM120"}, other("SM75"), "on Other GPU cannot load"),  # built ahead of time
        (
            "8.6.0",
            {"gpu": "SM80 SM120"},
            other("SM75"),
            r"for SM80 SM120, but this machine has Other GPU \(SM75\); .*a.onnx$",
        ),
        ("8.6.0", {"architecture": ""}, other("SM90"), "for Fake GPU, .*a.onnx$"),  # of 1.0
        ("8.6.0", {}, None, "NVIDIA GPU"),
        ("10.9.0", {}, other("SM90"), AMPERE),
        ("10.9.0", {"architecture": "SM80"}, other("SM120"), AMPERE),
        ("10.9.0", {}, other("SM89"), SAME),
        ("8.6.0", {}, other("SM89"), AMPERE),
        ("10.9.0", {}, other("SM75"), "a.onnx$"),
        ("10.9.0", {"options": {"hardware_compatible": "ampere+"}}, other("SM90"), "a.onnx$"),
        ("10.9.0", {"options": {"hardware_compatible": "same-cc"}}, other("SM90"), AMPERE),
    ],
)
def test_an_engine_that_does_not_load_says_why_and_what_would_have_helped(
    tmp_path, monkeypatch, version, note, here, said
):
    api, path = stand_in(monkeypatch, version), build_engine(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    replace(EngineNote.load(path), **note).save(path)
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: here)
    with pytest.raises(InputError, match=said):
        Execution(path, api, CPU)


def test_plugins_are_known_where_a_note_names_them_or_there_is_none(tmp_path, monkeypatch):
    api, path = stand_in(monkeypatch), build_engine(tmp_path)
    Execution(path, api, CPU)
    assert ("plugins", "") not in api.module.calls
    replace(EngineNote.load(path), plugins=True).save(path)
    register = vars(api.module).pop("init_libnvinfer_plugins")
    with pytest.raises(InputError, match="has no plugins here"):
        Execution(path, api, CPU)
    path.with_name("a.engine.json").unlink()
    Execution(path, api, CPU)  # which needs none
    api.module.init_libnvinfer_plugins = register
    Execution(path, api, CPU)
    assert ("plugins", "") in api.module.calls
    newer = Api(fake_tensorrt.make("10.3.0"))
    with pytest.raises(InputError, match="cannot load this engine: The engine plan file is not compatible"):
        Execution(path, newer, CPU)
    for kind in (RuntimeError, TypeError):

        def fail(self, plan, kind=kind):
            raise kind("what\n the bindings say")

        monkeypatch.setattr(api.module.Runtime, "deserialize_cuda_engine", fail)
        with pytest.raises(InputError, match="cannot load this engine: what the bindings say; build"):
            Execution(path, api, CPU)


def test_messages_without_where_in_tensorrt_they_were_made():
    for place, text in (
        ("onnx2trt_utils.cpp:374: ", "a warning about this network"), ("ModelImporter.cpp:776: ", "--- a.cu:1: text"),
        ("4: [network.cpp::validate::3036] Error Code 4: ", "Internal Error (no shape)"), ("3: ", "plain 4: text"),
    ):  # fmt: skip
        assert tensorrt_api.readable(place + text.replace(" ", "\n ")) == text


def test_notes_with_other_types_are_refused_and_other_keys_left_out(tmp_path):
    for content in ('{"typing": 3}', '{"seconds": "1"}', '{"warnings": "a"}', "[]", '{"plugins": 1}', "{"):
        (tmp_path / "a.engine.json").write_text(content)
        with pytest.raises(InputError, match="is damaged: "):
            EngineNote.load(tmp_path / "a.engine")
    (tmp_path / "a.engine.json").write_text('{"typing": "weak", "colour": "red"}')
    assert EngineNote.load(tmp_path / "a.engine") == EngineNote(typing="weak")


# layers in the inspector's JSON, the report, the image; of a recorded 8.6 engine

OLD = (ROOT / "tests/data/inspector-8.6.json").read_text()  # 31 layers of gelan-c in INT8, as TensorRT 8.6.0 wrote them


@pytest.fixture
def layers():
    """The recorded layers, the n-th of which took n microseconds."""
    return [replace(layer, ms=index / 1000) for index, layer in enumerate(inspector.parse_layers(OLD))]


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
    (layer,) = inspector.parse_layers(text)
    assert (layer.kind, layer.precision) == (kind, precision)


@pytest.mark.parametrize("text", ["no JSON", "{}", "3", '{"Layers": ["a"]}'])
def test_what_is_not_of_the_inspector_is_refused(text):
    with pytest.raises(InputError, match="detailed profiling" if "a" in text else "not JSON of TensorRT"):
        inspector.parse_layers(text)


@pytest.mark.parametrize("change", [str, as_version_11])
def test_all_schemas_say_the_same(change):
    layers = inspector.parse_layers(change(OLD))
    found = inspector.summarize(layers)
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
    found = inspector.summarize(layers)
    assert found.total_ms == pytest.approx(total)
    assert found.computing["INT8"] == (5, pytest.approx(int8))
    assert [layer.ms for layer in found.slowest] == sorted(each, reverse=True)[:10]
    text = "\n".join(inspector.report_lines(found, "title", "int8"))
    rows = [line.split() for line in text.splitlines()]
    assert ["INT8", "5", "38%", f"{int8:.4f}", f"{int8 / total:.0%}"] in rows
    assert f"{int8 / total:.0%} of {total:.3f} ms" in text
    slowest = rows[next(i for i, line in enumerate(rows) if line == ["Slowest", "layers:"]) + 2]
    assert slowest[:3] == [f"{each[-1]:.4f}", f"{each[-1] / total:.0%}", layers[-1].precision or layers[-1].kind]
    assert f"mostly not INT8: 38% of its layers and {int8 / total:.0%} of the time" in text
    assert f"{spent / total:.0%} of the time is spent on changing the form" in text


@pytest.mark.parametrize(
    (
        "int8",
        "fp16",
        "copies",
        "said",
    ),  # layers and milliseconds; of them advice says something from shares on
    [
        ((1, 50.0), (1, 35.0), (1, 15.0), []),
        ((1, 50.0), (1, 34.0), (1, 16.0), ["16% of the time is spent"]),
        ((9, 49.0), (9, 51.0), (0, 0.0), ["mostly not INT8: 50% of its layers and 49% of the time"]),
        ((4, 90.0), (5, 10.0), (0, 0.0), ["mostly not INT8: 44% of its layers and 90% of the time"]),
        ((4, 0.0), (5, 0.0), (9, 0.0), ["mostly not INT8: 44% of its layers. "]),
        ((5, 0.0), (5, 0.0), (9, 0.0), []),
    ],
)
def test_what_is_said_of_an_int8_engine(int8, fp16, copies, said):
    total = int8[1] + fp16[1] + copies[1]
    summary = inspector.LayerSummary({"INT8": int8, "FP16": fp16}, {"copy": copies}, total or None)
    sentences = inspector.advice(summary, "int8")
    assert [words in sentence for words, sentence in zip(said, sentences, strict=True)] == [True] * len(said)
    assert not [sentence for sentence in inspector.advice(summary, "fp16") if "INT8" in sentence]


def test_every_layer_is_drawn_and_connected(layers):
    text = inspector.dot(layers, 'a "title"')
    shown = [layer for layer in layers if layer.kind != "idle"]
    total = sum(layer.ms for layer in layers)
    nodes = re.findall(r'^  n(\d+) \[label="(.*?)", fillcolor="(#\w+)"', text, re.MULTILINE)
    assert len(nodes) == len(shown)
    for (_, label, colour), layer in zip(nodes, shown, strict=True):
        assert colour == (inspector.REFORMAT if layer.reformats else inspector.COLOURS.get(layer.precision))
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
    assert main([str(engine), "--device", "cpu"]) == 0
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
        inspector.inspect_engine(engine, draw=True)
    (tmp_path / "dot").write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    (tmp_path / "dot").chmod(0o755)
    with pytest.raises(QatError, match=r"a\.svg: no room$"):
        inspector.inspect_engine(engine, draw=True)
    capsys.readouterr()
    assert main([str(engine), "--device", "cpu", "--batch-size", "9"]) == 2
    assert "[9, 3, 32, 32]" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main([str(engine), "--device", "cpu"]) == 2
    assert "--device cpu" in capsys.readouterr().err
