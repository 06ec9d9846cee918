"""Search for the units to keep in FP16: score all units, measure AP of those that matter, add them greedily.

The run's state keeps what is measured: scores at the end of a pass over the images, AP of a network as soon as it is
known. A killed run repeats no more than that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from models.quantize.finetune import as_input
from utils.core.device import disable_tf32
from utils.core.input_spec import channels_of
from utils.core.score import Difference
from utils.core.tasks import AP_CONFIDENCE, Prediction
from utils.core.text import plural
from utils.evaluation.dataset import Loader, make_loader
from utils.evaluation.masks import between
from utils.evaluation.results import EvalResult
from utils.jobs.evaluate import Measurer, check_float_ap
from utils.jobs.inputs import Inputs
from utils.jobs.judgement import allowed_drop, judge, measured_on
from utils.jobs.options import SensitiveOptions
from utils.jobs.run_state import AnalysisState
from utils.jobs.sensitivity.units import State, Switches, Unit, Units, cost_of
from utils.reports.schema import Level, Row

logger = logging.getLogger(__name__)

IMAGES_A_UNIT = 25  # that each unit sees in screening, if the split has enough
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch
FLOAT, INT8 = "float", "INT8"  # names of the two whole networks
CONFIRMED = (4, 10)  # smallest and largest number of units whose AP is measured
MATTERS = 0.05  # a unit matters if it takes away a larger share of the INT8 network's distance
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried
NOISE = 0.05  # a unit that gains a smaller share of what was lost is not chosen
SCORES = 0.1  # of predictions, a difference in score against an equal one in IoU
BEST = 100  # anchors of an image whose masks are compared
SMALLEST_COST = 1e-3  # a unit with fewer multiply-adds is not chosen for being free


@dataclass
class Distances:
    """Sums over the images that a unit has seen in screening.

    Attributes:
        images: number of images.
        scale: the scale of the distances, see `weight`.
        int8: distances of the INT8 network from the FP32 model.
        in_float: distances of the INT8 network with the unit in float.
    """

    images: float = 0.0
    scale: float = 0.0
    int8: float = 0.0
    in_float: float = 0.0

    def add(self, images: int, scale: float, int8: float, in_float: float) -> None:
        """Add those of a batch."""
        self.images += images
        self.scale += scale
        self.int8 += int8
        self.in_float += in_float

    def as_result(self) -> dict[str, float]:
        """Return what the state keeps of a unit, see `Passes.screen`."""
        gained = self.int8 - self.in_float
        score = gained / max(self.scale, 1e-9)
        share = gained / max(self.int8, 1e-9)
        return {"images": self.images, "score": score, "share": share}


class Passes:
    """Passes of networks over the same validation images; `state` keeps their results, and is written to `folder`."""

    def __init__(
        self,
        inputs: Inputs[SensitiveOptions],
        switches: Switches,
        everything: State,
        state: AnalysisState,
        folder: Path,
    ) -> None:
        self.state = state
        self._inputs = inputs
        self._options = inputs.options
        self._folder = folder
        self._switches = switches
        self._everything = everything
        self._measurer = Measurer.of(inputs, inputs.options.num_image)

    def screen(self, units: Sequence[Unit]) -> None:
        """Score units, in turns, so that each sees another part of the images; with `--metric ap` all of them.

        The state gets of each unit the number of images, the `score`, which is how much nearer the INT8 network comes
        to the FP32 model's predictions with this unit in float, and its `share` of the INT8 network's distance.
        """
        waiting = [unit for unit in units if unit.name not in self.state.screened]
        if not waiting:
            return
        loader = self._loader()
        turns = self._number_of_turns(loader)
        title = f"screening {plural(len(waiting), 'unit')}"
        is_quiet = not logger.isEnabledFor(logging.INFO)
        sums: dict[str, Distances] = {}
        with disable_tf32(), torch.inference_mode():
            for index, batch in enumerate(tqdm(loader, title, unit="batch", disable=is_quiet)):
                units_now = [unit for place, unit in enumerate(waiting) if (index + place) % turns == 0]
                if units_now and len(batch):
                    self._add_distances(batch.images, units_now, sums)
        for name, distances in sums.items():
            self.state.screened[name] = distances.as_result()
        self.state.save(self._folder)

    def _loader(self) -> Loader:
        """Return the validation images that are used here."""
        return make_loader(
            self._inputs.data,
            "val",
            imgsz=self._inputs.imgsz,
            batch_size=self._options.batch_size,
            stride=self._inputs.source.stride,
            workers=self._options.workers,
            limit=self._options.num_image,
            progress=True,
        )

    def _number_of_turns(self, loader: Loader) -> int:
        """Return n, where a unit sees every n-th batch."""
        if self._options.metric == "ap":
            return 1
        images = len(loader.dataset)
        return max(1, min(LARGEST_TURN, images // IMAGES_A_UNIT, len(loader)))

    def _add_distances(self, images: Tensor, units: Sequence[Unit], sums: dict[str, Distances]) -> None:
        """Add to `sums` the distances on a batch of images, uint8 `[B, 3, H, W]`, with each of some units in float."""
        x = as_input(images, self._inputs.device, channels_of(self._switches.model))
        size = (x.shape[2], x.shape[3])
        origin = self._switches.predict(x, State())
        scale = float(weight(origin))
        int8 = float(distance(origin, self._switches.predict(x, self._everything), size))
        for unit in units:
            in_float = float(distance(origin, self._switches.predict(x, unit.in_float), size))
            sums.setdefault(unit.name, Distances()).add(len(x), scale, int8, in_float)

    def measure(self, name: str, state: State) -> Row:
        """Return the row of the network in this state of its quantizers; a row of the run's state is not made again."""
        return self.measure_network(name, lambda: self._switches.network_in(state))

    def measure_network(self, name: str, make: Callable[[], nn.Module]) -> Row:
        """Return the row of the network that `make` gives, whose `ap` is what decides: with masks the mean of both."""
        rows = self.state.rows
        if name not in rows:
            rows[name] = self._measured(name, make).model_dump()
            self.state.save(self._folder)
        return Row(**rows[name])

    def _measured(self, name: str, make: Callable[[], nn.Module]) -> Row:
        """Evaluate a network; without labels, those after the FP32 model are compared with its detections."""
        is_reference = self._options.unlabelled and name == FLOAT
        if self._options.unlabelled and not is_reference and self._measurer.reference is None:  # in a resumed run
            self._measurer.measure(self._switches.network_in(State()), FLOAT, as_reference=True)
        result = self._measurer.measure(make(), name, as_reference=is_reference)
        row = self._measurer.row(name, self._options.weights, result, result.seconds)
        return _with_mean_ap(row, result) if result.masks else row


