"""From units to a choice of them: score all, measure AP of what matters, add greedily.

What is measured is kept in the run's state: scores at the end of their pass over the images, AP of a network as soon as
it is known. So much a killed run repeats.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from models.quantize.finetune import as_input
from utils.core.device import disable_tf32
from utils.core.input_spec import channels_of
from utils.core.score import Difference
from utils.core.tasks import AP_CONFIDENCE, Prediction
from utils.core.text import plural
from utils.evaluation.dataset import make_loader
from utils.evaluation.masks import between
from utils.jobs.evaluate import Measurer, check_float_ap
from utils.jobs.inputs import Inputs
from utils.jobs.judgement import allowed_drop, judge, measured_on
from utils.jobs.options import SensitiveOptions
from utils.jobs.run_state import AnalysisState
from utils.jobs.sensitivity.units import State, Switches, Unit, Units, cost_of
from utils.reports.schema import Level, Row

logger = logging.getLogger(__name__)

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch
FLOAT, INT8 = "float", "INT8"  # names of the two whole networks
CONFIRMED = (4, 10)  # at least and at most so many units get an AP
MATTERS = 0.05  # share of the INT8 network's distance from which on a unit's score matters
EXPLAINED = 0.5  # if single units regain a smaller share of the loss, sets of units are tried
NOISE = 0.05  # a unit that gains a smaller share of what was lost is not chosen
SCORES = 0.1  # of predictions, a difference in score against an equal one in IoU
BEST = 100  # anchors of an image whose masks are compared
SMALLEST_COST = 1e-3  # a unit with fewer multiply-adds is not chosen for being free


class Passes:
    """Passes of networks over the same validation images; `state` keeps what they find, and is written to `folder`."""

    def __init__(
        self, inputs: Inputs[Any], switches: Switches, everything: State, state: AnalysisState, folder: Path
    ) -> None:  # fmt: skip
        self.state, self._inputs, self._folder = state, inputs, folder
        self._switches, self._everything = switches, everything
        self._measurer = Measurer.of(inputs, inputs.options.num_image)

    def screen(self, units: Sequence[Unit]) -> None:
        """Score units, in turns, so that each sees another part of the images; with `--metric ap` all of them.

        The state gets of each unit the number of images, the `score`, which is how much nearer the INT8 network comes
        to the float network's predictions with this unit in float, and its `share` of the INT8 network's distance.
        """
        done, inputs, options = self.state.screened, self._inputs, self._inputs.options
        if not (units := [unit for unit in units if unit.name not in done]):
            return
        loader = make_loader(
            inputs.data, "val", imgsz=inputs.imgsz, batch_size=options.batch_size, stride=inputs.source.stride,
            workers=options.workers, limit=options.num_image, progress=True,
        )  # fmt: skip
        count, channels = len(loader.dataset), channels_of(self._switches.model)
        turn = max(1, min(LARGEST_TURN, count // IMAGES_A_UNIT, len(loader))) if options.metric == "proxy" else 1
        sums: dict[str, list[float]] = {}  # of images, of the distances' scale, and of the distances
        title, quiet = f"screening {plural(len(units), 'unit')}", not logger.isEnabledFor(logging.INFO)
        with disable_tf32(), torch.inference_mode():
            for index, batch in enumerate(tqdm(loader, title, unit="batch", disable=quiet)):
                turns = [unit for place, unit in enumerate(units) if (index + place) % turn == 0]
                if not (turns and len(batch)):
                    continue
                images = as_input(batch.images, inputs.device, channels)
                origin, size = self._switches.predict(images, State()), (images.shape[2], images.shape[3])
                states = [self._everything, *(unit.in_float for unit in turns)]
                base, *distances = (
                    float(distance(origin, self._switches.predict(images, state), size)) for state in states
                )
                for unit, in_float in zip(turns, distances, strict=True):
                    seen = len(images), float(weight(origin)), base, in_float
                    sums[unit.name] = [a + b for a, b in zip(seen, sums.get(unit.name, [0.0] * 4), strict=True)]
        for name, (number, scale, base, in_float) in sums.items():
            score = (base - in_float) / max(scale, 1e-9)
            done[name] = {"images": number, "score": score, "share": (base - in_float) / max(base, 1e-9)}
        self.state.save(self._folder)

    def measure(self, name: str, state: State) -> Row:
        """The row of the network in this state of its quantizers; what the run's state has is not measured again."""
        return self.measure_network(name, lambda: self._switches.network_in(state))

    def measure_network(self, name: str, make: Callable[[], nn.Module]) -> Row:
        """The row of the network that `make` gives, whose `ap` is what decides: with masks the mean of both."""
        rows, unlabelled = self.state.rows, self._inputs.options.unlabelled
        if name not in rows:
            if unlabelled and name != FLOAT and self._measurer.reference is None:  # in a resumed run
                self._measurer.measure(self._switches.network_in(State()), FLOAT, as_reference=True)
            result = self._measurer.measure(make(), name, as_reference=unlabelled and name == FLOAT)
            row = self._measurer.row(name, self._inputs.options.weights, result, result.seconds)
            if result.masks:
                both = {"ap": result.score.decides, "mask_ap": None, "mask_ap_resampled": None}
                resampled = result.statistics and result.statistics.score_resampled()
                row = row.model_copy(update={**both, "ap_resampled": resampled})
            rows[name] = row.model_dump()
            self.state.save(self._folder)
        return Row(**rows[name])


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
        float_row, int8_row: the rows of the two whole networks.
        notes: what else a reader has to know, in sentences.
    """

    float_row: Row
    int8_row: Row

    def __init__(self, options: SensitiveOptions, units: Units, passes: Passes, shares: Mapping[str, float]) -> None:
        """`shares` are what parts of the network cost, see `units.cost_shares`."""
        self._options, self._groups, self._passes, self._shares = options, units, passes, shares
        self._allowed = allowed_drop(options.target_drop, options.unlabelled)
        self.units: dict[str, Unit] = {}
        self.notes: list[str] = []

    def run(self) -> Selection:
        """Screen, confirm, choose."""
        self.float_row = self._passes.measure(FLOAT, State())
        check_float_ap(ap_of(self.float_row), self._options.force)
        self.int8_row = self._passes.measure(INT8, self._groups.everything)
        gains = self._look_at(self._groups.all)
        start, lost = ap_of(self.int8_row), gain(self.float_row, self.int8_row)
        judgement = judge(gain(self.int8_row, self.float_row), self._allowed, images=measured_on(self.int8_row))
        if judgement.level is not Level.LOSS:
            recipe = " with --recipe" if self._options.recipe else ""
            return Selection((), start, 0.0, f"INT8{recipe} {judgement.words}")
        chosen, sets = self._choose(gains), self._groups.shared()
        missed = chosen.ap < ap_of(self.float_row) - self._allowed
        if sets and missed and chosen.ap - start < EXPLAINED * lost.value:
            logger.info("single units do not suffice; screening %d sets of all that reads one scale", len(sets))
            self.notes.append("single units did not regain the AP; sets of all that reads one scale were tried as well")
            chosen = self._choose(gains | self._look_at(sets))
        return chosen

    def cost(self, names: Sequence[str]) -> float:
        """Share of the network's cost of these units, what they have in common counted once."""
        return cost_of([pattern for name in names for pattern in self.units[name].patterns], self._shares)

    def _look_at(self, units: Sequence[Unit]) -> dict[str, float]:
        """Screen units, and give the AP gained with each of those with the highest scores, or of every one."""
        self.units |= {unit.name: unit for unit in units}
        self._passes.screen(units)
        screened = self._passes.state.screened
        best = sorted((unit for unit in units if unit.name in screened), key=lambda unit: -screened[unit.name]["score"])
        mattering = sum(screened[unit.name]["share"] > MATTERS for unit in best)
        if self._options.metric == "proxy":
            units = best[: min(max(mattering, CONFIRMED[0]), CONFIRMED[1])]
        return {unit.name: gain(self._passes.measure(unit.name, unit.in_float), self.int8_row).value for unit in units}

    def _choose(self, gains: Mapping[str, float]) -> Selection:
        """The units to leave in float, of those whose gain is known."""

        def evaluate(names: tuple[str, ...]) -> float:
            state = self._state_with(names)
            if not state.weights:  # nothing would be quantized: no recipe
                return -math.inf
            return ap_of(self._passes.measure("+".join(sorted(names)), state))

        return choose_units(
            {name: gain for name, gain in gains.items() if self._state_with((name,)).weights}, evaluate, self.cost,
            reference=ap_of(self.float_row), start=ap_of(self.int8_row),
            target_drop=self._allowed, budget=self._options.float_budget,
        )  # fmt: skip

    def _state_with(self, names: tuple[str, ...]) -> State:
        """The quantizers that are on while these units are in float."""
        return self._groups.in_float(path for name in names for path in self.units[name].convolutions)


