"""Which calibration method suits this network? AP of each from one pass of statistics (`qat.py calibrate`, `auto`).

Statistics are gathered once; every method's ranges are searched in them and its AP measured on the same images. Then
single scales may take another method than the best: those whose change brings the predictions nearer to the float
network's (`proxy.py`), if AP says that it pays.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize import calibration, placement
from models.quantize.finetune import as_input, seed_everything
from models.quantize.partial_forward import Layerwise, State
from models.quantize.recipe import Calibration, Recipe, parse_method
from utils.core import distributed
from utils.core.files import atomic_path
from utils.core.resampled import Difference, Resampled, difference_error
from utils.core.run_folder import new_run
from utils.evaluation.loop import EvalConfig
from utils.evaluation.proxy import distance
from utils.evaluation.results import EvalResult
from utils.jobs.evaluate import Measurer, without_tables
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import CalibrateOptions, QuantizeOptions, merged_recipe
from utils.jobs.sensitivity import report as report

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

METHODS = ("max", "percentile 99.9", "percentile 99.99", "percentile 99.999", "mse", "entropy")
IMAGES = 200  # that AP is measured on when a quantize run sweeps
BATCHES = 3  # that single scales are compared on: one proposes, the others judge
SAME = 0.02  # ranges that differ by less are not tried
NEARER = 0.01  # share of the distance that another method for one scale has to take away
PAYS = 0.0005  # AP that exceptions from the best method have to gain
EXCEPTIONS = "with exceptions"  # their place among a sweep's errors


@dataclass
class Sweep:
    """What a sweep found.

    Attributes:
        chosen: the settings with the highest AP, and that AP.
        images: how many AP was measured on.
        methods: AP of each of `METHODS`.
        exceptions: scales that another method seemed better for → that method; `with_exceptions` is the AP with them.
        errors: standard error of a method's AP difference to the best method's; `with exceptions` is one of them.
        seconds: for the ranges of all methods, after the pass of statistics.
        measure: what is called AP here: of segmentation the mean of box and mask AP.
    """

    chosen: Calibration
    chosen_ap: float
    images: int
    methods: dict[str, float]
    seconds: float
    exceptions: dict[str, str] = field(default_factory=dict)
    with_exceptions: float | None = None
    errors: dict[str, float | None] = field(default_factory=dict)
    measure: str = "AP"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `measure` where it is not AP itself."""
        return {name: value for name, value in asdict(self).items() if name != "measure" or value != "AP"}

    def lines(self) -> list[str]:
        """For the terminal and the report's notes, best method first; the others with their difference to it."""
        best, *others = sorted(self.methods, key=self.methods.__getitem__, reverse=True)
        ap = {**self.methods, **({} if self.with_exceptions is None else {EXCEPTIONS: self.with_exceptions})}
        less = {name: Difference(ap[name] - ap[best], self.errors.get(name)) for name in ap if name != best}
        text = ", ".join([f"{best} {ap[best]:.4f}", *(f"{name} {ap[name]:.4f} ({less[name]})" for name in others)])
        found = [f"calibration sweep, {self.measure} on {self.images} images: {text}"]
        if EXCEPTIONS in ap:
            scales = f"with another method for {len(self.exceptions)} scales"
            found.append(f"{scales}: {ap[EXCEPTIONS]:.4f} ({less[EXCEPTIONS]})")
        chosen = f"chosen: {describe(self.chosen)}, {self.measure} {self.chosen_ap:.4f}"
        equal = [name for name in others if not less[name].beyond_error]
        if self.chosen.scales:  # with exceptions: then they are what must have gained
            equal = [] if less[EXCEPTIONS].beyond_error else [best]
        if equal:
            chosen += f"; within a standard error of {', '.join(equal)}, so not measurably better"
        return [*found, chosen]


def describe(settings: Calibration) -> str:
    """A method in words: 'percentile 99.99', with how many scales have another."""
    name = f"percentile {settings.percentile:g}" if settings.method == "percentile" else settings.method
    return f"{name}, and another method for {len(settings.scales)} scales" if settings.scales else name


