"""Runs a TensorRT engine on a GPU: named addresses, one stream, CUDA graphs where shapes repeat."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, cuda

from utils.core.device import device_name
from utils.core.errors import InputError, QatError
from utils.core.input_spec import InputSpec
from utils.runners.base import Runner, TensorSpec
from utils.trt import tensorrt_api
from utils.trt.engine_file import EngineNote, load_engine
from utils.trt.tensorrt_api import TORCH_TYPES, Api

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
STREAMS_OF_TORCH = 32  # that differ, of a GPU: torch hands them out round robin


class Execution:
    """An engine that is ready to run on shapes of its profile.

    Attributes:
        inputs, outputs: by name, shape (None where dynamic) and dtype.
        profiles: input → min, opt and max shape.
        limits: input → min and max shape.
        buffers: for the present shapes, one tensor for each input and output.
        stream: the CUDA stream that the engine runs on.
    """

    def __init__(self, path: str | Path, api: Api, device: torch.device) -> None:
        """Load an engine; raises as `load_engine`, or `InputError` for tensors in a format that packs channels."""
        self.path = Path(path)
        self.device = device
        self.api = api
        self.log = api.log()
        self.note = EngineNote.load(self.path)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # TensorRT takes the current one
        gpu = tensorrt_api.gpu(device.index)
        self.engine: Any = load_engine(path, api, self.log, gpu)
        self.stream = cuda.Stream(device)
        # Auxiliary streams, drawn after `stream`, so that none is the same. TensorRT's own are "blocking": while one is
        # captured, CUDA lets nobody ask for the state of the default stream, and torch asks when it pins memory.
        self._beside = [cuda.Stream(device) for _ in range(min(self.streams or 0, STREAMS_OF_TORCH - 1))]
        self.buffers: dict[str, Tensor] = {}
        self._context: Any = None
        self._graph: Any = None
        self.inputs = self._specs(api.module.TensorIOMode.INPUT)
        self.outputs = self._specs(api.module.TensorIOMode.OUTPUT)
        self._dynamic = any(None in spec.shape for spec in self.inputs)
        self.profiles: dict[str, tuple[Any, ...]] = {}
        for spec in self.inputs:
            shapes = [spec.shape] * 3  # TensorRT may have no profile for a static shape
            if None in spec.shape:
                shapes = self.engine.get_tensor_profile_shape(spec.name, 0)
            self.profiles[spec.name] = tuple(map(tuple, shapes))
        self.limits = {name: (shapes[0], shapes[2]) for name, shapes in self.profiles.items()}
        self._start()
        if not self._dynamic:
            self.set_shapes({name: shapes[1] for name, shapes in self.profiles.items()})

    def _specs(self, mode: Any) -> tuple[TensorSpec, ...]:
        """The engine's inputs or outputs; `InputError` for one in a format that packs channels."""
        specs = []
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            if self.engine.get_tensor_mode(name) != mode:
                continue
            layout = "LINEAR"
            if hasattr(self.api.module, "TensorFormat"):  # the lean runtime does not have it
                layout = self.engine.get_tensor_format(name).name
            if layout != "LINEAR":  # of trtexec, or --input-format of 1.0
                raise InputError(
                    f"{self.path} has {name} in format {layout}, which is not supported; build the engine again"
                )
            shape = tuple(size if size >= 0 else None for size in self.engine.get_tensor_shape(name))
            specs.append(TensorSpec(name, shape, TORCH_TYPES[self.engine.get_tensor_dtype(name).name]))
        return tuple(specs)

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Make buffers for inputs of these shapes; nothing happens when they are the present ones.

        Raises:
            InputError: a shape is outside the engine's profile, or the size of an output depends on the data.
        """
        if self.buffers and all(self.buffers[name].shape == shape for name, shape in shapes.items()):
            return
        for name, shape in shapes.items():
            least, most = map(list, self.limits[name])
            is_inside = all(low <= size <= high for low, size, high in zip(least, shape, most, strict=False))
            if not is_inside or not self._context.set_input_shape(name, tuple(shape)):
                raise InputError(
                    f"{self.path} takes {name} from {least} to {most}, not {list(shape)}; build an engine for that"
                )
        self.buffers = {}
        self._graph = None  # it belongs to the shapes that it was captured with
        buffers = {}
        for spec in (*self.inputs, *self.outputs):
            shape = tuple(self._context.get_tensor_shape(spec.name))
            if any(size < 0 for size in shape):  # it is known only after a run
                raise InputError(
                    f"{self.path}: the size of output {spec.name} depends on the data, which is not supported; "
                    "export_qat.py writes files whose outputs have known sizes, also with --nms onnx"
                )
            with torch.inference_mode(False):  # else they could not be written to outside of inference mode
                buffers[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)
            self._context.set_tensor_address(spec.name, buffers[spec.name].data_ptr())
        self.buffers = buffers  # all of them, or none where memory is short

    def _start(self) -> None:
        """A fresh context, in place of the one before, for the present shapes and buffers."""
        self._graph = None
        self._context = None  # released first: contexts of 8.6 cannot share a profile
        self._context = self.engine.create_execution_context()
        if self._context is None:
            raise QatError(f"{self.path} does not start: {self.log.reason('not enough GPU memory?')}")
        # TensorRT chooses the profile by itself for an engine's first context only
        if self._dynamic and not self._context.set_optimization_profile_async(0, self.stream.cuda_stream):
            raise QatError(f"{self.path} does not start: {self.log.reason('it gives no reason')}")
        if self._beside:
            self._context.set_aux_streams([stream.cuda_stream for stream in self._beside])
        if self.buffers:
            for spec in self.inputs:
                self._context.set_input_shape(spec.name, tuple(self.buffers[spec.name].shape))
        for name, buffer in self.buffers.items():
            self._context.set_tensor_address(name, buffer.data_ptr())

    @property
    def streams(self) -> int | None:
        """Number of the engine's auxiliary streams; None where this TensorRT does not have it."""
        return getattr(self.engine, "num_aux_streams", None)

    def run(self) -> None:
        """Enqueue one run on `stream`, without waiting; raise `QatError` if TensorRT could not."""
        if not self._context.execute_async_v3(self.stream.cuda_stream):
            raise QatError(f"{self.path} failed to run: {self.log.reason('it gives no reason')}")

    def graph(self) -> Any:
        """The run on the present shapes as a CUDA graph (`replay()`), captured once until the shapes change.

        None where the size of a result depends on the image, which no graph can hold. Such a capture is not tried:
        torch before 2.12 takes a failed capture for one that still goes on, and no longer frees memory that several
        streams use.
        """
        if self.note.data_dependent:
            return None
        if self._graph is None:
            self.run()  # the first run after a change of shapes allocates, which a capture must not
            self.stream.synchronize()
            captured = cuda.CUDAGraph()
            # "thread_local": the data loader's thread pins memory meanwhile, which would spoil a global capture
            with cuda.graph(captured, stream=self.stream, capture_error_mode="thread_local"):
                self.run()
            self._graph = captured
        return self._graph

    def layer_times(self, runs: int = 20) -> dict[str, float]:
        """Mean milliseconds of each layer, by the inspector's names; measured one by one, without a CUDA graph.

        Empty where TensorRT has no IProfiler (TensorRT-RTX).
        """
        base: Any = getattr(self.api.module, "IProfiler", None)
        if base is None:
            return {}
        times: dict[str, float] = defaultdict(float)

        class Profiler(base):
            def __init__(self) -> None:
                base.__init__(self)

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                times[layer_name] += ms

        profiler = Profiler()
        self._start()  # a context keeps its profiler: this one is only for that
        self._context.profiler = profiler
        for index in range(runs + 3):
            if index == 3:
                times.clear()  # warm
            self.run()
            self.stream.synchronize()
        self._start()
        return {name: total / runs for name, total in times.items()}

    def information(self) -> str:
        """The engine inspector's JSON for the present shapes; `InputError` if this TensorRT has no inspector."""
        if not hasattr(self.api.module, "EngineInspector"):
            raise InputError(f"{self.api.name} has no inspector for the layers of {self.path}; use TensorRT itself")
        self.run()  # until then 8.6 says "N/A due to dynamic shapes" for types and formats
        self.stream.synchronize()
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self._context
        return str(inspector.get_engine_information(self.api.module.LayerInformationFormat.JSON))

    def close(self) -> None:
        """Release the engine and its buffers."""
        self.stream.synchronize()
        self._graph = None
        self.buffers = {}
        self._context = None
        self.engine = None

    @property
    def input_spec(self) -> InputSpec:
        """The form in which it takes images, see `InputSpec.of_file`."""
        return InputSpec.of_file(self.note.metadata, self.inputs[0].dtype, self.inputs[0].shape)


