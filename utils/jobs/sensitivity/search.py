"""From units to a choice of them: screen all, measure AP of what matters, add greedily, look for what was hidden.

A pass over the validation images holds a batch at a time and asks a `Layerwise` network for each state of it. Scores
are written down after each batch, AP at the end of its pass: so much a killed run repeats.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from models.quantize.finetune import as_input
from models.quantize.partial_forward import Layerwise, Run, State
from utils.core.input_spec import channels_of
from utils.core.score import Difference, Resampled, difference_error
from utils.core.text import plural
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.loop import add_detections, detections_of
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.results import as_labels
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity.prediction_distance import distance, weight
from utils.jobs.sensitivity.report import AnalysisState
from utils.jobs.sensitivity.units import Costs, Unit, Units

logger = logging.getLogger(__name__)

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch
FLOAT, INT8 = "float", "INT8"  # names of the two whole networks
CONFIRMED = (4, 10)  # at least and at most so many units get an AP
MATTERS = 0.05  # share of the INT8 network's distance from which on a unit's score matters
SCREENING_SHARE = 0.5  # of the time that --budget gives, at most
ROUNDS = 2  # of looking for what a larger problem hid
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried
NOISE = 0.05  # a unit that gains a smaller share of what was lost is not chosen
SMALLEST_COST = 1e-3  # a unit with fewer multiply-adds is not chosen for being free


class Clock:
    """The minutes that `--budget` gives this process, from `began` (`time.perf_counter()`) on; None: no limit."""

    def __init__(self, minutes: float | None, began: float) -> None:
        self._minutes, self._began = minutes, began

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is used."""
        return self._minutes is not None and time.perf_counter() > self._began + 60 * self._minutes * share


@dataclass(frozen=True)
class Screened:
    """What screening found about a unit: distances to the float network's predictions (`prediction_distance.py`).

    Attributes:
        images: that the unit was seen on.
        base: of the INT8 network, on the same images.
        in_float: of the INT8 network with this unit in float.
        alone: of the float network with this unit in INT8.
    """

    images: int
    base: float
    in_float: float
    alone: float

    @property
    def score(self) -> float:
        """How much nearer the INT8 network comes with the unit in float."""
        return self.base - self.in_float


