"""Forms of QAT compared on one network and many validation images, with controls; `scripts/compare_qat.py` runs it.

Each run begins with a calibration method, trains for so many steps, and measures AP on the way. Controls tell a gain
from noise: the same displacement of every weight and range with random signs; ranges trained alone; the loss that
compares layers; fixed ranges; several seeds, which draw other orders of the images.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.quantize import calibration, placement
from models.quantize.finetune import Finetuner, as_input, highest_rate, learning_rate, seed_everything
from models.quantize.recipe import Recipe
from utils.core.files import atomic_path, file_hash
from utils.core.resampled import Difference, difference_error
from utils.core.tasks import Prediction
from utils.core.text_tables import aligned, columns
from utils.evaluation.loop import add_predictions
from utils.evaluation.metrics import Statistics
from utils.jobs import made_from
from utils.jobs.calibrate import METHODS
from utils.jobs.inputs import Inputs
from utils.jobs.options import QuantizeOptions
from utils.runners.pytorch import TorchRunner

logger = logging.getLogger(__name__)

STARTS = ("max", "percentile 99.9", "percentile 99.999", "mse")
FORMS = {  # of training → what the recipe says about it
    "layers, fixed": {"finetune_supervision": "layers", "finetune_ranges": "fixed"},
    "layers, learned": {"finetune_supervision": "layers"},
    "task, fixed": {"finetune_ranges": "fixed"},
    "task, learned": {},
    "task, ranges only": {"finetune_train": "ranges"},
}
POINTS = (0.0, 0.2, 0.6, 1.0)  # shares of the steps at which AP is measured
CONTROLLED = ("task, learned", "task, fixed")  # forms whose displacement is also made at random
VALIDATION_BATCH = 250  # images


@dataclass(frozen=True)
class Run:
    """One training: where it begins, its form, and its seed."""

    start: str
    form: str
    seed: int

    @property
    def file(self) -> str:
        """Name of the file with its result."""
        return f"{self.start}-{self.form}-{self.seed}.json".replace(" ", "_").replace(",", "")


@dataclass
class Result:
    """What was measured of a run.

    Attributes:
        float_ap: of the float network, on the same images.
        images: validation images.
        steps, ap, held_out: AP and the loss on held-out training images, after so many steps.
        error: standard error of the difference of the last AP to `float_ap`, from a paired bootstrap over the images.
        random_ap: AP when each weight and range has moved as far as it did, in a random direction.
        random_error: standard error of the difference of the last AP to `random_ap`.
    """

    run: dict[str, Any]
    float_ap: float
    images: int
    steps: list[int] = field(default_factory=list)
    ap: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    error: float | None = None
    random_ap: float | None = None
    random_error: float | None = None


class Comparison:
    """The network, its images, all of them in memory, and the float network's AP."""

    def __init__(self, options: QuantizeOptions, steps: int, folder: Path) -> None:
        """Load everything.

        Raises:
            InputError: or one of its kinds: something cannot be used, or `folder` holds results of something else.
        """
        self._options, self._steps, self._folder = options, steps, folder
        self._inputs = Inputs.load(options, Recipe())
        made_from.keep_to(folder, {
            "--weights": file_hash(options.weights), "--data": made_from.dataset_digest(self._inputs.data),
            "--imgsz": self._inputs.imgsz, "--batch-size": options.batch_size, "--steps": steps,
        })  # fmt: skip
        self._teacher = self._inputs.teacher()
        self._training = torch.cat([one.images for one in self._inputs.training_loader(options)])
        self._held_out = [one.images for one in self._inputs.held_out_loader(options)]
        self._validation = list(self._inputs.validation_loader(VALIDATION_BATCH, options.workers))
        self._placed = self._inputs.network()
        placement.apply(self._placed, self._inputs.plan)
        self._placed.to(self._inputs.device)
        seed_everything(options.seed)
        images = (as_input(one.images, self._inputs.device) for one in self._inputs.calibration_loader(options))
        self._statistics = calibration.collect(self._placed, images, Recipe().calibration.batches, progress=False)
        self._float = self._measured(self._teacher)
        self._float_resampled = self._float.score_resampled()
        self._ptq_ap: dict[str, float] = {}

    def measure(self, run: Run) -> Result:
        """Train as `run` says, and measure."""
        recipe = Recipe().replace(**FORMS[run.form])
        calibration.settle(self._placed, self._statistics, recipe.calibration.model_copy(update=METHODS[run.start]))
        student = copy.deepcopy(self._placed)
        origin = copy.deepcopy(student)
        tuner = Finetuner(student, self._teacher, recipe.finetune, device=self._inputs.device)
        steps, highest = self._steps, highest_rate(recipe.finetune.lr, self._steps)
        result = Result(asdict(run), _ap(self._float), len(self._float.paths))
        batches, last = self._batches(run.seed), Statistics()
        for before, step in itertools.pairwise([0, *sorted({round(share * self._steps) for share in POINTS})]):
            if step > before:
                some = itertools.islice(batches, step - before)
                tuner.run_epoch(some, lambda count, first=before: learning_rate(first + count, steps, highest))  # type: ignore[misc]
                last = self._measured(student)
            result.steps.append(step)
            result.ap.append(_ap(last) if step else self._ptq(run.start))
            result.held_out.append(tuner.held_out_loss(self._held_out))
        trained = last.score_resampled()
        result.error = difference_error(trained, self._float_resampled)
        if run.form in CONTROLLED:
            self._move_at_random(origin, student, run.seed)
            moved = self._measured(origin)
            result.random_ap, result.random_error = _ap(moved), difference_error(trained, moved.score_resampled())
        return result

    def run(self, runs: Sequence[Run]) -> None:
        """Measure what is not measured yet; each result is written when it is there."""
        for run in runs:
            path = self._folder / run.file
            if not path.is_file():
                result = self.measure(run)
                with atomic_path(path) as temporary:
                    temporary.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
                logger.info("%s: AP %.4f to %.4f (float %.4f)", path.stem, result.ap[0], result.ap[-1], result.float_ap)

    def _batches(self, seed: int) -> Iterator[Tensor]:
        """Training batches without end; the images come in another order in every pass."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._training), generator=generator)
            for chosen in order.split(self._options.batch_size):
                yield self._training[chosen]

    def _ptq(self, start: str) -> float:
        """AP of a start, as it is placed and calibrated now; measured once."""
        if start not in self._ptq_ap:
            self._ptq_ap[start] = _ap(self._measured(self._placed))
        return self._ptq_ap[start]

    def _measured(self, model: nn.Module) -> Statistics:
        """What AP is computed from, on the validation images."""
        statistics = Statistics()
        with TorchRunner(model, self._inputs.device) as runner:
            for batch in self._validation:
                found = runner.infer({"images": as_input(batch.images, self._inputs.device)})
                add_predictions(statistics, Prediction.of(found, runner.task), batch)
        return statistics

    @staticmethod
    def _move_at_random(origin: nn.Module, moved: nn.Module, seed: int) -> None:
        """Move each weight of `origin` as far as in `moved`, in a random direction, and each amax by the same ratio."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for ours, theirs in zip(origin.parameters(), moved.parameters(), strict=True):
                ours += (theirs - ours) * _signs(ours, generator)
            before: Any = origin.activation_quantizers
            after: Any = moved.activation_quantizers
            amax = {}
            for name, quantizer in before.items():
                ratio = after[name]._amax / quantizer._amax
                amax[name] = quantizer._amax * ratio ** _signs(ratio, generator)
            calibration.load(origin, amax)


