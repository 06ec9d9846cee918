"""From units to a choice of them: screen all, measure AP of what matters, add greedily.

A pass over the validation images holds a batch at a time, and runs the network in each state of its quantizers.
Scores are written down after each batch, AP at the end of its pass: so much a killed run repeats.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from models.quantize.finetune import as_input
from utils.core.input_spec import channels_of
from utils.core.score import Difference, Resampled, difference_error
from utils.core.text import plural
from utils.evaluation.batch import Batch
from utils.evaluation.loop import add_detections, detections_of
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.results import as_labels
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity.prediction_distance import distance, weight
from utils.jobs.sensitivity.report import AnalysisState
from utils.jobs.sensitivity.units import Costs, State, Switches, Unit, Units

logger = logging.getLogger(__name__)

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch
FLOAT, INT8 = "float", "INT8"  # names of the two whole networks
CONFIRMED = (4, 10)  # at least and at most so many units get an AP
MATTERS = 0.05  # share of the INT8 network's distance from which on a unit's score matters
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried
NOISE = 0.05  # a unit that gains a smaller share of what was lost is not chosen
SMALLEST_COST = 1e-3  # a unit with fewer multiply-adds is not chosen for being free


@dataclass(frozen=True)
class Screened:
    """What screening found about a unit: distances to the float network's predictions (`prediction_distance.py`).

    Attributes:
        images: that the unit was seen on.
        base: of the INT8 network, on the same images.
        in_float: of the INT8 network with this unit in float.
    """

    images: int
    base: float
    in_float: float

    @property
    def score(self) -> float:
        """How much nearer the INT8 network comes with the unit in float."""
        return self.base - self.in_float


class Passes:
    """Passes of one network over the same images; `state` keeps what they find, and is written into `folder`.

    Args:
        loader: the images, in the same order every time.
        unlabelled: the float network's detections stand for labels.
    """

    def __init__(
        self, network: Switches, everything: State, loader: DataLoader[Any], device: torch.device, folder: Path,
        state: AnalysisState, *, unlabelled: bool = False,
    ) -> None:  # fmt: skip
        self._network, self._everything, self._loader, self._device = network, everything, loader, device
        self.state, self._folder, self._unlabelled = state, folder, unlabelled
        self._channels = channels_of(network.model)

    def screen(self, units: Sequence[Unit], stage: str, every_image: bool = False) -> dict[str, Screened]:
        """Score units, in turns, so that each sees another part of the images; `stage` names where results are kept."""
        count = len(self._loader.dataset)
        turn = 1 if every_image else max(1, min(LARGEST_TURN, count // IMAGES_A_UNIT, len(self._loader)))
        done = self.state.screened.setdefault(stage, {})
        for index, batch in self._batches(f"screening {plural(len(units), 'unit')}"):
            rows = done.setdefault(str(index), {})
            todo = [unit for place, unit in enumerate(units) if (index + place) % turn == 0 and unit.name not in rows]
            if todo and len(batch):
                rows.update(self._screen_batch(self._images(batch), todo))
                self.state.save(self._folder)
        found = {}
        for unit in units:
            if seen := [rows[unit.name] for rows in done.values() if unit.name in rows]:
                number, scale, *distances = map(sum, zip(*seen, strict=True))
                found[unit.name] = Screened(int(number), *(value / max(scale, 1e-9) for value in distances))
        return found

    def _screen_batch(self, images: Tensor, units: Sequence[Unit]) -> dict[str, list[float]]:
        """Unit → sums over a batch's images, as `AnalysisState.screened` has them."""
        origin, size = self._network.predict(images, State()), (images.shape[2], images.shape[3])

        def distance_in(state: State) -> float:
            return float(distance(origin, self._network.predict(images, state), size))

        sums = [len(images), float(weight(origin)), distance_in(self._everything)]
        return {unit.name: [*sums, distance_in(unit.in_float)] for unit in units}

    def measure_ap(self, stage: str, states: Mapping[str, State]) -> dict[str, float]:
        """AP by name of the state, of all images; what an earlier process has measured is not measured again.

        Args:
            stage: a name under which the results are kept; within it a name stands for one state only.
        """
        known = self.state.ap.setdefault(stage, {})
        if missing := {name: state for name, state in states.items() if name not in known}:
            results = {name: EvalStatistics() for name in missing}
            for _, batch in self._batches(f"AP of {len(missing)} networks"):
                if not len(batch):
                    continue
                images = self._images(batch)
                if self._unlabelled:
                    reference = detections_of(self._network.predict(images, State()), batch)
                    batch = replace(batch, labels=as_labels(reference.rows))
                for name, statistics in results.items():
                    prediction = self._network.predict(images, missing[name])
                    add_detections(statistics, detections_of(prediction, batch), batch)
            ap = {name: one.score().decides for name, one in results.items()}
            self.state.keep_ap(stage, ap, {name: one.score_resampled() for name, one in results.items()})
            self.state.save(self._folder)
        return {name: known[name] for name in states}

    def _images(self, batch: Batch) -> Tensor:
        return as_input(batch.images, self._device, self._channels)

    def _batches(self, title: str) -> Iterator[tuple[int, Batch]]:
        from tqdm import tqdm

        yield from enumerate(tqdm(self._loader, title, unit="batch", disable=not logger.isEnabledFor(logging.INFO)))


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
        notes: what else a reader has to know, in sentences.
    """

    def __init__(self, options: SensitiveOptions, units: Units, passes: Passes, costs: Costs) -> None:
        self._options, self._groups, self._passes, self._cost_of = options, units, passes, costs
        self.units: dict[str, Unit] = {}
        self.screened: dict[str, Screened] = {}
        self.ap: dict[str, float] = {}
        self.costs: dict[str, dict[str, float | None]] = {}
        self.resampled: dict[str, Resampled] = {}
        self.notes: list[str] = []

    def run(self) -> Selection:
        """Screen, confirm, choose."""
        whole = {FLOAT: State(), INT8: self._groups.everything}
        self._look_at("units", self._groups.all, whole, every_unit=self._options.metric == "ap")
        error = difference_error(self.resampled.get(FLOAT), self.resampled.get(INT8))
        lost = Difference(self.ap[FLOAT] - self.ap[INT8], error)
        if not lost.significant:
            recipe = " with --recipe" if self._options.recipe else ""
            return Selection((), self.ap[INT8], 0.0, f"INT8{recipe} loses no AP that these images can show")
        chosen = self._choose()
        sets = self._groups.shared()
        if (
            sets
            and chosen.ap - self.ap[INT8] < EXPLAINED * lost.value
            and chosen.ap < self.ap[FLOAT] - self._options.target_drop
        ):
            logger.info("single units do not suffice; screening %d sets of all that reads one scale", len(sets))
            self._look_at("shared scales", sets)
            self.notes.append("single units did not regain the AP; sets of all that reads one scale were tried as well")
            chosen = self._choose()
        return chosen

    def _look_at(
        self, stage: str, units: Sequence[Unit], others: Mapping[str, State] | None = None, every_unit: bool = False
    ) -> None:
        """Screen units, and measure AP of those with the highest scores (or of every one), and of the `others`."""
        self.units |= {unit.name: unit for unit in units}
        self.costs |= self._cost_of(units)
        screened = self._passes.screen(units, stage, every_unit)
        self.screened |= screened
        best = sorted((unit for unit in units if unit.name in screened), key=lambda unit: -screened[unit.name].score)
        mattering = sum(one.score > MATTERS * one.base for one in screened.values())
        confirmed = units if every_unit else best[: min(max(mattering, CONFIRMED[0]), CONFIRMED[1])]
        self.ap |= self._passes.measure_ap(
            stage, {**(others or {}), **{unit.name: unit.in_float for unit in confirmed}}
        )
        self.resampled |= self._passes.state.resampled(stage)

    def _choose(self) -> Selection:
        """The units to leave in float, of those whose AP is known."""

        def evaluate(names: tuple[str, ...]) -> float:
            state, label = self._state_with(names), "+".join(sorted(names))
            if not state.weights:  # nothing would be quantized: no recipe
                return -math.inf
            return self._passes.measure_ap(label, {label: state})[label]

        known = {name: ap for name, ap in self.ap.items() if name in self.units}
        return choose_units(
            {name: ap - self.ap[INT8] for name, ap in known.items() if self._state_with((name,)).weights},
            evaluate, self._cost, reference=self.ap[FLOAT], start=self.ap[INT8],
            target_drop=self._options.target_drop, budget=self._options.float_budget,
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
    gains: Mapping[str, float], evaluate: Callable[[tuple[str, ...]], float],
    cost_of: Callable[[tuple[str, ...]], float], *, reference: float, start: float, target_drop: float, budget: float,
) -> Selection:  # fmt: skip
    """Add units greedily by AP gained per cost until the loss is small enough, then leave out what was not needed.

    Args:
        gains: unit → AP gained when it alone is in float.
        evaluate: AP with these units in float.
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
        if found > ap:
            chosen, ap = (*chosen, name), found
    if ap >= goal:
        why = f"the AP loss is within {target_drop:g}"
        for name in sorted(chosen, key=gains.__getitem__):  # drop every unit that the goal does not need
            rest = tuple(other for other in chosen if other != name)
            if rest:
                found = start + gains[rest[0]] if len(rest) == 1 else evaluate(rest)
                if found >= goal:
                    chosen, ap = rest, found
    return Selection(chosen, ap, cost_of(chosen), why)
