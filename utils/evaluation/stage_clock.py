"""Times of the stages of a batch, by marks that the device sets, so that no stage waits for the one before."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class StageClock:
    """Seconds of each stage, batch by batch.

        clock.start()
        inputs = preprocess(batch)
        clock.stop("preprocess")
        outputs = infer(inputs)
        clock.stop("inference")

    On a GPU the marks are CUDA events on torch's current stream, so that the CPU prepares the next stage while the GPU
    is still busy. They are read between two batches; a stage that has not ended by then is left out.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a clock of stages that `device` works on."""
        self._device = device
        self._marks: list[tuple[str, Any]] = []  # of the batch at work: its start, and the end of each stage
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def start(self) -> None:
        """Begin the first stage of a batch; waits for the end of the one before."""
        self._read()
        self._marks.append(("", self._now()))

    def stop(self, stage: str) -> None:
        """End a stage, and begin the next."""
        self._marks.append((stage, self._now()))

    def seconds(self) -> dict[str, list[float]]:
        """Seconds of each stage, one number for each batch; waits for the end of the last batch."""
        self._read()
        return dict(self._seconds)

    def clear(self) -> None:
        """Forget all batches; waits for the end of the last one."""
        self._read()
        self._seconds.clear()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        """Add the stages of the batch at work to the seconds."""
        if self._marks and self._device.type == "cuda":
            self._marks[-1][1].synchronize()
        for (_, begin), (stage, end) in pairwise(self._marks):
            self._seconds[stage].append(self._between(begin, end))
        self._marks.clear()

    def _between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks."""
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1000
