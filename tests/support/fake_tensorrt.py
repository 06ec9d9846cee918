"""A stand-in for the `tensorrt` module and for `torch.cuda`, for a machine without either.

It records calls, checks their order and arguments as TensorRT would, and computes with ONNX Runtime on the very
addresses that it was given.

Stand-ins exist for what no wheel offers here: the 8.6, 10 and 11 modules and a GPU. TensorRT-RTX is tested as it is.
An "engine" is a file of the ONNX model and what it was built with; the inspector tells of one layer per ONNX node.
"""

from __future__ import annotations

import ctypes
import enum
import json
import pathlib
import types
from contextlib import contextmanager
from itertools import cycle
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError

SIZES = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT8": np.int8, "INT64": np.int64,
         "UINT8": np.uint8}  # fmt: skip
ONNX_TYPES = {1: "FLOAT", 10: "HALF", 6: "INT32", 3: "INT8", 7: "INT64", 2: "UINT8"}
# Module and version → class → its members, of enums with their values: see real_tensorrt.record
SURFACE = json.loads(pathlib.Path(__file__).with_name("tensorrt_surface.json").read_text())


def make(version: str = "8.6.0", gpu: str = "Fake GPU", lean: bool = False):
    """A module like TensorRT of that version, 8.6, 10 (both typings) or 11 (strong only), or like its lean runtime."""
    name, numbers = "tensorrt_lean" if lean else "tensorrt", [int(number) for number in version.split(".")[:2]]
    versions = [key.split()[1] for key in SURFACE if key.startswith(f"{name} ")]  # the last that is not later
    surface = SURFACE[f"{name} {[one for one in versions if [*map(int, one.split('.'))] <= numbers][-1]}"]
    trt = types.ModuleType(name)
    base = {"__init__": lambda self: setattr(self, "initialised", True)}
    classes = {"ILogger": None, "IProfiler": None, "IProgressMonitor": None, "EngineInspector": _Inspector,
               "Builder": lambda log: _Builder(trt, log), "OnnxParser": lambda network, log: _Parser(trt, network, log),
               "Runtime": lambda log: _Runtime(trt, log), "Refitter": _Refitter,
               "OnnxParserRefitter": _OnnxParserRefitter}  # fmt: skip
    for kind, members in surface.items():
        if isinstance(members, dict):
            setattr(trt, kind, enum.IntEnum(kind, members))
        elif kind == "IBuilderConfig":
            trt.IBuilderConfig = type(kind, (_Config,), {one: None for one in members if not hasattr(_Config, one)})
        elif kind in classes:
            setattr(trt, kind, classes[kind] or type(kind, (), base))
    trt.__version__ = version
    trt.calls = []  # (what, arguments), in order
    trt.built_for = gpu
    trt.extra_ms = lambda model: 0  # how much longer an engine takes than the one tick of an event
    trt.layer_ms = lambda node: 0.5  # that the profiler reports of a layer
    trt.ticks = lambda config: 0  # that a run of an engine takes beside its start, by how it was built
    severities = {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "INFO": 3, "VERBOSE": 4}
    trt.Severity = enum.IntEnum("Severity", severities)
    trt.Logger = type("Logger", (trt.ILogger,), {"WARNING": 2, "log": lambda self, severity, text: None})
    trt.Logger.__init__ = lambda self, severity: trt.ILogger.__init__(self)
    if not lean:
        trt.init_libnvinfer_plugins = lambda log, namespace: trt.calls.append(("plugins", namespace)) or True
    return trt


def say(trt, log, severity, text):
    """Log as TensorRT does, to a logger whose base class was initialised."""
    assert log.initialised
    log.log(trt.Severity[severity], text)


