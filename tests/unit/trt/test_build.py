"""Building engines: decisions, flags, profiles, cache, notes, refusals; on stand-ins of TensorRT 8.6, 10 and 11."""

import dataclasses
import hashlib
from types import SimpleNamespace

import onnx
import pytest
from one_conv import METADATA, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import InputError, QatError
from utils.trt.build import build
from utils.trt.engine_file import EngineNote, is_current
from utils.trt.preflight import BuildConfig, OnnxFile, decide, profile_shapes

QUIET = BuildConfig(progress=False)
FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16


def config(**changes):
    return BuildConfig(progress=False, **changes)


@pytest.fixture
def file(tmp_path):
    return write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))


def last(api, what):
    return [arguments for name, arguments in api.module.calls if name == what][-1]


# typing and precision


@pytest.mark.parametrize(
    ("version", "quantized", "dtype", "opset", "typing", "network_flags", "builder_flags"),
    [
        ("8.6.0", True, FP32, 17, "weak", ["EXPLICIT_BATCH"], ["FP16", "INT8"]),
        ("8.6.0", False, FP32, 17, "weak", ["EXPLICIT_BATCH"], ["FP16"]),
        ("8.6.0", False, FP16, 17, "weak", ["EXPLICIT_BATCH"], ["FP16"]),
        ("10.3.0", True, FP32, 17, "weak", ["EXPLICIT_BATCH"], ["FP16", "INT8"]),
        ("10.3.0", True, FP16, 19, "strong", ["EXPLICIT_BATCH", "STRONGLY_TYPED"], []),
        ("11.1.0", True, FP16, 19, "strong", [], []),
        ("11.1.0", False, FP16, 17, "strong", [], []),
    ],
)  # fmt: skip
def test_typing_follows_from_the_file_and_from_tensorrt(
    tmp_path, monkeypatch, version, quantized, dtype, opset, typing, network_flags, builder_flags
):
    api = stand_in(monkeypatch, version)
    path = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), dtype, quantized=quantized, opset=opset)
    note = build(path, tmp_path / "a.engine", QUIET)
    assert (note.typing, note.precision) == (typing, "int8" if quantized else "fp16")
    assert (last(api, "create_network"), last(api, "build")) == (network_flags, builder_flags)


def test_precision_of_a_float_file_can_be_chosen(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    for precision, expected in (("fp16", ["FP16"]), ("fp32", []), ("best", ["FP16"])):
        build(file, tmp_path / "a.engine", config(precision=precision))
        assert last(api, "build") == expected
    strong = stand_in(monkeypatch, "11.1.0")
    for change in ({"allow_fp32": True}, {"precision": "fp32"}):
        assert build(file, tmp_path / "a.engine", config(**change)).precision == "fp32"
    half = dataclasses.replace(OnnxFile.read(file), half=True)
    assert decide(half, strong, GPU, config(precision="fp16")).precision == "fp16"
    with pytest.raises(InputError, match="--precision fp32"):
        decide(half, strong, GPU, config(precision="fp32"))


QUANTIZED, HALF_SCALES = {"quantized": True}, {"half": True, "half_scales": True, "quantized": True}


@pytest.mark.parametrize(
    ("version", "about", "form", "changes", "advice"),
    [
        ("8.6.0", {"opset": 19}, "plain", {}, "--typing weak --opset 17"),
        ("8.6.0", HALF_SCALES, "plain", {}, "--typing weak --opset 17"),
        ("8.6.0", QUANTIZED, "plain", {"precision": "fp16"}, "for that precision"),
        (
            "11.1.0",
            QUANTIZED,
            "plain",
            {},
            "--typing strong (a float network too), or give build_engine.py --allow-fp32",
        ),
        ("11.1.0", {}, "plain", {}, "--allow-fp32"),
        # of DeepStream's own exporter, which has no --typing
        ("8.6.0", {"opset": 30}, "deepstream", {}, "with --opset 17"),
        ("8.6.0", HALF_SCALES, "deepstream", {}, "with --opset 17"),
        ("11.0.0", QUANTIZED, "deepstream", {}, "export it with --opset 19, or give build_engine.py --allow-fp32"),
        ("11.0.0", {}, "deepstream", {}, "would be slow; give build_engine.py --allow-fp32"),
    ],
)
def test_files_that_a_tensorrt_does_not_read_are_refused_with_advice(
    tmp_path, monkeypatch, version, about, form, changes, advice
):
    api = stand_in(monkeypatch, version)
    described = OnnxFile.read(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), metadata={"form": form}))
    with pytest.raises(InputError) as caught:
        decide(dataclasses.replace(described, **about), api, GPU, config(**changes))
    assert str(caught.value).endswith(advice)
    assert api.module.calls == []