def _ap(statistics: Statistics) -> float:
    return statistics.score().decides


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like)


def all_runs(seeds: int) -> list[Run]:
    """Every start, form and seed; first those of the form that is the default, then one seed of the others."""
    order = [(seed, "task, learned") for seed in range(seeds)]
    order += [pair for pair in itertools.product(range(seeds), FORMS) if pair not in order]
    return [Run(start, form, seed) for seed, form in order for start in STARTS]


def load_results(folder: Path) -> list[Result]:
    """The results that lie in a folder."""
    return [Result(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def draw(results: Sequence[Result], path: Path) -> None:
    """AP over steps, a panel for each start, a line for each form (the mean over its seeds)."""
    from utils.reports import figures

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for start, form in itertools.product(STARTS, FORMS):
        group = [one for one in results if one.run["start"] == start and one.run["form"] == form]
        if group:
            means = torch.tensor([one.ap for one in group], dtype=torch.float64).mean(0).tolist()
            panels.setdefault(start, {})[form] = list(zip(group[0].steps, means, strict=True))
    figures.save(figures.ap_per_step(panels, results[0].float_ap), path)
    logger.info("AP per step: %s", path)


def table(results: Sequence[Result]) -> list[str]:
    """A line for each start and form: mean AP over seeds, its difference to float, and the control."""
    headers = ("start", "form", "seeds", "PTQ", "end", "over seeds", "to float", "best", "random", "regained")
    rows = []
    for start, form in itertools.product(STARTS, FORMS):
        group = [one for one in results if one.run["start"] == start and one.run["form"] == form]
        if not group:
            continue
        ends = torch.tensor([one.ap[-1] for one in group], dtype=torch.float64)
        ptq, whole = group[0].ap[0], group[0].float_ap
        over_seeds = f"± {float(ends.std()) / len(ends) ** 0.5:.4f}" if len(ends) > 1 else "-"
        to_float = Difference(float(ends.mean()) - whole, _mean([one.error for one in group]))
        best, random = (_mean(values) for values in ([max(one.ap) for one in group], [one.random_ap for one in group]))
        regained = f"{(float(ends.mean()) - ptq) / (whole - ptq):.0%}" if whole != ptq else "-"
        rows.append((start, form, str(len(group)), f"{ptq:.4f}", f"{float(ends.mean()):.4f}", over_seeds, str(to_float),
                     f"{best:.4f}", "-" if random is None else f"{random:.4f}", regained))  # fmt: skip
    first = results[0]
    return [*aligned(columns(headers, left=headers[:2]), rows, rule=True),
            f"float AP {first.float_ap:.4f}, {first.images} images, {first.steps[-1]} steps"]  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
