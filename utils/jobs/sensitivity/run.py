"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: for every unit (`units.py`), two states of one placed and calibrated network, "all in INT8 but this unit" and
"nothing in INT8 but this unit", are scored by how far their predictions are from the float network's (`proxy.py`).
Layers before the unit are not run again (`models/quantize/partial_forward.py`), and units take turns (`screening.py`).
Confirming: AP for the units with the highest scores, all on the same images. Then units stay in float, greedily,
until the loss is small enough (`selection.py`), and that recipe is placed, calibrated and evaluated as
`qat.py quantize` does.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize import backend, calibration, placement
from models.quantize.finetune import as_input, seed_everything
from models.quantize.partial_forward import Layerwise
from models.quantize.recipe import AUTO, Recipe
from utils.core import distributed
from utils.core.errors import InputError, RecipeError
from utils.core.files import file_hash
from utils.core.run_folder import held, new_run
from utils.evaluation.fingerprint import Fingerprint, check_unchanged
from utils.evaluation.loop import EvalConfig
from utils.jobs.evaluate import Measurer, without_tables
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity import report as report
from utils.jobs.sensitivity import selection
from utils.jobs.sensitivity.confirming import Clock, Confirming, Work, forget_parts
from utils.jobs.sensitivity.screening import Screening
from utils.jobs.sensitivity.search import Costs, Search
from utils.jobs.sensitivity.state import AnalysisState
from utils.jobs.sensitivity.state import find_analysis as find_run
from utils.jobs.sensitivity.units import Unit, Units, macs

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_run", "resume", "start"]

logger = logging.getLogger(__name__)


