"""Runs an ONNX file in OpenVINO: real INT8 on a CPU, or on the GPU or NPU of an Intel processor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor

from utils.core.cpu import cpu_cores
from utils.core.errors import DependencyError, InputError
from utils.core.text import plural
from utils.core.weights import is_quantized
from utils.runners.base import Runner, TensorSpec

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # OpenVINO's names
CACHE = ".openvino"  # folder beside a file, where OpenVINO stores compiled networks
MOST_SHAPES = 4  # a network is compiled for each of the first input shapes; later shapes share one of dynamic shape
INSTALL = "pip install openvino (or ./install_dependencies.sh --openvino)"
_PLUGIN = "the file has a plugin of TensorRT's; export the file without NMS, or with --nms onnx"


class OpenVinoRunner(Runner):
    """An ONNX file in OpenVINO; axes with a symbolic size are None in the specs.

    Each input shape is compiled when it is first seen, since a network of one shape is faster than one of any shape.
    """

    def __init__(
        self,
        path: str | Path,
        model: ModelProto,
        device: str = "CPU",
        *,
        precision: Precision = "fp32",
        threads: int | None = None,
        profile: bool = False,
        note: str = "",
    ) -> None:
        """Read the network.

        Args:
            path: the file's, for messages and for the cache beside it.
            model: the graph that runs: the file's content, or a form of it that suits OpenVINO better.
            device: OpenVINO's name: CPU, GPU, GPU.1, NPU.
            precision: of the layers that are not INT8.
            threads: on a CPU; None: one for each core that this process may use.
            profile: keep the time of each layer, see `layer_times`.
            note: for the description.

        Raises:
            InputError: OpenVINO does not have the device, or cannot read the network.
            DependencyError: OpenVINO is not installed.
        """
        core = core_for(device)
        self._path = Path(path)
        threads = threads or cpu_cores()
        self._settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
            "PERFORMANCE_HINT": "LATENCY",
            "PERF_COUNT": profile,
        }
        if device == "CPU":
            self._settings["INFERENCE_NUM_THREADS"] = threads
        if os.access(self._path.parent, os.W_OK):
            self._settings["CACHE_DIR"] = str(self._path.parent / CACHE)
        self._core = core
        self._device = device
        try:
            self._network = core.read_model(model.SerializeToString())
        except RuntimeError as error:  # OpenVINO's exceptions are its subclasses
            reason = _PLUGIN if "_TRT" in str(error) else _short(error)
            raise InputError(f"OpenVINO {release()} cannot read {path}: {reason}") from error
        self._requests: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._of_any_shape: Any = None
        self._latest: Any = None
        inputs = [TensorSpec.of_onnx(value) for value in model.graph.input]
        outputs = [TensorSpec.of_onnx(value) for value in model.graph.output]
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        description = _description(model, device, precision, threads, note)
        super().__init__(inputs, outputs, metadata, torch.device("cpu"), description)

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: tensor.detach().contiguous().numpy() for name, tensor in feeds.items()}
        try:
            self._latest = self._request(tuple(array.shape for array in arrays.values()))
            self._latest.infer(arrays)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise InputError(f"{self._path} does not run on {shapes}: {_short(error)}") from error
        outputs = {}
        for spec in self.outputs:
            array = self._latest.get_tensor(spec.name).data
            outputs[spec.name] = torch.from_numpy(array.copy())
        return outputs

    def _request(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """OpenVINO's request that runs the network on inputs of these shapes, compiled if it is not there yet."""
        if shapes not in self._requests and len(self._requests) < MOST_SHAPES:
            network = self._network.clone()
            shape_of = {spec.name: list(shape) for spec, shape in zip(self.inputs, shapes, strict=True)}
            network.reshape(shape_of)
            self._requests[shapes] = self._compiled(network).create_infer_request()
        if shapes in self._requests:
            return self._requests[shapes]
        if self._of_any_shape is None:
            self._of_any_shape = self._compiled(self._network).create_infer_request()
        return self._of_any_shape

    def _compiled(self, network: Any) -> Any:
        return self._core.compile_model(network, self._device, self._settings)

    def layer_times(self) -> list[Any]:
        """The layers of the latest run and their times, as OpenVINO's `ProfilingInfo`; needs `profile`."""
        return list(self._latest.profiling_info)

    def _close(self) -> None:
        del self._requests, self._of_any_shape, self._latest, self._network


