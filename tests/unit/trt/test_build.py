"""Building engines: decisions, flags, profiles, cache, notes, refusals; on stand-ins, and by the real TensorRT-RTX."""

import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from decoding_graph import head_graph
from one_conv import METADATA, write_onnx
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError
from qdq_graph import Editor
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import InputError, QatError
from utils.core.files import file_hash
from utils.core.input_spec import InputSpec
from utils.onnx_graph.passes.decode_boxes import decode_boxes
from utils.runners.base import ONNX_TYPES
from utils.trt import tensorrt_api
from utils.trt.build import build, fp32_box_layers
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote, is_current, load_engine
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import decide, profile_shapes
from utils.trt.tensorrt_api import BUILDER_OPTIONS

QUIET = BuildConfig(progress=False)
FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16


def config(**changes):
    return BuildConfig(**{"progress": False, **changes})


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
        assert is_current(tmp_path / "a.engine", file, strong, GPU, QUIET)  # which it can only be
    half = dataclasses.replace(OnnxFile.read(file), half=True)
    assert decide(half, strong, GPU, config(precision="fp16")).precision == "fp16"
    with pytest.raises(InputError, match="--precision fp32"):
        decide(half, strong, GPU, config(precision="fp32"))


QUANTIZED, HALF_SCALES = {"quantized": True}, {"half": True, "half_scales": True, "quantized": True}


@pytest.mark.parametrize(
    ("version", "about", "changes", "advice"),
    [
        ("8.6.0", {"opset": 18}, {}, "has opset 18, which .*--typing weak --opset 17"),
        ("8.6.0", HALF_SCALES, {}, "and FP16 scales, which .*--typing weak --opset 17"),
        ("8.6.0", QUANTIZED, {"precision": "fp16"}, "for that precision"),
        ("11.1.0", QUANTIZED, {}, "--typing strong, .* give build_engine.py --allow-fp32"),
        ("11.1.0", {}, {}, "--allow-fp32"),
        ("8.6.0", {"unsigned": True, "quantized": True}, {}, "without --target"),
        ("11.1.0", {"unsigned": True, "half": True, "quantized": True}, {}, "without --target"),
        ("8.6.0", {}, {"targets": ("SM89",)}, "--target SM89; it builds only for the GPU it runs on"),
    ],
)
def test_what_cannot_be_built_is_refused_with_advice(file, monkeypatch, version, about, changes, advice):
    api = stand_in(monkeypatch, version)
    with pytest.raises(InputError, match=advice):
        decide(dataclasses.replace(OnnxFile.read(file), **about), api, GPU, config(**changes))
    assert api.module.calls == []


def test_what_a_file_holds_is_found_in_initializers_and_constants(tmp_path):
    model = onnx.load(write_onnx(tmp_path / "a.onnx", (2, 3, 64, 96), FP16, quantized=True, opset=19))
    file = OnnxFile.of_model(model, tmp_path)
    assert (file.opset, file.quantized, file.half, file.half_scales, file.plugins) == (19, True, True, True, False)
    assert list(map(str, (*file.inputs, *file.outputs))) == [
        "images float16 [2, 3, 64, 96]", "output0 float16 [2, 6, any]"
    ]  # fmt: skip
    stored = list(model.graph.initializer)
    del model.graph.initializer[:]
    for tensor in stored:
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    assert OnnxFile.of_model(model, tmp_path) == file
    weights = OnnxFile.read(write_onnx(tmp_path / "b.onnx", (2, 3, 64, 96), FP16))
    assert (weights.quantized, weights.half, weights.half_scales) == (False, True, False)
    for zero_point, unsigned in ((np.int8(0), False), (np.uint8(128), True)):
        edit = Editor(onnx.load(write_onnx(tmp_path / "c.onnx", quantized=True)))
        edit.set_tensor("zero", zero_point)
        assert OnnxFile.of_model(edit.model, tmp_path).unsigned is unsigned
    flat = dataclasses.replace(file.inputs[0], shape=(3, 4, 5))
    for inputs, said in (((), "nothing"), (file.inputs * 2, ", images float16"), ((flat,), "images .*3, 4, 5]")):
        with pytest.raises(InputError, match=f"takes .*{said}.*; expected one input"):
            assert dataclasses.replace(file, inputs=inputs).image
    assert {number: helper.tensor_dtype_to_np_dtype(number).name for number in ONNX_TYPES} == ONNX_TYPES


# options and profiles


@pytest.mark.parametrize(
    ("name", "most", "beyond"),
    [("optimization_level", (0, 5), (-1, 6)), ("max_aux_streams", (0, 64), (-1, 65)),
     ("tune", (0.1, 10_080), (0, 10_081))],
)  # fmt: skip
def test_bounds_of_options(name, most, beyond):
    assert [getattr(config(**{name: value}), name) for value in most] == list(most)
    for value in beyond:
        with pytest.raises(ValidationError, match=name):
            config(**{name: value})


