"""Stands in for a Triton server: it loads a model repository and answers over HTTP and gRPC, on the CPU.

Configurations are read by protobuf with tritonclient's compiled model_config.proto, and gRPC is spoken with its service
stubs; HTTP is written after KServe's protocol and Triton's binary extension. ONNX files run in ONNX Runtime, `model.py`
files are imported as the Python backend does it, ensembles run step by step. What goes into a model and comes out of it
is held against its configuration, so that a configuration which says something else than its file fails here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import grpc
import numpy as np
import onnxruntime
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

HEADER = "Inference-Header-Content-Length"


class Refused(Exception):
    """What the server answers instead of tensors."""


def parse(path: Path) -> model_config_pb2.ModelConfig:
    """A config.pbtxt, read by protobuf."""
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def type_of(data_type: int) -> np.dtype:
    """NumPy's type of a number of the enum DataType."""
    name = model_config_pb2.DataType.Name(data_type).removeprefix("TYPE_")
    return np.dtype(triton_to_np_dtype(name))


class Model:
    """A loaded model; `run` computes without looking at the configuration."""

    def __init__(self, folder: Path, models: Mapping[str, Model]) -> None:
        self.config = parse(folder / "config.pbtxt")
        assert self.config.name == folder.name
        self.labels = {
            one.name: (folder / one.label_filename).read_text(encoding="utf-8").splitlines()
            for one in self.config.output
            if one.label_filename
        }
        assert (folder / "1").is_dir()
        if self.config.platform == "onnxruntime_onnx":
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(str(folder / "1/model.onnx"), options)
            self._run = lambda feeds, names: dict(zip(names, session.run(names, feeds), strict=True))
        elif self.config.backend == "python":
            self._run = python_model(folder / "1/model.py", self.config)
        else:
            assert self.config.platform == "ensemble"
            self._run = lambda feeds, names: self._steps(feeds, names, models)
        for sample in self.config.model_warmup:
            feeds = {}
            for name, value in sample.inputs.items():
                assert value.WhichOneof("input_data_type") == "zero_data"
                batch = [sample.batch_size] if self.config.max_batch_size else []
                feeds[name] = np.zeros([*batch, *value.dims], type_of(value.data_type))
            self.infer(feeds, [one.name for one in self.config.output])

    def infer(self, feeds: Mapping[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        """Run, with what comes in and goes out held against the configuration."""
        self._check("input", feeds)
        found = self._run(dict(feeds), names)
        assert set(found) == set(names), (set(found), names)
        self._check("output", found)
        return found

    def _check(self, side: str, tensors: Mapping[str, np.ndarray]) -> None:
        known = {one.name: one for one in getattr(self.config, side)}
        if side == "input" and set(known) != set(tensors):
            raise Refused(f"expected inputs {sorted(known)}, got {sorted(tensors)}")
        for name, array in tensors.items():
            if name not in known:
                raise Refused(f"unexpected {side} {name!r} for model {self.config.name!r}")
            dims, shape = list(known[name].dims), list(array.shape)
            most = self.config.max_batch_size
            if most and not 0 < shape[0] <= most:
                raise Refused(f"{side} {name}: batch size must be <= {most} for {self.config.name!r}, got {shape[0]}")
            body = shape[1:] if most else shape
            if len(body) != len(dims) or any(own not in (-1, size) for own, size in zip(dims, body, strict=True)):
                raise Refused(f"unexpected shape for {side} {name!r}. Expected {dims}, got {body}")
            if array.dtype != type_of(known[name].data_type):
                raise Refused(f"{side} {name!r} has data-type {array.dtype}, expected {type_of(known[name].data_type)}")

    def _steps(self, feeds: dict[str, np.ndarray], names: list[str], models: Mapping[str, Model]) -> dict:
        tensors = dict(feeds)
        left = list(self.config.ensemble_scheduling.step)
        while left:
            step = next(one for one in left if set(one.input_map.values()) <= set(tensors))
            left.remove(step)
            inputs = {own: tensors[name] for own, name in step.input_map.items()}
            for own, array in models[step.model_name].infer(inputs, list(step.output_map)).items():
                tensors[step.output_map[own]] = array
        return {name: tensors[name] for name in names}


@dataclass
class _Tensor:
    """`pb_utils.Tensor`."""

    _name: str
    _array: np.ndarray

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


def python_backend() -> ModuleType:
    """What Triton's Python backend gives to models as `triton_python_backend_utils`, as far as ours use it."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor = _Tensor
    module.TritonError = lambda message: SimpleNamespace(message=lambda: message)
    module.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
        tensors=output_tensors, error=error
    )
    module.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    return module


def python_model(path: Path, config: model_config_pb2.ModelConfig):
    """A function that runs `model.py`, which sees NumPy and the backend's module and nothing of this repository."""
    spec = importlib.util.spec_from_file_location(f"model_of_{config.name.replace('.', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    before = sys.modules.get("triton_python_backend_utils")
    sys.modules["triton_python_backend_utils"] = python_backend()
    try:
        model = module.TritonPythonModel()
        text = json_format.MessageToJson(config, preserving_proto_field_name=True)
        model.initialize({"model_config": text, "model_name": config.name, "model_version": "1"})
    finally:
        if before is None:
            del sys.modules["triton_python_backend_utils"]

    def run(feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        request = SimpleNamespace(
            inputs={name: _Tensor(name, array) for name, array in feeds.items()}, requested_output_names=lambda: names
        )
        (response,) = model.execute([request])
        if response.error is not None:
            raise Refused(response.error.message())
        return {one.name(): one.as_numpy() for one in response.tensors}

    return run


class Server:
    """The models of a repository, and what was asked of them."""

    def __init__(self, repository: Path) -> None:
        folders = sorted(path for path in repository.iterdir() if path.is_dir())
        self.models: dict[str, Model] = {}
        for ensembles in (False, True):
            for folder in folders:
                if (parse(folder / "config.pbtxt").platform == "ensemble") == ensembles:
                    self.models[folder.name] = Model(folder, self.models)
        self.asked: list[tuple[str, str, dict[str, list[int]]]] = []

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise Refused(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def metadata(self, name: str) -> dict:
        config = self.model(name).config
        batch = [-1] if config.max_batch_size else []
        sides = {
            f"{side}s": [
                {"name": one.name, "datatype": np_to_triton_dtype(type_of(one.data_type)), "shape": [*batch, *one.dims]}
                for one in getattr(config, side)
            ]
            for side in ("input", "output")
        }
        return {"name": name, "versions": ["1"], "platform": config.platform or config.backend, **sides}

    def infer(self, way: str, name: str, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        self.asked.append((way, name, {key: list(array.shape) for key, array in feeds.items()}))
        return self.model(name).infer(feeds, names or [one.name for one in self.model(name).config.output])


def http_handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            _, version, kind, name, *more = self.path.split("/")
            assert (version, kind) == ("v2", "models")
            try:
                if more == ["config"]:
                    config = server.model(name).config
                    found = json.loads(json_format.MessageToJson(config, preserving_proto_field_name=True))
                    self._answer(200, json.dumps({"max_batch_size": 0, **found}).encode())
                else:
                    assert not more
                    self._answer(200, json.dumps(server.metadata(name)).encode())
            except Refused as error:
                self._answer(400, json.dumps({"error": str(error)}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            _, _, _, name, what = self.path.split("/")
            assert what == "infer"
            try:
                length = int(self.headers[HEADER])
                asked, place = json.loads(body[:length]), length
                feeds = {}
                for one in asked["inputs"]:
                    size = one["parameters"]["binary_data_size"]
                    dtype = triton_to_np_dtype(one["datatype"])
                    feeds[one["name"]] = np.frombuffer(body[place : place + size], dtype).reshape(one["shape"])
                    place += size
                assert place == len(body)
                names = [one["name"] for one in asked.get("outputs", [])]
                assert all(one["parameters"]["binary_data"] for one in asked.get("outputs", []))
                found = server.infer("http", name, feeds, names)
            except Refused as error:
                self._answer(400, json.dumps({"error": str(error)}).encode())
                return
            outputs = [
                {"name": key, "shape": list(array.shape), "datatype": np_to_triton_dtype(array.dtype),
                 "parameters": {"binary_data_size": array.nbytes}}
                for key, array in found.items()
            ]  # fmt: skip
            head = json.dumps({"model_name": name, "model_version": "1", "outputs": outputs}).encode()
            data = b"".join(np.ascontiguousarray(array).tobytes() for array in found.values())
            self._answer(200, head + data, {HEADER: str(len(head))})

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


class _Web(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of connections that wait: clients come many at a time


def grpc_service(server: Server) -> service_pb2_grpc.GRPCInferenceServiceServicer:
    class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelMetadata(self, request, context):
            try:
                found = server.metadata(request.name)
            except Refused as error:
                context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            return json_format.ParseDict(found, service_pb2.ModelMetadataResponse())

        def ModelConfig(self, request, context):
            return service_pb2.ModelConfigResponse(config=server.model(request.name).config)

        def ModelInfer(self, request, context):
            feeds = {
                one.name: np.frombuffer(raw, triton_to_np_dtype(one.datatype)).reshape(list(one.shape))
                for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
            }
            try:
                found = server.infer("grpc", request.model_name, feeds, [one.name for one in request.outputs])
            except Refused as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
            for name, array in found.items():
                datatype = np_to_triton_dtype(array.dtype)
                answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
                answer.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
            return answer

    return Service()


@dataclass
class Serving:
    """A running server and its addresses."""

    server: Server
    http: str
    grpc: str


@contextmanager
def serving(repository: Path) -> Iterator[Serving]:
    """Load a repository and answer on two ports of this machine."""
    server = Server(repository)
    web = _Web(("127.0.0.1", 0), http_handler(server))
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    remote = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(grpc_service(server), remote)
    port = remote.add_insecure_port("127.0.0.1:0")
    thread.start()
    remote.start()
    try:
        yield Serving(server, f"127.0.0.1:{web.server_port}", f"127.0.0.1:{port}")
    finally:
        web.shutdown()
        web.server_close()
        remote.stop(None).wait()
        thread.join()