def run(options: CalibrateOptions, command: str) -> Sweep:
    """`qat.py calibrate`: sweep, and write calibration.json and recipe.yaml to a new run folder.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = merged_recipe(options.as_quantize())
    inputs = Inputs.load(options.as_quantize(), recipe)
    with new_run(options.project, options.name, options.exist_ok) as folder:
        return _run(options, recipe, inputs, folder, command)


def _run(options: CalibrateOptions, recipe: Recipe, inputs: Inputs, folder: Path, command: str) -> Sweep:
    model = inputs.network()
    placement.apply(model, inputs.plan)
    model.to(inputs.device).eval()
    with without_tables():
        found = sweep(model, inputs, recipe, options.as_quantize(), options.num_image)
    content = {"schema_version": 1, "command": command, **found.to_dict(), "options": options.to_dict()}
    chosen = replace(recipe, calibration=found.chosen)
    if distributed.is_main():
        report.write_recipe(chosen.to_dict(), found.lines()[0], folder / report.RECIPE_FILE)
        with atomic_path(folder / "calibration.json") as temporary:  # last: where it lies, all is written
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    logger.info("\n%s\n", "\n".join(found.lines()))
    logger.info("python qat.py quantize --recipe %s applies it", shlex.quote(str(folder / report.RECIPE_FILE)))
    return found


def sweep(model: nn.Module, inputs: Inputs, recipe: Recipe, options: QuantizeOptions, limit: int = IMAGES) -> Sweep:
    """Gather statistics and compare methods; the model is left with the ranges of the best.

    Args:
        model: placed, on its device, in evaluation mode.
        limit: images to measure AP on, at most.
    """
    seed_everything(options.seed)
    images = image_batches(inputs.calibration_loader(options))
    statistics = calibration.collect(
        model, (as_input(batch, inputs.device) for batch in images), recipe.calibration.batches
    )
    config = EvalConfig(imgsz=inputs.imgsz, batch_size=options.batch_size, workers=options.workers, limit=limit)
    measurer = Measurer(inputs.data, inputs.device, config)
    began = time.perf_counter()
    ranges = {text: statistics.amax(*parse_method(text), recipe.calibration.median_limit) for text in METHODS}
    _wait(inputs.device)
    seconds = time.perf_counter() - began

    resampled: dict[str, Resampled | None] = {}
    results: list[EvalResult] = []

    def measured(amax: Mapping[str, Tensor], name: str, place: str) -> float:
        calibration.load(model, dict(amax))
        result = measurer.measure(model, f"calibration {name}")
        results.append(result)
        resampled[place] = result.statistics.score_resampled() if result.statistics else None
        return result.score.decides

    methods = {text: measured(ranges[text], text, text) for text in METHODS}
    best = max(METHODS, key=methods.__getitem__)
    method, percentile = parse_method(best)
    settings = replace(recipe.calibration, method=method, scales={})
    if method == "percentile":
        settings = replace(settings, percentile=percentile)
    found = Sweep(settings, methods[best], results[0].images, methods, seconds, measure=results[0].score.what)
    calibration.load(model, ranges[best])

    def exceptions() -> dict[str, str]:
        loader = inputs.validation_loader(options.batch_size, options.workers, limit=BATCHES * options.batch_size)
        batches = [as_input(batch, inputs.device) for batch in image_batches(loader)]
        return _exceptions(model, ranges, best, batches)

    found.exceptions = distributed.from_main(exceptions)
    if found.exceptions:
        tried = replace(settings, scales=found.exceptions)
        found.with_exceptions = measured(statistics.settled(tried), describe(tried), EXCEPTIONS)
        if found.with_exceptions >= methods[best] + PAYS:
            found.chosen, found.chosen_ap = tried, found.with_exceptions
    found.errors = {name: difference_error(one, resampled[best]) for name, one in resampled.items() if name != best}
    calibration.settle(model, statistics, found.chosen)
    return found


def _exceptions(
    model: Any, ranges: Mapping[str, Mapping[str, Tensor]], best: str, batches: list[Tensor]
) -> dict[str, str]:
    """Scale → a method that brings the predictions nearer to the float network's than the best method of all does.

    The first batch proposes; a proposal is kept if the others agree, on top of those kept before.
    """
    plan: placement.Plan = model.quantization_plan
    first, *others = batches
    proposals: dict[str, tuple[float, str]] = {}
    kept: dict[str, str] = {}
    with Layerwise(model) as network, torch.inference_mode():
        probe, judge = _Distance(network, [first]), _Distance(network, others or [first])
        for name in plan.scale_names:
            key = placement.scale_key(name)
            distinct = _distinct({text: float(ranges[text][key]) for text in METHODS}, best)
            tried = {text: probe.with_amax(key, torch.tensor(amax)) for text, amax in distinct.items()}
            calibration.load(model, {key: ranges[best][key]})
            nearest = min(tried, key=tried.__getitem__, default="")
            if nearest and tried[nearest] < probe.base * (1 - NEARER):
                proposals[name] = (tried[nearest], nearest)
        far = judge.base
        for name in sorted(proposals, key=proposals.__getitem__):
            key, text = placement.scale_key(name), proposals[name][1]
            found = judge.with_amax(key, ranges[text][key], *kept)
            if found < far - NEARER * judge.base:
                kept[name], far = text, found
            else:
                calibration.load(model, {key: ranges[best][key]})
    return kept


class _Distance:
    """Distance of a network's predictions from the float network's on some images, run from what is known."""

    def __init__(self, network: Layerwise, batches: Sequence[Tensor]) -> None:
        self._network = network
        self._known = [(network.run(images, State()), network.run(images, network.everything)) for images in batches]
        self.base = sum(
            float(distance(origin.prediction, whole.prediction, whole.size)) for origin, whole in self._known
        )

    def with_amax(self, key: str, amax: Tensor, *others: str) -> float:
        """The distance with another range for a scale; `others` are scales whose range has been changed already."""
        model, plan = self._network.model, self._network.model.quantization_plan
        calibration.load(model, {key: amax})
        names = [name for name in plan.scale_names if placement.scale_key(name) == key or name in others]
        tensors = frozenset(tensor for name in names for tensor in plan.scales.get(name, (name,)))
        found = 0.0
        for origin, whole in self._known:
            run = self._network.run(whole.images, self._network.everything, whole, tensors)
            found += float(distance(origin.prediction, run.prediction, run.size))
        return found


def _distinct(amax: Mapping[str, float], best: str) -> dict[str, float]:
    """The methods whose range differs from the best one's and from each other's."""
    found = {best: amax[best]}
    for text, value in amax.items():
        if all(abs(value - other) > SAME * other for other in found.values()):
            found[text] = value
    del found[best]
    return found


def _wait(device: torch.device) -> None:
    """Let a CUDA device finish, so that a clock tells its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