def start(options: SensitiveOptions, command: str) -> dict[str, Any]:
    """Begin a run in a new folder; the summary is returned, and lies in the folder.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = options.merged_recipe()
    analysis = Analysis(options, recipe)
    state = AnalysisState(
        options.model_dump(), recipe.to_dict(), file_hash(options.weights),
        dataset=analysis.fingerprint().to_text(), command=command,
    )  # fmt: skip
    with new_run(options.project, options.name, options.exist_ok) as folder:
        forget_parts(folder)  # an earlier run's detections, which have the same names
        state.save(folder)
        return analysis.run(folder, state)


def resume(folder: Path, given: SensitiveOptions) -> dict[str, Any]:
    """Continue the run in `folder`; the options of this command line must agree with the run's.

    Raises:
        InputError: the run cannot be continued as asked, or another program is at it.
    """
    with held(folder):
        return _resume(folder, given)


def _resume(folder: Path, given: SensitiveOptions) -> dict[str, Any]:
    state = distributed.from_main(lambda: AnalysisState.load(folder))
    options = given.resumed(state.options)
    recipe = Recipe.from_stored(state.recipe)
    if given.given("recipe"):
        options.check_recipe(recipe)
    analysis = Analysis(options, recipe)
    if file_hash(options.weights) != state.weights_hash:
        raise InputError(f"{options.weights} has changed since the run in {folder} was started; start a new run")
    check_unchanged(state.dataset, analysis.fingerprint(), folder)
    return analysis.run(folder, state)


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

    def fingerprint(self) -> Fingerprint:
        """What the run reads, to be compared when it is resumed."""
        return self._inputs.fingerprint({"--hyp": self.options.hyp, "--profile": self.options.profile})

    def run(self, folder: Path, state: AnalysisState) -> dict[str, Any]:
        """Do what is left to do; returns the summary."""
        self.folder, self.state = folder, state
        self.state.finished = False  # until all is written, again
        try:
            with without_tables():
                return self._run()
        except KeyboardInterrupt:
            logger.info("\nstopped; continue with: python qat.py sensitive --resume %s", shlex.quote(str(folder)))
            raise

    def _run(self) -> dict[str, Any]:
        units = list(self._units.all)
        logger.info("%s → %s: %d units (%s)", self.options.weights, self.folder, len(units), self.options.granularity)
        model = self._calibrated()
        loader = self._inputs.validation_loader(
            self.options.batch_size, self.options.workers, limit=self.options.num_image
        )
        work = Work(loader, self._inputs.device, self.folder, self.state, self._clock)
        notes = ["every AP here is the mean of box and mask AP"] if self._inputs.has_masks else []
        with Layerwise(model) as network, torch.inference_mode():
            confirming = Confirming(work, network)
            screening = Screening(work, network, confirming, thorough=self.options.metric == "ap")
            search = Search(self.options, self._units, screening, confirming, self._costs(model))
            chosen = search.run(network, notes)
        recipe = self._recipe_with(search.patterns(chosen.names))
        if distributed.is_main():
            report.write_recipe(recipe.to_dict(), chosen.why, self.folder / "recipe.yaml")
        recipe_ap = self._verified(recipe) if chosen.names else None
        if recipe_ap is not None and chosen.ap >= search.ap["float"] - self.options.target_drop > recipe_ap:
            lost = search.ap["float"] - recipe_ap
            notes.append(f"calibrated anew, the recipe loses {lost:.4f}, more than with the ranges it was found with")
        summary = report.summary(
            command=self.state.command, options=self.options.model_dump(), screened=search.screened, ap=search.ap,
            costs=search.costs, selection=chosen, patterns=recipe.float,
            recipe_ap=recipe_ap, seconds=self.state.seconds, notes=notes,
            resampled=search.resampled, recipe_resampled=self.state.resampled("recipe").get(_recipe_name(recipe)),
        )  # fmt: skip
        if distributed.is_main():
            report.save(summary, self.folder)
        self.state.finished = True
        self.state.save(self.folder)
        logger.info("\n%s\nresult: %s", "\n".join(report.lines(summary, self.folder)), self.folder)
        return summary

    def _calibrated(self) -> nn.Module:
        """The network as `qat.py quantize` with this recipe would calibrate it."""
        model = self._place(self._inputs.plan)
        if self.state.amax:
            calibration.load_all(model, {name: torch.tensor(value) for name, value in self.state.amax.items()})
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
        images = image_batches(self._inputs.calibration_loader(self.options.as_quantize()))
        calibration.calibrate(model, (as_input(batch, self._inputs.device) for batch in images), recipe.calibration)

    def _costs(self, model: nn.Module) -> Costs:
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
        """The run's recipe with more in float."""
        return self.recipe.replace(float=tuple(dict.fromkeys((*self.recipe.float, *patterns))))

    def _verified(self, recipe: Recipe) -> float | None:
        """AP of the network that `qat.py quantize --recipe` makes, placed and calibrated anew; None if time is over.

        It is kept by the recipe's name.
        """
        name, known = _recipe_name(recipe), self.state.ap.get("recipe", {})
        if name not in known and not self._clock.over():
            began = time.perf_counter()
            model = self._place(placement.plan(self._inputs.source.model, recipe))
            self._calibrate(model, recipe)
            config = EvalConfig(
                imgsz=self._inputs.imgsz, batch_size=self.options.batch_size, workers=self.options.workers,
                limit=self.options.num_image,
            )  # fmt: skip
            result = Measurer(self._inputs.data, self._inputs.device, config).measure(model, "the recipe")
            self.state.ap["recipe"] = known = {**known, name: result.score.decides}
            self.state.keep_resampled(
                "recipe", name, result.statistics.score_resampled() if result.statistics else None
            )
            self.finished("AP of the recipe", began)
        return known.get(name)

    def finished(self, stage: str, began: float) -> None:
        """A step is finished: count its time and write the state."""
        self.state.add_seconds(stage, time.perf_counter() - began)
        self.state.save(self.folder)


def _recipe_name(recipe: Recipe) -> str:
    """What tells the recipes of a run apart: what they leave in float."""
    return ", ".join(sorted(recipe.float))