@lru_cache
def core_for(device: str) -> Any:
    """OpenVINO's `Core`; `InputError` if it does not have the device, `DependencyError` if it is not installed."""
    try:
        import openvino
    except ImportError as error:
        raise DependencyError(f"this needs OpenVINO, which is not installed: {INSTALL}") from error
    core = openvino.Core()
    names = core.available_devices
    accepted = {*names, *(name.split(".")[0] for name in names)}
    if device not in accepted and device.removesuffix(".0") not in names:
        raise InputError(f"--device openvino:{device}: OpenVINO {release()} sees {', '.join(names)} on this machine")
    return core


CHANNELS = 32  # of the convolution PROBE: a sum of so many products LARGEST * LARGEST needs more than 16 bits
LARGEST = 127
PROBE = (
    ("QuantizeLinear", "x one middle", "xq"),
    ("DequantizeLinear", "xq one middle", "xd"),
    ("QuantizeLinear", "weights one zero", "wq"),
    ("DequantizeLinear", "wq one zero", "wd"),
    ("Conv", "xd wd", "y"),
)


@lru_cache
def multiplies_exactly(device: str) -> bool:
    """Return whether sums of INT8 products are exact on a device; without VNNI an x86 CPU adds two products in 16 bits.

    The device runs a small convolution of the largest values, `PROBE`.
    """
    images: np.ndarray = np.full((1, CHANNELS, 8, 8), LARGEST, np.float32)
    core = core_for(device)
    network = core.compile_model(core.read_model(_probe(images.shape).SerializeToString()), device)
    result = network({"x": images})["y"]
    return bool(np.allclose(result, CHANNELS * LARGEST * LARGEST, rtol=0.01))


def _probe(shape: Sequence[int]) -> ModelProto:
    """Return the model `PROBE`: a quantized 1×1 convolution on images of this shape, with weights of LARGEST."""
    constants = {
        "one": np.array(1, np.float32),
        "middle": np.array(128, np.uint8),
        "zero": np.array(0, np.int8),
        "weights": np.full((CHANNELS, CHANNELS, 1, 1), LARGEST, np.float32),
    }
    nodes = [helper.make_node(kind, inputs.split(), [output]) for kind, inputs, output in PROBE]
    images = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "probe", [images], [result], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def device_title(device: str) -> str:
    """The device in its maker's words, such as 'Intel(R) Xeon(R) Platinum 8480+'."""
    return str(core_for(device).get_property(device, "FULL_DEVICE_NAME")).strip()


def precisions(device: str) -> Sequence[Precision]:
    """The precisions in which a device computes float layers at full speed, FP32 first."""
    capabilities = core_for(device).get_property(device, "OPTIMIZATION_CAPABILITIES")
    return [name for name in PRECISIONS if name == "fp32" or name.upper() in capabilities]


def release() -> str:
    """Version of OpenVINO, without its build number."""
    import openvino

    return str(openvino.__version__).split("-")[0]


def _description(model: ModelProto, device: str, precision: Precision, threads: int, note: str) -> str:
    """Version, device and precision in words."""
    words = [f"OpenVINO {release()}", f"{device} ({device_title(device)})"]
    if device == "CPU":
        words.append(plural(threads, "thread"))
    words.append(f"INT8 and {precision.upper()}" if is_quantized(model) else precision.upper())
    if note:
        words.append(note)
    return ", ".join(words)


def _short(error: Exception) -> str:
    """The last line of OpenVINO's message that is not a place in its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return (lines[-1] if lines else type(error).__name__)[:300]
