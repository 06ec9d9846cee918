"""A stand-in for the `tensorrt` modules of 8.6, 10 and 11 on a machine without a GPU; TensorRT-RTX is tested as it is.

It records calls, checks their order and arguments as TensorRT would, and computes with ONNX Runtime on the very
addresses that it was given. Its classes are named as TensorRT's, and have only methods that those have, too.
An "engine" is a file of the ONNX model and what it was built with; the inspector tells of one layer per ONNX node.
"""

import enum
import json
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_cuda
import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from packaging.version import Version

# Module and version → class → an enum's values, or names of what an object has from the start: see real_tensorrt.record
SURFACE = json.loads(Path(__file__).with_name("tensorrt_surface.json").read_text())
TYPES = {"float32": "FLOAT", "float16": "HALF", "int32": "INT32", "int64": "INT64", "uint8": "UINT8"}
# Class → its methods that are one expression; the others are in the classes below
PLAIN = {
    "Logger": {"WARNING": 2, "log": lambda self, severity, text: None},
    "Builder": {
        "create_builder_config": lambda self: self.trt.IBuilderConfig(),
        "create_optimization_profile": lambda self: self.trt.IOptimizationProfile(shapes={}),
    },
    "IBuilderConfig": {
        "set_flag": lambda self, flag: self.flags.add(flag),
        "clear_flag": lambda self, flag: self.flags.discard(flag),
        "get_tactic_sources": lambda self: 0b11111,
        "set_tactic_sources": lambda self, sources: self.trt.calls.append(("tactic_sources", sources)),
        "set_memory_pool_limit": lambda self, pool, size: self.trt.calls.append(("workspace", size)),
        "add_optimization_profile": lambda self, profile: setattr(self, "profiles", profile.shapes),
        "create_timing_cache": lambda self, content: (
            None if content == b"of another GPU" else self.trt.ITimingCache(content=content)
        ),
        "set_timing_cache": lambda self, cache, ignore_mismatch: setattr(self, "cache", cache) or not ignore_mismatch,
        "get_timing_cache": lambda self: self.cache,
    },
    "IOptimizationProfile": {
        "set_shape": lambda self, name, low, best, high: self.shapes.update({name: list(map(list, (low, best, high)))})
    },
    "ITimingCache": {"serialize": lambda self: self.content},
    "INetworkDefinition": {"get_layer": lambda self, index: self.layers[index]},
    "ILayer": {
        "get_output": lambda self, index: self.outputs[index],
        "set_output_type": lambda self, index, dtype: self.told.update({index: dtype}),
    },
    "OnnxParser": {"get_error": lambda self, index: self.errors[index]},
    "ICudaEngine": {
        "get_tensor_name": lambda self, index: list(self.tensors)[index],
        "get_tensor_mode": lambda self, name: self.trt.TensorIOMode["INPUT" if name in self.inputs else "OUTPUT"],
        "get_tensor_shape": lambda self, name: tuple(dim.dim_value or -1 for dim in self.tensors[name].shape.dim),
        "get_tensor_dtype": lambda self, name: self.trt.DataType[TYPES[self.dtypes[name].name]],
        "get_tensor_format": lambda self, name: self.trt.TensorFormat[self.formats.get(name, "LINEAR")],
        "create_engine_inspector": lambda self: self.trt.EngineInspector(engine=self),
    },
    "IExecutionContext": {"set_tensor_address": lambda self, name, address: not self.addresses.update({name: address})},
    "OnnxParserRefitter": {"refit_from_file": lambda self, path: not setattr(self.refitter, "model", onnx.load(path))},
    "Refitter": {"refit_cuda_engine": lambda self: self.engine._compute_with(self.model)},
}