class Passes:
    """Passes of one network over the same images; `state` keeps what they find."""

    def __init__(
        self, network: Layerwise, loader: DataLoader[Any], device: torch.device, folder: Path, state: AnalysisState,
        clock: Clock, *, every_unit: bool = False, unlabelled: bool = False,
    ) -> None:  # fmt: skip
        """Prepare the passes; nothing is run yet.

        Args:
            loader: the images, in the same order every time.
            folder: where the state is written.
            every_unit: units see every image in screening, and their AP costs no further run.
            unlabelled: the float network's detections stand for labels.
        """
        self._network, self._loader, self._device = network, loader, device
        self._channels = channels_of(network.model)
        self.state, self._folder, self._clock, self._every_unit = state, folder, clock, every_unit
        self._unlabelled = unlabelled
        self._labels: dict[int, RaggedBatch] = {}  # of each batch, where the dataset has none
        self._detected: dict[tuple[str, str, int], Any] = {}  # stage, state and batch → what screening has detected

    def screen(self, units: Sequence[Unit], stage: str, share: float) -> bool:
        """Score units, in turns, so that each sees another part of the images; False if the time budget ended it.

        Args:
            stage: a name under which the results are kept.
            share: of the time budget that it may use.
        """
        count = len(self._loader.dataset)
        turn = 1 if self._every_unit else max(1, min(LARGEST_TURN, count // IMAGES_A_UNIT, len(self._loader)))
        done = self.state.screened.setdefault(stage, {})
        for index, batch in self._batches(f"screening {plural(len(units), 'unit')}"):
            rows = done.setdefault(str(index), {})
            todo = [unit for place, unit in enumerate(units) if (index + place) % turn == 0 and unit.name not in rows]
            if todo and len(batch):
                if self._clock.over(share):
                    return False
                rows.update(self._screen_batch(batch, todo, stage, index))
                self.state.save(self._folder)
        return True

    def _screen_batch(self, batch: Batch, units: Sequence[Unit], stage: str, index: int) -> dict[str, list[float]]:
        """Unit → sums over a batch's images, as `AnalysisState.screened` has them."""
        images = as_input(batch.images, self._device, self._channels)
        origin = self._network.run(images, State())
        whole = self._network.run(images, self._network.everything)
        batch = self._with_labels(batch, index, images)
        detected = {FLOAT: network_detections(batch, origin), INT8: network_detections(batch, whole)}
        sums = [len(images), float(weight(origin.prediction)), _apart(origin, whole)]
        rows = {}
        for unit in units:
            in_float = self._network.run(images, unit.in_float, whole)
            alone = self._network.run(images, unit.alone, origin)
            rows[unit.name] = [*sums, _apart(origin, in_float), _apart(origin, alone)]
            if self._every_unit:
                detected[unit.name] = network_detections(batch, in_float)
        self._detected |= {(stage, name, index): found for name, found in detected.items()}
        return rows

    def screened(self, units: Sequence[Unit], stage: str) -> dict[str, Screened]:
        """What screening found, by unit; units that it never came to are missing."""
        found = {}
        for unit in units:
            rows = [rows[unit.name] for rows in self.state.screened.get(stage, {}).values() if unit.name in rows]
            if rows:
                count, scale, *distances = map(sum, zip(*rows, strict=True))
                found[unit.name] = Screened(int(count), *(value / max(scale, 1e-9) for value in distances))
        return found

    def measure_ap(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, float], bool]:
        """AP by name of the state, of all images, and whether that is all: a time budget may end it after some.

        What an earlier process has measured is not measured again. Where the budget ends the rest of it, only that
        is given: AP of fewer images does not compare with it.

        Args:
            stage: a name under which the results are kept; within it a name stands for one state only.
        """
        known = {name: ap for name, ap in self.state.ap.get(stage, {}).items() if name in states}
        missing = {name: state for name, state in states.items() if name not in known}
        if missing:
            results, whole = self._statistics(stage, missing)
            found = {name: one.score().decides for name, one in results.items()}
            if not whole:
                return known or found, False
            self.state.keep_ap(stage, found, {name: one.score_resampled() for name, one in results.items()})
            self.state.save(self._folder)
            known |= found
        return {name: known[name] for name in states}, True

    def _statistics(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, EvalStatistics], bool]:
        """What the network detects in each of these states, and whether it is in all images."""
        results = {name: EvalStatistics() for name in states}
        for index, batch in self._batches(f"AP of {len(states)} networks"):
            if index and self._clock.over():
                return results, False
            if not len(batch):
                continue
            images, whole = as_input(batch.images, self._device, self._channels), None
            batch = self._with_labels(batch, index, images)
            for name, statistics in results.items():
                found = self._detected.get((stage, name, index))
                if found is None:
                    if whole is None and len(results) > 1:
                        whole = self._network.run(images, self._network.everything)
                    found = network_detections(batch, self._network.run(images, states[name], whole))
                statistics.extend(found)
        return results, True

    def _with_labels(self, batch: Batch, index: int, images: Tensor) -> Batch:
        """The batch; where the dataset has no labels, the float network's detections are its labels."""
        if not self._unlabelled:
            return batch
        if index not in self._labels:
            prediction = self._network.run(images, State()).prediction
            self._labels[index] = as_labels(detections_of(prediction, batch).rows)
        return replace(batch, truth=self._labels[index])

    def _batches(self, title: str) -> Iterator[tuple[int, Batch]]:
        from tqdm import tqdm

        yield from enumerate(tqdm(self._loader, title, unit="batch", disable=not logger.isEnabledFor(logging.INFO)))


def _apart(origin: Run, other: Run) -> float:
    return float(distance(origin.prediction, other.prediction, other.size))


def network_detections(batch: Batch, run: Run) -> dict[str, Any]:
    """What a network detects in a batch, as the evaluation loop keeps it."""
    statistics = EvalStatistics()
    add_detections(statistics, detections_of(run.prediction, batch), batch)
    return statistics.to_plain()