def ap_of(row: Row) -> float:
    """AP of a network that was measured."""
    assert row.ap is not None
    return row.ap


def gain(row: Row, base: Row) -> Difference:
    """AP of a network of this run over that of another."""
    difference = row.difference(base)
    assert difference is not None, "of one run, all compare"
    return difference


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


def distance(reference: Prediction, other: Prediction, size: tuple[int, int]) -> Tensor:
    """How far predictions are from the float network's, without labels and NMS, summed over images: float32 scalar.

    AP depends on the boxes that survive NMS: where they lie, to the last percent of IoU, and how their scores are
    ordered. So the distance is mostly one of boxes, 0 for equal ones; every anchor counts by the third power of the
    score that either network gives it, which is close to what NMS keeps. Masks of the best anchors are compared, too.
    `weight` gives the scale.

    Args:
        reference: of the float network.
        size: (height, width) of the input.
    """
    ours, theirs = reference.scores.float(), other.scores.float()
    counts = ours.maximum(theirs)
    counts = counts * (counts > AP_CONFIDENCE)  # evaluation drops scores below it
    weights = counts.amax(1) ** 3
    boxes = weights * (1 - overlap(reference.boxes, other.boxes))
    found = boxes.sum() + SCORES * (counts.square() * (ours - theirs).abs()).sum()
    return found if reference.prototypes is None else found + _of_masks(reference, other, weights, size)