BYTES_LAST = InputSpec("uint8", "nhwc")


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ((2, 3, 64, 96), {}, {}),
        (("b", 3, 64, 96), {}, [(1, 3, 64, 96), (8, 3, 64, 96), (16, 3, 64, 96)]),
        (("b", 3, "h", "w"), {"batch": (1, 2, 4)}, [(1, 3, 64, 96), (2, 3, 64, 96), (4, 3, 64, 96)]),
        (("b", 3, "h", "w"), {"height": (32, 64, 128), "width": (32, 96, 160)},
         [(1, 3, 32, 32), (8, 3, 64, 96), (16, 3, 128, 160)]),
        (("b", "h", "w", 3), {"height": (32, 64, 96)}, [(1, 32, 96, 3), (8, 64, 96, 3), (16, 96, 96, 3)]),
        ((2, 3, 64, 96), {"batch": (1, 2, 4)}, "--batch-size 2"),
        (("b", 3, 64, 96), {"height": (32, 32, 32)}, "--imgsz"),
        (("b", 3, "h", "w"), {"height": (32, 64, 100)}, "multiples of the stride, 32"),
    ],
)  # fmt: skip
def test_profile(tmp_path, shape, changes, expected):
    file = OnnxFile.read(write_onnx(tmp_path / "a.onnx", shape))
    if shape[-1] == 3:
        file = dataclasses.replace(file, input_spec=BYTES_LAST)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            profile_shapes(file, config(**changes))
    else:
        assert profile_shapes(file, config(**changes)) == (expected and {"images": tuple(expected)})


# builds


def test_what_is_written(file, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch, "10.3.0.5")
    note = build(file, tmp_path / "out/a.engine", QUIET)
    assert note == EngineNote.load(tmp_path / "out/a.engine")
    assert (note.api, note.gpu, note.metadata) == ("TensorRT 10.3.0", GPU.name, METADATA)
    assert note.options == {"max_aux_streams": 2}
    assert note.warnings == ("a warning about this network",)
    assert "a warning about this network" in caplog.text
    assert ("workspace", int(GPU.free * 0.75)) in api.module.calls
    assert not list(tmp_path.glob("out/.a-*"))
    assert note.tensors == {"images": ["float32", [1, 3, 64, 96]], "output0": ["float32", [1, 6, None]]}
    one = (tmp_path / "out/a.engine", file, api)
    assert is_current(*one, GPU, QUIET)
    assert not is_current(*one, GPU._replace(name=f"{GPU.name} Ti"), QUIET)
    assert not is_current(*one, GPU, QUIET.model_copy(update={"max_aux_streams": 0}))
    dataclasses.replace(note, options={}).save(tmp_path / "out/a.engine")  # as builds without streams wrote it
    assert not is_current(*one, GPU, QUIET)


def test_timing_cache_is_read_and_written(file, tmp_path, monkeypatch, caplog):
    stand_in(monkeypatch)
    cache = tmp_path / "Fake-GPU-TensorRT-8.6.0.timing.cache"
    for expected in (b"+measured", b"+measured+measured"):
        build(file, tmp_path / "a.engine", QUIET)
        assert cache.read_bytes() == expected
    cache.write_bytes(b"of another GPU")
    build(file, tmp_path / "a.engine", QUIET)
    assert "measuring kernels again" in caplog.text
    assert cache.read_bytes() == b"+measured"
    build(file, tmp_path / "b/a.engine", config(timing_cache=""))
    assert not list((tmp_path / "b").glob("*.cache"))


@pytest.mark.parametrize(
    ("version", "options", "flags", "expected"),
    [
        ("8.6.0", {}, set(), "None 3 2"),
        ("8.6.0", {"optimization_level": 2, "max_aux_streams": 0, "hardware_compatible": "ampere+"}, set(),
         "AMPERE_PLUS 2 0"),
        ("10.9.0", {"version_compatible": True, "strip_weights": True, "hardware_compatible": "same-cc"},
         {"EXCLUDE_LEAN_RUNTIME", "REFIT_IDENTICAL", "STRIP_PLAN", "VERSION_COMPATIBLE"},
         "SAME_COMPUTE_CAPABILITY 3 2"),
    ],
)  # fmt: skip
def test_options_reach_the_builder_and_the_note(file, tmp_path, monkeypatch, version, options, flags, expected):
    api, seen = stand_in(monkeypatch, version), []
    api.module.ticks = lambda setup: seen.append(setup) or 0
    note = build(file, tmp_path / "a.engine", config(**options))
    assert (note.options, {*last(api, "build")}) == ({"max_aux_streams": 2} | options, {"FP16", *flags})
    names = ("hardware_compatibility_level", "builder_optimization_level", "max_aux_streams")
    values = [getattr(seen[0], name, None) for name in names]
    assert " ".join(getattr(value, "name", str(value)) for value in values) == expected
    assert note.onnx_sha256 == (file_hash(file) if "strip_weights" in options else "")


