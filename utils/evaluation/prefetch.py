"""The next batch on its way: copied to the GPU and, with `--overlap`, through the network while this one is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from utils.evaluation.batch import Batch
from utils.evaluation.detector import Detector, Found

T = TypeVar("T")


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """The same items, each given once the next one has been made, so that what it starts goes on meanwhile."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def on_device(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The loader's batches, on a GPU with the images of the next one being copied there while this one is used."""
    if device.type != "cuda":
        yield from loader
        return
    stream = torch.cuda.Stream(device)

    def copied(batch: Batch) -> tuple[Batch, Any]:
        with torch.cuda.stream(stream):
            return replace(batch, images=batch.images.to(device, non_blocking=True)), stream.record_event()

    for batch, event in prefetch(map(copied, loader)):
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        batch.images.record_stream(current)  # its memory is kept until that stream has used it
        yield batch


@dataclass(frozen=True)
class Started:
    """What a network computes for a batch, on a GPU perhaps still.

    Attributes:
        raw: its outputs, as `Detector` names them.
        shape: of the images, `[B, 3, H, W]`.
        marks: events on the GPU: before it, when images are ready, after it.
    """

    raw: dict[str, Tensor]
    shape: Sequence[int]
    marks: Sequence[Any] = ()


class OverlappingDetector(Detector):
    """A detector whose network can be started on a batch before NMS of the one before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As a `Detector`."""
        super().__init__(*args, **options)
        self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def start(self, images: Tensor) -> Started:
        """Let the network compute a batch; on a GPU this does not wait, and runs beside torch's current stream.

        `finish` gives what is detected; a further batch can be started before.

        Args:
            images: as those of a call.
        """
        self._counts.append(len(images))
        if self._beside is None:
            clock = self._now()
            inputs = self._prepare(images)
            clock = self._lap("preprocess", clock)
            raw = self._infer(inputs, kept=True)
            self._lap("inference", clock)
            return Started(raw, images.shape)
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        if images.is_cuda:
            images.record_stream(self._beside)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        with torch.cuda.stream(self._beside):
            marks[0].record()
            inputs = self._prepare(images)
            marks[1].record()
            raw = self._infer(inputs, kept=True)
            marks[2].record()
        return Started(raw, images.shape, marks)

    def finish(self, started: Started, shapes: Sequence[Any]) -> Found:
        """What is detected in a batch that was started; see a call."""
        if started.marks:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(started.marks[-1])
            for tensor in started.raw.values():
                tensor.record_stream(current)
        clock = self._now()
        for part, (before, after) in zip(("preprocess", "inference"), pairwise(started.marks), strict=False):
            self._times[part].append(before.elapsed_time(after) / 1000)
        found = self._found(started.raw, started.shape, shapes)
        self._lap("nms", clock)
        return found


def awaited(batches: Iterable[Batch], seconds: dict[str, float]) -> Iterator[Batch]:
    """The batches, with the time that is spent waiting for them added to the seconds of `images`."""
    clock = time.perf_counter()
    for batch in batches:
        seconds["images"] += time.perf_counter() - clock
        yield batch
        clock = time.perf_counter()


def detections(batches: Iterable[Batch], detector: Detector) -> Iterator[tuple[Batch, Found | None]]:
    """Batches in their order with what is detected in them; None in one without images.

    The network of an `OverlappingDetector` is started on each batch before NMS of the one before it.
    """
    if not isinstance(detector, OverlappingDetector):
        for batch in batches:
            yield batch, detector(batch.images, batch.shapes) if len(batch) else None
        return
    for batch, started in prefetch((one, detector.start(one.images) if len(one) else None) for one in batches):
        yield batch, None if started is None else detector.finish(started, batch.shapes)
