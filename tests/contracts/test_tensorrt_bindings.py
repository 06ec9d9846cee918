"""What the library asks of TensorRT is in its real Python API, from 8.6 to 11.4, and the stand-in has nothing else."""

import ast
import enum
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import fake_tensorrt
import pytest
from one_conv import write_onnx
from packaging.specifiers import SpecifierSet
from real_tensorrt import BINDINGS, record, signatures, surface
from tensorrt_stand_in import GPU

from utils.core.errors import InputError
from utils.trt.build_options import BuildConfig
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import check_target, decide
from utils.trt.tensorrt_api import MODULES, Api, load_tensorrt

ROOT = Path(__file__).resolve().parents[2]
USED = {  # by utils/trt and examples/detect.py, beside what the stand-in's classes have
    "IBuilderConfig": "profiling_verbosity builder_optimization_level max_aux_streams avg_timing_iterations "
    "hardware_compatibility_level", "ILayer": "name num_outputs", "ITensor": "dtype", "ParserError": "desc",
    "INetworkDefinition": "num_layers", "IExecutionContext": "profiler",
    "ICudaEngine": "num_aux_streams num_io_tensors", "EngineInspector": "execution_context",
    "BuilderFlag": "TF32", "MemoryPoolType": "WORKSPACE", "ProfilingVerbosity": "DETAILED",
    "LayerInformationFormat": "JSON", "TensorIOMode": "INPUT OUTPUT",
    "DataType": "FLOAT HALF INT8 INT32 UINT8 BOOL", "TensorFormat": "LINEAR",
}  # fmt: skip
# asked for before it is used, with hasattr or by name: from a version on, or up to one without it
SOMETIMES = {
    ("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH"): "<11", ("BuilderFlag", "FP16"): "<11",
    ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"): ">=10", ("BuilderFlag", "INT8"): "<11",
    ("BuilderFlag", "PREFER_PRECISION_CONSTRAINTS"): "<11",
    ("ILayer", "precision"): "<11", ("ILayer", "set_output_type"): "<11", ("DataType", "INT64"): ">=10",
    ("IBuilderConfig", "progress_monitor"): ">=10", ("ParserError", "node_name"): ">=10",
    ("ParserError", "node_operator"): ">=10", ("Runtime", "engine_host_code_allowed"): ">=8.6",
    ("OnnxParserRefitter", "refit_from_file"): ">=10",
}  # fmt: skip
OTHER = {  # of other objects, too
    "__init__", "reset", "name", "update", "min", "max", "kind", "type", "data", "size", "shape", "dims", "format",
    "file", "flags", "node", "metadata", "engine", "value", "read", "write", "log", "ERROR",
}  # fmt: skip
ANSWERS = {  # weakly typed, strongly typed, how files are exported by default
    "8.6": (True, False, "weak"), "10.0": (True, True, "weak"), "10.3": (True, True, "weak"),
    "10.9": (True, True, "weak"), "10.12": (True, True, "strong"), "10.16": (True, True, "strong"),
    "11.0": (False, True, "strong"), "11.4": (False, True, "strong"),
}  # fmt: skip


@pytest.fixture(params=BINDINGS)
def version(request):
    return request.param


def stand_in():
    """Class of the stand-in → its public members; `trt` and `parts` are what `make` says to all of them."""
    classes = {kind: one for kind, one in vars(fake_tensorrt.make("11.4")).items() if inspect.isclass(one)}
    return {
        kind: {name: member for name, member in inspect.getmembers(one)
               if name[0] != "_" and name not in ("trt", "parts") and member is not None}
        for kind, one in classes.items() if not issubclass(one, enum.Enum)
    }  # fmt: skip


def bindings(version, name="tensorrt"):
    try:
        return surface(version, name)
    except (OSError, ValueError) as error:
        pytest.skip(f"the bindings of {name} {version} cannot be had here: {error}")


@pytest.fixture
def real(version):
    return bindings(version)


def test_what_the_library_asks_for_is_there(real, version):
    missing = [f"{kind}.{name}" for kind, names in USED.items() for name in names.split() if name not in real[kind]]
    assert missing == []
    for (kind, name), versions in SOMETIMES.items():
        assert (name in real.get(kind, {})) == (version in SpecifierSet(versions)), f"{kind}.{name} in {version}"


