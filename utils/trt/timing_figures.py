"""What was timed, in figures: milliseconds of each part of a query, and queries per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class Figures:
    """Queries per second, and milliseconds of each of PARTS; a query is one batch."""

    qps: float
    parts: Mapping[str, Summary]

    def to_dict(self) -> dict[str, Any]:
        """Queries per second and the summary of each part, as JSON holds them."""
        return {"qps": self.qps, **{name: asdict(summary) for name, summary in self.parts.items()}}

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
