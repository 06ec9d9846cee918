"""Opening what the user names: any file as a runner, or a checkpoint as the exporters need it.

Programs ask first whether the libraries that a file needs are installed. Importing this module imports none of them.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from models.quantize import __version__
from utils.core.errors import ENVIRONMENT, DependencyError, InputError
from utils.core.files import check_file, read_onnx
from utils.core.logging import warn_once
from utils.core.tasks import Task, task_of_head
from utils.core.weights import FLOAT_HASH, is_quantized
from utils.trt.engine_file import ENGINE_SUFFIXES

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto
    from torch import nn

    from models.quantize.checkpoint import QuantizedCheckpoint
    from utils.runners.base import Runner
    from utils.runners.openvino import OpenVinoRunner
    from utils.upstream import FloatCheckpoint


logger = logging.getLogger(__name__)

EXPECTED_FILE = "expected an ONNX file, an engine or a .pt"
SEVEN_BITS_WARNING = (
    "this processor has no VNNI: it adds pairs of 8-bit products as 16-bit numbers, which are too small for them. INT8 "
    "therefore runs with weights of 7 bits here, and AP and agreement can be lower than with VNNI and in TensorRT"
)
INSTALL = {
    "torch": ENVIRONMENT,
    **dict.fromkeys(
        ("tritonclient", "grpc"), 'pip install "tritonclient[grpc]" (which also defines the form of config.pbtxt)'
    ),
    "openvino": "./install_dependencies.sh --openvino, or pip install openvino",
    "onnxslim": "pip install onnxslim, or leave --simplify out",
}


def need(*modules: str) -> None:
    """Raise `DependencyError` for the first module that is not installed; nothing is imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            hint = INSTALL.get(name, f"{ENVIRONMENT}, or pip install {name}")
            raise DependencyError(f"this needs {name}, which is not installed: {hint}")


def need_tensorrt() -> None:
    """Raise `DependencyError` if TensorRT is not installed; nothing is imported."""
    from utils.trt import tensorrt_api

    if tensorrt_api.installed_module() is None:
        tensorrt_api.load_tensorrt()


def need_for(path: str | Path, openvino: str | None = None) -> None:
    """Check that a network file exists, and that the library that runs it is installed.

    Args:
        openvino: OpenVINO's device, where that runs ONNX files.

    Raises:
        InputError: the file does not exist.
        DependencyError: the library is not installed.
    """
    check_file(path, EXPECTED_FILE)
    need("torch")
    suffix = Path(path).suffix.lower()
    if suffix == ".onnx":
        need("openvino" if openvino else "onnxruntime")
    elif suffix in ENGINE_SUFFIXES:
        need_tensorrt()


@dataclass(frozen=True)
class Network:
    """A network ready to run or to be exported: fused, float32, evaluation mode.

    Attributes:
        source: the checkpoint, which also holds the names of classes, stride, image size and dataset.
        kind: 'float'; 'ptq': calibrated; 'qat': finetuned, too.
        head: upstream's class of the last layer, such as DDetect.
    """

    model: nn.Module
    source: FloatCheckpoint | QuantizedCheckpoint
    kind: str
    head: str
    task: Task

    @property
    def quantized(self) -> bool:
        """True if there are quantizers in it."""
        return self.kind != "float"

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further values that a quantized checkpoint holds; empty for an FP32 one."""
        return getattr(self.source, "extra", {})

    def metadata(self) -> dict[str, str]:
        """Return properties for the exported file; values are texts, structures JSON."""
        source: Any = self.source
        model: Any = self.model
        entries = {"stride": str(source.stride), "names": json.dumps(source.names)}
        entries["task"] = self.task.name
        entries["kind"] = self.kind
        entries["version"] = __version__
        if source.weights_hash:
            entries[FLOAT_HASH] = source.weights_hash
        if source.origin:
            entries["origin"] = source.origin
        if self.task.prototypes:
            entries["nm"] = str(model.model[-1].nm)
        if hasattr(source, "recipe"):
            entries["recipe"] = json.dumps(source.recipe.to_dict())
        return entries


def load_network(weights: str | Path, device: torch.device | str = "cpu", *, auxiliary: bool = True) -> Network:
    """Load an FP32 checkpoint of upstream's, or a quantized one of `qat.py`; `CheckpointError` if it cannot be used.

    With `auxiliary` the main branch is taken of a network that has an auxiliary one, as upstream trains it.
    """
    from models.quantize import checkpoint
    from utils import upstream

    source: FloatCheckpoint | QuantizedCheckpoint
    if checkpoint.kind(weights) == "quantized":
        source = checkpoint.load_quantized(weights)
        model: Any = source.model
        kind = "ptq" if source.extra.get("stage") == "PTQ" else "qat"
    else:
        source = _load_float(weights, auxiliary)
        model = upstream.call_fused(upstream.fuse(source.model))
        kind = "float"
    head = model.model[-1]
    return Network(model.to(device), source, kind, type(head).__name__, task_of_head(head))


def _load_float(weights: str | Path, auxiliary: bool) -> FloatCheckpoint:
    """Load an FP32 checkpoint of upstream's; with `auxiliary` also one with an auxiliary branch, without that."""
    from models import reparam
    from utils import upstream
    from utils.upstream.description import HEADS, TRAINING_HEAD

    if not auxiliary:
        return upstream.load_float(weights, HEADS)
    source = upstream.load_float(weights, (*HEADS, TRAINING_HEAD))
    model: Any = source.model
    has_auxiliary_branch = type(model.model[-1]).__name__ == TRAINING_HEAD
    return reparam.convert(source) if has_auxiliary_branch else source


