"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: for every unit (`units.py`), two states of one placed and calibrated network, "all in INT8 but this unit" and
"nothing in INT8 but this unit", are scored by how far their predictions are from the float network's (`proxy.py`).
Layers before the unit are not run again (`layerwise.py`), and units take turns (`screening.py`).
Confirming: AP for the units with the highest scores, all on the same pictures. Then units stay in float, greedily,
until the loss is small enough (`selection.py`), and that recipe is placed, calibrated and evaluated as
`qat.py quantize` does.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize import backend, calibration, placement, selection
from models.quantize.analysis_state import AnalysisState, find_analysis
from models.quantize.errors import InputError, RecipeError
from models.quantize.finetune import as_input, seed_everything
from models.quantize.inputs import Inputs, pictures
from models.quantize.layerwise import Layerwise, State
from models.quantize.measure import Measurer, without_tables
from models.quantize.options import SensitiveOptions, merged_recipe, resumed_options
from models.quantize.recipe import AUTO, Recipe
from models.quantize.run_state import file_hash
from models.quantize.screening import Clock, Confirming, Screened, Screening, Work
from models.quantize.units import Unit, Units, macs
from utils.cli import make_run_dir
from utils.evaluation.loop import EvalConfig
from utils.reports import sensitivity as report

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_analysis", "resume", "start"]

logger = logging.getLogger(__name__)

CONFIRMED = (4, 10)  # at least and at most so many units get an AP
MATTERS = 0.05  # share of the INT8 network's distance from which on a unit's score matters
SCREENING_SHARE = 0.5  # of the time that --budget gives, at most
ROUNDS = 2  # of looking for what a larger problem hid
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried


def start(options: SensitiveOptions, command: str) -> dict[str, Any]:
    """Begin a run in a new folder; the summary is returned, and lies in the folder.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = merged_recipe(options.as_quantize())
    analysis = Analysis(options, recipe)
    folder = make_run_dir(options.project, options.name, options.exist_ok)
    state = AnalysisState(options.to_dict(), recipe.to_dict(), file_hash(options.weights))
    state.save(folder)
    return analysis.run(folder, state, command)


def resume(folder: Path, given: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Continue the run in `folder`; `given` are the options of this command line, which must agree with the run's.

    Raises:
        InputError: the run cannot be continued as asked.
    """
    state = AnalysisState.load(folder)
    options = resumed_options(state.options, given, SensitiveOptions)
    analysis = Analysis(options, Recipe.from_dict(state.recipe))
    if file_hash(options.weights) != state.weights_hash:
        raise InputError(f"{options.weights} has changed since the run in {folder} was started; start a new run")
    return analysis.run(folder, state, command)


