"""Times of engines as trtexec takes them, with or without copies; interleaved.

While one query runs the next is enqueued, so that the GPU is never idle, and the distance of two events is its time for
one query, without the time that the CPU needs to start it. Inputs and outputs are copied from and to pinned memory, on
streams of their own, while other queries run ("Command-Line Programs", TensorRT documentation: trtexec).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, cuda

from utils.trt.runner import Execution

Name = TypeVar("Name")


@dataclass(frozen=True)
class TimingConfig:
    """Settings of a timing, with trtexec's defaults."""

    warm_up: float = 200.0  # milliseconds before each round that do not count
    duration: float = 3.0  # seconds for each engine, over all rounds
    rounds: int = 3  # how often each network gets its turn
    cuda_graph: bool = False  # replay a CUDA graph instead of enqueueing layer by layer
    spin_wait: bool = False  # wait for the GPU without sleeping: shorter times that scatter less, and a busy core
    transfers: bool = True  # copy inputs and outputs too, while other queries run
    iterations: int = 10  # queries of each engine, over all rounds, at least


def time_interleaved(
    networks: Mapping[str, Execution | Callable[[], object]], config: TimingConfig
) -> dict[str, Figures]:
    """Time networks, interleaved, so that ratios can be trusted when clocks drift.

    Each is an engine, or a call that runs a query on a CPU.
    """
    starts: dict[str, Callable[[], _Query | _HostQuery]] = {}
    for name, network in networks.items():
        starts[name] = partial(_HostQuery, network) if callable(network) else _Lane(network, config).start
    queries: dict[str, list[_Query | _HostQuery]] = {name: [] for name in networks}
    seconds = dict.fromkeys(networks, 0.0)
    iterations = -(-config.iterations // config.rounds)  # of each round, rounded up
    for name in interleaved(networks, config.rounds):
        _run(starts[name], config.warm_up / 1000, 1)
        began = time.perf_counter()
        queries[name] += _run(starts[name], config.duration / config.rounds, iterations)
        seconds[name] += time.perf_counter() - began
    figures = {}
    for name in networks:
        milliseconds = [query.milliseconds() for query in queries[name]]
        figures[name] = Figures.of(milliseconds, seconds[name])
    return figures


def _run(start: Callable[[], _Query | _HostQuery], seconds: float, iterations: int) -> list[_Query | _HostQuery]:
    """Run queries for so long, and at least so many; the next one is enqueued while one runs."""
    began = time.perf_counter()
    queries = [start()]
    while len(queries) < iterations or time.perf_counter() - began < seconds:
        queries.append(start())
        queries[-2].wait()
    queries[-1].wait()
    return queries


def random_input(shape: Sequence[int], dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
    """Random values of a type, in 0..1 or 0..255: a GPU computes zeros with less power, and so at a higher clock."""
    values = torch.zeros(*shape, dtype=dtype, pin_memory=pin_memory)
    if values.is_floating_point():
        values.uniform_()
    elif dtype == torch.uint8:
        values.random_(0, 256)
    return values


class _Query:
    """The events of one query: before and after copying its inputs, its run, and copying its outputs."""

    enqueue: float  # milliseconds that the CPU needed to start the run

    def __init__(self, config: TimingConfig) -> None:
        parts = ("h2d", "compute", "d2h") if config.transfers else ("compute",)
        self._events = {}  # of each part, its beginning and end
        for part in parts:
            begin = cuda.Event(enable_timing=True, blocking=not config.spin_wait)
            end = cuda.Event(enable_timing=True, blocking=not config.spin_wait)
            self._events[part] = (begin, end)

    @contextmanager
    def part(self, name: str, stream: Any, after: str = "") -> Iterator[None]:
        """Context in which a part is enqueued on this stream; it begins when the part `after` is done."""
        if after in self._events:
            stream.wait_event(self._events[after][1])
        with cuda.stream(stream):
            self._events[name][0].record(stream)
            yield
            self._events[name][1].record(stream)

    def wait(self) -> None:
        """Wait until it is done."""
        _, end = list(self._events.values())[-1]
        end.synchronize()

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds of each part; latency is trtexec's: all of them together, without the waits between."""
        parts = {name: before.elapsed_time(after) for name, (before, after) in self._events.items()}
        return {**parts, "latency": sum(parts.values()), "enqueue": self.enqueue}


class _HostQuery:
    """A query on a CPU, which is done when it returns."""

    def __init__(self, run: Callable[[], object]) -> None:
        before = time.perf_counter()
        run()
        self._ms = (time.perf_counter() - before) * 1000

    def wait(self) -> None:
        """Do nothing: the query is done."""

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds of the whole query."""
        return {"latency": self._ms}


class _Lane:
    """An engine with its pinned memory and its streams for copies.

    Every copy to a buffer has the same content. So a copy for the next query, while this one still reads the buffer,
    changes nothing, and takes as long as a copy to a second buffer.
    """

    def __init__(self, execution: Execution, config: TimingConfig) -> None:
        self.execution = execution
        self.config = config
        pinned = execution.device.type == "cuda" and config.transfers
        self.memory: dict[str, Tensor] = {}
        for spec in execution.inputs:
            buffer = execution.buffers[spec.name]
            self.memory[spec.name] = random_input(buffer.shape, buffer.dtype, pinned)
            buffer.copy_(self.memory[spec.name])
        if config.transfers:
            for spec in execution.outputs:
                buffer = execution.buffers[spec.name]
                self.memory[spec.name] = torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=pinned)
        self._copies = (cuda.Stream(execution.device), cuda.Stream(execution.device))
        graph = execution.graph() if config.cuda_graph else None
        self._start_run = graph.replay if graph else execution.run

    def start(self) -> _Query:
        """Enqueue a query."""
        execution = self.execution
        query = _Query(self.config)
        to_device, to_host = self._copies
        if self.config.transfers:
            with query.part("h2d", to_device):
                for spec in execution.inputs:
                    execution.buffers[spec.name].copy_(self.memory[spec.name], non_blocking=True)
        with query.part("compute", execution.stream, after="h2d"):
            before = time.perf_counter()
            self._start_run()
            query.enqueue = (time.perf_counter() - before) * 1000
        if self.config.transfers:
            with query.part("d2h", to_host, after="compute"):
                for spec in execution.outputs:
                    self.memory[spec.name].copy_(execution.buffers[spec.name], non_blocking=True)
        return query


def interleaved(names: Iterable[Name], rounds: int) -> Iterator[Name]:
    """The order in which networks are measured: all of them in each round, every other round backwards."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()


@dataclass(frozen=True)
class TimeStatistics:
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
    def of(cls, values: Sequence[float]) -> TimeStatistics:
        """Statistics of milliseconds; percentiles are measured values, as trtexec's, not interpolated."""
        array = np.asarray(values, dtype=np.float64)
        p90, p95, p99 = np.percentile(array, (90, 95, 99), method="inverted_cdf").tolist()
        low = float(array.min())
        high = float(array.max())
        return cls(low, high, float(array.mean()), float(np.median(array)), p90, p95, p99, array.size)


@dataclass(frozen=True)
class Figures:
    """Queries per second, and milliseconds of the parts: latency, enqueue, h2d, compute, d2h; a query is one batch."""

    qps: float
    parts: Mapping[str, TimeStatistics]

    @classmethod
    def of(cls, queries: Sequence[Mapping[str, float]], seconds: float) -> Figures:
        """Figures from the milliseconds of each query by part, and from the seconds of all queries."""
        parts = {name: TimeStatistics.of([query[name] for query in queries]) for name in queries[0]}
        return cls(len(queries) / seconds, parts)

    def to_dict(self) -> dict[str, Any]:
        """Queries per second and the summary of each part, as JSON holds them."""
        parts = {name: asdict(summary) for name, summary in self.parts.items()}
        return {"qps": self.qps, **parts}

    def __str__(self) -> str:
        latency = self.parts["latency"]
        return f"{self.qps:,.1f} queries/s, latency {latency.median:.3f} ms (99 %: {latency.p99:.3f} ms)"
