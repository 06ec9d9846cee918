"""Which calibration method suits this network? AP of each from one pass of statistics (`qat.py calibrate`, `auto`).

Statistics are gathered once; every method's ranges are searched in them and its AP measured on the same images.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from models.quantize import calibration
from models.quantize.recipe import Calibration
from utils import upstream
from utils.cli import command_line
from utils.core.files import write_text
from utils.core.run_folder import new_run
from utils.core.score import Difference, difference_error
from utils.core.text import plural
from utils.evaluation.results import EvalResult
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.options import RECIPE_FILE, CalibrateOptions
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report, Row
from utils.reports.tables import terminal_table, verdict

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

METHODS: dict[str, dict[str, Any]] = {  # name → what the recipe says about calibration
    "max": {"calibration_method": "max"},
    **{f"percentile {p}": {"calibration_method": "percentile", "calibration_percentile": p}
       for p in (99.9, 99.99, 99.999)},
    "mse": {"calibration_method": "mse"},
}  # fmt: skip
IMAGES = 200  # that AP is measured on when a quantize run sweeps


@dataclass
class Sweep:
    """What a sweep found.

    Attributes:
        chosen: the settings with the highest AP, and that AP.
        images: how many AP was measured on.
        methods: AP of each of `METHODS`.
        seconds: for the ranges of all methods, after the pass of statistics.
        errors: standard error of a method's AP difference to the best method's.
        measure: what is called AP here: of segmentation the mean of box and mask AP.
        rows: of a report, one for each method, the best last.
    """

    chosen: Calibration
    chosen_ap: float
    images: int
    methods: dict[str, float]
    seconds: float
    errors: Mapping[str, float | None] = field(default_factory=dict)
    measure: str = "AP"
    rows: list[Row] = field(default_factory=list, repr=False)

    def lines(self) -> list[str]:
        """For the terminal and the report's notes, best method first; the others with their difference to it."""
        ap = self.methods
        best, *others = sorted(ap, key=ap.__getitem__, reverse=True)
        less = {name: Difference(ap[name] - ap[best], self.errors.get(name)) for name in others}
        text = ", ".join([f"{best} {ap[best]:.4f}", *(f"{name} {ap[name]:.4f} ({less[name]})" for name in others)])
        chosen = f"chosen: {best}, {self.measure} {self.chosen_ap:.4f}"
        if equal := [name for name in others if not less[name].significant]:
            chosen += f"; no measurable difference (two standard errors) to {', '.join(equal)}"
        return [f"calibration sweep, {self.measure} on {plural(self.images, 'image')}: {text}", chosen]


def run(options: CalibrateOptions) -> Sweep:
    """`qat.py calibrate`: sweep, and write calibration.json and recipe.yaml to a new run folder.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = options.merged_recipe()
    inputs = Inputs.load(options, recipe)
    options = inputs.options
    with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder, without_tables():
        report = Report(command=command_line(), title="Calibration methods", data=str(options.data))
        measurer = Measurer.of(inputs, options.num_image)
        result = measurer.measure(upstream.call_fused(inputs.network()), FLOAT_MODEL)
        report.add(measurer.row("float", options.weights, result, result.seconds))
        found = sweep(inputs.placed(), inputs, options.num_image)
        recipe_file = {"file": str(folder / RECIPE_FILE), "size_bytes": None}  # a recipe's size is no network's
        report.rows += [row.model_copy(update=recipe_file) for row in found.rows]
        report.notes, report.splits = found.lines(), inputs.data.counts()
        content = {"schema_version": 1, "command": command_line(), **asdict(found), "options": options.model_dump()}
        del content["rows"]
        content["chosen"] = found.chosen.to_dict()
        if found.measure == "AP":
            del content["measure"]
        recipe.replace(calibration=found.chosen).save(folder / RECIPE_FILE, found.lines()[0])
        write_all(report, folder)
        # last: where it lies, all is written
        write_text(folder / "calibration.json", json.dumps(content, indent=2) + "\n")
    table, page = terminal_table(report), folder / PAGE_NAME
    logger.info("\n%s\n\n%s\n\n%s\n%s\nreport: %s", table, "\n".join(report.notes), *verdict(report), page)
    return found


def sweep(model: nn.Module, inputs: Inputs[Any], limit: int = IMAGES) -> Sweep:
    """Gather statistics and compare methods; the model is left with the ranges of the best.

    Args:
        model: placed, on its device, in evaluation mode.
        limit: images to measure AP on, at most.
    """
    recipe, options = inputs.recipe, inputs.options
    statistics = calibration.collect(model, inputs.calibration_images())
    settings = {name: recipe.replace(**changes).calibration for name, changes in METHODS.items()}
    began = time.perf_counter()
    ranges = {name: statistics.amax(one.method, one.percentile, one.median_limit) for name, one in settings.items()}
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    seconds = time.perf_counter() - began

    measurer = Measurer.of(inputs, limit)
    results: dict[str, EvalResult] = {}
    for name, amax in ranges.items():
        calibration.set_ranges(model, amax)
        results[name] = measurer.measure(model, f"calibration {name}")
    ap = {name: result.score.decides for name, result in results.items()}
    best = max(METHODS, key=ap.__getitem__)
    resampled = {name: one.statistics.score_resampled() if one.statistics else None for name, one in results.items()}
    errors = {name: difference_error(one, resampled[best]) for name, one in resampled.items() if name != best}
    calibration.apply_calibration(model, statistics, settings[best])
    rows = [measurer.row(name, options.weights, one, one.seconds) for name, one in results.items()]
    rows.sort(key=lambda row: (ap[row.stage], row.stage == best))
    what = results[best].score.what
    return Sweep(settings[best], ap[best], results[best].images, ap, seconds, errors, what, rows)