class Analysis:
    """One sensitivity run: what it works on, where it stands, and the steps."""

    def __init__(self, options: SensitiveOptions, recipe: Recipe) -> None:
        if recipe.calibration.method == AUTO:
            raise RecipeError(
                "sensitive needs one calibration method, not auto; python qat.py calibrate finds the best and writes "
                "a recipe to give here"
            )
        self._clock = Clock(options.budget)
        self._profile = selection.read_profile(options.profile) if options.profile else None
        self.options, self.recipe = options, recipe
        self._inputs = inputs = Inputs.load(options.as_quantize(), recipe)
        self._units = Units(inputs.source.model, inputs.plan, recipe, options.granularity)
        if not self._units.all:
            raise InputError("the recipe leaves every convolution in float; there is nothing to analyse")

    def run(self, folder: Path, state: AnalysisState, command: str) -> dict[str, Any]:
        """Do what is left to do; returns the summary."""
        self.folder, self.state = folder, state
        try:
            with without_tables():
                return self._run(command)
        except KeyboardInterrupt:
            logger.info("\nstopped; continue with: python qat.py sensitive --resume %s", folder)
            raise

    def _run(self, command: str) -> dict[str, Any]:
        units = list(self._units.all)
        logger.info("%s → %s: %d units (%s)", self.options.weights, self.folder, len(units), self.options.granularity)
        model = self._calibrated()
        loader = self._inputs.validation_loader(
            self.options.batch_size, self.options.workers, limit=self.options.num_image
        )
        work = Work(loader, self._inputs.device, self.folder, self.state, self._clock)
        notes: list[str] = []
        with Layerwise(model) as network, torch.inference_mode():
            confirming = Confirming(work, network)
            screening = Screening(work, network, confirming, thorough=self.options.metric == "ap")
            search = _Search(self, units, screening, confirming, self._costs(model))
            chosen = search.run(network, notes)
        recipe = self._recipe_with(search.patterns(chosen.names))
        report.write_recipe(recipe.to_dict(), chosen.why, self.folder / "recipe.yaml")
        if chosen.names and not self._clock.over():
            self._verify(recipe)
        summary = report.summary(
            command=command, options=self.options.to_dict(), screened=search.screened, ap=search.ap,
            costs=search.costs, selection=chosen, patterns=recipe.float,
            recipe_ap=self.state.ap.get("recipe", {}).get("recipe"), seconds=self.state.seconds, notes=notes,
        )  # fmt: skip
        report.save(summary, self.folder)
        self.state.finished = True
        self.state.save(self.folder)
        logger.info("\n%s\nresult: %s", "\n".join(report.lines(summary, self.folder)), self.folder)
        return summary

    def _calibrated(self) -> nn.Module:
        """The network as `qat.py quantize` with this recipe would calibrate it."""
        model = self._place(self._inputs.plan)
        if self.state.amax:
            calibration.load(model, {name: torch.tensor(value) for name, value in self.state.amax.items()})
            return model
        began = time.perf_counter()
        self._calibrate(model, self.recipe)
        scales: Any = model.activation_quantizers
        self.state.amax = {name: float(backend.get_amax(quantizer)) for name, quantizer in scales.items()}
        self.finished("calibration", began)
        return model

    def _place(self, plan: placement.Plan) -> nn.Module:
        model = self._inputs.network()
        placement.apply(model, plan)
        return model.to(self._inputs.device).eval()

    def _calibrate(self, model: nn.Module, recipe: Recipe) -> None:
        seed_everything(self.options.seed)
        images = pictures(self._inputs.training_loader(self.options.as_quantize()))
        calibration.calibrate(model, (as_input(batch, self._inputs.device) for batch in images), recipe.calibration)

    def _costs(self, model: nn.Module) -> Any:
        """A function: units → share of the network's multiply-adds, and of engine time where a profile is given."""
        size = self._inputs.imgsz
        counted = macs(model, torch.zeros(1, 3, size, size, device=self._inputs.device))

        def costs(units: Sequence[Unit]) -> dict[str, dict[str, float | None]]:
            shares = selection.mac_shares({unit.name: unit.convolutions for unit in units}, counted)
            times: Mapping[str, float | None] = dict.fromkeys(shares)
            if self._profile is not None:
                times = selection.time_shares({unit.name: unit.patterns for unit in units}, self._profile)
            return {name: {"macs": shares[name], "engine_time": times[name]} for name in shares}

        return costs

    def _recipe_with(self, patterns: Sequence[str]) -> Recipe:
        """The run's recipe with more in float, and without calibration exceptions for scales that are gone then."""
        recipe = self.recipe.replace(float=tuple(dict.fromkeys((*self.recipe.float, *patterns))))
        kept = set(placement.plan(self._inputs.source.model, recipe).scale_names)
        scales = {name: method for name, method in recipe.calibration.scales.items() if name in kept}
        return recipe.replace(calibration_scales=scales)

    def _verify(self, recipe: Recipe) -> None:
        """AP of the network that `qat.py quantize --recipe` makes: placed and calibrated anew."""
        if "recipe" in self.state.ap:
            return
        began = time.perf_counter()
        model = self._place(placement.plan(self._inputs.source.model, recipe))
        self._calibrate(model, recipe)
        config = EvalConfig(
            imgsz=self._inputs.imgsz, batch_size=self.options.batch_size, workers=self.options.workers,
            limit=self.options.num_image,
        )  # fmt: skip
        result = Measurer(self._inputs.data, self._inputs.device, config).measure(model, "the recipe")
        self.state.ap["recipe"] = {"recipe": result.ap}
        self.finished("AP of the recipe", began)

    def finished(self, stage: str, began: float) -> None:
        """A step is finished: count its time and write the state."""
        self.state.add_seconds(stage, time.perf_counter() - began)
        self.state.save(self.folder)


