"""Arithmetic of `qat.py sensitive --engine`: what a difference of engine times means, and which point to choose.

An engine is timed in turns with two builds of the all-INT8 engine, so that the difference within a round holds when
clocks drift. The difference of the two builds is the control: it shows what building the same network again changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from utils.jobs.sensitivity import selection

Kind = Literal["INT8", "FP16", "mixed"]
Profile = Sequence[tuple[str, float]]  # names of layers, and milliseconds
SMALLEST_SHARE = 1e-3  # of the INT8 engine's time: a unit that costs less is not chosen for being free


@dataclass(frozen=True)
class Times:
    """Milliseconds of a batch, the median of each round, of engines that took turns.

    Attributes:
        ms: of the engine in question.
        int8, again: of the all-INT8 engine, and of its control.
        seconds: that building the engine took.
    """

    ms: tuple[float, ...]
    int8: tuple[float, ...]
    again: tuple[float, ...]
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Times:
        """The inverse of `dataclasses.asdict`, also of what JSON made of it."""
        ms, int8, again = (tuple(map(float, entries[name])) for name in ("ms", "int8", "again"))
        return cls(ms, int8, again, float(entries["seconds"]))

    @property
    def cost(self) -> float:
        """Milliseconds more than the INT8 engine takes: the median over rounds."""
        return median(self._over(self.ms))

    @property
    def spread(self) -> float:
        """Half the distance between the smallest and the largest of the rounds' differences, milliseconds."""
        return (max(self._over(self.ms)) - min(self._over(self.ms))) / 2

    @property
    def control(self) -> float:
        """Milliseconds by which the control differs from the INT8 engine, without sign."""
        return abs(median(self._over(self.again)))

    def _over(self, other: Sequence[float]) -> list[float]:
        return [one - int8 for one, int8 in zip(other, self.int8, strict=True)]


@dataclass(frozen=True)
class Point:
    """A choice of what runs in float: a point of the curve of AP against milliseconds.

    Attributes:
        units: names of what is in float; none in the all-INT8 point, and in FP16's.
        cost: milliseconds more than the INT8 engine takes; None where that is neither measured nor estimated.
        spread: of the cost over rounds; None where it is estimated.
        estimate: the cost as layers say that were measured one by one, without conversions between the types.
        ap: None where it was not measured.
        ap_error: standard error of its difference to INT8's.
        engine: name of the file.
    """

    units: tuple[str, ...]
    kind: Kind = "mixed"
    cost: float | None = None
    spread: float | None = None
    estimate: float | None = None
    ap: float | None = None
    ap_error: float | None = None
    engine: str = ""

    @property
    def measured(self) -> bool:
        """Whether an engine was timed; else the cost is an estimate."""
        return self.spread is not None

    @property
    def name(self) -> str:
        """For the user: what is in float."""
        return {"INT8": "nothing (INT8)", "FP16": "everything (FP16)"}.get(self.kind, ", ".join(self.units))


def noise_of(times: Iterable[Times]) -> float:
    """The smallest difference of two engines that means something, milliseconds: the control's largest."""
    return max((one.control for one in times), default=0.0)


def differs(one: Point, other: Point, noise: float) -> bool:
    """Whether two measured engines take different times: by more than the control, and than their own scatter."""
    return abs((one.cost or 0.0) - (other.cost or 0.0)) > max(noise, one.spread or 0.0, other.spread or 0.0)


class Estimates:
    """What units cost in float, from the layers of the INT8 and the FP16 engine, each measured by itself.

    A unit costs what its layers take in the FP16 engine, less what they take in the INT8 engine. Layers are measured
    without a CUDA graph, so that only their shares are used, of the time that the engine takes as a whole. What
    converting between the types costs at the unit's borders is not in it.
    """

    def __init__(self, int8: Profile, fp16: Profile, int8_ms: float, fp16_ms: float) -> None:
        self._engines = ((fp16, fp16_ms), (int8, -int8_ms))

    def costs(self, units: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Milliseconds by unit; `units` have the paths of their modules."""
        found = dict.fromkeys(units, 0.0)
        for profile, ms in self._engines:
            for name, share in selection.time_shares(units, profile).items():
                found[name] += share * ms
        return found


def order_of(gains: Mapping[str, float], costs: Mapping[str, float], least: float, smallest: float) -> list[str]:
    """Units that gain something, by what they gain per cost.

    Args:
        gains: of AP, or of a score, when the unit alone is in float.
        costs: in any unit of measure.
        least: a unit that gains no more, or nothing, is left out.
        smallest: costs below it count as this.
    """
    worth = [name for name, gain in gains.items() if gain > max(least, 0)]
    return sorted(worth, key=lambda name: gains[name] / max(costs[name], smallest), reverse=True)


def choose(points: Sequence[Point], reference: float, target_drop: float, noise: float) -> tuple[Point, str]:
    """The point for the recipe, of those that were measured, and why, in words.

    It is the fastest within the AP that may be lost, and of those that are as fast, as far as can be told, the one
    with the highest AP. FP16 is not among them: it needs no recipe.

    Args:
        points: with the INT8 one.
        reference: AP of the float network.
        target_drop: AP that may be lost.
    """
    known = [one for one in points if one.measured and one.ap is not None and one.kind != "FP16"]
    within = [one for one in known if _ap(one) >= reference - target_drop]
    if within:
        fastest = min(within, key=_cost)
        alike = [one for one in within if not differs(one, fastest, noise)]
        chosen = max(alike, key=lambda one: (_ap(one), -_cost(one)))
        why = f"it is the fastest engine that loses at most {target_drop:g} AP"
        if chosen is not fastest:
            why = f"no engine that loses at most {target_drop:g} AP is faster, and it has the most AP of the fastest"
        return chosen, why
    fp16 = next((one for one in points if one.kind == "FP16" and one.measured), None)
    useful = [one for one in known if one.kind == "INT8" or fp16 is None or _cost(one) < _cost(fp16)]
    chosen = max(useful, key=lambda one: (_ap(one), -_cost(one)))
    than = "" if fp16 is None else " of those that are faster than FP16"
    return chosen, f"no engine measured loses at most {target_drop:g} AP, and it has the most AP{than}"


def _ap(point: Point) -> float:
    return point.ap or 0.0


def _cost(point: Point) -> float:
    return point.cost or 0.0
