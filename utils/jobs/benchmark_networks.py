"""Networks in PyTorch and in ONNX Runtime as candidates of a benchmark: beside engines, or on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, cuda

from models.quantize import checkpoint
from utils import upstream
from utils.core.errors import InputError
from utils.core.tasks import DETECT, IMAGES, task_of_head
from utils.runners.base import TensorSpec
from utils.runners.onnxrt import OnnxRuntimeRunner, convolution_type
from utils.runners.pytorch import last_layer
from utils.trt.benchmark import COMPILED, FAILURES, ONNX_RUNTIME, PYTORCH, BenchmarkRow, Candidate, one_line
from utils.trt.preflight import OnnxFile

if TYPE_CHECKING:
    from torch import nn

    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

DEFAULT_SIZE = (640, 640)  # of a .pt, which does not say one; pixels


class TorchExecution:
    """A PyTorch network on images of one shape, in PyTorch's own settings: GPUs convolve float32 in TF32.

    Attributes:
        inputs, outputs, buffers, stream, device: see `timing.Timed`.
    """

    def __init__(self, model: nn.Module, images: Tensor, compiled: bool = False) -> None:
        """Run the network once, which compiles it if it is to be.

        Args:
            images: `[B, 3, H, W]` on the network's device, of its dtype.
            compiled: by `torch.compile`, for this shape alone.
        """
        self.device = images.device
        self.stream: Any = cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._task = task_of_head(last_layer(model))
        self._call: Any = torch.compile(model, dynamic=False) if compiled else model
        self._compiled = compiled
        self._graph: Any = None
        self.buffers: dict[str, Tensor] = {IMAGES: images}
        self.inputs: Sequence[TensorSpec] = [_spec(IMAGES, images)]
        if self.stream is not None:  # weights and images come from the current stream
            self.stream.wait_stream(cuda.current_stream(self.device))
        self._run_apart(1)
        self.outputs: Sequence[TensorSpec] = [_spec(name, self.buffers[name]) for name in self._task.outputs]

    def run(self) -> None:
        """Run once on torch's current stream."""
        with torch.inference_mode():
            result = self._call(self.buffers[IMAGES])
        self.buffers |= self._task.named(result)

    def graph(self) -> Any:
        """The compiled network as a CUDA graph, captured once; None for an eager one, which has none by nature."""
        if not self._compiled:
            return None
        if self._graph is None:
            self._run_apart(3)  # what is chosen or allocated in first runs must not be captured
            captured = cuda.CUDAGraph()
            with cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"):
                self.run()
            self._graph = captured
        return self._graph

    def _run_apart(self, times: int) -> None:
        """Run on the network's own stream, and wait."""
        with nullcontext() if self.stream is None else cuda.stream(self.stream):
            for _ in range(times):
                self.run()
        if self.stream is not None:
            self.stream.synchronize()


class RunnerExecution:
    """A runner on a CPU with feeds of one shape; its attributes are those of `timing.Timed`."""

    stream = None

    def __init__(self, runner: Runner, shapes: Mapping[str, Sequence[int]]) -> None:
        self._runner = runner
        self.inputs, self.outputs, self.device = runner.inputs, runner.outputs, runner.device
        self.buffers = {spec.name: torch.zeros(*shapes[spec.name], dtype=getattr(torch, spec.dtype))
                        for spec in runner.inputs}  # fmt: skip
        self.run()

    def run(self) -> None:
        """Run once."""
        self.buffers |= self._runner.infer({spec.name: self.buffers[spec.name] for spec in self.inputs})

    def graph(self) -> None:
        """There is none on a CPU."""


def load_checkpoint(file: Path, device: torch.device) -> nn.Module:
    """A float checkpoint, fused, on the device.

    Raises:
        InputError: it is quantized, or one of its kinds: it cannot be read.
    """
    if checkpoint.kind(file) == "quantized":
        raise InputError(
            f"{file} is a quantized checkpoint, which PyTorch computes in float with fake quantization: its time says "
            "nothing. Give the ONNX file that export_qat.py makes of it, and the float checkpoint as a .pt"
        )
    return upstream.call_fused(upstream.fuse(upstream.load_float(file).model)).to(device).eval()


def open_checkpoint(
    file: Path, model: nn.Module, shape: tuple[int, int, int], device: torch.device, *, compiled: bool, graphs: bool
) -> list[Candidate]:
    """PyTorch FP32 and FP16, eager and, if wanted, by torch.compile; what does not run is a row that says why.

    Args:
        shape: batch size, and height and width in pixels.
        graphs: replay CUDA graphs of the compiled networks.

    Raises:
        InputError: the size does not fit the network.
    """
    stride, masks = upstream.network_stride(model), bool(task_of_head(last_layer(model)).prototypes)
    if any(side % stride for side in shape[1:]):
        raise InputError(f"--imgsz {shape[1]} {shape[2]}: {file} takes multiples of {stride}, its stride")
    torch.compiler.reset()  # else the networks of other batch sizes count against the number that it compiles
    found = []
    for dtype, precision in ((torch.float32, "FP32"), (torch.float16, "FP16")):
        network = deepcopy(model).to(dtype) if dtype != torch.float32 else model
        for runtime in (PYTORCH, COMPILED) if compiled else (PYTORCH,):
            row = BenchmarkRow(file.stem, shape[0], False, precision, masks=masks, runtime=runtime)
            try:
                images = torch.zeros(shape[0], 3, *shape[1:], dtype=dtype, device=device)
                execution = TorchExecution(network, images, runtime == COMPILED)
                if graphs and device.type == "cuda":
                    execution.graph()
                found.append(Candidate(row, [execution]))
            except Exception as error:  # no compiler, no memory, an operator without FP16: of many kinds
                reason = f"{type(error).__name__}: {one_line(error)}"
                logger.debug("%s", row.title, exc_info=error)
                found.append(Candidate(replace(row, error=f"does not run: {reason[:200]}")))
    return found


def open_onnx(file: Path, baseline: bool, batch: int, size: tuple[int, int] | None, opened: ExitStack) -> Candidate:
    """An ONNX file in ONNX Runtime on the CPU; what does not run is a row that says why.

    Where a file is not computed in the type that it holds, the row's precision and a note say both.
    """
    summary = OnnxFile.read(file)
    precision = "INT8" if summary.quantized else "FP16" if summary.half else "FP32"
    row = BenchmarkRow(file.stem, batch, baseline, precision, runtime=ONNX_RUNTIME,
              nms=set(DETECT.detections) <= set(summary.outputs))  # fmt: skip
    try:
        runner = opened.enter_context(OnnxRuntimeRunner(file))
        row = replace(row, masks=bool(runner.task.masks))
        spec = runner.inputs[0]
        side = size or (runner.imgsz if None in spec.shape[1:] else None)
        known = tuple(1 if one is None else one for one in spec.shape)
        _, channels, *own = summary.input_spec.nchw(known)
        height, width = side or own
        shape = summary.input_spec.own((batch, channels, height, width))
        execution = RunnerExecution(runner, {spec.name: shape})
        computed = None
        if precision != "FP32":
            computed = convolution_type(file, {spec.name: execution.buffers[spec.name]})
        if computed not in (None, precision):
            note = (
                f"{file}: the file holds {precision}, and ONNX Runtime computes its convolutions in {computed} on this "
                f"CPU: its times say nothing of {precision}"
            )
            row = replace(row, precision=f"{precision} in {computed}", notes=(note,))
        return Candidate(row, [execution])
    except FAILURES as error:
        return Candidate(replace(row, error=one_line(error)))


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