class _Builder:
    def __init__(self, trt, log):
        self.trt, self.log = trt, log

    def create_network(self, flags=0):
        names = [flag.name for flag in self.trt.NetworkDefinitionCreationFlag if flags >> int(flag) & 1]
        if self.trt.__version__.startswith("8") and "EXPLICIT_BATCH" not in names:
            raise AssertionError("TensorRT 8.6 parses ONNX into networks of explicit batch only")
        self.trt.calls.append(("create_network", names))
        return _Network(names)

    def create_builder_config(self):
        return self.trt.IBuilderConfig(self.trt)

    def create_optimization_profile(self):
        return _Profile()

    def build_serialized_network(self, network, config):
        flags = sorted(flag.name for flag in config.flags)
        self.trt.calls.append(("build", flags))
        model = onnx.load(network.path)
        free = [d for value in model.graph.input for d in value.type.tensor_type.shape.dim if d.dim_value <= 0]
        if free and not config.profiles:
            say(self.trt, self.log, "ERROR", "4: [network.cpp::validate::3036] Error Code 4: no optimization profile")
            return None
        if (monitor := getattr(config, "progress_monitor", None)) is not None:
            monitor.phase_start("Building engine", None, 2)
            monitor.phase_start("Tactics", "Building engine", 1)
            for phase, step in (("Tactics", 0), ("Building engine", 0), ("Building engine", 1)):
                assert monitor.step_complete(phase, step)
            for phase in ("Tactics", "Building engine"):
                monitor.phase_finish(phase)
        say(self.trt, self.log, "WARNING", "onnx2trt_utils.cpp:374: a warning about\n this network")
        config.measured = (config.cache.content if config.cache else b"") + b"+measured"
        head = {"version": self.trt.__version__, "gpu": self.trt.built_for, "profiles": config.profiles,
                "ticks": self.trt.ticks(config), "streams": max(0, config.max_aux_streams),
                "portable": "VERSION_COMPATIBLE" in flags, "stripped": "STRIP_PLAN" in flags,
                "formats": {value.name: "LINEAR" for value in model.graph.input}}  # fmt: skip
        for tensor in model.graph.initializer if head["stripped"] else ():
            tensor.raw_data = b"\0" * len(tensor.raw_data)
        return json.dumps(head).encode() + b"\n" + model.SerializeToString()


class _Network:
    def __init__(self, names):
        self.path, self.names, self.layers = None, names, []

    @property
    def num_layers(self):
        return len(self.layers)

    def get_layer(self, index):
        return self.layers[index]


class _Layer:
    """A layer of an ONNX node's name, with the precision and the types of results that it was told to have."""

    def __init__(self, trt, node, integers):
        self.name, self.num_outputs, self.precision, self.told = node.name, len(node.output), None, {}
        whole = getattr(trt.DataType, "INT64", trt.DataType.INT32)  # 8.6 has no INT64
        kinds = [whole if name in integers else trt.DataType.FLOAT for name in node.output]
        self.outputs = [types.SimpleNamespace(dtype=kind) for kind in kinds]

    def get_output(self, index):
        return self.outputs[index]

    def set_output_type(self, index, kind):
        self.told[index] = kind


class _Config:
    max_aux_streams, builder_optimization_level, avg_timing_iterations = -1, 3, 1  # 8.6's own

    def __init__(self, trt):
        vars(self).update(trt=trt, flags={trt.BuilderFlag.TF32}, profiles={}, cache=None, measured=None)

    def __setattr__(self, name, value):
        assert name in vars(self) or hasattr(type(self), name), f"this version's IBuilderConfig has no {name}"
        vars(self)[name] = value

    def set_flag(self, flag):
        self.flags.add(flag)

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool, size):
        assert isinstance(size, int)
        assert size > 0
        self.trt.calls.append(("workspace", size))

    def get_tactic_sources(self):
        return 0b11111

    def set_tactic_sources(self, sources):
        self.trt.calls.append(("tactic_sources", sources))
        return True

    def add_optimization_profile(self, profile):
        self.profiles = profile.shapes

    def create_timing_cache(self, content):
        self.trt.calls.append(("timing_cache", content))
        return None if content == b"of another GPU" else _Cache(content)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        return _Cache(self.measured or self.cache.content)


class _Cache:
    def __init__(self, content):
        self.content = content

    def serialize(self):
        return self.content


class _Profile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, name, least, best, most):
        assert all(a <= b <= c for a, b, c in zip(least, best, most, strict=True))
        self.shapes[name] = [list(least), list(best), list(most)]


class _Parser:
    def __init__(self, trt, network, log):
        self.trt, self.network, self.log, self.errors = trt, network, log, []

    def parse_from_file(self, path):
        model = onnx.load(path)
        kinds = {node.op_type for node in model.graph.node}
        if any(kind.endswith("_TRT") for kind in kinds) and ("plugins", "") not in self.trt.calls:
            kinds.add("Unknown")
        if "Unknown" in kinds:
            text = "In node 0 (importNode): UNSUPPORTED_NODE: no importer for Unknown"
            self.errors = [types.SimpleNamespace(desc=lambda: text)]
            return False
        self.network.path = path
        inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        whole = {value.name for value in inferred if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}
        self.network.layers = [_Layer(self.trt, node, whole) for node in model.graph.node]
        self.trt.calls.append(("layers", self.network.layers))
        return True

    @property
    def num_errors(self):
        return len(self.errors)

    def get_error(self, index):
        return self.errors[index]


