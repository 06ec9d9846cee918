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
    """Losses and gradients of batches, from the fourth batch of a shape on by replaying the third's kernels.

    Batches of another shape, such as the last one of an epoch, are computed eagerly. Where recording fails, all are.

    Args:
        compute: float images `[B, 3, H, W]` → detached loss; leaves gradients in the parameters. It must neither look
            at values on the CPU nor depend on anything but its argument and tensors that stay where they are.
        parameters: those that get gradients.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self._compute = compute
        self._parameters = parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side: torch.cuda.Stream | None = None
        self._warm_up_steps = WARM_UP  # those still to come; -1 once recording has failed
        self._images: Tensor | None = None
        self._loss: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    def __call__(self, images: Tensor) -> Tensor:
        """Loss of a batch, float32 scalar; the parameters have its gradients, and no others."""
        if self._images is None:
            self._images = torch.empty_like(images)
        if images.shape != self._images.shape:
            return self._eager(images)
        if self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            return self._eager(images)
        if self._warm_up_steps < 0 or not (self._graph or self._record()):
            return self._eager(images)
        assert self._graph is not None
        assert self._loss is not None
        self._images.copy_(images)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()

    def _eager(self, images: Tensor) -> Tensor:
        """Compute a step from Python, on a stream of its own, as recording needs it of the steps before."""
        self._forget_gradients()
        current = torch.cuda.current_stream(images.device)
        self._side = self._side or torch.cuda.Stream(images.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            loss = self._compute(images)
        current.wait_stream(self._side)
        return loss

    def _record(self) -> bool:
        """Record the kernels of a step; False if that fails."""
        self._forget_gradients()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph's memory is its own
        graph = torch.cuda.CUDAGraph()
        try:
            # a loader's thread pins memory meanwhile, which is an error in the default mode
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._loss = self._compute(self._images)
        except RuntimeError as error:
            logger.warning("QAT goes on without a CUDA graph: %s", str(error).splitlines()[0])
            self._warm_up_steps = -1
            return False
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self._parameters]
        return True

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
