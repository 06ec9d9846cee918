"""Building engines: flags, profiles, cache and refusals, on stand-ins of TensorRT 8.6, 10 and 11."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import onnx
import pytest
from one_conv import METADATA, write_onnx
from onnx import TensorProto
from tensorrt_stand_in import GPU, stand_in

from utils.core.errors import DependencyError, InputError, QatError
from utils.trt import tensorrt_api
from utils.trt.build_config import BuildConfig, describe_options
from utils.trt.builder import build
from utils.trt.engine_file import EngineNote

QUIET = BuildConfig(progress=False)
FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16


@pytest.fixture
def file(tmp_path):
    return write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))


def flags(api):
    return [arguments for name, arguments in api.module.calls if name == "build"][-1]


def network(api):
    return [arguments for name, arguments in api.module.calls if name == "create_network"][-1]


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
    result = build(path, tmp_path / "a.engine", QUIET)
    assert result.note.typing == typing
    assert result.note.precision == ("int8" if quantized else "fp16")
    assert network(api) == network_flags
    assert flags(api) == builder_flags


def test_precision_of_a_float_file_can_be_chosen_and_of_a_quantized_one_not(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    path = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96))
    for precision, expected in (("fp16", ["FP16"]), ("fp32", []), ("best", ["FP16"])):
        build(path, tmp_path / "a.engine", dataclasses.replace(QUIET, precision=precision))
        assert flags(api) == expected
    path = write_onnx(tmp_path / "b.onnx", (1, 3, 64, 96), quantized=True)
    with pytest.raises(InputError, match="holds quantizers, so its engine is INT8; an FP16 engine to compare"):
        build(path, tmp_path / "b.engine", dataclasses.replace(QUIET, precision="fp16"))


@pytest.mark.parametrize(
    ("version", "quantized", "dtype", "opset", "message"),
    [
        ("8.6.0", True, FP32, 19, "has opset 19, and TensorRT 8.6.0 reads up to 17; export it with --typing weak"),
        ("11.1.0", True, FP32, 17, "is in FP32, and TensorRT 11.1.0 builds what the file says"),
        ("11.1.0", False, FP32, 17, "or give build_engine.py --allow-fp32"),
    ],
)
def test_wrong_typing_or_opset_is_refused_before_the_build(
    tmp_path, monkeypatch, version, quantized, dtype, opset, message
):
    api = stand_in(monkeypatch, version)
    path = write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96), dtype, quantized=quantized, opset=opset)
    with pytest.raises(InputError, match=message):
        build(path, tmp_path / "a.engine", QUIET)
    assert api.module.calls == []
    assert not (tmp_path / "a.engine").exists()


def test_fp32_on_purpose(file, tmp_path, monkeypatch):
    stand_in(monkeypatch, "11.1.0")
    for change in ({"allow_fp32": True}, {"precision": "fp32"}):
        assert build(file, tmp_path / "a.engine", dataclasses.replace(QUIET, **change)).note.precision == "fp32"


def test_no_gpu_and_unknown_targets(file, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    with pytest.raises(InputError, match=r"no NVIDIA GPU.*build_engine.py builds ahead of time with TensorRT-RTX"):
        build(file, tmp_path / "a.engine", QUIET)
    with pytest.raises(InputError, match="only for the GPU it runs on; --target is for TensorRT-RTX"):
        build(file, tmp_path / "a.engine", dataclasses.replace(QUIET, targets=("SM89",)))


def test_tensorrt_is_not_installed_or_broken(monkeypatch):
    monkeypatch.setattr(tensorrt_api, "MODULES", ("no_such_module",))
    with pytest.raises(DependencyError, match=r"install_dependencies.sh --tensorrt"):
        tensorrt_api.load()
    monkeypatch.setattr(tensorrt_api.importlib, "import_module", lambda name: (_ for _ in ()).throw(OSError("libnv")))
    with pytest.raises(DependencyError, match="is installed but cannot be imported: libnv"):
        tensorrt_api.load("tensorrt")


@pytest.mark.parametrize(
    ("there", "for_gpus_elsewhere"),
    [(("tensorrt", "tensorrt_rtx"), "tensorrt_rtx"), (("tensorrt",), "tensorrt"), (("tensorrt_rtx",), "tensorrt_rtx")],
)
def test_for_gpus_elsewhere_rtx_builds_also_beside_tensorrt(monkeypatch, there, for_gpus_elsewhere):
    monkeypatch.setattr(tensorrt_api.importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(tensorrt_api.importlib, "import_module", lambda name: SimpleNamespace(__name__=name))
    assert tensorrt_api.load_for(()).module.__name__ == there[0]
    assert tensorrt_api.load_for(("SM89",)).module.__name__ == for_gpus_elsewhere


@pytest.mark.parametrize("changes", [{"batch": (4, 2, 8)}, {"batch": (0, 1, 1)}, {"optimization_level": 6},
                                     {"max_aux_streams": -1}])  # fmt: skip
def test_configurations_that_mean_nothing(changes):
    with pytest.raises(InputError, match=r"expected min <= opt <= max|outside 0 to 5|expected 0 or more"):
        BuildConfig(**changes)


def test_what_is_written(file, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch, "10.3.0")
    caplog.set_level("INFO")
    result = build(file, tmp_path / "out/a.engine", QUIET)
    assert result.path.stat().st_size == result.size_bytes
    note = EngineNote.load(result.path)
    assert note == result.note
    assert (note.api, note.gpu, note.metadata) == ("TensorRT 10.3.0", GPU.name, METADATA)
    assert note.warnings == ("a warning about this network",)
    assert "TensorRT: a warning about this network" in caplog.text
    assert ("workspace", int(GPU.free * 0.75)) in api.module.calls
    assert not list(tmp_path.glob("out/.a-*"))


def test_timing_cache_is_read_written_and_merged(file, tmp_path, monkeypatch, caplog):
    api = stand_in(monkeypatch)
    build(file, tmp_path / "a.engine", QUIET)
    cache = tmp_path / "Fake-GPU-TensorRT-8.6.0.timing.cache"
    assert cache.read_bytes() == b"+measured"
    build(file, tmp_path / "a.engine", QUIET)
    assert ("timing_cache", b"+measured") in api.module.calls
    assert cache.read_bytes() == b"+measured+measured"
    # another build wrote to it meanwhile
    monkeypatch.setattr(type(api.module.Builder(api.log().handle)), "build_serialized_network", _building(cache))
    build(file, tmp_path / "a.engine", QUIET)
    assert cache.read_bytes() == b"mine|theirs"
    cache.write_bytes(b"of another GPU")
    build(file, tmp_path / "a.engine", QUIET)
    assert "is from another GPU or TensorRT; kernels are measured anew" in caplog.text
    build(file, tmp_path / "b/a.engine", dataclasses.replace(QUIET, timing_cache=""))
    assert not list((tmp_path / "b").glob("*.cache"))


def test_what_cannot_be_written_is_said_before_the_build(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    (tmp_path / "is a file").touch()
    for engine, cache in (("is a file/a.engine", ""), ("a.engine", str(tmp_path / "is a file/x.cache"))):
        with pytest.raises(InputError, match=r"cannot write .*is a file/"):
            build(file, tmp_path / engine, dataclasses.replace(QUIET, timing_cache=cache))
    assert "build" not in dict(api.module.calls)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "is a file"]


def test_a_cache_that_cannot_be_written_costs_no_engine(file, tmp_path, monkeypatch, caplog):
    """Its disk is full by the end of the build."""
    api = stand_in(monkeypatch)
    cache = tmp_path / "caches/x.cache"
    api.module.ticks = lambda setup: cache.parent.rmdir() or 0
    result = build(file, tmp_path / "a.engine", dataclasses.replace(QUIET, timing_cache=str(cache)))
    assert result.path.stat().st_size == result.size_bytes > 0
    assert EngineNote.load(result.path) == result.note
    assert f"the timing cache {cache} cannot be written: " in caplog.text


def _building(cache):
    def build_and_be_overtaken(self, network, config):
        cache.write_bytes(b"theirs")
        config.measured = b"mine"
        return b"plan"

    return build_and_be_overtaken


def test_nothing_is_emptied_by_the_lock_of_the_cache(file, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".Fake-GPU-TensorRT-8.6.0.timing.cache.lock").symlink_to(tmp_path / "mine")
    build(file, tmp_path / "a.engine", QUIET)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "a.engine").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, '{"metadata": []}', '{"seconds": "1"}', '{"warnings": 1}', "[]"])
def test_a_damaged_note_is_one_line(tmp_path, content):
    (tmp_path / "a.engine.json").write_text(content)
    with pytest.raises(InputError, match=r"a\.engine\.json is damaged: .*; delete it, or build the engine again"):
        EngineNote.load(tmp_path / "a.engine")


def test_tactic_sources_switched_off(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    config = dataclasses.replace(QUIET, tactic_sources_off=("CUBLAS", "cublas_lt", "CUDNN"))
    build(file, tmp_path / "a.engine", config)
    assert ("tactic_sources", 0b11000) in api.module.calls
    with pytest.raises(InputError, match="no tactic source CUBLASS; it has CUBLAS, "):
        build(file, tmp_path / "a.engine", dataclasses.replace(QUIET, tactic_sources_off=("CUBLASS",)))


def test_options_reach_the_builder_and_the_note(file, tmp_path, monkeypatch):
    api, seen = stand_in(monkeypatch), []
    api.module.ticks = lambda setup: seen.append(setup) or 0
    config = dataclasses.replace(QUIET, optimization_level=2, max_aux_streams=0, timing_iterations=4)
    note = build(file, tmp_path / "a.engine", config).note
    build(file, tmp_path / "b.engine", QUIET)
    names = ("builder_optimization_level", "max_aux_streams", "avg_timing_iterations")
    assert [[getattr(setup, name) for name in names] for setup in seen] == [[2, 0, 4], [3, -1, 1]]
    assert note.options == {"optimization_level": 2, "max_aux_streams": 0, "timing_iterations": 4}
    assert describe_options(note.options) == "level 2, 0 streams, 4 timing iterations"
    assert EngineNote.load(tmp_path / "b.engine").options == {}


@pytest.mark.parametrize("field", ["optimization_level", "max_aux_streams"])
def test_options_that_this_tensorrt_lacks(file, tmp_path, monkeypatch, field):
    """Both are new in 8.6."""
    api = stand_in(monkeypatch)
    monkeypatch.setattr(api.module, "IBuilderConfig", type("IBuilderConfig", (), {}))
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(InputError, match=rf"TensorRT 8.6.0 has no \w+; leave out {option}"):
        build(file, tmp_path / "a.engine", dataclasses.replace(QUIET, **{field: 2}))
    assert "build" not in dict(api.module.calls)


def test_tactic_sources_from_the_environment(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    monkeypatch.setenv("TRT_TACTIC_SOURCES_OFF", "CUBLAS,CUDNN")
    build(file, tmp_path / "a.engine", QUIET)
    assert ("tactic_sources", 0b11010) in api.module.calls


def test_parser_and_builder_that_refuse(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    model = onnx.load(file)
    model.graph.node[0].op_type = "Unknown"
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(InputError, match=r"cannot parse .*b.onnx: In node 0 .*no importer for Unknown"):
        build(tmp_path / "b.onnx", tmp_path / "b.engine", QUIET)
    builder = type(api.module.Builder(api.log().handle))
    monkeypatch.setattr(builder, "create_optimization_profile", lambda self: _NoProfile())
    free = write_onnx(tmp_path / "c.onnx")
    with pytest.raises(QatError, match=r"could not build .*c.onnx: no optimization profile"):
        build(free, tmp_path / "c.engine", QUIET)


class _NoProfile:
    shapes = None

    def set_shape(self, *shapes):
        pass


@pytest.mark.parametrize("content", [None, b"", b"no network"])
def test_files_that_are_no_onnx(tmp_path, content, monkeypatch):
    stand_in(monkeypatch)
    if content is not None:
        (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(InputError, match=r"a.onnx (does not exist|is not an ONNX file)"):
        build(tmp_path / "a.onnx", tmp_path / "a.engine", QUIET)


def test_progress_bar(file, tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch, "10.3.0")
    build(file, tmp_path / "a.engine", BuildConfig())
    assert "a.engine: Building engine: 100%" in capsys.readouterr().err
    stand_in(monkeypatch, "8.6.0")
    build(file, tmp_path / "a.engine", BuildConfig())
    shown = capsys.readouterr().err
    assert re.search(r"a.engine: measuring kernels:  67%.* 2/3 .*250 kernels", shown)
    assert re.search(r"a.engine: measuring kernels: 100%.* 3/3 ", shown)
    build(file, tmp_path / "a.engine", QUIET)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("onnx2trt_utils.cpp:374: Your ONNX model has\nINT64 weights", "Your ONNX model has INT64 weights"),
        ("4: [network.cpp::validate::3036] Error Code 4: Internal Error (x)", "Internal Error (x)"),
        ("plain", "plain"),
    ],
)
def test_messages_are_lines(message, expected):
    assert tensorrt_api.readable(message) == expected


def test_note_that_is_damaged(tmp_path):
    (tmp_path / "a.engine.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        EngineNote.load(tmp_path / "a.engine")
    (tmp_path / "a.engine.json").write_text(json.dumps({"unknown": 1}))
    with pytest.raises(InputError, match="is damaged"):
        EngineNote.load(tmp_path / "a.engine")


def test_plugins_are_registered_for_files_that_use_them_only(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    assert not build(file, tmp_path / "a.engine", QUIET).note.plugins
    assert ("plugins", "") not in api.module.calls
    model = onnx.load(file)
    model.graph.node.append(onnx.helper.make_node("EfficientNMS_TRT", ["output0"], ["num_dets"]))
    onnx.save(model, tmp_path / "nms.onnx")
    monkeypatch.setattr(type(api.module.Builder(api.log().handle)), "build_serialized_network", lambda *_: b"plan")
    assert build(
        tmp_path / "nms.onnx", tmp_path / "nms.engine", dataclasses.replace(QUIET, timing_cache="")
    ).note.plugins
    assert ("plugins", "") in api.module.calls
    delattr(api.module, "init_libnvinfer_plugins")
    with pytest.raises(InputError, match="has no plugins here; export with --nms onnx, or without NMS"):
        build(tmp_path / "nms.onnx", tmp_path / "nms.engine", QUIET)


@pytest.mark.parametrize(
    ("version", "name", "typing"),
    [
        ("8.6.0", "TensorRT 8.6.0", "weak"),
        ("10.11.0.33", "TensorRT 10.11.0", "weak"),
        ("10.12.0.36", "TensorRT 10.12.0", "strong"),
        ("11.1.0.7", "TensorRT 11.1.0", "strong"),
    ],
)
def test_what_a_version_is_called_and_wants(monkeypatch, version, name, typing):
    """As trtexec calls itself, without the number of the build; from 10.12 on weak typing is deprecated."""
    api = stand_in(monkeypatch, version)
    assert (api.name, api.typing) == (name, typing)


def test_an_engine_of_a_gpu_whose_name_begins_alike(file, tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    note = build(file, tmp_path / "a.engine", QUIET).note
    assert note.made_by(api, GPU)
    assert not dataclasses.replace(note, gpu=f"{GPU.name} Ti").made_by(api, GPU)


def test_every_log_hears_what_is_said_since_it_was_made(monkeypatch, caplog):
    """TensorRT knows one logger in a process."""
    api = stand_in(monkeypatch)
    first, second = api.log(), api.log()
    assert first.handle is second.handle
    severity = api.module.Severity
    first.handle.log(severity.WARNING, "a warning")
    first.handle.log(severity.ERROR, "1: [a.cpp::b::3] Error Code 1: too bad")
    third = api.log()
    first.handle.log(severity.WARNING, "a warning")
    first.handle.log(severity.INFO, "chatter")
    assert [log.warnings for log in (first, second, third)] == [["a warning"]] * 3
    assert [log.reason("unknown") for log in (first, second, third)] == ["too bad", "too bad", "unknown"]
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 2