def make(version: str = "8.6.0", lean: bool = False):
    """A module like TensorRT of that version, 8.6, 10 (both typings) or 11 (strong only), or like its lean runtime.

    Tests read `calls`: (what, arguments), in order. They may set `ticks`: how long an engine runs beside its start, by
    the IBuilderConfig that it was built with.
    """
    trt = ModuleType("tensorrt_lean" if lean else "tensorrt")
    trt.__version__, trt.calls, trt.ticks = version, [], lambda config: 0
    recorded = [key.split()[1] for key in SURFACE if key.startswith(f"{trt.__name__} ")]
    last = [one for one in recorded if Version(one) <= Version(version)][-1]  # not later than it
    for kind, members in SURFACE[f"{trt.__name__} {last}"].items():
        if isinstance(members, dict):
            setattr(trt, kind, enum.IntEnum(kind, members))
        else:
            base = globals().get(kind, _Object)  # as of ILogger, which the library derives from
            unset = {name: None for name in members if not hasattr(base, name)}
            setattr(trt, kind, type(kind, (base,), {**unset, **PLAIN.get(kind, {}), "trt": trt, "parts": members}))

    def init_libnvinfer_plugins(logger, namespace):
        trt.calls.append(("plugins", namespace))
        return True

    if not lean:
        trt.init_libnvinfer_plugins = init_libnvinfer_plugins
    return trt


class _Object:
    """It is of the module `trt`, and keeps what it was made of: what TensorRT's own constructor takes, and more."""

    def __init__(self, *arguments, **more):
        vars(self).update(zip(self.parts, arguments, strict=True), **more, initialised=True)

    def _say(self, severity, text):
        """Log as TensorRT does, to a logger whose base class was initialised."""
        assert self.logger.initialised
        self.logger.log(SimpleNamespace(name=severity), text)


class Builder(_Object):
    def create_network(self, flags=0):
        names = [flag.name for flag in self.trt.NetworkDefinitionCreationFlag if flags >> int(flag) & 1]
        self.trt.calls.append(("create_network", names))
        return self.trt.INetworkDefinition()

    def build_serialized_network(self, network, config):
        model, flags = network.model, sorted(flag.name for flag in config.flags)
        self.trt.calls.append(("build", flags))
        sizes = [dim.dim_value for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
        if min(sizes) <= 0 and not config.profiles:
            self._say("ERROR", "4: [network.cpp::validate::3036] Error Code 4: no optimization profile")
            return None
        self._say("WARNING", "onnx2trt_utils.cpp:374: a warning about\n this network")
        if config.cache is not None:
            config.cache.content += b"+measured"
        for tensor in model.graph.initializer if "STRIP_PLAN" in flags else ():
            tensor.raw_data = b"\0" * len(tensor.raw_data)
        about = {"version": self.trt.__version__, "flags": flags, "profiles": config.profiles,
                 "ticks": self.trt.ticks(config), "num_aux_streams": max(0, config.max_aux_streams),
                 "formats": {value.name: "LINEAR" for value in model.graph.input}}  # fmt: skip
        return json.dumps(about).encode() + b"\n" + model.SerializeToString()


class IBuilderConfig(_Object):
    max_aux_streams, builder_optimization_level, avg_timing_iterations = -1, 3, 1  # 8.6's own

    def __init__(self):
        vars(self).update(flags={self.trt.BuilderFlag.TF32}, profiles={}, cache=None)

    def __setattr__(self, name, value):
        assert name in vars(self) or hasattr(type(self), name), f"this version's IBuilderConfig has no {name}"
        vars(self)[name] = value


class OnnxParser(_Object):
    def parse_from_file(self, path):
        """Make a layer of each node; layers keep in `told` the types that their outputs were told to have."""
        model, types = onnx.load(path), self.trt.DataType
        operators = {node.op_type for node in model.graph.node}
        plugins = any(operator.endswith("_TRT") for operator in operators)
        if "Unknown" in operators or (plugins and ("plugins", "") not in self.trt.calls):
            reason = "In node 0 (importNode): UNSUPPORTED_NODE: no importer for Unknown"
            self.errors = [SimpleNamespace(desc=lambda: reason)]
            return False
        inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        integers = {value.name for value in inferred if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}
        layers = []
        for node in model.graph.node:
            outputs = [SimpleNamespace(dtype=types.INT32 if name in integers else types.FLOAT) for name in node.output]
            layer = self.trt.ILayer(name=node.name, outputs=outputs, num_outputs=len(outputs), precision=None, told={})
            layers.append(layer)
        vars(self.network).update(model=model, layers=layers, num_layers=len(layers))
        self.trt.calls.append(("layers", layers))
        return True


class Runtime(_Object):
    engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan):
        assert not self.engine_host_code_allowed
        about, _, model = plan.partition(b"\n")
        try:
            about, model = json.loads(about), onnx.load_from_string(model)
        except (ValueError, DecodeError):
            self._say("ERROR", "1: [stdArchiveReader.cpp::StdArchiveReader::40] Error Code 1: Serialization failed")
            return None
        if "lean" in self.trt.__name__ and "VERSION_COMPATIBLE" not in about["flags"]:
            return None
        if about["version"] != self.trt.__version__:
            self._say("ERROR", "6: The engine plan file is not compatible with this version of TensorRT")
            return None
        return self.trt.ICudaEngine(model, about)