class _Runtime:
    engine_host_code_allowed = False

    def __init__(self, trt, log, lean=""):
        self.trt, self.log, self.lean = trt, log, lean or (trt.__version__ if "lean" in trt.__name__ else "")

    def load_runtime(self, path):
        version = pathlib.Path(path).name.removeprefix("libnvinfer_lean.so.")
        return _Runtime(self.trt, self.log, version) if version[0].isdigit() else None

    def deserialize_cuda_engine(self, plan):
        assert not self.engine_host_code_allowed
        try:
            head, _, model = plan.partition(b"\n")
            head, model = json.loads(head), onnx.load_from_string(model)
            assert model.graph.node
        except (ValueError, DecodeError, AssertionError):
            say(
                self.trt, self.log, "ERROR", "1: [stdArchiveReader.cpp::StdArchiveReader::40] Error Code 1: "
                "Serialization (Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match)",
            )  # fmt: skip
            return None
        if self.lean and not head["portable"]:
            return None
        if head["version"] != (self.lean or self.trt.__version__):
            say(self.trt, self.log, "ERROR", "6: The engine plan file is not compatible with this version of TensorRT")
            return None
        return _Engine(self.trt, model, head)


class _Engine:
    def __init__(self, trt, model, head):
        self.trt, self.model, self.profiles, self.ticks = trt, model, head["profiles"], head["ticks"]
        self.num_aux_streams, self.formats = head["streams"], head["formats"]
        self.contexts, self.started = WeakSet(), False
        self.tensors = {value.name: value for value in [*model.graph.input, *model.graph.output]}
        self.ins = [value.name for value in model.graph.input]
        self._compute_with(model)

    def _compute_with(self, model):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    @property
    def num_io_tensors(self):
        return len(self.tensors)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return self.trt.TensorIOMode.INPUT if name in self.ins else self.trt.TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return self.trt.TensorLocation.DEVICE

    def get_tensor_shape(self, name):
        dims = self.tensors[name].type.tensor_type.shape.dim
        return tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in dims)

    def get_tensor_dtype(self, name):
        return self.trt.DataType[ONNX_TYPES[self.tensors[name].type.tensor_type.elem_type]]

    def get_tensor_format(self, name):
        return self.trt.TensorFormat[self.formats.get(name, "LINEAR")]

    def get_tensor_profile_shape(self, name, profile):
        assert profile == 0
        return [tuple(shape) for shape in self.profiles.get(name, [self.get_tensor_shape(name)] * 3)]

    def create_execution_context(self):
        context = _Context(self)
        context.profiled, self.started = not self.started, True
        self.contexts.add(context)
        return context

    def create_engine_inspector(self):
        return _Inspector(self)


class _Refitter:
    def __init__(self, engine, logger):
        self.engine, self.model = engine, None

    def refit_cuda_engine(self):
        self.engine._compute_with(self.model)
        return True


class _OnnxParserRefitter:
    def __init__(self, refitter, logger):
        self.refitter = refitter

    def refit_from_file(self, model):
        self.refitter.model = onnx.load(model)
        return True


class _Inspector:
    def __init__(self, engine):
        self.engine, self.execution_context = engine, None

    def get_engine_information(self, form):
        assert form is self.engine.trt.LayerInformationFormat.JSON
        layers = []
        free = any(-1 in self.engine.get_tensor_shape(name) for name in self.engine.ins)
        known = not free or (self.execution_context is not None and self.execution_context.ran)
        form = "Row major linear FP32" if known else "N/A due to dynamic shapes"  # so recorded from 8.6
        for node in self.engine.model.graph.node:
            ends = ({"Name": name, "Dimensions": [1], "Format/Datatype": form} for name in node.output)
            layers.append({"Name": node.output[0], "LayerType": node.op_type, "Inputs": [], "Outputs": list(ends)})
        return json.dumps({"Layers": layers, "Bindings": list(self.engine.tensors)})


