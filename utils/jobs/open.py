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
from typing import TYPE_CHECKING, Any

from models.quantize import __version__
from utils.core.errors import ENVIRONMENT, DependencyError, InputError
from utils.core.files import check_file
from utils.core.tasks import DETECT, Task, task_of_head
from utils.trt.engine_file import ENGINE_SUFFIXES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from models.quantize.checkpoint import QuantizedCheckpoint
    from models.quantize.recipe import Recipe
    from utils.runners.base import Runner
    from utils.upstream import FloatCheckpoint


logger = logging.getLogger(__name__)

A_NETWORK = "expected an ONNX file, an engine or a .pt"
TRITONCLIENT = 'pip install "tritonclient[grpc]"'
INSTALL = {
    "torch": ENVIRONMENT,
    "tritonclient": TRITONCLIENT,
    "grpc": TRITONCLIENT,
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


def need_for(path: str | Path) -> None:
    """Check that a network file (`.onnx`, `.engine`, `.plan`, `.pt`) is there, and then that what runs it is installed.

    Raises:
        InputError: there is no such file.
        DependencyError: a library is missing.
    """
    check_file(path, A_NETWORK)
    need("torch")
    suffix = Path(path).suffix.lower()
    if suffix == ".onnx":
        need("onnxruntime")
    elif suffix in ENGINE_SUFFIXES:
        need_tensorrt()


@dataclass(frozen=True)
class Network:
    """A network ready for export: fused, float32, evaluation mode.

    Attributes:
        names: class id → name.
        stride: image sizes are multiples of it, pixels.
        head: upstream's class of the checkpoint's last layer, such as DDetect.
        recipe: of a quantized network, None for a float one.
        kind: 'float'; 'ptq': calibrated; 'qat': finetuned, too.
        imgsz: side, or (height, width), that it was calibrated or trained at, in pixels; None where it is not known.
        data: the dataset's YAML that it was calibrated or trained with; None where it is not known.
        labels_of: the float network whose detections are labels, of one that was quantized with `--unlabelled`.
    """

    model: nn.Module
    names: dict[int, str]
    stride: int
    head: str
    recipe: Recipe | None
    kind: str
    task: Task = DETECT
    imgsz: int | tuple[int, int] | None = None
    data: str | None = None
    labels_of: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether there are quantizers in it."""
        return self.recipe is not None

    def metadata(self) -> dict[str, str]:
        """Properties for the exported file; values are texts, structures JSON."""
        head: Any = self.model.model[-1]
        entries = {"stride": str(self.stride), "names": json.dumps(self.names), "task": self.task.name,
                   "kind": self.kind, "version": __version__}  # fmt: skip
        entries |= {"nm": str(head.nm)} if self.task.prototypes else {}
        return entries if self.recipe is None else entries | {"recipe": json.dumps(self.recipe.to_dict())}


def load_network(weights: str | Path, device: torch.device) -> Network:
    """Load a float checkpoint of upstream's, or a quantized one of `qat.py`; of a training network the main branch.

    Raises:
        CheckpointError: it is neither, or damaged, or a network that cannot be exported.
    """
    from models import reparam
    from models.quantize import checkpoint
    from utils import upstream
    from utils.upstream.description import HEADS, TRAINING_HEAD

    if checkpoint.kind(weights) == "quantized":
        quantized = checkpoint.load_quantized(weights)
        kind = "ptq" if quantized.extra.get("stage") == "PTQ" else "qat"
        task = task_of_head(quantized.model.model[-1])
        model = quantized.model.to(device)
        return Network(model, quantized.names, quantized.stride, _head(model), quantized.recipe, kind, task,
                       quantized.imgsz, quantized.data, quantized.extra.get("labels_of"))  # fmt: skip
    source = upstream.load_float(weights, (*HEADS, TRAINING_HEAD))
    head = _head(source.model)
    if head == TRAINING_HEAD:
        source = reparam.convert(source)
    model = upstream.call_fused(upstream.fuse(source.model)).to(device)
    return Network(model, source.names, source.stride, head, None, "float", task_of_head(model.model[-1]),
                   source.imgsz, source.data)  # fmt: skip


def _head(model: Any) -> str:
    return str(model.yaml["head"][-1][2])


def dataset_of(data: str | None, known: Mapping[Path, str | None]) -> str:
    """The dataset's YAML: `--data`'s, or the first there is of `known` (network → its own, or None), which is said.

    Raises:
        InputError: `--data` was not given, and no network knows a dataset that is there.
    """
    if data is not None:
        return data
    for network, own in known.items():
        if own and os.path.isfile(own):
            logger.info("--data %s, as %s says", own, network)
            return own
    why = (f"{own}, which {net} names, does not exist" if own else f"{net} names none" for net, own in known.items())
    raise InputError(f"--data was not given: {', '.join(why)}; give the dataset's YAML")


def open_runner(path: str | Path, device: torch.device | str = "cpu") -> Runner:
    """Open a network: `.onnx` in ONNX Runtime, `.engine` or `.plan` in TensorRT, `.pt` in PyTorch.

    Raises:
        InputError: the file is missing, damaged, of none of these kinds, or an engine and the device no CUDA device.
        DependencyError: what runs it is not installed.
    """
    path = check_file(path, A_NETWORK)
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        from utils.runners.onnxrt import OnnxRuntimeRunner

        return OnnxRuntimeRunner(path, device)
    if suffix in ENGINE_SUFFIXES:
        return open_engine(path, device)
    if suffix != ".pt":
        raise InputError(f"{path}: cannot tell what it is by its name; expected .onnx, .engine, .plan or .pt")
    from utils.runners.pytorch import TorchRunner

    source, model = load_checkpoint(path)
    return TorchRunner(model, device, imgsz=source.imgsz, data=source.data)


def open_engine(path: Path, device: torch.device | str) -> Runner:
    """A runner for a TensorRT engine; `InputError` if the device is no CUDA device, or the engine not for here."""
    if not str(device).startswith("cuda"):
        raise InputError(
            f"{path} is a TensorRT engine and runs on an NVIDIA GPU only, and the device is {device}; "
            "the .onnx that it was built from runs on a CPU"
        )
    from utils.trt.runner import TensorRTRunner

    return TensorRTRunner(path, device)


def load_checkpoint(weights: str | Path) -> tuple[QuantizedCheckpoint | FloatCheckpoint, nn.Module]:
    """A float checkpoint of upstream's, or a quantized one of `qat.py`; and its network, a float one fused.

    Raises:
        CheckpointError: it is neither, or damaged, or a network with an auxiliary branch.
    """
    from models.quantize import checkpoint
    from utils import upstream

    if checkpoint.kind(weights) == "quantized":
        quantized = checkpoint.load_quantized(weights)
        return quantized, quantized.model
    source = upstream.load_float(weights)
    return source, upstream.call_fused(upstream.fuse(source.model))