@dataclass(frozen=True)
class Selection:
    """What stays in float, the AP with that, its share of the network's cost (0..1), and why the search ended there."""

    names: tuple[str, ...]
    ap: float
    cost: float
    why: str


class Search:
    """From units to a choice of them.

    Attributes:
        units: what was looked at, by name.
        screened, ap, resampled, costs: what was found, by unit; `ap` and `resampled` also have 'float' and 'INT8'.
        notes: what a time budget cut short, in sentences.
    """

    def __init__(self, options: SensitiveOptions, units: Units, passes: Passes, costs: Costs) -> None:
        self._options, self._groups, self._passes, self._cost_of = options, units, passes, costs
        self.units = {unit.name: unit for unit in units.all}
        self.screened: dict[str, Screened] = {}
        self.ap: dict[str, float] = {}
        self.costs = costs(units.all)
        self.resampled: dict[str, Resampled] = {}
        self.notes: list[str] = []

    def run(self) -> Selection:
        """Screen, confirm, choose."""
        units = list(self.units.values())
        if not self._passes.screen(units, "units", SCREENING_SHARE):
            self.notes.append("--budget ended screening early: scores are of fewer images, or missing")
        self.screened = self._passes.screened(units, "units")
        confirmed = units if self._options.metric == "ap" else self._confirmed(units)
        whole = {FLOAT: State(), INT8: self._groups.everything}
        if not self._measure("units", whole | {unit.name: unit.in_float for unit in confirmed}):
            self.notes.append("--budget ended the measuring of AP early: it is of fewer images, or missing")
            return self._choose()
        error = difference_error(self.resampled.get(FLOAT), self.resampled.get(INT8))
        lost = Difference(self.ap[FLOAT] - self.ap[INT8], error)
        if not lost.significant:
            recipe = " with --recipe" if self._options.recipe else ""
            return Selection((), self.ap[INT8], 0.0, f"INT8{recipe} loses no AP that these images can show")
        chosen = self._choose()
        if self._options.granularity == "quantizer":
            return chosen
        if chosen.ap - self.ap[INT8] < EXPLAINED * lost.value and not self._reached(chosen):
            chosen = self._with_sets() or chosen
        for _ in range(ROUNDS):
            if not self._reached(chosen) and chosen.names:
                chosen = self._beside(chosen)
        return chosen

    def _measure(self, stage: str, states: Mapping[str, State]) -> bool:
        """Measure AP of these states and remember it; False if the time budget ended it."""
        found, whole = self._passes.measure_ap(stage, states)
        if whole or stage == "units":
            self.ap |= found
            self.resampled |= self._passes.state.resampled(stage)
        return whole

    def _confirmed(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that get an AP: those with the highest scores, best first."""
        seen = [(self.screened[unit.name], unit) for unit in units if unit.name in self.screened]
        seen.sort(key=lambda pair: pair[0].score, reverse=True)
        mattering = sum(one.score > MATTERS * one.base for one, _ in seen)
        return [unit for _, unit in seen[: min(max(mattering, CONFIRMED[0]), CONFIRMED[1])]]

    def _reached(self, chosen: Selection) -> bool:
        return chosen.ap >= self.ap[FLOAT] - self._options.target_drop

    def _with_sets(self) -> Selection | None:
        """Choose again, with the sets of all that read one scale as further candidates."""
        stage, sets = "shared scales", self._groups.shared()
        logger.info("single units do not suffice; screening %d sets of all that reads one scale", len(sets))
        if not sets or not self._passes.screen(sets, stage, 1.0):
            return None
        self.units |= {unit.name: unit for unit in sets}
        self.screened |= self._passes.screened(sets, stage)
        self.costs |= self._cost_of(sets)
        if not self._measure(stage, {unit.name: unit.in_float for unit in self._confirmed(sets)}):
            return None
        self.notes.append("single units did not regain the AP; sets of all that reads one scale were tried as well")
        return self._choose()

    def _beside(self, chosen: Selection) -> Selection:
        """Add units whose gain only shows when the chosen ones are in float: a larger problem hides smaller ones."""
        taken = {path for name in chosen.names for path in self.units[name].convolutions}
        left = [name for name in self.screened if taken.isdisjoint(self.units[name].convolutions)]
        left.sort(key=lambda name: self.screened[name].alone, reverse=True)
        states = {name: self._state_with((*chosen.names, name)) for name in left[: CONFIRMED[0]]}
        if not states:
            return chosen
        found, whole = self._passes.measure_ap(f"beside {'+'.join(sorted(chosen.names))}", states)
        if not whole:
            return chosen
        more = self._greedy(found, chosen)
        return Selection((*chosen.names, *more.names), more.ap, chosen.cost + more.cost, more.why)

    def _choose(self) -> Selection:
        found = {name: ap for name, ap in self.ap.items() if name in self.units}
        return self._greedy(found, Selection((), self.ap[INT8], 0.0, ""))

    def _greedy(self, ap: Mapping[str, float], taken: Selection) -> Selection:
        """The units to add to those that are taken; `ap` is that of each of them beside those."""

        def evaluate(names: tuple[str, ...]) -> float | None:
            label = "+".join(sorted((*taken.names, *names)))
            state = self._state_with((*taken.names, *names))
            if not state.weights:  # nothing would be quantized: no recipe
                return -math.inf
            found, whole = self._passes.measure_ap(label, {label: state})
            return found[label] if whole else None

        return choose_units(
            {name: one - taken.ap for name, one in ap.items() if self._state_with((*taken.names, name)).weights},
            evaluate, lambda names: self._cost((*taken.names, *names)) - taken.cost, reference=self.ap[FLOAT],
            start=taken.ap, target_drop=self._options.target_drop, budget=self._options.float_budget - taken.cost,
        )  # fmt: skip

    def _cost(self, names: tuple[str, ...]) -> float:
        """Share of the network's cost of these units, what they have in common counted once."""
        if not names:
            return 0.0
        (shares,) = self._cost_of([self._groups.union([self.units[name] for name in names])]).values()
        return float(shares["macs"] or 0.0) if shares["engine_time"] is None else shares["engine_time"]

    def _state_with(self, names: tuple[str, ...]) -> State:
        """The quantizers that are on while these units are in float."""
        return self._groups.in_float(path for name in names for path in self.units[name].convolutions)


def choose_units(
    gains: Mapping[str, float], evaluate: Callable[[tuple[str, ...]], float | None],
    cost_of: Callable[[tuple[str, ...]], float], *, reference: float, start: float, target_drop: float, budget: float,
) -> Selection:  # fmt: skip
    """Add units greedily by AP gained per cost until the loss is small enough, then leave out what was not needed.

    Args:
        gains: unit → AP gained when it alone is in float.
        evaluate: AP with these units in float; None if there is no time left to find out.
        cost_of: their share of the network's cost, 0..1; units that overlap cost less than their sum.
        reference, start: AP of the float network, and of the one that is all INT8.
        target_drop: AP that may be lost.
        budget: share of the network's cost that may run in float.
    """
    chosen: tuple[str, ...] = ()
    ap, goal, why = start, reference - target_drop, "no further unit gains AP"
    useful = [name for name, gain in gains.items() if gain > max(NOISE * (reference - start), 0)]
    for name in sorted(useful, key=lambda name: gains[name] / max(cost_of((name,)), SMALLEST_COST), reverse=True):
        if ap >= goal:
            break
        if cost_of((*chosen, name)) > budget:
            why = "what is left would exceed the budget of float time"
            continue
        found = evaluate((*chosen, name)) if chosen else start + gains[name]
        if found is None:
            why = "the time budget is used up"
            break
        if found > ap:
            chosen, ap = (*chosen, name), found
    if ap >= goal:
        why = f"the AP loss is within {target_drop:g}"
        for name in sorted(chosen, key=gains.__getitem__):  # drop every unit that the goal does not need
            rest = tuple(other for other in chosen if other != name)
            if rest:
                found = start + gains[rest[0]] if len(rest) == 1 else evaluate(rest)
                if found is not None and found >= goal:
                    chosen, ap = rest, found
    return Selection(chosen, ap, cost_of(chosen), why)
