"""From units to a choice of them: screen all, measure AP of what matters, add greedily, look for what was hidden."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from models.quantize.partial_forward import Layerwise, State
from utils.core.resampled import Resampled
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity import selection
from utils.jobs.sensitivity.confirming import Confirming
from utils.jobs.sensitivity.screening import Screened, Screening
from utils.jobs.sensitivity.units import Unit, Units

logger = logging.getLogger(__name__)

CONFIRMED = (4, 10)  # at least and at most so many units get an AP
MATTERS = 0.05  # share of the INT8 network's distance from which on a unit's score matters
SCREENING_SHARE = 0.5  # of the time that --budget gives, at most
ROUNDS = 2  # of looking for what a larger problem hid
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried
Costs = Callable[[Sequence[Unit]], dict[str, dict[str, float | None]]]


class Search:
    """From units to a choice of them.

    Attributes:
        units: what was looked at, by name.
        screened, ap, resampled, costs: what was found, by unit; `ap` and `resampled` also have 'float' and 'INT8'.
    """

    def __init__(
        self, options: SensitiveOptions, units: Units, screening: Screening, confirming: Confirming, costs: Costs
    ) -> None:
        """Prepare the search; nothing is run yet.

        Args:
            costs: gives units their shares of multiply-adds (`macs`) and, if known, of engine time (`engine_time`).
        """
        self._options, self._groups = options, units
        self._screening, self._confirming, self._cost_of = screening, confirming, costs
        self.units = {unit.name: unit for unit in units.all}
        self.screened: dict[str, Screened] = {}
        self.ap: dict[str, float] = {}
        self.resampled: dict[str, Resampled] = {}
        self.costs: dict[str, dict[str, float | None]] = costs(units.all)

    def run(self, network: Layerwise, notes: list[str]) -> selection.Selection:
        """Screen, confirm, choose; what a time budget cut short goes to `notes`."""
        units = list(self.units.values())
        if not self._screening.run(units, "units", SCREENING_SHARE):
            notes.append("--budget ended screening early: scores are of fewer images, or missing")
        self.screened = self._screening.found(units, "units")
        states = {unit.name: unit.in_float for unit in self._confirmed(units, everything=self._options.metric == "ap")}
        found, whole = self._confirming.run("units", {"float": State(), "INT8": network.everything, **states})
        if not whole:
            notes.append("--budget ended the measuring of AP early: AP is of fewer images than asked for, or missing")
        self.ap |= found
        self.resampled |= self._confirming.resampled("units")
        chosen = self._choose()
        if not whole or self._options.granularity == "quantizer":
            return chosen
        if chosen.ap - self.ap["INT8"] < EXPLAINED * (self.ap["float"] - self.ap["INT8"]) and not self._reached(chosen):
            chosen = self._with_sets(notes) or chosen
        for _ in range(ROUNDS):
            if not self._reached(chosen) and chosen.names:
                chosen = self._beside(chosen)
        return chosen

    def _reached(self, chosen: selection.Selection) -> bool:
        return chosen.ap >= self.ap["float"] - self._options.target_drop

    def patterns(self, names: Sequence[str]) -> list[str]:
        """What a recipe's `float` says to keep these units in float."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.units[name].patterns for name in names)))

    def _with_sets(self, notes: list[str]) -> selection.Selection | None:
        """Choose again, with the sets of all that read one scale as further candidates."""
        sets = self._groups.shared()
        logger.info("single units do not suffice; screening %d sets of all that reads one scale", len(sets))
        if not sets or not self._screening.run(sets, "shared scales", 1.0):
            return None
        self.units |= {unit.name: unit for unit in sets}
        self.screened |= self._screening.found(sets, "shared scales")
        self.costs |= self._cost_of(sets)
        states = {unit.name: unit.in_float for unit in self._confirmed(sets)}
        found, whole = self._confirming.run("shared scales", states)
        if not whole:
            return None
        self.ap |= found
        self.resampled |= self._confirming.resampled("shared scales")
        notes.append("single units did not regain the AP; sets of all that reads one scale were tried as well")
        return self._choose()

    def _beside(self, chosen: selection.Selection) -> selection.Selection:
        """Add units whose gain only shows when the chosen ones are in float: a larger problem hides smaller ones."""
        taken = set(itertools.chain.from_iterable(self.units[name].convolutions for name in chosen.names))
        left = [name for name in self.screened if taken.isdisjoint(self.units[name].convolutions)]
        left.sort(key=lambda name: self.screened[name].alone, reverse=True)
        states = {name: self.state_with((*chosen.names, name)) for name in left[: CONFIRMED[0]]}
        if not states:
            return chosen
        found, whole = self._confirming.run(f"beside {'+'.join(sorted(chosen.names))}", states)
        if not whole:
            return chosen
        more = self._greedy({name: value - chosen.ap for name, value in found.items()}, chosen)
        names, cost = (*chosen.names, *more.names), chosen.cost + more.cost
        return selection.Selection(names, more.ap, cost, more.why)

    def _confirmed(self, units: Sequence[Unit], *, everything: bool = False) -> list[Unit]:
        """The units that get an AP: those with the highest scores, best first."""
        seen = self.screened
        if everything:
            return list(units)
        order = sorted((unit for unit in units if unit.name in seen), key=lambda u: seen[u.name].score, reverse=True)
        mattering = sum(seen[unit.name].score > MATTERS * seen[unit.name].base for unit in order)
        return order[: min(max(mattering, CONFIRMED[0]), CONFIRMED[1])]

    def _choose(self) -> selection.Selection:
        gains = {name: value - self.ap["INT8"] for name, value in self.ap.items() if name in self.units}
        return self._greedy(gains, selection.Selection((), self.ap["INT8"], 0.0, ""))

    def _greedy(self, gains: Mapping[str, float], taken: selection.Selection) -> selection.Selection:
        """The units to add to those taken already; `gains` are beside them."""

        def evaluate(names: tuple[str, ...]) -> float | None:
            label = "+".join(sorted((*taken.names, *names)))
            state = self.state_with((*taken.names, *names))
            if not state.weights:  # nothing would be quantized: no recipe
                return -math.inf
            found, whole = self._confirming.run(label, {label: state})
            return found[label] if whole else None

        def cost_of(names: tuple[str, ...]) -> float:
            return self.cost((*taken.names, *names)) - taken.cost

        candidates = [
            selection.Candidate(name, gain, _cost(self.costs[name]))
            for name, gain in gains.items()
            if self.state_with((*taken.names, name)).weights
        ]
        return selection.choose(
            candidates, evaluate, cost_of, reference=self.ap["float"], start=taken.ap,
            target_drop=self._options.target_drop, budget=self._options.float_budget - taken.cost,
        )  # fmt: skip

    def cost(self, names: tuple[str, ...]) -> float:
        """Share of the network's cost of these units, what they have in common counted once."""
        if not names:
            return 0.0
        together = self._groups.union([self.units[name] for name in names])
        return _cost(self._cost_of([together])[together.name])

    def state_with(self, names: tuple[str, ...]) -> State:
        """The quantizers that are on while these units are in float."""
        paths = itertools.chain.from_iterable(self.units[name].convolutions for name in names)
        return self._groups.in_float(paths)


def _cost(shares: Mapping[str, float | None]) -> float:
    """Share of engine time where it is known, otherwise of multiply-adds."""
    time_share = shares["engine_time"]
    return float(shares["macs"] or 0.0) if time_share is None else time_share