class _Context:
    """As in 8.6, only the first context has a profile by itself, and two cannot have the same at a time."""

    profiler = None

    def __init__(self, engine):
        self.profiled, self.ran = False, False
        self.engine, self.shapes, self.addresses, self.ready = engine, {}, {}, False
        self.beside = []

    def set_aux_streams(self, aux_streams):
        assert len(set(aux_streams)) == len(aux_streams)
        self.beside = list(aux_streams)

    def set_optimization_profile_async(self, index, stream):
        assert (index, type(stream)) == (0, int)
        in_use = any(other.profiled for other in self.engine.contexts if other is not self)
        assert not in_use, "8.6.0 has ended with a segmentation fault here"
        self.profiled = True
        return True

    def set_input_shape(self, name, shape):
        assert isinstance(shape, tuple)
        if not self.profiled and -1 in self.engine.get_tensor_shape(name):
            return False
        least, _, most = self.engine.get_tensor_profile_shape(name, 0)
        if not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return False
        self.shapes[name] = shape
        self.ready = False
        return True

    def get_tensor_shape(self, name):
        if name in self.engine.ins:
            return self.shapes.get(name, (-1,))
        feeds = {key: np.zeros(shape, self._numpy(key)) for key, shape in self.shapes.items()}
        return self.engine.session.run([name], feeds)[0].shape

    def set_tensor_address(self, name, address):
        assert address
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        assert isinstance(stream, int)
        assert stream not in self.beside
        assert FakeCuda.capturing is None or len(self.beside) == self.engine.num_aux_streams, (
            "TensorRT's own streams are blocking: another thread may not pin memory while they are captured"
        )
        missing = set(self.engine.tensors) - set(self.addresses)
        assert not missing, f"no address for {missing}"
        self.engine.trt.calls.append(("execute", tuple(self.shapes.values())))
        self.ran = True
        if FakeCuda.capturing is not None:
            FakeCuda.capturing.recorded.append(self._run)
        else:
            self._run()
        if self.profiler is not None:
            for node in self.engine.model.graph.node:
                self.profiler.report_layer_time(node.output[0], self.engine.trt.layer_ms(node))
        return True

    def _run(self):
        FakeCuda.ticks += self.engine.ticks + self.engine.trt.extra_ms(self.engine.model)
        feeds = {name: self._memory(name, shape) for name, shape in self.shapes.items()}
        names = [name for name in self.engine.tensors if name not in self.engine.ins]
        for name, result in zip(names, self.engine.session.run(names, feeds), strict=True):
            self._memory(name, result.shape)[...] = result

    def _memory(self, name, shape):
        """A tensor at its address."""
        count = int(np.prod(shape)) * np.dtype(self._numpy(name)).itemsize
        raw = (ctypes.c_char * count).from_address(self.addresses[name])
        return np.frombuffer(raw, self._numpy(name)).reshape(shape)

    def _numpy(self, name):
        return SIZES[self.engine.get_tensor_dtype(name).name]


class FakeCuda:
    """What the library uses of torch.cuda, on the CPU: everything runs at once, and an event is a tick."""

    capturing = None
    ticks = 0

    class Stream:
        handles = cycle(range(1001, 1033))  # as torch gives its streams

        def __init__(self, device=None):
            self.device, self.cuda_stream = device, next(self.handles)

        def synchronize(self):
            assert FakeCuda.capturing is None, "a capture must not synchronise"

        def wait_stream(self, other):
            pass

        def wait_event(self, event):
            assert event.tick is not None, "nothing was recorded that could be waited for"

    class Event:
        def __init__(self, enable_timing=False, blocking=False):
            self.timed, self.tick = enable_timing, None

        def record(self, stream=None):
            FakeCuda.ticks += 1
            self.tick = FakeCuda.ticks

        def elapsed_time(self, other):
            assert self.timed
            assert other.timed
            return float(other.tick - self.tick)

        def synchronize(self):
            pass

    class CUDAGraph:
        def __init__(self):
            self.recorded = []

        def replay(self):
            assert self.recorded, "an empty graph"
            for run in self.recorded:
                run()

    @staticmethod
    @contextmanager
    def graph(captured, stream=None, capture_error_mode="global"):
        assert capture_error_mode == "thread_local", "another thread may pin memory"
        FakeCuda.capturing = captured
        try:
            yield
        finally:
            FakeCuda.capturing = None

    @staticmethod
    @contextmanager
    def stream(stream):
        yield

    @staticmethod
    def current_stream(device=None):
        return FakeCuda.Stream(device)

    @staticmethod
    def synchronize(device=None):
        pass
