"""Which calibration method suits this network? All come from one pass of statistics.

`qat.py calibrate` measures AP of each on the same validation images; `--calib-method auto` of a quantize run compares
the loss of three on training images.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from models.quantize import calibration
from models.quantize.finetune import held_out_loss
from models.quantize.recipe import Calibration
from utils import upstream
from utils.cli import command_line
from utils.core.files import write_text
from utils.core.run_folder import new_run
from utils.core.score import Difference, difference_error
from utils.core.text import plural
from utils.evaluation.results import EvalResult
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, without_tables
from utils.jobs.inputs import HELD_OUT, Inputs, image_batches
from utils.jobs.options import RECIPE_FILE, CalibrateOptions
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report
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
CANDIDATES = ("percentile 99.999", "percentile 99.99", "mse")  # of `auto`


@dataclass
class Sweep:
    """What a sweep found.

    Attributes:
        chosen: the settings with the highest AP, and that AP.
        images: how many AP was measured on.
        methods: AP of each of `METHODS`.
        errors: standard error of a method's AP difference to the best method's.
        measure: what is called AP here: of segmentation the mean of box and mask AP; without labels agreement.
    """

    chosen: Calibration
    chosen_ap: float
    images: int
    methods: dict[str, float]
    errors: Mapping[str, float | None] = field(default_factory=dict)
    measure: str = "AP"

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
        result = measurer.measure(upstream.call_fused(inputs.network()), FLOAT_MODEL, as_reference=True)
        report.add(measurer.row("float", options.weights, result, result.seconds))
        model = inputs.placed()
        statistics = calibration.collect(model, inputs.calibration_images())
        settings = {name: recipe.replace(**changes).calibration for name, changes in METHODS.items()}
        results: dict[str, EvalResult] = {}
        for name, one in settings.items():
            calibration.set_ranges(model, statistics.amax(one.method, one.percentile, one.median_limit))
            results[name] = measurer.measure(model, f"calibration {name}")
        ap = {name: one.score.decides for name, one in results.items()}
        best = max(METHODS, key=ap.__getitem__)
        resampled = {
            name: one.statistics.score_resampled() if one.statistics else None for name, one in results.items()
        }
        errors = {name: difference_error(one, resampled[best]) for name, one in resampled.items() if name != best}
        found = Sweep(
            settings[best], ap[best], results[best].images, ap, errors,
            "agreement AP" if options.unlabelled else results[best].score.what,
        )  # fmt: skip
        rows = [measurer.row(name, options.weights, one, one.seconds) for name, one in results.items()]
        rows.sort(key=lambda row: (ap[row.stage], row.stage == best))
        recipe_file = {"file": str(folder / RECIPE_FILE), "size_bytes": None}  # a recipe's size is no network's
        report.rows += [row.model_copy(update=recipe_file) for row in rows]
        report.notes, report.splits = found.lines(), inputs.data.counts()
        agreement = {name: one.agreement.ap for name, one in results.items() if one.agreement}
        if agreement and (closest := max(agreement, key=agreement.__getitem__)) != best:
            report.notes.append(
                f"closest to the float network: {closest}, agreement {agreement[closest]:.4f}; {best} has "
                f"{agreement[best]:.4f}, so its AP may be chance where validation images are few"
            )
        content = {"schema_version": 1, "command": command_line(), **asdict(found), "options": options.model_dump()}
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


def choose_by_loss(model: nn.Module, teacher: nn.Module, inputs: Inputs[Any]) -> tuple[Calibration, str]:
    """`--calib-method auto`: the candidate whose task loss on the training images that are held out is smallest.

    No validation image is looked at. The statistics are those of one pass.

    Args:
        model: placed, on its device; it is left with the ranges of what is chosen.
        teacher: the float network.

    Returns:
        What is chosen, and a sentence with all losses and the standard errors of their differences to the smallest.
    """
    statistics = calibration.collect(model, inputs.calibration_images())
    settings = {name: inputs.recipe.replace(**METHODS[name]).calibration for name in CANDIDATES}
    loader, losses = inputs.held_out_loader(), {}
    for name, one in settings.items():
        calibration.set_ranges(model, statistics.amax(one.method, one.percentile, one.median_limit))
        losses[name] = held_out_loss(model, teacher, image_batches(loader), inputs.device)
    best, *others = sorted(losses, key=lambda name: losses[name].value)
    calibration.apply_calibration(model, statistics, settings[best])
    more = (
        "{} {:.4g} ({:+.2g} ± {:.2g})".format(name, losses[name].value, *losses[name].difference(losses[best]))
        for name in others
    )
    images = f"{plural(len(losses[best].terms), 'training image')} ({HELD_OUT[bool(inputs.held_out)]})"
    return settings[best], (
        f"calibration auto chose {best}, by the task loss on {images}: "
        + ", ".join([f"{best} {losses[best].value:.4g}", *more])
    )
