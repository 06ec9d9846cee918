"""Runs a TensorRT engine on a GPU: named addresses, one stream, CUDA graphs where shapes repeat."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, cuda

from utils.core.device import device_name
from utils.core.errors import QatError
from utils.runners.base import Runner
from utils.trt import tensorrt_api
from utils.trt.context import Execution
from utils.trt.tensorrt_api import Api

logger = logging.getLogger(__name__)


class TensorRTRunner(Runner):
    """An engine; axes that are dynamic in its profile are None in the specs, and `limits` has their range.

    Feeds in pageable memory go through pinned memory; those in pinned memory are copied while the call returns, and
    must not be written to before the outputs are used. Outputs are ordered on torch's current stream.
    """

    def __init__(
        self, path: str | Path, device: torch.device | str = "cuda", graphs: bool = True, api: Api | None = None
    ) -> None:
        """Load the engine.

        Args:
            graphs: replay a CUDA graph from the second run of a shape on.

        Raises:
            InputError: the file is missing, damaged, or of another TensorRT or GPU; or there is no GPU.
            DependencyError: TensorRT is not installed.
        """
        api = api or tensorrt_api.load()
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", cuda.current_device())  # as its tensors say
        self._execution = Execution(path, api, device)
        self._graphs = graphs
        self._last: tuple[object, ...] = ()
        self._pinned: dict[str, Tensor] = {}
        self._marks = [cuda.Event(enable_timing=True) for _ in range(3)]  # before copying, before running, after it
        self._ran = False
        form, precision = self._execution.input_form, self._execution.note.precision
        words = [api.name, device_name(device), *([precision.upper()] if precision else [])]
        words += [f"{form.kind} input, {form.layout}"] * (form.kind != "float")
        super().__init__(
            inputs=self._execution.inputs,
            outputs=self._execution.outputs,
            metadata=self._execution.note.metadata,
            device=device,
            description=", ".join(words),
        )
        self.limits = dict(self._execution.limits)

    def times(self) -> dict[str, float]:
        """Milliseconds of the last call: `copy`, of the feeds to the engine's memory, and `compute`. Waits for it."""
        if not self._ran:
            return {}
        before, copied, done = self._marks
        done.synchronize()
        return {"copy": before.elapsed_time(copied), "compute": copied.elapsed_time(done)}

    def _to_device(self, name: str, feed: Tensor) -> Tensor:
        """Pinned memory instead of the device: the copy to the engine's own memory follows on its stream."""
        feed = feed.detach()
        if feed.device.type != "cpu" or self.device.type == "cpu" or feed.is_pinned():
            return feed
        stored = self._pinned.get(name)
        if stored is None or stored.shape != feed.shape:
            with torch.inference_mode(False):
                stored = self._pinned[name] = torch.empty(feed.shape, dtype=feed.dtype, pin_memory=True)
        elif self._ran:
            self._marks[1].synchronize()  # the last call's copy still reads it
        return stored.copy_(feed)

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        execution, current = self._execution, cuda.current_stream(self.device)
        execution.set_shapes({name: tuple(feed.shape) for name, feed in feeds.items()})
        execution.stream.wait_stream(current)
        before, copied, done = self._marks
        shapes = tuple(feed.shape for feed in feeds.values())
        with cuda.stream(execution.stream):
            before.record(execution.stream)
            for name, feed in feeds.items():
                execution.buffers[name].copy_(feed, non_blocking=True)
            graph = self._graph() if self._graphs and shapes == self._last else None
            copied.record(execution.stream)
            if graph is None:
                execution.run()
            else:
                graph.replay()
            done.record(execution.stream)
        current.wait_stream(execution.stream)
        self._last, self._ran = shapes, True
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
        self._pinned.clear()
