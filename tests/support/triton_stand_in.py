"""Stands in for a Triton server: loads a model repository and answers over gRPC, on the CPU.

ONNX files run in ONNX Runtime, `model.py` files as Triton's Python backend runs them, ensembles step by step. What goes
into a model and comes out of it is held against its configuration, so that one which belies its file fails here.
gRPC is spoken with tritonclient's service stubs.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import grpc
import numpy as np
import onnxruntime
from google.protobuf import json_format, text_format
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

Tensors = Mapping[str, np.ndarray]


class Refused(Exception):
    """What the server answers instead of tensors."""


class Model:
    """A loaded model."""

    def __init__(self, folder: Path, models: Mapping[str, "Model"]) -> None:
        self.config = text_format.Parse((folder / "config.pbtxt").read_text("utf-8"), ModelConfig())
        self._models = models
        assert (folder / "1").is_dir()
        assert all((folder / one.label_filename).exists() for one in self.config.output)
        if self.config.platform == "onnxruntime_onnx":
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(str(folder / "1/model.onnx"), options)
            self._run = lambda feeds, names: dict(zip(names, session.run(names, feeds), strict=True))
        elif self.config.backend == "python":
            self._run = python_model(folder / "1/model.py", self.config)
        else:
            assert self.config.platform == "ensemble"
            self._run = self._steps
        for sample in self.config.model_warmup:
            batch = [sample.batch_size] if self.config.max_batch_size else []
            self.infer({k: np.zeros([*batch, *v.dims], dtype(v)) for k, v in sample.inputs.items() if v.zero_data})

    def infer(self, feeds: Tensors, names: list[str] | None = None) -> Tensors:
        """Run, with what comes in and goes out held against the configuration."""
        self._check("input", feeds)
        outputs = self._run(dict(feeds), names or [one.name for one in self.config.output])
        self._check("output", outputs)
        return outputs

    def _check(self, side: str, tensors: Tensors) -> None:
        known = {one.name: one for one in getattr(self.config, side)}
        if (side == "input" and known.keys() != tensors.keys()) or not tensors.keys() <= known.keys():
            raise Refused(f"expected {side}s {sorted(known)}, got {sorted(tensors)}")
        for name, array in tensors.items():
            dims, shape, most = list(known[name].dims), list(array.shape), self.config.max_batch_size
            if most and not 0 < shape.pop(0) <= most:
                raise Refused(f"{side} {name}: batch size must be 1 to {most}, got {array.shape[0]}")
            if len(shape) != len(dims) or any(own not in (-1, size) for own, size in zip(dims, shape, strict=True)):
                raise Refused(f"unexpected shape for {side} {name}: expected {dims}, got {shape}")
            if array.dtype != dtype(known[name]):
                raise Refused(f"{side} {name} is {array.dtype}, expected {dtype(known[name])}")

    def _steps(self, feeds: Tensors, names: list[str]) -> Tensors:
        tensors = dict(feeds)
        for step in self.config.ensemble_scheduling.step:
            inputs = {own: tensors[name] for own, name in step.input_map.items()}
            outputs = self._models[step.model_name].infer(inputs, list(step.output_map))
            tensors |= {step.output_map[own]: array for own, array in outputs.items()}
        return {name: tensors[name] for name in names}

    def metadata(self) -> service_pb2.ModelMetadataResponse:
        batch = [-1] if self.config.max_batch_size else []
        sides = {
            f"{side}s": [
                {"name": one.name, "datatype": np_to_triton_dtype(dtype(one)), "shape": [*batch, *one.dims]}
                for one in getattr(self.config, side)
            ]
            for side in ("input", "output")
        }
        return service_pb2.ModelMetadataResponse(name=self.config.name, platform=self.config.platform, **sides)


def dtype(tensor: object) -> np.dtype:
    return np.dtype(triton_to_np_dtype(DataType.Name(tensor.data_type).removeprefix("TYPE_")))


def python_model(path: Path, config: ModelConfig):
    """A function that runs `model.py`, which sees NumPy and Triton's `triton_python_backend_utils`."""
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(f"python_{config.name}", path))
    sys.modules[module.__name__] = module  # dataclasses look there
    module.__spec__.loader.exec_module(module)
    utils = ModuleType("triton_python_backend_utils")
    utils.Tensor = lambda name, array: SimpleNamespace(name=name, as_numpy=lambda: array)
    utils.InferenceResponse = lambda output_tensors: SimpleNamespace(tensors=output_tensors)
    utils.get_input_tensor_by_name = lambda request, name: request.inputs[name]
    sys.modules[utils.__name__] = utils
    model = module.TritonPythonModel()
    model.initialize({"model_config": json_format.MessageToJson(config, preserving_proto_field_name=True)})

    def run(feeds: Tensors, names: list[str]) -> Tensors:
        inputs = {name: utils.Tensor(name, array) for name, array in feeds.items()}
        (response,) = model.execute([SimpleNamespace(inputs=inputs, requested_output_names=lambda: names)])
        return {one.name: one.as_numpy() for one in response.tensors}

    return run


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers about the models."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = models

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise Refused(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def ModelMetadata(self, request, context):
        return self._or_abort(context, lambda: self.model(request.name).metadata())

    def ModelConfig(self, request, context):
        return service_pb2.ModelConfigResponse(config=self.model(request.name).config)

    def ModelInfer(self, request, context):
        feeds = {
            one.name: np.frombuffer(raw, triton_to_np_dtype(one.datatype)).reshape(list(one.shape))
            for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        names = [one.name for one in request.outputs]
        outputs = self._or_abort(context, lambda: self.model(request.model_name).infer(feeds, names))
        answer = service_pb2.ModelInferResponse(raw_output_contents=[array.tobytes() for array in outputs.values()])
        for name, array in outputs.items():
            answer.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        return answer

    def _or_abort(self, context, work):
        try:
            return work()
        except Refused as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


@contextmanager
def serving(repository: Path) -> Iterator[str]:
    """Load a repository and answer on a port of this machine; HOST:PORT."""
    models: dict[str, Model] = {}
    for folder in sorted(repository.iterdir()):
        models[folder.name] = Model(folder, models)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(models), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