class TensorRTRunner(Runner):
    """An engine; axes that are dynamic in its profile are None in the specs, and `limits` has their range.

    Feeds in pageable memory go through pinned memory; those in pinned memory are copied while the call returns, and
    must not be written to before the outputs are used. Outputs are ordered on torch's current stream.
    """

    def __init__(
        self, path: str | Path, device: torch.device | str = "cuda", graphs: bool = True, api: Api | None = None
    ) -> None:
        """Load the engine; `graphs`: replay a CUDA graph from the second run of a shape on.

        Raises:
            InputError: the file is missing, damaged, or of another TensorRT or GPU; or there is no GPU.
            DependencyError: TensorRT is not installed.
        """
        api = api or tensorrt_api.load_tensorrt()
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", cuda.current_device())  # as its tensors say
        self._execution = Execution(path, api, device)
        self._graphs = graphs
        self._last: tuple[object, ...] = ()
        form = self._execution.input_spec
        precision = self._execution.note.precision
        words = [api.name, device_name(device)]
        if precision:
            words.append(precision.upper())
        if form.kind == "uint8":
            words.append(f"{form.kind} input, {form.layout}")
        super().__init__(
            inputs=self._execution.inputs,
            outputs=self._execution.outputs,
            metadata=self._execution.note.metadata,
            device=device,
            description=", ".join(words),
        )
        self.limits = dict(self._execution.limits)

    def _to_device(self, name: str, feed: Tensor) -> Tensor:
        """Pinned memory, which `_infer` copies from on the engine's stream; torch reuses it once that is done."""
        feed = feed.detach()
        if feed.device.type == "cpu" and self.device.type == "cuda":
            return feed.contiguous().pin_memory()
        return feed

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        execution = self._execution
        current = cuda.current_stream(self.device)
        execution.set_shapes({name: tuple(feed.shape) for name, feed in feeds.items()})
        execution.stream.wait_stream(current)
        shapes = tuple(feed.shape for feed in feeds.values())
        with cuda.stream(execution.stream):
            for name, feed in feeds.items():
                execution.buffers[name].copy_(feed, non_blocking=True)
            graph = self._graph() if self._graphs and shapes == self._last else None
            if graph:
                graph.replay()
            else:
                execution.run()
        current.wait_stream(execution.stream)
        self._last = shapes
        return {spec.name: execution.buffers[spec.name] for spec in self.outputs}

    def _graph(self) -> cuda.CUDAGraph | None:
        try:
            return self._execution.graph()
        except (RuntimeError, QatError) as error:  # something in the engine cannot be captured
            logger.warning("%s runs without CUDA graphs: %s", self._execution.path, str(error).splitlines()[0])
            self._graphs = False
            return None

    def _close(self) -> None:
        self._execution.close()
