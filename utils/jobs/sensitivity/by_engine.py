"""The last step of `qat.py sensitive --engine`: what the search has found, judged by engines of it.

Candidates are built and timed one after the other, the most telling first, until all are known or the time is up: the
all-INT8 engine and its control, FP16, what the search chose, units added in the order of AP gained per millisecond,
units by themselves, and last the units that engines have shown to be no faster in INT8. AP is that of the networks in
PyTorch, on the same images and with the same ranges as everywhere in the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from models.quantize.partial_forward import State
from models.quantize.recipe import Recipe
from utils.core.resampled import Resampled, difference_error
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity import engine_points, selection
from utils.jobs.sensitivity.engine_points import Estimates, Point
from utils.jobs.sensitivity.engines import AGAIN, FP16, INT8, Bench
from utils.jobs.sensitivity.search import Search

logger = logging.getLogger(__name__)

LONGEST = 8  # units that are added one after the other, at most
Names = tuple[str, ...]
Measure = Callable[[Mapping[str, State]], tuple[Mapping[str, float], Mapping[str, Resampled]]]


@dataclass(frozen=True)
class Curve:
    """AP against milliseconds.

    Attributes:
        points: INT8, FP16, then the others by their cost; those without one last.
        chosen: one of them.
        why: it was chosen, in words.
        ms: of the all-INT8 engine, for a batch.
        noise: a smaller difference of two engines means nothing, milliseconds.
        measured_on: TensorRT, GPU, batch.
        notes: sentences for the user.
        no_control: why the noise is that of the INT8 engine timed twice, not of two builds of it; '' if it is not.
    """

    points: tuple[Point, ...]
    chosen: Point
    why: str
    ms: float
    noise: float
    measured_on: str
    notes: tuple[str, ...] = field(default=())
    no_control: str = ""


class EngineJudge:
    """The step: candidates → times and AP → the curve."""

    def __init__(
        self, options: SensitiveOptions, search: Search, bench: Bench, recipe_with: Callable[[Sequence[str]], Recipe]
    ) -> None:
        """Prepare the step; nothing is built yet.

        Args:
            search: what was found before, of which this is the judge.
            recipe_with: patterns → the run's recipe with these in float as well.
        """
        self._options, self._search, self._bench, self._recipe_with = options, search, bench, recipe_with
        self._layers: Estimates | None = None
        self._estimates: dict[str, float] = {}
        self._ap: dict[str, float] = {}
        self._resampled: dict[str, Resampled] = {}

    def build(self, chosen: Names) -> None:
        """Build and time what there is time for.

        Args:
            chosen: the search's choice.

        Raises:
            QatError: the INT8 or the FP16 engine cannot be built.
        """
        bench, search = self._bench, self._search
        if FP16 not in bench.times:
            bench.compare_with(self._recipe_with(()))
            bench.measure(FP16, None)
        self._estimate_units()
        for names in self._candidates(chosen):
            if name_of(names) in bench.times:
                continue
            if not bench.has_time():
                logger.info("--engine-minutes %g are used up: what was not measured is estimated", bench.limit)
                break
            bench.compare_with(self._recipe_with(()))
            bench.measure(name_of(names), self._recipe_with(search.patterns(names)))

    def curve(self, measure_ap: Measure) -> Curve:
        """Measure AP of what was built, and choose.

        Args:
            measure_ap: states by name → AP by name, and AP on resampled images, as far as there was time.
        """
        wanted = {name_of(names): names for names in self._wanted()}
        unknown = wanted.keys() - self._search.ap.keys()
        missing = {name: self._search.state_with(names) for name, names in wanted.items() if name in unknown}
        self._ap, self._resampled = dict(self._search.ap), dict(self._search.resampled)
        if missing:
            ap, resampled = measure_ap(missing)
            self._ap |= ap
            self._resampled |= resampled
        return self._curve()

    def _estimate_units(self) -> None:
        """Milliseconds that each unit costs in float; nothing where TensorRT does not measure layers."""
        int8, fp16 = self._bench.profile(INT8), self._bench.profile(FP16)
        if int8 is not None and fp16 is not None:
            self._layers = Estimates(int8, fp16, self._bench.ms(), self._bench.ms() + self._bench.times[FP16].cost)
            self._estimates = self._layers.costs({name: one.patterns for name, one in self._search.units.items()})

    def _candidates(self, chosen: Names) -> Iterator[Names]:
        """What is built, the most telling first; each time once, and nothing that leaves no INT8."""
        seen: set[State] = {self._search.state_with(())}
        for names in self._proposals(chosen):
            state = self._search.state_with(names)
            if state.weights and state not in seen:
                seen.add(state)
                yield names

    def _proposals(self, chosen: Names) -> Iterator[Names]:
        yield chosen
        path, whole_path = self._path(), self._whole_path()
        yield from _prefixes(path)
        yield from ((name,) for name in path)
        for length in range(len(path) + 1, len(whole_path) + 1):
            yield whole_path[:length]
            yield (whole_path[length - 1],)
        yield from ((name,) for name in sorted(self._search.units, key=lambda name: self._estimates.get(name, 0.0)))
        free = self._no_faster_in_int8()
        yield free
        yield tuple(dict.fromkeys((*chosen, *free)))

    def _path(self) -> Names:
        """Units that gain AP, in the order in which they are worth their time."""
        search, whole = self._search, self._search.ap["INT8"]
        gains = {name: ap - whole for name, ap in search.ap.items() if name in search.units}
        return self._worth(gains, selection.NOISE * (search.ap["float"] - whole))

    def _whole_path(self) -> Names:
        """The path, and behind it units by their scores: what leads on where AP alone shows no next step."""
        path = self._path()
        scores = {name: seen.score for name, seen in self._search.screened.items() if name not in path}
        return (*path, *self._worth(scores, 0.0))[:LONGEST]

    def _worth(self, gains: Mapping[str, float], least: float) -> Names:
        smallest = engine_points.SMALLEST_SHARE * (self._bench.ms() if self._estimates else 1)
        macs = {name: float(self._search.costs[name]["macs"] or 0.0) for name in gains}
        return tuple(engine_points.order_of(gains, self._estimates or macs, least, smallest))[:LONGEST]

    def _no_faster_in_int8(self) -> Names:
        """Units that engines have shown to take less time in float than in INT8."""
        noise = engine_points.noise_of(self._bench.times.values())
        found = []
        for name in self._search.units:
            times = self._bench.times.get(name)
            if times is not None and times.cost < -max(noise, times.spread):
                found.append(name)
        return tuple(found)

    def _wanted(self) -> list[Names]:
        """What gets an AP: all that has an engine, and what else the path leads over."""
        path = self._path()
        measured = (tuple(name.split("+")) for name in self._bench.times if name != FP16)
        known = (names for names in (*measured, *_prefixes(path)) if set(names) <= self._search.units.keys())
        return list(dict.fromkeys(self._in_order(names) for names in known))

    def _in_order(self, names: Names) -> Names:
        """As the network has them."""
        return tuple(name for name in self._search.units if name in names)

    def _curve(self) -> Curve:
        search, bench = self._search, self._bench
        noise = engine_points.noise_of(bench.times.values())
        whole = Point((), "INT8", 0.0, 0.0, ap=search.ap["INT8"], engine=bench.path(INT8).name)
        fp16 = self._point(FP16, (), "FP16", search.ap["float"])
        singles = ((name,) for name in search.units)
        mixed = [self._point(name_of(names), names) for names in dict.fromkeys((*self._wanted(), *singles))]
        mixed.sort(key=lambda one: (one.cost is None, one.cost or 0.0))
        points = (whole, fp16, *mixed)
        best, why = engine_points.choose(points, search.ap["float"], self._options.target_drop, noise)
        notes = tuple(self._notes(points, best, noise))
        return Curve(points, best, why, bench.ms(), noise, bench.measured_on, notes, bench.no_control)

    def _point(self, name: str, names: Names, kind: engine_points.Kind = "mixed", ap: float | None = None) -> Point:
        times = self._bench.times.get(name)
        estimate = self._estimate(names) if names else None
        label = "float" if kind == "FP16" else name
        return Point(
            names, kind,
            cost=times.cost if times else estimate, spread=times.spread if times else None, estimate=estimate,
            ap=self._ap.get(name) if ap is None else ap,
            ap_error=difference_error(self._resampled.get(label), self._resampled.get("INT8")),
            engine=self._bench.path(name).name if times else "",
        )  # fmt: skip

    def _estimate(self, names: Names) -> float | None:
        return self._layers.costs({"all": self._search.patterns(names)})["all"] if self._layers else None

    def _notes(self, points: Sequence[Point], best: Point, noise: float) -> Iterator[str]:
        """What a reader should know of the curve."""
        whole, fp16 = points[:2]
        if fp16.cost is not None and not (fp16.cost > 0 and engine_points.differs(fp16, whole, noise)):
            yield "all in INT8 is not faster than FP16 on this GPU at this batch size"
        elif best.kind == "mixed" and not ((fp16.cost or 0.0) > (best.cost or 0.0)):
            yield "the chosen engine is not faster than FP16"
        if best.kind == "mixed" and not engine_points.differs(best, whole, noise):
            yield "the chosen engine is as fast as all INT8, as far as these measurements can tell"
        both = [one for one in points if one.measured and one.estimate is not None and one.cost is not None]
        if both:
            more = sum((one.cost or 0.0) - (one.estimate or 0.0) for one in both) / len(both)
            yield (
                f"in the mean of {len(both)}, engines take {abs(more):.3f} ms {'more' if more > 0 else 'less'} than "
                "estimated from layers, which leaves out conversions between INT8 and float at the borders of units"
            )
        goal = (points[1].ap or 0.0) - self._options.target_drop
        likely = [one for one in points if not one.measured and one.cost is not None and (one.ap or 0.0) >= goal]
        if likely and (best.ap or 0.0) < goal:
            yield (
                f"by its estimate {likely[0].name} in float is worth an engine; --resume with more --engine-minutes "
                "builds it"
            )
        if self._bench.no_control:
            yield f"the INT8 engine was timed twice, for its control was not built: {self._bench.no_control}"
        for name, why in self._bench.failed.items():
            if name != AGAIN:
                yield f"no engine with {name} in float: {why}"


def _prefixes(path: Names) -> Iterator[Names]:
    """The first unit, the first two, and so on."""
    return (path[:length] for length in range(1, len(path) + 1))


def name_of(names: Names) -> str:
    """What a choice of units is kept under: the name that the search gives it, too."""
    return "+".join(sorted(names))