def test_tactic_sources_switched_off(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    note = build(file, tmp_path / "a.engine", config(tactic_sources_off=["CUDNN", "CUBLAS", "cublas_lt"], workspace=3))
    assert last(api, "workspace") == 3 << 20
    assert note.options == {"max_aux_streams": 2, "tactic_sources_off": ["CUBLAS", "CUBLAS_LT", "CUDNN"]}
    assert last(api, "tactic_sources") == 0b11000
    with pytest.raises(InputError, match="CUBLASS"):
        build(file, tmp_path / "a.engine", config(tactic_sources_off=["CUBLASS"]))
    monkeypatch.setenv("TRT_TACTIC_SOURCES_OFF", "CUBLAS,CUDNN")
    build(file, tmp_path / "a.engine", QUIET)
    assert last(api, "tactic_sources") == 0b11010


def test_parser_and_builder_that_refuse(file, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch)
    model = onnx.load(file)
    model.graph.node[0].op_type = "Unknown"
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(InputError, match=r"b.onnx: In node 0 .*no importer for Unknown"):
        build(tmp_path / "b.onnx", tmp_path / "b.engine", QUIET)
    no_profile = SimpleNamespace(shapes=None, set_shape=lambda *shapes: None)
    monkeypatch.setattr(api.module.Builder, "create_optimization_profile", lambda self: no_profile)
    with pytest.raises(QatError, match=r"c.onnx: no optimization profile"):
        build(write_onnx(tmp_path / "c.onnx"), tmp_path / "c.engine", QUIET)
    assert not [one for one in caplog.records if "no optimization profile" in one.message and one.levelno > 10]


def test_plugins_are_registered_for_files_that_use_them_only(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    assert not build(file, tmp_path / "a.engine", QUIET).plugins
    assert ("plugins", "") not in api.module.calls
    model = onnx.load(file)
    model.graph.node.append(onnx.helper.make_node("EfficientNMS_TRT", ["output0"], ["num_dets"]))
    model.graph.node.append(onnx.helper.make_node("NonZero", ["output0"], ["unread"]))
    onnx.save(model, tmp_path / "nms.onnx")
    monkeypatch.setattr(api.module.Builder, "build_serialized_network", lambda *_: b"plan")
    note = build(tmp_path / "nms.onnx", tmp_path / "nms.engine", config(timing_cache=""))
    assert (note.plugins, note.data_dependent) == (True, True)
    assert ("plugins", "") in api.module.calls
    delattr(api.module, "init_libnvinfer_plugins")
    with pytest.raises(InputError, match="--nms onnx"):
        build(tmp_path / "nms.onnx", tmp_path / "nms.engine", QUIET)


# boxes in FP32 where TensorRT would choose


HEAD = "/model.5/"
TRACED = {
    HEAD + name
    for name in ("dfl/Softmax", "dfl/conv/Conv", "dfl/Reshape_1", "Split_1", "Sub", "Add", "Add_1", "Div", "Sub_1",
                 "Concat", "Mul", "Concat_1")
}  # fmt: skip


def followed_by(graph, *nodes, tensors=()):
    """The graph with more nodes behind its `output0`."""
    graph.graph.node.extend(nodes)
    graph.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in tensors)
    return graph


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, name=kind, **attributes)


def test_from_the_softmax_to_the_output():
    assert fp32_box_layers(head_graph()) == TRACED
    graph = decode_boxes(head_graph())
    found = fp32_box_layers(graph)
    names = [one.name for one in graph.graph.node]
    first = next(index for index, one in enumerate(graph.graph.node) if one.op_type == "Softmax")
    assert found == set(names[first:]) - {f"{HEAD}Sigmoid"}


def test_what_is_computed_from_integers_does_not_count():
    nodes = [node("ArgMax", ["output0"], ["which"]), node("Cast", ["which"], ["number"], to=TensorProto.FLOAT),
             node("TopK", ["output0", "k"], ["most", "place"]), node("Gather", ["output0", "place"], ["gathered"]),
             node("Sqrt", ["place"], ["root"]), node("Neg", ["most"], ["negative"])]  # fmt: skip
    found = fp32_box_layers(followed_by(head_graph(), *nodes, tensors=[("k", np.array([3]))]))
    assert found - TRACED == {"ArgMax", "TopK", "Gather", "Neg"}


@pytest.mark.parametrize("kind", ["Conv", "QuantizeLinear"])
def test_a_softmax_of_features_does_not_count(kind):
    tensors = [("features", np.ones((5, 7, 1), np.float32)), ("scale", np.float32(1))]
    inputs = {"Conv": ["output0", "features"], "QuantizeLinear": ["output0", "scale"]}[kind]
    assert fp32_box_layers(followed_by(head_graph(), node(kind, inputs, ["more"]), tensors=tensors)) == frozenset()


