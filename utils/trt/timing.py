"""Times of engines as trtexec takes them, with or without copies; interleaved.

While one query runs the next is enqueued, so that the GPU is never idle, and the distance of two events is its time for
one query, without the time that the CPU needs to start it. Inputs and outputs are copied from and to pinned memory, on
streams of their own, while other queries run ("Command-Line Programs", TensorRT documentation: trtexec).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, cuda

from utils.core.errors import QatError
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api


@dataclass(frozen=True)
class TimingConfig:
    """What is timed, with trtexec's defaults.

    Attributes:
        warm_up: milliseconds before each round that do not count.
        duration: seconds for each engine, over all rounds.
        rounds: how often each network gets its turn.
        cuda_graph: replay a CUDA graph instead of enqueueing layer by layer.
        spin_wait: wait for the GPU without sleeping: shorter times that scatter less, and a busy core.
        transfers: copy inputs and outputs too, while other queries run.
        iterations: queries of each engine, over all rounds, at least.
    """

    warm_up: float = 200.0
    duration: float = 3.0
    rounds: int = 3
    cuda_graph: bool = False
    spin_wait: bool = False
    transfers: bool = True
    iterations: int = 10


TUNING_ROUNDS = 5
TUNING_ROUND = TimingConfig(warm_up=100, duration=0.2, rounds=1, cuda_graph=True, transfers=False, iterations=20)


@dataclass
class _Samples:
    queries: list[_Query] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)  # of runs on a CPU
    enqueue: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def figures(self) -> Figures:
        if self.milliseconds:
            return Figures(len(self.milliseconds) / self.seconds, {"latency": TimeStatistics.of(self.milliseconds)})
        spans = [query.milliseconds() for query in self.queries]
        parts = {name: TimeStatistics.of([span[name] for span in spans]) for name in spans[0]}
        parts["latency"] = TimeStatistics.of([sum(span.values()) for span in spans])  # trtexec's: without waits between
        parts["enqueue"] = TimeStatistics.of(self.enqueue)
        return Figures(len(self.queries) / self.seconds, parts)


def time_interleaved(
    networks: Mapping[str, Execution | Callable[[], object]], config: TimingConfig
) -> dict[str, Figures]:
    """Time several networks interleaved, so that the ratio of their times can be trusted when clocks drift.

    Args:
        networks: by name an engine, or on a CPU what runs a query.
    """
    lanes = {name: _HostLane(one) if callable(one) else _Lane(one, config) for name, one in networks.items()}
    samples = {name: _Samples() for name in networks}
    for name in interleaved(networks, config.rounds):
        _run(lanes[name], config.warm_up / 1000, 1, _Samples())
        each = -(-config.iterations // config.rounds)
        _run(lanes[name], config.duration / config.rounds, each, samples[name])
    return {name: sample.figures() for name, sample in samples.items()}


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

    def __init__(self, config: TimingConfig) -> None:
        parts = ("h2d", "compute", "d2h") if config.transfers else ("compute",)
        self._events = {part: [cuda.Event(enable_timing=True, blocking=not config.spin_wait) for _ in range(2)]
                        for part in parts}  # fmt: skip

    @contextmanager
    def part(self, name: str, stream: Any, after: str = "") -> Iterator[None]:
        """What is enqueued within it is that part, on this stream, and begins when the part `after` is done."""
        if after in self._events:
            stream.wait_event(self._events[after][1])
        with cuda.stream(stream):
            self._events[name][0].record(stream)
            yield
            self._events[name][1].record(stream)

    def wait(self) -> None:
        """Wait until it is done."""
        list(self._events.values())[-1][1].synchronize()

    def milliseconds(self) -> dict[str, float]:
        """Of each part."""
        return {name: before.elapsed_time(after) for name, (before, after) in self._events.items()}


class _Lane:
    """An engine with its pinned memory, its streams for copies, and the queries that are on their way.

    What is copied to a buffer is the same each time. So a copy for the next query, while this one still reads the
    buffer, changes nothing, and takes as long as one to a second buffer.
    """

    def __init__(self, execution: Execution, config: TimingConfig) -> None:
        self.execution, self.config = execution, config
        pinned = execution.device.type == "cuda" and config.transfers
        self.memory: dict[str, Tensor] = {}
        for spec in execution.inputs:
            buffer = execution.buffers[spec.name]
            self.memory[spec.name] = random_input(buffer.shape, buffer.dtype, pinned)
            buffer.copy_(self.memory[spec.name])
        for spec in execution.outputs if config.transfers else ():
            buffer = execution.buffers[spec.name]
            self.memory[spec.name] = torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=pinned)
        self._copies = (cuda.Stream(execution.device), cuda.Stream(execution.device))
        self._graph = execution.graph() if config.cuda_graph else None
        self._waiting: deque[_Query] = deque()

    def enqueue(self, into: _Samples) -> None:
        """Enqueue a query."""
        execution, query, (to_device, to_host) = self.execution, _Query(self.config), self._copies
        if self.config.transfers:
            with query.part("h2d", to_device):
                for spec in execution.inputs:
                    execution.buffers[spec.name].copy_(self.memory[spec.name], non_blocking=True)
        with query.part("compute", execution.stream, after="h2d"):
            before = time.perf_counter()
            if self._graph is None:
                execution.run()
            else:
                self._graph.replay()
            into.enqueue.append((time.perf_counter() - before) * 1000)
        if self.config.transfers:
            with query.part("d2h", to_host, after="compute"):
                for spec in execution.outputs:
                    self.memory[spec.name].copy_(execution.buffers[spec.name], non_blocking=True)
        into.queries.append(query)
        self._waiting.append(query)

    def wait(self, remaining: int) -> None:
        """Wait until so many queries are on their way."""
        while len(self._waiting) > remaining:
            self._waiting.popleft().wait()


class _HostLane:
    """A network on a CPU: a query is done when it returns."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run_once = run

    def enqueue(self, into: _Samples) -> None:
        """Run a query."""
        before = time.perf_counter()
        self._run_once()
        into.milliseconds.append((time.perf_counter() - before) * 1000)

    def wait(self, remaining: int) -> None:
        """Nothing is on its way."""