# profiles


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ((2, 3, 64, 96), {}, {}),
        (("b", 3, 64, 96), {}, {"images": ((1, 3, 64, 96), (8, 3, 64, 96), (16, 3, 64, 96))}),
        (("b", 3, 64, 96), {"batch": (1, 4, 8)}, {"images": ((1, 3, 64, 96), (4, 3, 64, 96), (8, 3, 64, 96))}),
        (("b", 3, "h", "w"), {"batch": (1, 2, 4)}, {"images": ((1, 3, 64, 96), (2, 3, 64, 96), (4, 3, 64, 96))}),
        (("b", 3, "h", "w"), {"height": (32, 64, 128), "width": (32, 96, 160)},
         {"images": ((1, 3, 32, 32), (8, 3, 64, 96), (16, 3, 128, 160))}),
    ],
)  # fmt: skip
def test_profile(tmp_path, shape, changes, expected):
    file = OnnxFile.read(write_onnx(tmp_path / "a.onnx", shape))
    assert profile_shapes(file, config(**changes)) == expected


@pytest.mark.parametrize(
    ("shape", "changes", "named"),
    [
        ((2, 3, 64, 96), {"batch": (1, 2, 4)}, "--batch-size 2"),
        (("b", 3, 64, 96), {"height": (32, 32, 32)}, "--imgsz"),
        (("b", 3, "h", "w"), {"height": (32, 64, 100)}, "multiples of 32"),
    ],
)
def test_shapes_that_do_not_fit_the_file(tmp_path, shape, changes, named):
    file = OnnxFile.read(write_onnx(tmp_path / "a.onnx", shape))
    with pytest.raises(InputError, match=named):
        profile_shapes(file, config(**changes))


# builds


def test_what_is_written(file, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch, "10.3.0")
    note = build(file, tmp_path / "out/a.engine", QUIET)
    assert note == EngineNote.load(tmp_path / "out/a.engine")
    assert (note.api, note.gpu, note.metadata, note.options) == ("TensorRT 10.3.0", GPU.name, METADATA, {})
    assert note.warnings == ("a warning about this network",)
    assert "a warning about this network" in caplog.text
    assert ("workspace", int(GPU.free * 0.75)) in api.module.calls
    assert not list(tmp_path.glob("out/.a-*"))
    assert note.tensors == {"images": ["float32", [1, 3, 64, 96]], "output0": ["float32", [1, 6, None]]}
    one = (tmp_path / "out/a.engine", file, api)
    assert is_current(*one, GPU, QUIET)
    assert not is_current(*one, dataclasses.replace(GPU, name=f"{GPU.name} Ti"), QUIET)


def test_timing_cache_is_read_and_written(file, tmp_path, monkeypatch, caplog):
    stand_in(monkeypatch)
    cache = tmp_path / "Fake-GPU-TensorRT-8.6.0.timing.cache"
    for expected in (b"+measured", b"+measured+measured"):
        build(file, tmp_path / "a.engine", QUIET)
        assert cache.read_bytes() == expected
    cache.write_bytes(b"of another GPU")
    build(file, tmp_path / "a.engine", QUIET)
    assert "kernels are measured anew" in caplog.text
    assert cache.read_bytes() == b"+measured"
    build(file, tmp_path / "b/a.engine", config(timing_cache=""))
    assert not list((tmp_path / "b").glob("*.cache"))