class _Search:
    """From units to a choice of them.

    Attributes:
        screened, ap, costs: what was found, by unit; `ap` also has 'float' and 'INT8'.
    """

    def __init__(
        self, analysis: Analysis, units: Sequence[Unit], screening: Screening, confirming: Confirming, costs: Any
    ) -> None:
        self._options, self._groups = analysis.options, analysis._units
        self._screening, self._confirming, self._cost_of = screening, confirming, costs
        self._by_name = {unit.name: unit for unit in units}
        self.screened: dict[str, Screened] = {}
        self.ap: dict[str, float] = {}
        self.costs: dict[str, dict[str, float | None]] = costs(units)

    def run(self, network: Layerwise, notes: list[str]) -> selection.Selection:
        """Screen, confirm, choose; what a time budget cut short goes to `notes`."""
        units = list(self._by_name.values())
        if not self._screening.run(units, "units", SCREENING_SHARE):
            notes.append("--budget ended screening early: scores are of fewer pictures, or missing")
        self.screened = self._screening.found(units, "units")
        states = {unit.name: unit.in_float for unit in self._confirmed(units, everything=self._options.metric == "ap")}
        found, whole = self._confirming.run("units", {"float": State(), "INT8": network.everything, **states})
        if not whole:
            notes.append("--budget ended the measuring of AP early: AP is of fewer pictures than asked for")
        self.ap |= found
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
        return list(dict.fromkeys(itertools.chain.from_iterable(self._by_name[name].patterns for name in names)))

    def _with_sets(self, notes: list[str]) -> selection.Selection | None:
        """Choose again, with the sets of all that read one scale as further candidates."""
        sets = self._groups.shared()
        logger.info("single units do not suffice; screening %d sets of all that reads one scale", len(sets))
        if not sets or not self._screening.run(sets, "shared scales", 1.0):
            return None
        self._by_name |= {unit.name: unit for unit in sets}
        self.screened |= self._screening.found(sets, "shared scales")
        self.costs |= self._cost_of(sets)
        states = {unit.name: unit.in_float for unit in self._confirmed(sets)}
        found, whole = self._confirming.run("shared scales", states)
        if not whole:
            return None
        self.ap |= found
        notes.append("single units did not regain the AP; sets of all that reads one scale were tried as well")
        return self._choose()

    def _beside(self, chosen: selection.Selection) -> selection.Selection:
        """Add units whose gain only shows when the chosen ones are in float: a larger problem hides smaller ones."""
        taken = set(itertools.chain.from_iterable(self._by_name[name].convolutions for name in chosen.names))
        left = [name for name in self.screened if taken.isdisjoint(self._by_name[name].convolutions)]
        left.sort(key=lambda name: self.screened[name].alone, reverse=True)
        states = {name: self._together((*chosen.names, name)) for name in left[: CONFIRMED[0]]}
        found, whole = self._confirming.run(f"beside {'+'.join(sorted(chosen.names))}", states)
        if not states or not whole:
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
        gains = {name: value - self.ap["INT8"] for name, value in self.ap.items() if name in self._by_name}
        return self._greedy(gains, selection.Selection((), self.ap["INT8"], 0.0, ""))

    def _greedy(self, gains: Mapping[str, float], taken: selection.Selection) -> selection.Selection:
        """The units to add to those taken already; `gains` are beside them."""

        def evaluate(names: tuple[str, ...]) -> float | None:
            label = "+".join(sorted((*taken.names, *names)))
            found, whole = self._confirming.run(label, {label: self._together((*taken.names, *names))})
            return found[label] if whole else None

        candidates = [selection.Candidate(name, gain, _cost(self.costs[name])) for name, gain in gains.items()]
        return selection.choose(
            candidates, evaluate, reference=self.ap["float"], start=taken.ap,
            target_drop=self._options.target_drop, budget=self._options.float_budget - taken.cost,
        )  # fmt: skip

    def _together(self, names: tuple[str, ...]) -> State:
        paths = itertools.chain.from_iterable(self._by_name[name].convolutions for name in names)
        return self._groups.in_float(paths)


def _cost(shares: Mapping[str, float | None]) -> float:
    """Share of engine time where it is known, otherwise of multiply-adds."""
    time_share = shares["engine_time"]
    return float(shares["macs"] or 0.0) if time_share is None else time_share
