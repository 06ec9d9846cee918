"""A training step's forward and backward as one CUDA graph.

A step launches thousands of kernels from Python, which takes longer than many of them run: the GPU waits. Recorded once
and replayed, they follow each other without Python (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

WARM_UP = 3  # steps before recording, in which libraries choose algorithms and kernels are compiled


class StepGraph:
    """Losses and gradients of batches: the first three run eagerly, the fourth is recorded, and then all are replayed.

    Batches of another shape than the first, such as the last one of an epoch, run eagerly. If recording fails, every
    batch does.

    Args:
        compute: float images `[B, 3, H, W]` → detached losses; leaves gradients in the parameters. It must neither look
            at values on the CPU nor depend on anything but its argument and tensors that stay where they are.
        parameters: those that get gradients.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._compute = compute
        self._parameters = parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side: torch.cuda.Stream | None = None
        self._warm_up_steps = WARM_UP  # those still to come
        self._has_failed = False  # recording
        self._images: Tensor | None = None
        self._losses: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Losses of a batch, as `compute` returns them; the parameters have its gradients, and no others."""
        if self._images is None:
            self._images = torch.empty_like(images)
        if images.shape != self._images.shape:
            return self._eager(images)
        if self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            return self._eager(images)
        if self._graph is None and not self._has_failed:
            self._record(self._images)
        if self._graph is None:
            return self._eager(images)
        assert self._losses is not None
        self._images.copy_(images)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._losses.clone()

    def _eager(self, images: Tensor) -> Tensor:
        """Compute a step from Python, on a side stream: recording requires that the warm-up ran on one."""
        self._forget_gradients()
        current = torch.cuda.current_stream(images.device)
        if self._side is None:
            self._side = torch.cuda.Stream(images.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            losses = self._compute(images)
        current.wait_stream(self._side)
        return losses

    def _record(self, images: Tensor) -> None:
        """Record the kernels of a step on `images`, on their device; note if that fails."""
        self._forget_gradients()
        device = torch.cuda.device(images.device)
        with device:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the graph's memory is its own
            graph = torch.cuda.CUDAGraph()
        try:
            # a loader's thread pins memory meanwhile, which is an error in the default mode
            with device, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._losses = self._compute(images)
        except RuntimeError as error:
            logger.warning("QAT goes on without a CUDA graph: %s", str(error).splitlines()[0])
            self._has_failed = True
            return
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
