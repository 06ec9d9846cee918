"""Runners: one interface to PyTorch, ONNX Runtime and TensorRT; `open_runner` picks one by the file's name.

This module imports none of them until a file is opened.

runner.py, torch_runner.py, onnxruntime_runner.py, tensorrt_runner.py   running
tensorrt_api.py     the only importer of TensorRT; what its version can do
onnx_file.py, build_plan.py, builder.py, progress.py, trtexec.py        ONNX file → engine
engine_file.py, execution.py                                            engine → a context with buffers
timing.py, stopwatch.py                                                 kernels alone; as a caller sees it
benchmark.py, benchmark_report.py                                       INT8 against FP16 over batches
inspector.py, engine_report.py, engine_graph.py, look.py                layers → table, sentences, picture
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from models.quantize.errors import DependencyError, InputError, no_file

if TYPE_CHECKING:
    import torch

    from utils.engine.runner import Runner

ENGINE_SUFFIXES = (".engine", ".plan")


def open_runner(path: str | Path, device: torch.device | str = "cpu") -> Runner:
    """Open a network: `.onnx` in ONNX Runtime, `.engine` or `.plan` in TensorRT, `.pt` in PyTorch.

    Raises:
        InputError: the file is missing, damaged, or of none of these kinds.
        DependencyError: what runs it is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".onnx", ".pt", *ENGINE_SUFFIXES):
        raise InputError(f"{path}: cannot tell what it is by its name; expected .onnx, .engine, .plan or .pt")
    if not path.is_file():
        raise InputError(no_file(path, "expected an ONNX file, an engine or a .pt"))
    if suffix == ".onnx":
        from utils.engine.onnxruntime_runner import OnnxRuntimeRunner

        return OnnxRuntimeRunner(path, device)
    if suffix == ".pt":
        return _open_checkpoint(path, device)
    return _open_engine(path, device)


def _open_engine(path: Path, device: torch.device | str) -> Runner:
    from utils.engine import tensorrt_api

    if tensorrt_api.installed() is None:
        raise DependencyError(f"{path} needs TensorRT, which is not installed: ./install_dependencies.sh --tensorrt")
    if not str(device).startswith("cuda"):
        raise InputError(
            f"{path} is a TensorRT engine and runs on an NVIDIA GPU only, and the device is {device}; "
            "the .onnx that it was built from runs on a CPU"
        )
    from utils.engine.tensorrt_runner import TensorRTRunner

    return TensorRTRunner(path, device)


def _open_checkpoint(path: Path, device: torch.device | str) -> Runner:
    from models.quantize import checkpoint
    from utils.engine.torch_runner import TorchRunner

    if checkpoint.kind(path) == "quantized":
        return TorchRunner(checkpoint.load(path).model, device)
    from utils import upstream

    return TorchRunner(upstream.call_fused(upstream.fuse(upstream.load_float(path).model)), device)