@pytest.mark.parametrize(("version", "precision"), [("8.6.0", "best"), ("10.3.0", "best"), ("8.6.0", "fp32")])
def test_they_are_built_in_float32_and_integers_stay(tmp_path, monkeypatch, version, precision):
    api, path = stand_in(monkeypatch, version), write_onnx(tmp_path / "a.onnx", (2, 3, 4, 8))
    nodes = [("Softmax", "raw", "soft"), ("Relu", "soft", "more"), ("ArgMax", "more", "which")]
    onnx.save(followed_by(onnx.load(path), *(node(kind, [source], [name]) for kind, source, name in nodes)), path)
    build(path, tmp_path / "a.engine", config(precision=precision))
    calls, fp32 = dict(api.module.calls), api.module.DataType.FLOAT
    assert calls["build"] == ([] if precision == "fp32" else ["FP16", "PREFER_PRECISION_CONSTRAINTS"])
    told = {one.name: (one.precision, one.told) for one in calls["layers"] if one.told}
    assert told == ({} if precision == "fp32" else dict.fromkeys(("Softmax", "Relu"), (fp32, {0: fp32})))


# the real TensorRT-RTX, which builds without a GPU; no stand-in is used here


@pytest.fixture
def rtx(monkeypatch):
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    return tensorrt_api.load_tensorrt("tensorrt_rtx_bindings")


def ahead(**changes):
    return config(**{"targets": ("SM89",), **changes})


@pytest.mark.parametrize(
    ("quantized", "shape", "changes", "precision"),
    [
        (True, (2, 3, 64, 96), {}, "int8"),
        (False, (1, 3, 64, 96), {"targets": ("SM89", "SM120")}, "fp16"),
        (True, ("b", 3, "h", "w"), {"batch": (1, 2, 4), "height": (32, 64, 64), "width": (32, 96, 96)}, "int8"),
        (True, (2, 3, 64, 96), {"optimization_level": 2, "max_aux_streams": 3, "hardware_compatible": "ampere+",
                                "version_compatible": True}, "int8"),
    ],
)  # fmt: skip
def test_strongly_typed_files(rtx, tmp_path, capsys, quantized, shape, changes, precision):
    file = write_onnx(tmp_path / "a.onnx", shape, FP16, quantized=quantized, opset=19)
    note = build(file, tmp_path / "a.engine", ahead(progress=True, **changes), rtx)
    assert "a.engine: Building engine: 100%" in capsys.readouterr().err
    assert note.options == {name: changes[name] for name in BUILDER_OPTIONS if name in changes}
    assert (tmp_path / "a.engine").stat().st_size > 1000
    assert (note.typing, note.precision, note.api) == ("strong", precision, rtx.name)
    assert note.gpu == " ".join(changes.get("targets", ("SM89",)))
    assert note.metadata == METADATA
    assert note.warnings == () or "hardware_compatible" in changes  # which RTX does not support
    assert note.profile == ({"images": [[1, 3, 32, 32], [2, 3, 64, 96], [4, 3, 64, 96]]} if "batch" in changes else {})
    assert not list(tmp_path.glob("*.cache"))  # nothing was measured


def test_what_is_refused_and_given_up(rtx, tmp_path):
    full = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), quantized=True, opset=19)
    half = write_onnx(tmp_path / "b.onnx", (1, 3, 64, 96), FP16)
    model = onnx.load(half)
    model.graph.node[1].op_type = "Unknown"
    onnx.save(model, tmp_path / "c.onnx")
    for file, changes, said in (
        (half, {"targets": ()}, r"--target with one of .*SM89"),
        (half, {"targets": ("SM42",)}, r"SM42; it builds for .*SM120"),
        (tmp_path / "c.onnx", {}, r"c.onnx \(node without a name, Unknown\): .*Plugin not found"),
    ):
        with pytest.raises(InputError, match=said):
            build(file, tmp_path / "a.engine", ahead(**changes), rtx)
    with pytest.raises(QatError, match="Build canceled"):
        build(half, tmp_path / "a.engine", ahead(), rtx, until=time.monotonic())
    assert {path.name for path in tmp_path.iterdir()} == {"a.onnx", "b.onnx", "c.onnx"}
    later = time.monotonic() + 100
    assert build(full, tmp_path / "a.engine", ahead(allow_fp32=True), rtx, until=later).precision == "int8"
    with pytest.raises(InputError, match=r"export without NMS$"):
        rtx.register_plugins(rtx.log())
    with pytest.raises(InputError, match="NVIDIA GPU"):
        load_engine(tmp_path / "a.engine", rtx, rtx.log(), None)