def test_options_reach_the_builder_and_the_note(file, tmp_path, monkeypatch):
    api, seen = stand_in(monkeypatch), []
    api.module.ticks = lambda setup: seen.append(setup) or 0
    note = build(
        file, tmp_path / "a.engine", config(optimization_level=2, max_aux_streams=0, hardware_compatible="ampere+")
    )
    build(file, tmp_path / "b.engine", QUIET)
    names = ("builder_optimization_level", "max_aux_streams", "hardware_compatibility_level")
    ampere = api.module.HardwareCompatibilityLevel.AMPERE_PLUS
    assert [[getattr(setup, name) for name in names] for setup in seen] == [[2, 0, ampere], [3, -1, None]]
    assert note.options == {"optimization_level": 2, "max_aux_streams": 0, "hardware_compatible": "ampere+"}


def test_portable_engines_and_tiling(file, tmp_path, monkeypatch):
    api, seen = stand_in(monkeypatch, "10.9.0"), []
    api.module.ticks = lambda setup: seen.append(setup) or 0
    options = {"version_compatible": True, "strip_weights": True, "hardware_compatible": "same-cc",
               "tiling_level": "moderate", "max_tactics": 9}  # fmt: skip
    note = build(file, tmp_path / "a.engine", config(**options))
    assert note.options == options
    assert note.onnx_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    flags = {"EXCLUDE_LEAN_RUNTIME", "FP16", "REFIT_IDENTICAL", "STRIP_PLAN", "VERSION_COMPATIBLE"}
    assert set(last(api, "build")) == flags
    (setup,), module = seen, api.module
    assert setup.hardware_compatibility_level is module.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    assert (setup.tiling_optimization_level, setup.max_num_tactics) == (module.TilingOptimizationLevel.MODERATE, 9)


def test_tactic_sources_switched_off(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    note = build(file, tmp_path / "a.engine", config(tactic_sources_off=["CUDNN", "CUBLAS", "cublas_lt"]))
    assert note.options == {"tactic_sources_off": ["CUBLAS", "CUBLAS_LT", "CUDNN"]}
    assert last(api, "tactic_sources") == 0b11000
    with pytest.raises(InputError, match="CUBLASS"):
        build(file, tmp_path / "a.engine", config(tactic_sources_off=["CUBLASS"]))
    monkeypatch.setenv("TRT_TACTIC_SOURCES_OFF", "CUBLAS,CUDNN")
    build(file, tmp_path / "a.engine", QUIET)
    assert last(api, "tactic_sources") == 0b11010


def test_parser_and_builder_that_refuse(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    model = onnx.load(file)
    model.graph.node[0].op_type = "Unknown"
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(InputError, match=r"b.onnx: In node 0 .*no importer for Unknown"):
        build(tmp_path / "b.onnx", tmp_path / "b.engine", QUIET)
    no_profile = SimpleNamespace(shapes=None, set_shape=lambda *shapes: None)
    builder = type(api.module.Builder(api.log().handle))
    monkeypatch.setattr(builder, "create_optimization_profile", lambda self: no_profile)
    with pytest.raises(QatError, match=r"c.onnx: no optimization profile"):
        build(write_onnx(tmp_path / "c.onnx"), tmp_path / "c.engine", QUIET)
    for content in (None, b"", b"no network"):
        (tmp_path / "d.onnx").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "d.onnx").write_bytes(content)
        with pytest.raises(InputError, match=r"d\.onnx"):
            build(tmp_path / "d.onnx", tmp_path / "d.engine", QUIET)


def test_plugins_are_registered_for_files_that_use_them_only(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    assert not build(file, tmp_path / "a.engine", QUIET).plugins
    assert ("plugins", "") not in api.module.calls
    model = onnx.load(file)
    model.graph.node.append(onnx.helper.make_node("EfficientNMS_TRT", ["output0"], ["num_dets"]))
    model.graph.node.append(onnx.helper.make_node("NonZero", ["output0"], ["unread"]))
    onnx.save(model, tmp_path / "nms.onnx")
    monkeypatch.setattr(type(api.module.Builder(api.log().handle)), "build_serialized_network", lambda *_: b"plan")
    note = build(tmp_path / "nms.onnx", tmp_path / "nms.engine", config(timing_cache=""))
    assert (note.plugins, note.data_dependent) == (True, True)
    assert ("plugins", "") in api.module.calls
    delattr(api.module, "init_libnvinfer_plugins")
    with pytest.raises(InputError, match="--nms onnx"):
        build(tmp_path / "nms.onnx", tmp_path / "nms.engine", QUIET)