def test_every_member_that_the_library_names_is_listed(real):
    """What is in no list above is not TensorRT's, or is missing from the lists."""
    listed = {name for names in USED.values() for name in names.split()} | {name for _, name in SOMETIMES} | OTHER
    listed |= {name for members in stand_in().values() for name in members}
    theirs = {name for kind in stand_in() for name in real.get(kind, {})}
    files = [*ROOT.glob("utils/trt/*.py"), ROOT / "examples/detect.py"]
    named = {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }
    assert (named & theirs) - listed == set()


def test_the_stand_in_has_only_what_the_real_one_has(real):
    for kind, members in stand_in().items():
        for name, member in members.items():
            assert name in real.get(kind, {}) or (kind, name) in SOMETIMES, f"{kind}.{name} is not TensorRT's"
            if inspect.isfunction(member) and (overloads := signatures(str(real.get(kind, {}).get(name, "")))):
                parameters = list(inspect.signature(member).parameters.values())[1:]
                needed = sum(one.default is one.empty for one in parameters)
                assert any(needed <= most and least <= len(parameters) for least, most in overloads), (kind, name)


def test_the_comparison_notices_a_member_that_is_not_there(real, monkeypatch):
    monkeypatch.setattr(fake_tensorrt.IBuilderConfig, "set_everything", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match="set_everything"):
        test_the_stand_in_has_only_what_the_real_one_has(real)


def test_the_lean_runtime_has_what_runs_an_engine(real, version):
    """Methods that give what it has no class for raise TypeError, such as get_tensor_format."""
    lean = bindings(version, "tensorrt_lean")
    for kind in ["Runtime", "ICudaEngine", "IExecutionContext", "ILogger"]:
        assert {*stand_in()[kind], *USED.get(kind, "").split()} <= lean[kind].keys(), kind
    for kind in ("DataType", "TensorIOMode"):
        assert set(USED[kind].split()) <= lean[kind].keys()
    with pytest.raises(InputError, match="builds no engines"):
        check_target(Api(module_of(lean, version, "tensorrt_lean")), GPU, ())


def test_the_lean_runtime_is_taken_where_it_alone_is_installed(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, fake_tensorrt.make("10.3.0", lean=True) if "lean" in name else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys.modules[name])
    assert load_tensorrt().name == "TensorRT's lean runtime 10.3.0"


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_lean"])
def test_the_stand_in_is_made_from_the_real_one(version, name):
    """tests/support/tensorrt_surface.json holds what a real module has."""
    kinds = {kind for kinds in fake_tensorrt.SURFACE.values() for kind in kinds}
    assert fake_tensorrt.SURFACE[f"{name} {version}"] == record(bindings(version, name), kinds)


def module_of(real, version, name="tensorrt"):
    module = types.ModuleType(name)
    module.__version__ = BINDINGS[version].partition("==")[2]
    for kind, members in real.items():
        setattr(module, kind, type(kind, (), members))
    return module


def test_what_is_asked_of_a_version_is_answered(real, version):
    api = Api(module_of(real, version))
    assert (api.weakly_typed, api.strongly_typed, api.typing) == ANSWERS[version]
    assert api.ahead_of_time == ()
    assert hasattr(api.module, "IProgressMonitor") == (version != "8.6")


@pytest.mark.parametrize(
    ("name", "value", "versions"),
    [
        ("optimization_level", 2, ">=8.6"), ("max_aux_streams", 0, ">=8.6"),
        ("version_compatible", True, ">=8.6"), ("hardware_compatible", "ampere+", ">=8.6"),
        ("hardware_compatible", "same-cc", ">=10.9"), ("strip_weights", True, ">=10.0"),
    ],
)  # fmt: skip
def test_an_option_is_taken_or_refused_by_name(real, version, name, value, versions, tmp_path):
    file = OnnxFile.read(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)))
    config, api = BuildConfig(**{name: value}, allow_fp32=True), Api(module_of(real, version))
    if version in SpecifierSet(versions):
        decide(file, api, GPU, config)
    else:
        word = rf" {re.escape(value)}" if isinstance(value, str) else ""
        with pytest.raises(InputError, match=rf"^TensorRT {version}\.\d+ has no .*--{name.replace('_', '-')}{word}$"):
            decide(file, api, GPU, config)
