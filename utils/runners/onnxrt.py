"""Runs an ONNX file in ONNX Runtime, on the CPU or, where its CUDA provider is installed, on a GPU."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from utils.core.cpu import cpu_cores, thread_limit
from utils.core.device import device_name
from utils.core.errors import DependencyError, InputError, no_file
from utils.core.text import plural
from utils.runners.base import Runner, TensorSpec

logger = logging.getLogger(__name__)

_DTYPES = {"float": "float32", "double": "float64"}  # others are called as in torch
_PLUGIN = "it has a plugin of TensorRT's, which runs in engines only; build one, or export the file with --nms onnx"
FP16_SCALES = Version("1.30")  # the first whose quantizers round with FP16 scales as others do: 1.19 to 1.29 did not
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"


class OnnxRuntimeRunner(Runner):
    """An ONNX file; axes with a symbolic size are None in the specs."""

    def __init__(self, path: str | Path, device: torch.device | str = "cpu", threads: int | None = None) -> None:
        """Load the file.

        Args:
            device: on `cuda` without the CUDA provider it runs on the CPU, and warns.
            threads: of one operator; None leaves it to ONNX Runtime.

        Raises:
            InputError: the file is missing, damaged, or uses something that this ONNX Runtime does not know.
            DependencyError: ONNX Runtime is not installed.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise DependencyError(f"{path} needs ONNX Runtime; install it with: pip install onnxruntime") from error
        path = Path(path)
        device = torch.device(device)
        if not path.is_file():
            raise InputError(no_file(path, "expected an ONNX file"))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        providers: list[Any] = [_CPU]
        if device.type == "cuda" and _CUDA in onnxruntime.get_available_providers():
            providers.insert(0, (_CUDA, {"device_id": device.index or 0}))
        try:
            session = open_session(str(path), options, providers)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            reason = _PLUGIN if "_TRT(" in str(error) else _short(error)
            raise InputError(f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {reason}") from error
        metadata = session.get_modelmeta().custom_metadata_map
        has_fp16_scales = metadata.get("typing") == "strong" and metadata.get("kind") != "float"
        if has_fp16_scales and Version(version()) < FP16_SCALES:
            text = "ONNX Runtime before %s computes other values from %s, which is strongly typed; use --typing weak"
            logger.warning(text, FP16_SCALES, path)
        if device.type == "cuda" and session.get_providers()[0] != _CUDA:
            logger.warning(
                "the CUDA provider of ONNX Runtime does not start (pip install onnxruntime-gpu); using the CPU"
            )
            device = torch.device("cpu")
        description = f"ONNX Runtime {version()}, {device_name(device)}"
        if device.type == "cpu":
            description += f", {plural(threads or cpu_cores(), 'thread')}"
        self._session = session
        self._path = path
        super().__init__(
            inputs=[_spec(argument) for argument in session.get_inputs()],
            outputs=[_spec(argument) for argument in session.get_outputs()],
            metadata=metadata,
            device=device,
            description=description,
        )

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in feeds.items()}
        names = [spec.name for spec in self.outputs]
        try:
            results = self._session.run(names, arrays)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise InputError(f"{self._path} does not run on {shapes}: {_short(error)}") from error
        return {name: torch.from_numpy(array).to(self.device) for name, array in zip(names, results, strict=True)}

    def _close(self) -> None:
        del self._session


def open_session(source: str | bytes, options: Any, providers: Sequence[Any]) -> Any:
    """A session on a path or a serialized graph.

    ONNX Runtime (seen in 1.31) replaces a Concat between FP16 quantizers, as in strongly typed files, by an operator
    that it then refuses; without its rewriting of quantizers it runs such a file, in float.
    """
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph

    if not options.intra_op_num_threads:
        options.intra_op_num_threads = thread_limit() or 0
    try:
        return onnxruntime.InferenceSession(source, options, providers=providers)
    except InvalidGraph:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return onnxruntime.InferenceSession(source, options, providers=providers)


def _short(error: Exception) -> str:
    """ONNX Runtime's message on one line, without its error code and the path that precede it."""
    text = " ".join(str(error).split()).rsplit(" : ", 1)[-1]
    return re.sub(r"^(\[ONNXRuntimeError\] |Load model from .*? failed: ?)", "", text)[:300]


def _spec(argument: Any) -> TensorSpec:
    kind = argument.type.removeprefix("tensor(").removesuffix(")")
    shape = tuple(size if isinstance(size, int) and size > 0 else None for size in argument.shape)
    return TensorSpec(argument.name, shape, _DTYPES.get(kind, kind))


def version() -> str:
    """Version of ONNX Runtime, which several packages bring."""
    import onnxruntime

    return str(onnxruntime.__version__)
