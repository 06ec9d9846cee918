"""What the library asks of TensorRT is in its real Python API, from 8.6 to 11.4, and the stand-in has nothing else."""

from __future__ import annotations

import ast
import inspect
import types
from pathlib import Path

import fake_tensorrt
import pytest
from one_conv import write_onnx
from packaging.specifiers import SpecifierSet
from real_tensorrt import BINDINGS, signatures, surface
from tensorrt_stand_in import GPU

from utils.core.errors import InputError
from utils.trt.preflight import BuildConfig, OnnxFile, decide
from utils.trt.tensorrt_api import Api

ROOT = Path(__file__).resolve().parents[2]
USED = {  # by utils/trt and examples/detect.py
    "Builder": "create_network create_builder_config create_optimization_profile build_serialized_network",
    "INetworkDefinition": "num_layers get_layer",
    "ILayer": "name num_outputs get_output",
    "ITensor": "dtype",
    "IBuilderConfig": "set_flag clear_flag set_memory_pool_limit profiling_verbosity get_tactic_sources "
    "set_tactic_sources add_optimization_profile create_timing_cache set_timing_cache get_timing_cache "
    "builder_optimization_level max_aux_streams avg_timing_iterations",
    "ITimingCache": "serialize combine",
    "IOptimizationProfile": "set_shape",
    "OnnxParser": "parse_from_file num_errors get_error",
    "ParserError": "desc",
    "Runtime": "deserialize_cuda_engine",
    "ICudaEngine": "num_io_tensors get_tensor_name get_tensor_mode get_tensor_location get_tensor_shape "
    "get_tensor_dtype get_tensor_format get_tensor_profile_shape create_execution_context create_engine_inspector "
    "num_aux_streams",
    "EngineInspector": "execution_context get_engine_information",
    "IExecutionContext": "set_aux_streams set_optimization_profile_async set_input_shape get_tensor_shape "
    "set_tensor_address execute_async_v3 profiler",
    "BuilderFlag": "TF32", "MemoryPoolType": "WORKSPACE", "ProfilingVerbosity": "DETAILED",
    "LayerInformationFormat": "JSON", "TensorLocation": "HOST", "TensorIOMode": "INPUT OUTPUT",
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
}  # fmt: skip
OTHER = {  # of other objects, too
    "__init__", "reset", "name", "update", "min", "max", "kind", "type", "data", "size", "shape", "dims", "format",
    "file", "node", "metadata", "engine", "value", "read", "write", "log",
}  # fmt: skip
STAND_IN = {"Builder": "_Builder", "INetworkDefinition": "_Network", "ILayer": "_Layer", "IBuilderConfig": "_Config",
            "ITimingCache": "_Cache", "IOptimizationProfile": "_Profile", "OnnxParser": "_Parser",
            "Runtime": "_Runtime", "ICudaEngine": "_Engine", "EngineInspector": "_Inspector",
            "IExecutionContext": "_Context"}  # fmt: skip
ANSWERS = {  # weakly typed, strongly typed, how files are exported by default, the last opset
    "8.6": (True, False, "weak", 17), "10.0": (True, True, "weak", None), "10.3": (True, True, "weak", None),
    "10.9": (True, True, "weak", None), "10.12": (True, True, "strong", None), "10.16": (True, True, "strong", None),
    "11.0": (False, True, "strong", None), "11.4": (False, True, "strong", None),
}  # fmt: skip


@pytest.fixture(params=BINDINGS)
def version(request):
    return request.param


@pytest.fixture
def real(version):
    try:
        return surface(version)
    except (OSError, ValueError) as error:
        pytest.skip(f"the bindings of TensorRT {version} cannot be had here: {error}")


def test_what_the_library_asks_for_is_there(real, version):
    missing = [f"{kind}.{name}" for kind, names in USED.items() for name in names.split() if name not in real[kind]]
    assert missing == []
    for (kind, name), versions in SOMETIMES.items():
        assert (name in real[kind]) == (version in SpecifierSet(versions)), f"{kind}.{name} in {version}"


def test_every_member_that_the_library_names_is_listed(real):
    """What is in no list above is not TensorRT's, or is missing from the lists."""
    listed = {name for names in USED.values() for name in names.split()} | {name for _, name in SOMETIMES} | OTHER
    theirs = {member for members in (real[kind] for kind in STAND_IN) for member in members}
    files = [*ROOT.glob("utils/trt/*.py"), ROOT / "examples/detect.py"]
    named = {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }
    assert (named & theirs) - listed == set()


def test_the_stand_in_has_only_what_the_real_one_has(real):
    for kind, stand_in in STAND_IN.items():
        for name, member in vars(getattr(fake_tensorrt, stand_in)).items():
            if name.startswith("_"):
                continue
            assert name in real[kind] or (kind, name) in SOMETIMES, f"{stand_in}.{name} is not in {kind}"
            if inspect.isfunction(member) and (overloads := signatures(str(real[kind].get(name, "")))):
                parameters = list(inspect.signature(member).parameters.values())[1:]
                needed = sum(one.default is one.empty for one in parameters)
                assert any(needed <= most and least <= len(parameters) for least, most in overloads), (kind, name)


def test_the_comparison_notices_a_member_that_is_not_there(real, monkeypatch):
    monkeypatch.setattr(fake_tensorrt._Config, "set_everything", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match="set_everything"):
        test_the_stand_in_has_only_what_the_real_one_has(real)


def test_values_of_enums_are_those_of_the_stand_in(real, version):
    fake = fake_tensorrt.make({"8.6": "8.6.1"}.get(version, f"{version}.0"))
    for kind in ("BuilderFlag", "NetworkDefinitionCreationFlag", "TensorFormat", "TacticSource"):
        for member in getattr(fake, kind):
            assert real[kind].get(member.name) == int(member), f"{kind}.{member.name} in {version}"


def module_of(real, version):
    module = types.ModuleType("tensorrt")
    module.__version__ = BINDINGS[version].partition("==")[2]
    for kind, members in real.items():
        setattr(module, kind, type(kind, (), members))
    return module


def test_what_is_asked_of_a_version_is_answered(real, version):
    api = Api(module_of(real, version))
    assert (api.weakly_typed, api.strongly_typed, api.typing, api.max_opset) == ANSWERS[version]
    assert api.ahead_of_time == ()
    assert (api.progress_monitor is not None) == (version != "8.6")


@pytest.mark.parametrize(
    ("name", "value", "versions"),
    [
        ("optimization_level", 2, ">=8.6"), ("max_aux_streams", 0, ">=8.6"), ("timing_iterations", 4, ">=8.6"),
        ("version_compatible", True, ">=8.6"), ("hardware_compatible", "ampere+", ">=8.6"),
        ("hardware_compatible", "same-cc", ">=10.9"), ("strip_weights", True, ">=10.0"),
        ("tiling_level", "fast", ">=10.9"), ("tiling_level", "full", ">=10.9"), ("max_tactics", 9, ">=10.9"),
    ],
)  # fmt: skip
def test_an_option_is_taken_or_refused_by_name(real, version, name, value, versions, tmp_path):
    file = OnnxFile.read(write_onnx(tmp_path / "a.onnx", (1, 3, 64, 96)))
    config, api = BuildConfig(**{name: value}, allow_fp32=True), Api(module_of(real, version))
    if version in SpecifierSet(versions):
        decide(file, api, GPU, config)
    else:
        with pytest.raises(InputError, match=rf"^TensorRT {version}\.\d+ has no .*--{name.replace('_', '-')}$"):
            decide(file, api, GPU, config)
