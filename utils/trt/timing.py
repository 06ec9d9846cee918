"""Times of engines on a GPU that can be compared: same process, alternating, CUDA graphs, medians.

Replays are enqueued one behind the other with an event between them, so that the GPU is never idle and the distance of
two events is its time for one run, without the time that the CPU needs to start one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from torch import cuda

from utils.trt.context import Execution

WARM_UP = 10  # runs before each round that do not count


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
        return asdict(self)


def alternate(
    executions: Mapping[str, Execution],
    iterations: int = 300,
    rounds: int = 5,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of single runs of several engines, measured in turns, so that drifting clocks meet all alike.

    Args:
        iterations: runs of each engine, over all rounds, at least.
        on_round: called after each engine in each round, for a progress bar.
    """
    times: dict[str, list[float]] = {name: [] for name in executions}
    each = -(-iterations // rounds)
    for name in turns(executions, rounds):
        times[name] += measure(executions[name], each)
        on_round()
    return times


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """The order in which engines are measured: all of them in each round, every other round backwards."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()


def measure(execution: Execution, iterations: int) -> list[float]:
    """Milliseconds of runs in a row, as a CUDA graph on the present shapes."""
    graph, stream = execution.graph(), execution.stream
    events = [cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    with cuda.stream(stream):
        for _ in range(WARM_UP):
            graph.replay()
        events[0].record(stream)
        for event in events[1:]:
            graph.replay()
            event.record(stream)
    stream.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