def weight(reference: Prediction) -> Tensor:
    """What a distance is relative to: about 1 if no box of the float network is in its place, and 2 if no mask is."""
    return (reference.scores.float().amax(1) ** 3).sum()


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes `[B, 4, n]` (cx, cy, w, h) with the box at the same place, `[B, n]`."""
    a, b = a.float(), b.float()
    low = (a[:, :2] - a[:, 2:] / 2).maximum(b[:, :2] - b[:, 2:] / 2)
    high = (a[:, :2] + a[:, 2:] / 2).minimum(b[:, :2] + b[:, 2:] / 2)
    common = (high - low).clamp(min=0).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - common
    return common / union.clamp(min=1e-9)


def _of_masks(reference: Prediction, other: Prediction, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """What the masks of the best anchors add, by IoU of probabilities; `weights` are of all anchors, `[B, anchors]`.

    One image at a time: at 640 pixels its masks take 20 MB.
    """
    total = weights.new_zeros(())
    for image, (value, anchors) in enumerate(zip(*weights.topk(min(BEST, weights.shape[1])), strict=True)):
        boxes = reference.boxes[image, :, anchors].float()
        ours, theirs = (_masks(one, image, anchors, boxes, size) for one in (reference, other))
        common, union = (one.sum((1, 2)) for one in (ours.minimum(theirs), ours.maximum(theirs)))
        total = total + (value * (1 - (common + 1e-6) / (union + 1e-6))).sum()  # two empty masks are equal
    return total


def _masks(prediction: Prediction, image: int, anchors: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks of some anchors of an image, `[n, h, w]` in 0..1, cropped to `boxes` `[4, n]` (cx, cy, w, h)."""
    assert prediction.prototypes is not None  # who calls this has looked
    prototypes = prediction.prototypes[image].float()
    sums = prediction.coefficients[image, :, anchors].T.float() @ prototypes.flatten(1)
    height, width = prototypes.shape[1:]
    scale = boxes.new_tensor([[width / size[1]], [height / size[0]]])
    low, high = ((boxes[:2] + sign * boxes[2:] / 2) * scale for sign in (-1, 1))
    inside = between(low[1], high[1], height)[:, :, None] & between(low[0], high[0], width)[:, None, :]
    return sums.sigmoid_().unflatten(1, (height, width)) * inside
