"""Times of engines as trtexec takes them: queries one after the other, with or without copies; engines in turns.

While one query runs the next is enqueued, so that the GPU is never idle, and the distance of two events is its time for
one query, without the time that the CPU needs to start it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, cuda

from utils.core.errors import InputError
from utils.trt.context import Execution

PARTS = ("latency", "enqueue", "h2d", "compute", "d2h")
TITLES = {"latency": "Latency", "enqueue": "Enqueue Time", "h2d": "H2D Latency", "compute": "GPU Compute Time",
          "d2h": "D2H Latency"}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Milliseconds of several runs."""

    min: float
    max: float
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Percentiles as trtexec takes them: a value that was measured, not one between two."""
        array = np.sort(np.asarray(values, dtype=np.float64))
        p90, p95, p99 = (float(np.percentile(array, q, method="inverted_cdf")) for q in (90, 95, 99))
        return cls(
            float(array[0]), float(array[-1]), float(array.mean()), float(np.median(array)), p90, p95, p99, array.size
        )

    def to_dict(self) -> dict[str, float]:
        """The fields by name, as JSON holds them."""
        return asdict(self)


@dataclass(frozen=True)
class TimingConfig:
    """What is timed, with trtexec's defaults.

    Attributes:
        warm_up: milliseconds before each round that do not count.
        duration: seconds for each engine, over all rounds.
        rounds: turns that the engines take.
        cuda_graph: replay a CUDA graph instead of enqueueing layer by layer.
        spin_wait: wait for the GPU without sleeping: shorter times that scatter less, and a busy core.
        transfers: copy inputs and outputs too.
        iterations: queries of each engine, over all rounds, at least.
    """

    warm_up: float = 200.0
    duration: float = 3.0
    rounds: int = 3
    cuda_graph: bool = False
    spin_wait: bool = False
    transfers: bool = True
    iterations: int = 10

    def __post_init__(self) -> None:
        if self.warm_up < 0 or self.duration < 0 or self.rounds < 1 or self.iterations < 1:
            raise InputError("--warmUp and --duration must not be negative, --iterations and --rounds must be positive")


@dataclass(frozen=True)
class Figures:
    """Queries per second, and milliseconds of each of PARTS; a query is one batch."""

    qps: float
    parts: Mapping[str, Summary]

    def to_dict(self) -> dict[str, Any]:
        """Queries per second and the summary of each part, as JSON holds them."""
        return {"qps": self.qps, **{name: summary.to_dict() for name, summary in self.parts.items()}}

    def lines(self) -> list[str]:
        """The summary as trtexec prints it."""
        lines = ["=== Performance summary ===", f"Throughput: {self.qps:.6g} qps"]
        for name in (name for name in PARTS if name in self.parts):
            one = self.parts[name]
            lines.append(
                f"{TITLES[name]}: min = {one.min:.6g} ms, max = {one.max:.6g} ms, mean = {one.mean:.6g} ms, median = "
                f"{one.median:.6g} ms, percentile(90%) = {one.p90:.6g} ms, percentile(95%) = {one.p95:.6g} ms, "
                f"percentile(99%) = {one.p99:.6g} ms"
            )
        return lines


@dataclass
class _Samples:
    marks: list[tuple[Any, ...]] = field(default_factory=list)  # four events for each query
    enqueue: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self, transfers: bool) -> Figures:
        spans = {"latency": (0, 3), "compute": (1, 2), **({"h2d": (0, 1), "d2h": (2, 3)} if transfers else {})}
        parts = {
            name: Summary.of([marks[start].elapsed_time(marks[end]) for marks in self.marks])
            for name, (start, end) in spans.items()
        }
        parts["enqueue"] = Summary.of(self.enqueue)
        return Figures(len(self.marks) / self.seconds, parts)


def measure(
    executions: Mapping[str, Execution], config: TimingConfig, on_round: Callable[[], object] = lambda: None
) -> dict[str, Figures]:
    """Time several engines in turns, so that the ratio of their times can be trusted when clocks drift.

    Args:
        on_round: called after each engine in each round, for a progress bar.
    """
    samples = {name: _Samples() for name in executions}
    hosts = {name: _Host(execution) for name, execution in executions.items()}
    for name in turns(executions, config.rounds):
        _run(executions[name], hosts[name], config, config.warm_up / 1000, 1, _Samples())
        each = -(-config.iterations // config.rounds)
        _run(executions[name], hosts[name], config, config.duration / config.rounds, each, samples[name])
        on_round()
    return {name: one.figures(config.transfers) for name, one in samples.items()}


class _Host:
    """Inputs and outputs in pinned memory, channel after channel: where an engine wants them packed, the GPU packs."""

    def __init__(self, execution: Execution) -> None:
        pinned = execution.device.type == "cuda"
        self.memory: dict[str, Tensor] = {
            name: torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=pinned)
            for name, buffer in execution.buffers.items()
        }
        for spec in execution.inputs:
            memory = self.memory[spec.name]
            memory.uniform_() if memory.is_floating_point() else memory.random_()
            execution.buffers[spec.name].copy_(self.memory[spec.name])


def _run(
    execution: Execution, host: _Host, config: TimingConfig, seconds: float, iterations: int, into: _Samples
) -> None:
    """Run queries for so long, and at least so many, each enqueued while the one before it runs."""
    graph = execution.graph() if config.cuda_graph else None
    stream = execution.stream
    began, previous, count = time.perf_counter(), None, 0
    with cuda.stream(stream):
        while count < iterations or time.perf_counter() - began < seconds:
            count += 1
            marks = tuple(cuda.Event(enable_timing=True, blocking=not config.spin_wait) for _ in range(4))
            marks[0].record(stream)
            if config.transfers:
                for spec in execution.inputs:
                    execution.buffers[spec.name].copy_(host.memory[spec.name], non_blocking=True)
            marks[1].record(stream)
            before = time.perf_counter()
            if graph is None:
                execution.run()
            else:
                graph.replay()
            into.enqueue.append((time.perf_counter() - before) * 1000)
            marks[2].record(stream)
            if config.transfers:
                for spec in execution.outputs:
                    host.memory[spec.name].copy_(execution.buffers[spec.name], non_blocking=True)
            marks[3].record(stream)
            into.marks.append(marks)
            if previous is not None:
                previous.synchronize()
            previous = marks[3]
    stream.synchronize()
    into.seconds += time.perf_counter() - began


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """The order in which engines are measured: all of them in each round, every other round backwards."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()