class ICudaEngine(_Object):
    def __init__(self, model, about):
        vars(self).update(about, model=model, profile_owner=None)
        self.tensors = {value.name: value.type.tensor_type for value in [*model.graph.input, *model.graph.output]}
        self.dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(one.elem_type) for name, one in self.tensors.items()}
        self.inputs, self.num_io_tensors = [value.name for value in model.graph.input], len(self.tensors)
        self._compute_with(model)

    def _compute_with(self, model):
        """Use this model's weights from now on; True, as TensorRT says where it worked."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return True

    def get_tensor_profile_shape(self, name, profile):
        assert profile == 0
        return [tuple(shape) for shape in self.profiles.get(name, [self.get_tensor_shape(name)] * 3)]

    def create_execution_context(self):
        """As in 8.6, only the first context has the profile by itself, and two cannot have it at a time."""
        more = {"shapes": {}, "addresses": {}, "aux_streams": [], "ran": False, "profiler": None}
        context = self.trt.IExecutionContext(engine=self, **more)
        self.profile_owner = self.profile_owner or weakref.ref(context)
        return context


class EngineInspector(_Object):
    def get_engine_information(self, form):
        assert form is self.trt.LayerInformationFormat.JSON
        known = self.execution_context.ran or not self.engine.profiles
        kind = "Row major linear FP32" if known else "N/A due to dynamic shapes"  # so recorded from 8.6
        layers = []
        for node in self.engine.model.graph.node:
            outputs = [{"Name": name, "Dimensions": [1], "Format/Datatype": kind} for name in node.output]
            layers.append({"Name": node.output[0], "LayerType": node.op_type, "Inputs": [], "Outputs": outputs})
        return json.dumps({"Layers": layers, "Bindings": list(self.engine.tensors)})


class IExecutionContext(_Object):
    def set_aux_streams(self, aux_streams):
        assert len(set(aux_streams)) == len(aux_streams)
        self.aux_streams = list(aux_streams)

    def set_optimization_profile_async(self, index, stream):
        assert (index, type(stream)) == (0, int)
        assert self.engine.profile_owner() in (None, self), "8.6.0 has ended with a segmentation fault here"
        self.engine.profile_owner = weakref.ref(self)
        return True

    def set_input_shape(self, name, shape):
        assert isinstance(shape, tuple)
        if len(shape) != len(self.engine.get_tensor_shape(name)):
            return False
        if self.engine.profiles and self.engine.profile_owner() is not self:
            return False
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name):
        if name in self.shapes:
            return self.shapes[name]
        feeds = {key: np.zeros(shape, self.engine.dtypes[key]) for key, shape in self.shapes.items()}
        return self.engine.session.run([name], feeds)[0].shape

    def execute_async_v3(self, stream):
        assert isinstance(stream, int)
        assert stream not in self.aux_streams
        own_streams = len(self.aux_streams) != self.engine.num_aux_streams  # which are blocking
        assert not (fake_cuda.gpu.graph and own_streams), "another thread may not pin memory while they are captured"
        assert self.addresses.keys() == self.engine.tensors.keys(), "a tensor has no address"
        self.trt.calls.append(("execute", tuple(self.shapes.values())))
        self.ran = True
        fake_cuda.enqueue(self._run)
        for node in self.engine.model.graph.node if self.profiler else ():
            self.profiler.report_layer_time(node.output[0], 0.5)
        return True

    def _run(self):
        fake_cuda.gpu.ticks += self.engine.ticks
        binding = self.engine.session.io_binding()
        for name, address in self.addresses.items():
            bind = binding.bind_input if name in self.shapes else binding.bind_output
            bind(name, "cpu", 0, self.engine.dtypes[name], self.get_tensor_shape(name), address)
        self.engine.session.run_with_iobinding(binding)