def dataset_of(data: str | None, own_data: Mapping[Path, str | None]) -> str:
    """Return the dataset's YAML: that of `--data`, or the first that a network names and that exists.

    Args:
        data: the value of `--data`.
        own_data: file of a network → the dataset's YAML that it names; None if it does not name one.

    Raises:
        InputError: there is no such YAML.
    """
    if data is not None:
        return data
    reasons = []
    for network, own in own_data.items():
        if own and os.path.isfile(own):
            logger.info("--data was not given: using %s, which %s names", own, network)
            return own
        reasons.append(f"{own}, which {network} names, does not exist" if own else f"{network} does not name one")
    raise InputError(f"--data was not given: {', '.join(reasons)}; give the dataset's YAML")


def open_runner(
    path: str | Path, device: torch.device | str = "cpu", openvino: str | None = None, precision: str | None = None
) -> Runner:
    """Open a network: `.onnx` in ONNX Runtime or OpenVINO, `.engine` or `.plan` in TensorRT, `.pt` in PyTorch.

    Args:
        openvino: OpenVINO's device, where that runs ONNX files.
        precision: OpenVINO's, of layers that are not INT8: fp32, bf16, fp16.

    Raises:
        InputError: the file is missing, damaged or of another kind, or it is an engine and the device is not a CUDA
            device.
        DependencyError: the library that runs it is not installed.
    """
    path = check_file(path, EXPECTED_FILE)
    suffix = path.suffix.lower()
    if suffix == ".onnx" and openvino:
        return open_openvino(path, openvino, precision)
    if suffix == ".onnx":
        from utils.runners.onnxrt import OnnxRuntimeRunner

        return OnnxRuntimeRunner(path, device)
    if suffix in ENGINE_SUFFIXES:
        return open_engine(path, device)
    if suffix != ".pt":
        raise InputError(f"{path} is not a network file; expected .onnx, .engine, .plan or .pt")
    return torch_runner(load_network(path, auxiliary=False), device)


def open_openvino(path: Path, device: str, precision: str | None = None, **more: Any) -> OpenVinoRunner:
    """Return a runner for an ONNX file in OpenVINO; `more` are options of `OpenVinoRunner`.

    An INT8 file is run in the form that `openvino_form` gives it.
    """
    from utils.runners.openvino import OpenVinoRunner

    model, note = openvino_form(read_onnx(path), device)
    return OpenVinoRunner(path, model, device, precision=cast(Any, precision or "fp32"), note=note, **more)


def openvino_form(model: ModelProto, device: str) -> tuple[ModelProto, str]:
    """Return the graph as OpenVINO computes it correctly and fastest on a device, and a note if its numbers differ.

    An FP32 graph stays as it is, and so does one that was exported with weights of 7 bits.
    """
    from utils.onnx_graph.passes.for_openvino import (
        SEVEN_BIT_TARGET,
        TARGET_KEY,
        drop_repeated_quantizers,
        offset_activations,
        seven_bit_weights,
    )
    from utils.onnx_graph.view import metadata_of
    from utils.runners.openvino import multiplies_exactly

    if metadata_of(model).get(TARGET_KEY) == SEVEN_BIT_TARGET:
        return model, "weights of 7 bits"
    if not is_quantized(model):
        return model, ""
    note = ""
    if not multiplies_exactly(device):
        warn_once(logger, SEVEN_BITS_WARNING)
        model = seven_bit_weights(offset_activations(model))
        note = "weights of 7 bits"
    return drop_repeated_quantizers(model), note


def torch_runner(network: Network, device: torch.device | str) -> Runner:
    """Return a runner for a checkpoint that is loaded."""
    from utils.runners.pytorch import TorchRunner

    source = network.source
    return TorchRunner(network.model, device, imgsz=source.imgsz, data=source.data, float_hash=source.weights_hash)


def open_engine(path: Path, device: torch.device | str) -> Runner:
    """Return a runner for a TensorRT engine; `InputError` for another device than a CUDA device."""
    if not str(device).startswith("cuda"):
        raise InputError(
            f"{path} is a TensorRT engine and runs on an NVIDIA GPU only, and the device is {device}; "
            "the .onnx that it was built from runs on a CPU"
        )
    from utils.trt.runner import TensorRTRunner

    return TensorRTRunner(path, device)
