"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: for every unit (`units.py`), two states of one placed and calibrated network, "all in INT8 but this unit" and
"nothing in INT8 but this unit", are scored by how far their predictions are from the float network's
(`prediction_distance.py`).
Layers before the unit are not run again (`models/quantize/partial_forward.py`), and units take turns (`passes.py`).
Confirming: AP for the units with the highest scores, all on the same images. Then units stay in float, greedily,
until the loss is small enough (`search.py`), and that recipe is placed, calibrated and evaluated as `qat.py quantize`
does.
"""

from __future__ import annotations

import logging
import shlex
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
from utils.evaluation.dataset import check_unchanged
from utils.evaluation.loop import EvalConfig
from utils.jobs.evaluate import Measurer, without_tables
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import SensitiveOptions
from utils.jobs.run_state import find_run
from utils.jobs.sensitivity import report
from utils.jobs.sensitivity.passes import FLOAT, Clock, Passes
from utils.jobs.sensitivity.report import STATE_FILE, AnalysisState
from utils.jobs.sensitivity.search import Search
from utils.jobs.sensitivity.units import Costs, Units, read_profile

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def start(options: SensitiveOptions, command: str) -> dict[str, Any]:
    """Begin a run in a new folder; the summary is returned, and lies in the folder.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = options.merged_recipe()
    analysis = Analysis(options, recipe)
    dataset = analysis.dataset_hash()
    state = AnalysisState(options.model_dump(), recipe.to_dict(), file_hash(options.weights), dataset, command)
    with new_run(options.project, options.name, options.exist_ok) as folder:
        state.save(folder)
        return analysis.run(folder, state)


def resume(given: SensitiveOptions) -> dict[str, Any]:
    """Continue the run that `--resume` names; the options of this command line must agree with the run's.

    Raises:
        InputError: the run cannot be continued as asked, or another program is at it.
    """
    folder = find_run(given.resume or "", given.project, STATE_FILE)
    with held(folder):
        state = distributed.from_main(lambda: AnalysisState.load(folder))
        options = given.resumed(state.options)
        recipe = Recipe.from_stored(state.recipe)
        if given.given("recipe"):
            options.check_recipe(recipe)
        analysis = Analysis(options, recipe)
        if file_hash(options.weights) != state.weights_hash:
            raise InputError(f"{options.weights} has changed since the run in {folder} was started; start a new run")
        check_unchanged(state.dataset, analysis.dataset_hash(), folder)
        return analysis.run(folder, state)


class Analysis:
    """One sensitivity run: what it works on, and the steps."""

    def __init__(self, options: SensitiveOptions, recipe: Recipe) -> None:
        if recipe.calibration.method == AUTO:
            raise RecipeError(
                "sensitive needs one calibration method, not auto; python qat.py calibrate finds the best and writes "
                "a recipe to give here"
            )
        self._clock = Clock(options.budget)
        self._profile = read_profile(options.profile) if options.profile else None
        self._options, self._recipe = options, recipe
        self._inputs = inputs = Inputs.load(options.as_quantize(), recipe)
        self._units = Units(inputs.source.model, inputs.plan, recipe, options.granularity)

    def dataset_hash(self) -> str:
        """What the run reads, to be compared when it is resumed."""
        return self._inputs.dataset_hash({"--hyp": self._options.hyp, "--profile": self._options.profile})

    def run(self, folder: Path, state: AnalysisState) -> dict[str, Any]:
        """Do what is left to do; returns the summary."""
        try:
            with without_tables():
                return self._run(folder, state)
        except KeyboardInterrupt:
            logger.info("\nstopped; continue with: python qat.py sensitive --resume %s", shlex.quote(str(folder)))
            raise

    def _run(self, folder: Path, state: AnalysisState) -> dict[str, Any]:
        options, inputs, units = self._options, self._inputs, self._units
        logger.info("%s → %s: %d units (%s)", options.weights, folder, len(units.all), options.granularity)
        model = self._placed(inputs.plan)
        if state.amax:
            calibration.load_all(model, {name: torch.tensor(value) for name, value in state.amax.items()})
        else:
            self._calibrate(model)
            scales: Any = model.activation_quantizers
            state.amax = {name: float(backend.get_amax(quantizer)) for name, quantizer in scales.items()}
            state.save(folder)
        costs = Costs(model, torch.zeros(1, 3, inputs.imgsz, inputs.imgsz, device=inputs.device), self._profile)
        loader = inputs.validation_loader(options.batch_size, options.workers, limit=options.num_image)
        with Layerwise(model) as network, torch.inference_mode():
            every_unit = options.metric == "ap"
            passes = Passes(network, loader, inputs.device, folder, state, self._clock, every_unit=every_unit)
            search = Search(options, units, passes, costs)
            chosen = search.run()
        patterns = (pattern for name in chosen.names for pattern in search.units[name].patterns)
        recipe = self._recipe.replace(float=tuple(dict.fromkeys((*self._recipe.float, *patterns))))
        if distributed.is_main():
            report.write_recipe(recipe.to_dict(), chosen.why, folder / report.RECIPE_FILE)
        name, verified = ", ".join(sorted(recipe.float)), state.ap.setdefault("recipe", {})
        if chosen.names and name not in verified and not self._clock.over():
            self._verify(recipe, name, state)
            state.save(folder)
        recipe_ap = verified.get(name) if chosen.names else None
        notes = ["every AP here is the mean of box and mask AP"] if inputs.has_masks else []
        notes += search.notes
        if recipe_ap is not None and chosen.ap >= search.ap[FLOAT] - options.target_drop > recipe_ap:
            lost = search.ap[FLOAT] - recipe_ap
            notes.append(f"calibrated anew, the recipe loses {lost:.4f}, more than with the ranges it was found with")
        resampled = state.resampled("recipe").get(name)
        summary = report.summary(state, search, chosen, recipe.float, recipe_ap, resampled, notes)
        if distributed.is_main():
            report.save(summary, folder)
        logger.info("\n%s\nresult: %s", "\n".join(report.lines(summary, folder)), folder)
        return summary

    def _placed(self, plan: placement.Plan) -> nn.Module:
        """The network with quantizers, on its device, in evaluation mode."""
        model = self._inputs.network()
        placement.apply(model, plan)
        return model.to(self._inputs.device).eval()

    def _calibrate(self, model: nn.Module) -> None:
        """As `qat.py quantize` does it."""
        seed_everything(self._options.seed)
        batches = image_batches(self._inputs.calibration_loader(self._options.as_quantize()))
        images = (as_input(batch, self._inputs.device) for batch in batches)
        calibration.calibrate(model, images, self._recipe.calibration)

    def _verify(self, recipe: Recipe, name: str, state: AnalysisState) -> None:
        """Measure AP of the network that `qat.py quantize --recipe` makes; `name` says what is in float."""
        options, inputs = self._options, self._inputs
        model = self._placed(placement.plan(inputs.source.model, recipe))
        self._calibrate(model)
        config = EvalConfig(
            imgsz=inputs.imgsz, batch_size=options.batch_size, workers=options.workers, limit=options.num_image
        )
        result = Measurer(inputs.data, inputs.device, config).measure(model, "the recipe")
        resampled = result.statistics.score_resampled() if result.statistics else None
        state.keep_ap("recipe", {name: result.score.decides}, {name: resampled})
