"""The job behind `scripts/benchmark_trt.py`: engines, PyTorch networks and ONNX files, timed interleaved."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, cuda

from models.quantize import checkpoint
from utils import upstream
from utils.core.errors import InputError
from utils.core.input_spec import COLOURS, KIND_KEY, InputSpec, channels_of
from utils.core.options import height_width
from utils.core.tasks import DETECT, IMAGES, task_of_head
from utils.runners import onnxrt
from utils.runners.base import TensorSpec
from utils.runners.onnxrt import OnnxRuntimeRunner, convolution_type
from utils.runners.pytorch import last_layer
from utils.trt import benchmark
from utils.trt.benchmark import (
    FAILURES,
    ONNX_RUNTIME,
    PYTORCH,
    BenchmarkRow,
    Candidate,
    Entry,
    one_line,
)
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_shapes
from utils.trt.timing import TimingConfig

if TYPE_CHECKING:
    from torch import nn

    from utils.runners.base import Runner
    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8, 12)
DEFAULT_SIZE = (640, 640)  # of a .pt that does not say one; pixels


@dataclass(frozen=True)
class Benchmark:
    """What is timed, and how.

    Attributes:
        entries: ONNX files and engines; without `api` ONNX Runtime runs the former.
        networks: float checkpoints → networks on the device.
        size: (height, width) in pixels that was given, for files of dynamic size; None: each has its own.
        timed_size: the one at which everything is timed; None if an engine alone does not say it.
        contexts: numbers of contexts that run side by side, of engines.
        api: TensorRT; None where no engine takes part.
        program: trtexec, if it takes the times.
    """

    entries: Sequence[Entry]
    networks: Mapping[Path, nn.Module]
    size: tuple[int, int] | None
    contexts: Sequence[int]
    timing: TimingConfig
    building: BuildConfig
    device: torch.device
    timed_size: tuple[int, int] | None = None
    api: Api | None = None
    program: Trtexec | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is what is measured."""
        return self.api is not None or self.device.type == "cuda"

    def measure(self, batch: int) -> list[BenchmarkRow]:
        """Build what is missing for this batch size, and time everything interleaved."""
        engines: dict[Entry, Path | str] = {}
        if self.api is not None:
            engines = benchmark.prepare(self.entries, batch, self.size, self.building, self.api)
        shape = (batch, *(self.timed_size or DEFAULT_SIZE))
        with ExitStack() as stack:
            candidates: list[Candidate] = []
            for file, model in self.networks.items():
                candidates += open_checkpoint(file, model, shape, self.device)
            if self.api is not None:
                candidates += benchmark.open_engines(
                    engines, batch, self.size, self.contexts, self.api, self.device, self.timing, stack, self.program
                )
            else:
                candidates += [open_onnx(entry.file, entry.baseline, batch, self.size, stack)
                               for entry in self.entries]  # fmt: skip
            rows = benchmark.time_candidates(candidates, self.timing, self.program)
            candidates.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # TensorRT cannot have what PyTorch keeps
        return rows

    def software(self) -> list[str]:
        """Names and versions of what runs the networks."""
        names = [self.api.name] if self.api else []
        names += [f"PyTorch {torch.__version__.split('+')[0]}"] if self.networks else []
        return names + ([f"ONNX Runtime {onnxrt.version()}"] if self.entries and not self.api else [])


def common_size(entries: Sequence[Entry], checkpoints: Sequence[Path]) -> tuple[int, int] | None:
    """(height, width) in pixels at which files are timed without --imgsz: that of all of them.

    A checkpoint takes that of the others, or that of its training; None if there is nothing that says one.

    Raises:
        InputError: they differ, or an engine beside other files does not say its size.
    """
    sizes = {entry.file: _size_of(entry) for entry in entries}
    if not entries:
        sides = {file: upstream.load_float(file).imgsz for file in checkpoints if checkpoint.kind(file) != "quantized"}
        sizes = {file: height_width(side) for file, side in sides.items() if side}
    unknown = [file for file, size in sizes.items() if size is None]
    if unknown and len(sizes) + len(checkpoints) > 1:
        raise InputError(f"{unknown[0]} does not say its image size, and all files are timed at one; give --imgsz")
    texts = {file: "x".join(map(str, size)) for file, size in sizes.items() if size is not None}
    first = next(iter(texts), None)
    for file, text in texts.items():
        if first is not None and text != texts[first]:
            raise InputError(f"{first} is of {texts[first]}, and {file} of {text}; give --imgsz, or files of one size")
    return next(iter(sizes.values()), None)