def _with_mean_ap(row: Row, result: EvalResult) -> Row:
    """Return a row of a segmentation network with the mean of box and mask AP in place of both."""
    resampled = result.statistics.score_resampled() if result.statistics else None
    mean = {"ap": result.score.decides, "ap_resampled": resampled, "mask_ap": None, "mask_ap_resampled": None}
    return row.model_copy(update=mean)


@dataclass(frozen=True)
class Selection:
    """The units that stay in float.

    Attributes:
        names: of the units.
        ap: AP with these units in float.
        cost: their share of the network's cost, 0..1.
        why: why the search ended there, as a clause.
    """

    names: tuple[str, ...]
    ap: float
    cost: float
    why: str


class Search:
    """The way from units to a choice of them.

    Attributes:
        units: the units that were screened, by name.
        float_row, int8_row: the rows of the two whole networks.
        notes: further sentences for the reader.
    """

    float_row: Row
    int8_row: Row

    def __init__(self, options: SensitiveOptions, units: Units, passes: Passes, shares: Mapping[str, float]) -> None:
        """`shares` are the costs of parts of the network, see `units.cost_shares`."""
        self._options = options
        self._groups = units
        self._passes = passes
        self._shares = shares
        self._allowed = allowed_drop(options.target_drop, options.unlabelled)
        self.units: dict[str, Unit] = {}
        self.notes: list[str] = []

    def run(self) -> Selection:
        """Screen, confirm, choose; if single units regain too little, once more with sets of units."""
        self.float_row = self._passes.measure(FLOAT, State())
        check_float_ap(ap_of(self.float_row), self._options.force)
        self.int8_row = self._passes.measure(INT8, self._groups.everything)
        gains = self._measure_gains(self._groups.all)
        loss = gain(self.int8_row, self.float_row)
        judgement = judge(loss, self._allowed, images=measured_on(self.int8_row))
        if judgement.level is not Level.LOSS:
            recipe = " with --recipe" if self._options.recipe else ""
            return Selection((), ap_of(self.int8_row), 0.0, f"INT8{recipe} {judgement.words}")
        chosen = self._choose(gains)
        sets = self._groups.shared()
        if not sets or self._is_enough(chosen):
            return chosen
        logger.info("single units are not enough; screening %d sets of units that read the same scale", len(sets))
        self.notes.append("single units did not regain the AP, so sets of units that read the same scale were tried")
        return self._choose(gains | self._measure_gains(sets))

    def _is_enough(self, chosen: Selection) -> bool:
        """True if a choice of single units reaches the target, or regains enough of the loss."""
        target = ap_of(self.float_row) - self._allowed
        regained = chosen.ap - ap_of(self.int8_row)
        lost = gain(self.float_row, self.int8_row).value
        return chosen.ap >= target or regained >= EXPLAINED * lost

    def cost(self, names: Sequence[str]) -> float:
        """Return the share of the network's cost of these units; parts that several have in common count once."""
        patterns = [pattern for name in names for pattern in self.units[name].patterns]
        return cost_of(patterns, self._shares)

    def _measure_gains(self, units: Sequence[Unit]) -> dict[str, float]:
        """Screen units, and return the AP gained by each of those with the highest scores, or by every unit."""
        for unit in units:
            self.units[unit.name] = unit
        self._passes.screen(units)
        if self._options.metric == "proxy":
            units = self._highest_scores(units)
        gains = {}
        for unit in units:
            row = self._passes.measure(unit.name, unit.in_float)
            gains[unit.name] = gain(row, self.int8_row).value
        return gains

    def _highest_scores(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units whose AP is worth an evaluation, by their scores."""
        screened = self._passes.state.screened
        scored = [unit for unit in units if unit.name in screened]
        scored.sort(key=lambda unit: screened[unit.name]["score"], reverse=True)
        mattering = [unit for unit in scored if screened[unit.name]["share"] > MATTERS]
        fewest, most = CONFIRMED
        number = min(max(len(mattering), fewest), most)
        return scored[:number]

    def _choose(self, gains: Mapping[str, float]) -> Selection:
        """Choose the units to leave in float, of those whose gain is known."""

        def evaluate(names: tuple[str, ...]) -> float:
            state = self._state_with(names)
            if not state.weights:  # nothing would be quantized: no recipe
                return -math.inf
            return ap_of(self._passes.measure("+".join(sorted(names)), state))

        possible = {name: gain for name, gain in gains.items() if self._state_with((name,)).weights}
        return choose_units(
            possible,
            evaluate,
            self.cost,
            reference=ap_of(self.float_row),
            start=ap_of(self.int8_row),
            target_drop=self._allowed,
            budget=self._options.float_budget,
        )

    def _state_with(self, names: tuple[str, ...]) -> State:
        """Return the quantizers that are on while these units are in float."""
        return self._groups.in_float(path for name in names for path in self.units[name].convolutions)


def ap_of(row: Row) -> float:
    """Return the AP of a network that was measured."""
    assert row.ap is not None
    return row.ap


def gain(row: Row, base: Row) -> Difference:
    """Return the AP of a network of this run over that of another."""
    difference = row.difference(base)
    assert difference is not None, "all rows of one run compare"
    return difference


def choose_units(
    gains: Mapping[str, float],
    evaluate: Callable[[tuple[str, ...]], float],
    cost_of: Callable[[tuple[str, ...]], float],
    *,
    reference: float,
    start: float,
    target_drop: float,
    budget: float,
) -> Selection:
    """Add units greedily by AP gained per cost until the loss is small enough, then leave out what was not needed.

    Args:
        gains: unit → AP gained when it alone is in float.
        evaluate: gives the AP with these units in float.
        cost_of: gives their share of the network's cost, 0..1; units that overlap cost less than their sum.
        reference: AP of the FP32 model.
        start: AP of the network that is all INT8.
        target_drop: AP that may be lost.
        budget: share of the network's cost that may run in float.
    """

    def ap_with(names: tuple[str, ...]) -> float:
        return start + gains[names[0]] if len(names) == 1 else evaluate(names)

    def value(name: str) -> float:
        return gains[name] / max(cost_of((name,)), SMALLEST_COST)

    goal = reference - target_drop
    smallest_gain = max(NOISE * (reference - start), 0)
    useful = [name for name in gains if gains[name] > smallest_gain]
    chosen: tuple[str, ...] = ()
    ap = start
    why = "no further unit gains AP"
    for name in sorted(useful, key=value, reverse=True):
        if ap >= goal:
            break
        larger = (*chosen, name)
        if cost_of(larger) > budget:
            why = "the other units would exceed --float-budget"
            continue
        larger_ap = ap_with(larger)
        if larger_ap > ap:
            chosen = larger
            ap = larger_ap
    if ap >= goal:
        chosen, ap = _needed(sorted(chosen, key=gains.__getitem__), chosen, ap, ap_with, goal)
        why = f"the AP loss is within {target_drop:g}"
    return Selection(chosen, ap, cost_of(chosen), why)


def _needed(
    candidates: Sequence[str],
    chosen: tuple[str, ...],
    ap: float,
    ap_with: Callable[[tuple[str, ...]], float],
    goal: float,
) -> tuple[tuple[str, ...], float]:
    """Leave out each of the candidates without which the others still reach the goal; return the others and their AP.

    Args:
        candidates: the chosen units, in the order in which they are left out.
        ap: AP with all of `chosen` in float.
        ap_with: gives the AP with these units in float.
    """
    for name in candidates:
        rest = tuple(other for other in chosen if other != name)
        if not rest:
            continue
        rest_ap = ap_with(rest)
        if rest_ap >= goal:
            chosen = rest
            ap = rest_ap
    return chosen, ap


def distance(reference: Prediction, other: Prediction, size: tuple[int, int]) -> Tensor:
    """Distance of predictions from the FP32 model's, without labels and NMS, summed over images: float32 scalar.

    AP depends on the boxes that survive NMS: where they lie, to the last percent of IoU, and how their scores are
    ordered. So the distance is mostly one of boxes, 0 for equal ones; every anchor counts by the third power of the
    score that either network gives it, which is close to what NMS keeps. Masks of the best anchors are compared, too.
    `weight` gives the scale.

    Args:
        reference: predictions of the FP32 model.
        size: (height, width) of the input.
    """
    scores = reference.scores.float()
    other_scores = other.scores.float()
    higher = scores.maximum(other_scores)
    higher = higher.masked_fill(higher <= AP_CONFIDENCE, 0)  # evaluation drops scores below it
    weights = higher.amax(1) ** 3
    of_boxes = weights * (1 - overlap(reference.boxes, other.boxes))
    of_scores = higher.square() * (scores - other_scores).abs()
    total = of_boxes.sum() + SCORES * of_scores.sum()
    if reference.prototypes is None:
        return total
    return total + _distance_of_masks(reference, other, weights, size)


def weight(reference: Prediction) -> Tensor:
    """Scale of a distance: a distance of this size means that no box of the FP32 model is in its place.

    Twice the size means that no mask is, either.
    """
    return (reference.scores.float().amax(1) ** 3).sum()


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes `[B, 4, n]` (cx, cy, w, h) with the box at the same place, `[B, n]`."""
    a = a.float()
    b = b.float()
    low = (a[:, :2] - a[:, 2:] / 2).maximum(b[:, :2] - b[:, 2:] / 2)
    high = (a[:, :2] + a[:, 2:] / 2).minimum(b[:, :2] + b[:, 2:] / 2)
    common = (high - low).clamp(min=0).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - common
    return common / union.clamp(min=1e-9)


def _distance_of_masks(reference: Prediction, other: Prediction, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Distance of the masks of the best anchors, by IoU of probabilities; `weights` are of all anchors `[B, anchors]`.

    One image at a time: at 640 pixels its masks take 20 MB.
    """
    total = weights.new_zeros(())
    values, anchors = weights.topk(min(BEST, weights.shape[1]))
    for image in range(len(weights)):
        places = anchors[image]
        boxes = reference.boxes[image, :, places].float()
        masks = _masks(reference, image, places, boxes, size)
        other_masks = _masks(other, image, places, boxes, size)
        common = masks.minimum(other_masks).sum((1, 2))
        union = masks.maximum(other_masks).sum((1, 2))
        iou = (common + 1e-6) / (union + 1e-6)  # two empty masks are equal
        total = total + (values[image] * (1 - iou)).sum()
    return total


def _masks(prediction: Prediction, image: int, anchors: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks of some anchors of an image, `[n, h, w]` in 0..1, cropped to `boxes` `[4, n]` (cx, cy, w, h)."""
    assert prediction.prototypes is not None  # the caller has checked
    prototypes = prediction.prototypes[image].float()
    sums = prediction.coefficients[image, :, anchors].T.float() @ prototypes.flatten(1)
    height, width = prototypes.shape[1:]
    scale = boxes.new_tensor([[width / size[1]], [height / size[0]]])
    half = boxes[2:] / 2
    low = (boxes[:2] - half) * scale
    high = (boxes[:2] + half) * scale
    rows = between(low[1], high[1], height)[:, :, None]
    columns = between(low[0], high[0], width)[:, None, :]
    return sums.sigmoid_().unflatten(1, (height, width)) * (rows & columns)