def _run(lane: _Lane | _HostLane, seconds: float, iterations: int, into: _Samples) -> None:
    """Run queries for so long, and at least so many; the next one is enqueued while one runs."""
    began, count = time.perf_counter(), 0
    while count < iterations or time.perf_counter() - began < seconds:
        lane.enqueue(into)
        count += 1
        lane.wait(1)
    lane.wait(0)
    into.seconds += time.perf_counter() - began


def interleaved(names: Iterable[str], rounds: int) -> Iterator[str]:
    """The order in which networks are measured: all of them in each round, every other round backwards."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()


def time_engines(engines: Mapping[str, Path], api: Api, device: torch.device) -> dict[str, tuple[float, ...] | str]:
    """Time engines interleaved, in `TUNING_ROUNDS` rounds, each at its profile's opt shape.

    Returns:
        By name the median milliseconds of a run in each round, or the reason why an engine could not be timed.
    """
    reasons: dict[str, str] = {}
    medians: dict[str, list[float]] = {}
    with ExitStack() as stack:
        executions: dict[str, Execution] = {}
        for name, path in engines.items():
            try:
                execution = Execution(path, api, device)
                stack.callback(execution.close)
                execution.set_shapes({spec.name: execution.profiles[spec.name][1] for spec in execution.inputs})
                execution.graph()
                executions[name] = execution
            except (QatError, RuntimeError) as error:  # torch's, when memory is short or nothing can be captured
                reasons[name] = " ".join(str(error).split())[:200]
        for name in interleaved(executions, TUNING_ROUNDS):
            figures = time_interleaved({name: executions[name]}, TUNING_ROUND)
            medians.setdefault(name, []).append(figures[name].parts["compute"].median)
    torch.cuda.empty_cache()  # the next build wants the memory
    return {**reasons, **{name: tuple(values) for name, values in medians.items()}}


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
        """Percentiles as trtexec takes them: a value that was measured, not one between two."""
        array = np.sort(np.asarray(values, dtype=np.float64))
        p90, p95, p99 = (float(np.percentile(array, q, method="inverted_cdf")) for q in (90, 95, 99))
        return cls(
            float(array[0]), float(array[-1]), float(array.mean()), float(np.median(array)), p90, p95, p99, array.size
        )


@dataclass(frozen=True)
class Figures:
    """Queries per second, and milliseconds of the parts: latency, enqueue, h2d, compute, d2h; a query is one batch."""

    qps: float
    parts: Mapping[str, TimeStatistics]

    def to_dict(self) -> dict[str, Any]:
        """Queries per second and the summary of each part, as JSON holds them."""
        return {"qps": self.qps, **{name: asdict(summary) for name, summary in self.parts.items()}}

    def __str__(self) -> str:
        latency = self.parts["latency"]
        return f"{self.qps:,.1f} queries/s, latency {latency.median:.3f} ms (99 %: {latency.p99:.3f} ms)"