def _size_of(entry: Entry) -> tuple[int, int] | None:
    """Height and width at which a file is timed by itself; None for an engine whose note does not say it."""
    if not entry.is_engine:
        summary = OnnxFile.read(entry.file)
        ranges = profile_shapes(summary, BuildConfig())
        shape = summary.input_spec.nchw(ranges[summary.image[0]][-1]) if ranges else summary.image[1]
        return cast(tuple[int, int], tuple(shape[2:]))
    note = EngineNote.load(entry.file)
    for _, _, largest in note.profile.values():
        form = InputSpec.of_file(note.metadata, note.metadata.get(KIND_KEY, "float"), largest)
        _, channels, height, width = form.nchw(largest)
        return (height, width) if channels in COLOURS else None
    try:
        height, width = json.loads(note.metadata.get("imgsz", ""))
        return int(height), int(width)
    except (ValueError, TypeError):
        return None


def batch_sizes(given: Sequence[int] | None, sweep: int | None) -> list[int]:
    """The batch sizes that were asked for; `sweep` is the last of 1, 2, 4, ..., also where it is no power of two."""
    if sweep is None:
        return list(dict.fromkeys(given or BATCHES))
    powers = [1 << n for n in range(sweep.bit_length()) if 1 << n <= sweep]
    return list(dict.fromkeys((*powers, sweep)))


def succeeded(rows: Sequence[BenchmarkRow]) -> bool:
    """Whether all rows have figures."""
    return not any(row.error for row in rows)


# --- networks in PyTorch and in ONNX Runtime as candidates ------------------------------------------------------------


class TorchExecution:
    """A PyTorch network on images of one shape, in PyTorch's own settings: GPUs convolve float32 in TF32.

    Attributes:
        inputs, outputs, buffers, stream, device: see `timing.Timed`.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        """Run the network once on images `[B, 3, H, W]` on its device, of its dtype."""
        self.device = images.device
        self.stream: Any = cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._task = task_of_head(last_layer(model))
        self._model = model
        self.buffers: dict[str, Tensor] = {IMAGES: images}
        self.inputs: Sequence[TensorSpec] = [_spec(IMAGES, images)]
        if self.stream is not None:  # weights and images come from the current stream
            self.stream.wait_stream(cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else cuda.stream(self.stream):
            self.run()
        if self.stream is not None:
            self.stream.synchronize()
        self.outputs: Sequence[TensorSpec] = [_spec(name, self.buffers[name]) for name in self._task.outputs]

    def run(self) -> None:
        """Run once on torch's current stream."""
        with torch.inference_mode():
            result = self._model(self.buffers[IMAGES])
        self.buffers |= self._task.named(result)

    def graph(self) -> None:
        """There is none of an eager network."""


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


def open_checkpoint(file: Path, model: nn.Module, shape: tuple[int, int, int], device: torch.device) -> list[Candidate]:
    """PyTorch FP32 and FP16; what does not run is a row that says why.

    Args:
        shape: batch size, and height and width in pixels.

    Raises:
        InputError: the size does not fit the network.
    """
    stride, masks = upstream.network_stride(model), bool(task_of_head(last_layer(model)).prototypes)
    if any(side % stride for side in shape[1:]):
        raise InputError(f"--imgsz {shape[1]} {shape[2]}: {file} takes multiples of {stride}, its stride")
    candidates = []
    for dtype, precision in ((torch.float32, "FP32"), (torch.float16, "FP16")):
        network = deepcopy(model).to(dtype) if dtype != torch.float32 else model
        row = BenchmarkRow(file.stem, shape[0], False, precision, masks=masks, runtime=PYTORCH)
        try:
            images = torch.zeros(shape[0], channels_of(model), *shape[1:], dtype=dtype, device=device)
            candidates.append(Candidate(row, [TorchExecution(network, images)]))
        except Exception as error:  # no memory, an operator without FP16: of many kinds
            reason = f"{type(error).__name__}: {one_line(error)}"
            logger.debug("%s", row.title, exc_info=error)
            candidates.append(Candidate(replace(row, error=f"does not run: {reason[:200]}")))
    return candidates


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
