"""Layer tables from the inspector's JSON: recorded from TensorRT 8.6, and written after the documentation of 11."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from utils.core.errors import InputError
from utils.trt import inspector

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests/data"
OLD = (DATA / "inspector-8.6.json").read_text()  # 31 layers of gelan-c in INT8, as TensorRT 8.6.0 wrote them


def as_version_11(text):
    """The same layers in the schema of 11, as its migration guide describes it ("Migrating IEngineInspector Usage")."""
    content = json.loads(text, strict=False)
    for layer in content["Layers"]:
        for tensor in [*layer["Inputs"], *layer["Outputs"]]:
            words = tensor.pop("Format/Datatype")
            kind = next(kind for kind in ("Int8", "FP16", "FP32") if kind in words)
            tensor["Datatype"] = {"FP16": "Half", "FP32": "Float"}.get(kind, kind)
            tensor["Format"] = words.replace(f"{kind} ", "").replace(f" {kind}", "")
    names = content.pop("Bindings")
    content["I/O Tensors"] = [{"Name": name, "IOMode": "Input", "DataType": "Float"} for name in names]
    content["Engine Metadata"] = {"Multi-Device": "Disabled"}
    return json.dumps(content)


@pytest.mark.parametrize("text", [OLD, as_version_11(OLD)], ids=["8.6", "11"])
def test_both_schemas_say_the_same(text):
    layers = inspector.parse(text)
    found = inspector.summarize(layers)
    assert found.counts == {"INT8": 5, "FP16": 7, "FP32": 1}
    assert found.reformats == {"quantize": 1, "copy": 6, "dequantize": 4, "cast": 3}
    assert found.int8_layers == 5 / 13
    assert (found.ms, found.reformat_ms, found.total_ms, found.int8_time) == (None, None, None, None)
    first = next(layer for layer in layers if layer.type == "CaskConvolution")
    assert (first.precision, first.inputs[0].shape) == ("INT8", (8, 3, 640, 640))
    assert "tilesize128x64x64" in first.tactic


def test_types_are_capitalised_differently():
    content = json.loads(OLD, strict=False)
    whole = inspector.summarize(inspector.parse(OLD))
    for layer in content["Layers"]:
        layer["LayerType"] = layer["LayerType"].lower()
    content["Layers"] += [{"Name": kind, "LayerType": kind} for kind in ("signal_wait", "shape_call", "wait")]
    assert inspector.summarize(inspector.parse(json.dumps(content))) == whole


def test_the_recording_has_raw_control_characters():
    with pytest.raises(ValueError, match="control character"):
        json.loads(OLD)


def test_times_and_shares():
    layers = inspector.parse(OLD)
    names = {layer.name: float(index) for index, layer in enumerate(layers)}
    timed = inspector.with_times(layers, names)
    found = inspector.summarize(timed)
    assert found.total_ms == sum(range(len(layers)))
    assert found.ms["INT8"] == sum(i for i, layer in enumerate(layers) if layer.precision == "INT8")
    assert found.int8_time == found.ms["INT8"] / found.total_ms
    assert sum(found.reformat_ms.values()) == sum(i for i, layer in enumerate(layers) if layer.reformats)
    assert [layer.ms for layer in found.slowest] == sorted(names.values(), reverse=True)[:10]


@pytest.mark.parametrize(
    ("origin", "before", "after", "kind"),
    [
        ("QDQ", "Int8", "Int8", "requantize"),
        ("CONCAT", "Int8", "Int8", "copy"),
        ("REFORMAT", "FP16", "FP16", "copy"),
        ("QDQ", "FP16", "Int8", "quantize"),
        ("QDQ", "Int8", "FP32", "dequantize"),
        ("REFORMAT", "FP16", "FP32", "cast"),
    ],
)
def test_what_a_reformat_is(origin, before, after, kind):
    ends = {side: [{"Name": "x", "Dimensions": [1], "Format/Datatype": f"Row major linear {word}"}]
            for side, word in (("Inputs", before), ("Outputs", after))}  # fmt: skip
    text = json.dumps({"Layers": [{"Name": "a", "LayerType": "Reformat", "Origin": origin, **ends}]})
    (layer,) = inspector.parse(text)
    assert (layer.kind, layer.reformats) == (kind, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON of TensorRT's"),
        ("[]", "no JSON of TensorRT's"),
        ('{"Layers": ["a + b"]}', "only names of layers"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(InputError, match=message):
        inspector.parse(text)


def test_a_record_is_read_where_torch_is_not_installed(tmp_path):
    """A laptop that looks at what a Jetson wrote."""
    (tmp_path / "a.json").write_text(OLD)
    hide = (
        "import sys; sys.modules['torch'] = None; sys.path[:0] = [{0!r}, {0!r} + '/scripts']; import inspect_engine; "
    )
    script = hide.format(str(ROOT)) + "sys.exit(inspect_engine.run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.layers.json").is_file()
