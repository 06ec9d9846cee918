#!/usr/bin/env python3
"""Does an INT8 network need thresholds of its own, one or one for each class, to behave as the FP32 network does?

    python benchmarks/thresholds.py litter=litter.npz robots=robots.npz --groups 'robots=\\d{3}' --output results.json

SET=FILE are files of benchmarks/detections.py, with a network that is called float and any others, such as PTQ and QAT.

A user has a confidence threshold t0 for the FP32 network: that of best F1, 0.25, or 0.5. Three rules give the threshold
of the INT8 network:

- same: t0.
- shifted: one other threshold for all classes, with which the INT8 network has the precision (or recall, or F1) over
  all classes that FP32 has at t0.
- by class: of each class the threshold with which INT8 has the class's precision (recall, F1) of FP32 at t0; a class
  with fewer than 50 objects in the half that thresholds are fitted on takes the shifted one.

"Has" means to within half an object, by the threshold nearest to t0 and at most 0.25 away; where no threshold reaches
it, the one that comes closest is taken. Thresholds are fitted on a random half of the images (of the groups, where
--groups says which images belong together), and judged on the other half, by the deviation from FP32 at t0 there: the
mean over classes, weighted by objects, of |precision of INT8 - precision of FP32| (or recall, or F1), and the same of
all classes together. Deviations are means over 200 random halves. ± is the standard error over images or groups: each
of 200 resamplings of them is halved ten times, and what ten halvings cannot average out is taken off. On 60
draws of 125 images of the demo set it was 10 and 29 % larger than the spread of the two differences.

The decision was written down before there were data:

- A rule is judged at FP32's threshold of best F1, by the deviation over classes, in the mean of precision, recall
  and F1.
- "By class" wins a set, with an INT8 state, if its deviation is smaller than that of "same" and than that of "shifted"
  by two standard errors each (with fewer than 30 groups by the t quantile of 95 %), and its deviation over all classes
  together is not larger than the smaller one of the others by as much.
- Thresholds by class are worth their code if they win at least three of four sets with the PTQ state, or with QAT's.
- The study is valid only if by class does not win with FP32's own scores and a little noise (1 % of the logit's
  standard deviation), and wins where FP32's scores of one class are multiplied by 0.8. That class is the one with
  most objects of those that have at most half of all objects, and at least 100; a set without such a class cannot
  show anything, and is counted as not won.

Other thresholds t0, each criterion alone, and thresholds that keep the number of detections (for which no labels are
needed) are reported and decide nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where benchmarks/ and utils/ lie

import numpy as np
from scipy import stats

from benchmarks.detections import Detections, Dump, named_files, read_dump
from utils.cli import command_line, run_program
from utils.core.errors import InputError
from utils.core.files import refuse_overwrite, write_text
from utils.core.options import Count, Field, Options, option
from utils.core.text import markdown_table
from utils.evaluation.bootstrap import group_images
from utils.evaluation.metrics import ClassScores, ap_per_class

CRITERIA = ("precision", "recall", "F1")
DETECTIONS = "detections"  # the criterion that needs no labels: as many detections as FP32
RULES = ("same", "shifted", "by class")
BEST_F1 = "best F1"
FURTHER = (0.25, 0.5)  # thresholds t0 that many users have
STEP, FURTHEST = 0.002, 0.25  # between thresholds that are tried, and from t0
FEW_UNITS = 30  # images or groups; with fewer the t quantile stands for two standard errors
NOISE, FACTOR = 0.01, 0.8  # of the two controls
CONTROLS = ("control: noise", "control: one class x 0.8")


class ThresholdOptions(Options):
    """What is compared."""

    sets: list[str] = option(..., "files of detections.py, each with a name", positional=True, metavar="SET=FILE")
    groups: list[str] = option([], "of a set: images that belong together, as of qat.py quantize", metavar="SET=REGEX")
    output: Path = option("runs/thresholds.json", "the results", metavar="FILE")
    splits: Count = option(200, "random halves", metavar="N")
    resamplings: Annotated[int, Field(ge=2)] = option(200, "of images or groups, for standard errors", metavar="N")
    least_objects: Count = option(50, "in the fitting half, of a class with a threshold of its own", metavar="N")
    seed: int = option(57, "of all draws", metavar="N")


class Halves(NamedTuple):
    """How often each unit counts, when thresholds are fitted and when they are judged: float32 `[draws, units]`."""

    fit: np.ndarray
    test: np.ndarray


HALVINGS = 10  # of each resampling


def draw_halves(units: int, splits: int, resamplings: int, seed: int) -> Halves:
    """Random halves of the units, then of resamplings of them HALVINGS each; no unit is in both halves of a draw."""
    random = np.random.default_rng(seed)
    draws: list[np.ndarray] = [np.ones(units, np.float32)] * splits
    for _ in range(resamplings):
        drawn = np.bincount(random.integers(units, size=units), minlength=units)
        draws += [drawn.astype(np.float32)] * HALVINGS
    fit: np.ndarray = np.zeros((len(draws), units), np.float32)
    test: np.ndarray = np.zeros_like(fit)
    for row, counts in enumerate(draws):
        there = random.permutation(np.flatnonzero(counts))
        middle = (len(there) + random.integers(2)) // 2  # of an odd number either half is the larger one
        fit[row, there[:middle]] = counts[there[:middle]]
        test[row, there[middle:]] = counts[there[middle:]]
    return Halves(fit, test)


@dataclass(frozen=True)
class Counts:
    """What networks do at each of T thresholds, in units (images, or groups of them) or in draws of them.

    Attributes:
        found, taken: objects that are found, and detections with that confidence at least, `[units, classes, T]`.
        objects: `[units, classes]`.
    """

    found: np.ndarray
    taken: np.ndarray
    objects: np.ndarray

    @classmethod
    def of(cls, dump: Dump, detections: Detections, units: np.ndarray, thresholds: np.ndarray) -> Counts:
        """Count; `units` are the numbers of the images' units, and `thresholds` ascend."""
        shape = (int(units.max()) + 1, len(dump.class_names))
        objects: np.ndarray = np.zeros(shape, np.float32)
        np.add.at(objects, (units[dump.label_image], dump.label_class), 1)
        # how many thresholds let each detection through
        passed: np.ndarray = np.atleast_1d(np.searchsorted(thresholds, detections.score, side="right"))
        place = (units[detections.image], detections.classes, passed)
        hit = detections.correct[:, 0]
        counted = {}
        for name, chosen in (("found", hit), ("taken", np.ones_like(hit))):
            histogram: np.ndarray = np.zeros((*shape, len(thresholds) + 1), np.float32)
            np.add.at(histogram, tuple(part[chosen] for part in place), 1)
            from_last: np.ndarray = histogram[..., ::-1].cumsum(axis=2)
            counted[name] = np.flip(from_last[..., :-1], 2)  # those that passed the first threshold, the second, ...
        return cls(**counted, objects=objects)

    def drawn(self, weights: np.ndarray) -> Counts:
        """The same in draws of the units, by how often each unit counts in each: `[draws, units]`."""
        return Counts(*(np.tensordot(weights, one, 1) for one in (self.found, self.taken, self.objects)))

    def together(self) -> Counts:
        """All classes as one."""
        return Counts(*(one.sum(1, keepdims=True) for one in (self.found, self.taken, self.objects)))

    def at(self, index: np.ndarray) -> Counts:
        """The counts at one threshold of each draw and class, by its number `[draws, classes]`; T is 1 then."""
        found, taken = (np.take_along_axis(one, index[..., None], 2) for one in (self.found, self.taken))
        return Counts(found, taken, self.objects)

    def score(self, criterion: str) -> np.ndarray:
        """Precision, recall, F1, or detections for each object: `[draws, classes, T]`; 0 where it is 0 of 0."""
        objects = self.objects[..., None]
        part, whole = {
            "precision": (self.found, self.taken),
            "recall": (self.found, objects),
            "F1": (2 * self.found, self.taken + objects),
            DETECTIONS: (self.taken, objects),
        }[criterion]
        score: np.ndarray = part / np.maximum(whole, 1)
        return score


def reached(scores: np.ndarray, targets: np.ndarray, objects: np.ndarray, thresholds: np.ndarray, t0: float) -> Any:
    """The number of the threshold nearest to t0 at which a score reaches its target, to within half an object.

    Where none does, that of the score closest to the target. `scores` are `[draws, classes, T]`, `targets`
    `[draws, classes, 1]`, `objects` `[draws, classes]`; the result is `[draws, classes]`.
    """
    difference = np.abs(scores - targets)
    near = difference <= 0.5 / np.maximum(objects, 1)[..., None]
    return np.where(near, np.abs(thresholds - t0), 1 + difference).argmin(2)


@dataclass(frozen=True)
class Study:
    """One INT8 network beside FP32, at one threshold t0.

    Attributes:
        base, other: counts of FP32 and of the INT8 network, in units.
        thresholds: that are tried, float `[T]`; `start` is the number of t0.
    """

    base: Counts
    other: Counts
    thresholds: np.ndarray
    start: int
    least_objects: int

    def fitted(self, rule: str, criterion: str, weights: np.ndarray) -> np.ndarray:
        """Numbers of the thresholds by a rule, fitted in draws of units: `[draws, classes]`."""
        base, other = self.base.drawn(weights), self.other.drawn(weights)
        start = np.full(base.objects.shape, self.start)
        if rule == "same":
            return start
        shifted = np.broadcast_to(self._reached(base.together(), other.together(), criterion), start.shape)
        if rule == "shifted":
            return shifted
        return np.where(base.objects >= self.least_objects, self._reached(base, other, criterion), shifted)

    def deviations(self, criterion: str, halves: Halves) -> dict[str, np.ndarray]:
        """By rule, of each draw the deviation over classes and that of all classes together: `[draws, 2]`."""
        base, other = self.base.drawn(halves.test), self.other.drawn(halves.test)
        base = base.at(np.full(base.objects.shape, self.start))
        weights = base.objects / np.maximum(base.objects.sum(1, keepdims=True), 1)
        result = {}
        for rule in RULES:
            judged = other.at(self.fitted(rule, criterion, halves.fit))
            of_class = np.abs(judged.score(criterion) - base.score(criterion))[..., 0]
            overall = np.abs(judged.together().score(criterion) - base.together().score(criterion))[:, 0, 0]
            result[rule] = np.stack([(weights * of_class).sum(1), overall], 1)
        return result

    def _reached(self, base: Counts, other: Counts, criterion: str) -> np.ndarray:
        targets = base.score(criterion)[..., self.start : self.start + 1]
        t0 = float(self.thresholds[self.start])
        result: np.ndarray = reached(other.score(criterion), targets, base.objects, self.thresholds, t0)
        return result


@dataclass(frozen=True)
class Estimate:
    """A mean over halves, and its standard error over units."""

    value: float
    error: float

    @classmethod
    def of(cls, draws: np.ndarray, splits: int, units: int) -> Estimate:
        """Of the value in each draw of `draw_halves`: the first `splits` are halves of all units."""
        resampled = draws[splits:].reshape(-1, HALVINGS)
        variance = resampled.mean(1).var(ddof=1) - resampled.var(1, ddof=1).mean() / HALVINGS
        error = math.sqrt(max(variance, 0) * units / max(units - 1, 1))
        return cls(float(draws[:splits].mean()), error)

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f}"


def smaller(difference: Estimate, units: int) -> bool:
    """Whether a difference is below 0 by two standard errors, or by the t quantile of few units."""
    return difference.value < -quantile(units) * difference.error


def quantile(units: int) -> float:
    """How many standard errors count."""
    return float(stats.t.ppf(0.975, units - 1)) if units < FEW_UNITS else 2.0


def compare(deviations: Mapping[str, np.ndarray], splits: int, units: int) -> dict[str, Any]:
    """Deviations of all rules, and by how much by class differs from the others, over classes and of all together."""
    result: dict[str, Any] = {}
    for column, what in enumerate(("over classes", "all together")):
        of_rule = {rule: draws[:, column] for rule, draws in deviations.items()}
        result[what] = {rule: float(draws[:splits].mean()) for rule, draws in of_rule.items()}
        for rule in RULES[:2]:
            difference = Estimate.of(of_rule["by class"] - of_rule[rule], splits, units)
            result[what][f"by class - {rule}"] = asdict(difference)
    return result


def wins(compared: Mapping[str, Any], units: int) -> bool:
    """Whether by class wins, as the decision says."""
    over_classes, together = compared["over classes"], compared["all together"]
    better = all(smaller(Estimate(**over_classes[f"by class - {rule}"]), units) for rule in RULES[:2])
    best = min(RULES[:2], key=together.__getitem__)
    difference = Estimate(**together[f"by class - {best}"])
    return better and difference.value <= quantile(units) * difference.error


def control_class(dump: Dump, least: int) -> int | None:
    """The class with most objects, of those with at most half of them all, and at least 2 x `least`; None: no class."""
    objects = np.bincount(dump.label_class, minlength=len(dump.class_names))
    fitting = np.flatnonzero((objects >= 2 * least) & (2 * objects <= objects.sum()))
    return int(fitting[objects[fitting].argmax()]) if len(fitting) else None


def controls(dump: Dump, float_name: str, least: int, seed: int) -> dict[str, Detections]:
    """FP32's detections with a little noise in the scores, and with lower scores of one class if one is fit for it."""
    base = dump.networks[float_name]
    logits = np.log(base.score / np.maximum(1 - base.score, 1e-6))
    noise = np.random.default_rng(seed).normal(0, NOISE * logits.std(), len(logits))
    noisy = 1 / (1 + np.exp(-(logits + noise)))
    result = {CONTROLS[0]: replace(base, score=noisy.astype(np.float32))}
    if (label := control_class(dump, least)) is not None:
        lower = np.where(base.classes == label, base.score * np.float32(FACTOR), base.score)
        result[CONTROLS[1]] = replace(base, score=lower)
    return result


def class_scores(dump: Dump, detections: Detections) -> ClassScores:
    """AP and the threshold of best F1, as an evaluation has them."""
    return ap_per_class(detections.correct, detections.score, detections.classes, dump.label_class)


def tried(t0: float) -> tuple[np.ndarray, int]:
    """The thresholds that are tried, ascending, and the number of t0 among them."""
    steps = np.arange(-round(FURTHEST / STEP), round(FURTHEST / STEP) + 1)
    thresholds = t0 + steps * STEP
    inside = (thresholds > STEP) & (thresholds < 1 - STEP)
    return thresholds[inside], int(np.flatnonzero(steps[inside] == 0)[0])


FLOAT = "float"


def study_set(dump: Dump, groups: str | None, options: ThresholdOptions) -> dict[str, Any]:
    """All results of one set, as JSON holds them."""
    names = group_images(dump.images, groups) if groups else dump.images
    units = np.unique(names, return_inverse=True)[1]
    number = int(units.max()) + 1
    base = class_scores(dump, dump.networks[FLOAT])
    networks = {name: one for name, one in dump.networks.items() if name != FLOAT}
    networks |= controls(dump, FLOAT, options.least_objects, options.seed)
    halves = draw_halves(number, options.splits, options.resamplings, options.seed)
    rows = []
    for at, t0 in {BEST_F1: base.threshold, **{str(value): value for value in FURTHER}}.items():
        thresholds, start = tried(t0)
        counts = Counts.of(dump, dump.networks[FLOAT], units, thresholds)
        for name, detections in networks.items():
            if name in CONTROLS and at != BEST_F1:
                continue
            other = Counts.of(dump, detections, units, thresholds)
            study = Study(counts, other, thresholds, start, options.least_objects)
            rows += study_rows(study, dump.class_names, halves, {"network": name, "at": at, "t0": t0}, options.splits)
    objects = np.bincount(dump.label_class, minlength=len(dump.class_names)).tolist()
    return {
        "images": len(dump.images),
        "units": number,
        "grouped": bool(groups),
        "objects": dict(zip(dump.class_names, objects, strict=True)),
        "AP": {name: class_scores(dump, one).mean().ap for name, one in dump.networks.items()},
        "control class": class_name(dump, control_class(dump, options.least_objects)),
        "rows": rows,
    }


def class_name(dump: Dump, label: int | None) -> str:
    """The name of a class; empty for none."""
    return "" if label is None else dump.class_names[label]


def study_rows(
    study: Study, class_names: list[str], halves: Halves, about: Mapping[str, Any], splits: int
) -> list[dict[str, Any]]:
    """A row for each criterion, and one for the mean of those that decide, with its verdict."""
    units = halves.fit.shape[1]
    by_criterion = {criterion: study.deviations(criterion, halves) for criterion in (*CRITERIA, DETECTIONS)}
    mean = {rule: np.mean([by_criterion[one][rule] for one in CRITERIA], 0) for rule in RULES}
    compared = compare(mean, splits, units)
    rows = [{**about, "criterion": "mean", **compared, "by class wins": wins(compared, units)}]
    everything = np.ones((1, units), np.float32)
    for criterion, deviations in by_criterion.items():
        compared = compare(deviations, splits, units)
        fitted = {rule: study.thresholds[study.fitted(rule, criterion, everything)[0]] for rule in RULES[1:]}
        rows.append({
            **about, "criterion": criterion, **compared, "by class wins": wins(compared, units),
            "shifted threshold": round(float(fitted["shifted"][0]), 4),
            "thresholds by class": dict(zip(class_names, fitted["by class"].round(4).tolist(), strict=True)),
        })  # fmt: skip
    return rows


def judge_study(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The decision: which sets by class wins with which network, and whether the controls did what they should."""
    won: dict[str, list[str]] = {}
    for name, content in sets.items():
        for row in content["rows"]:
            if row["at"] == BEST_F1 and row["criterion"] == "mean":
                won.setdefault(row["network"], [])
                won[row["network"]] += [name] if row["by class wins"] else []
    with_class = [name for name, content in sets.items() if content["control class"]]
    states = {network: names for network, names in won.items() if network not in CONTROLS}
    return {
        "won": won,
        "noise wins nothing": not won[CONTROLS[0]],
        "one class wins where it can": won.get(CONTROLS[1], []) == with_class,
        "sets that can show something": with_class,
        "worth its code": {network: len(names) >= 3 for network, names in states.items()},
    }


def study_table(sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: of each set and network what the rules come to."""
    heads = ["set", "network", "t0", "criterion", *RULES, *(f"by class - {rule}" for rule in RULES[:2]), "wins"]
    lines = []
    for name, content in sets.items():
        for row in content["rows"]:
            shown = row["over classes"]
            cells = [name, row["network"], f"{row['at']} ({row['t0']:.3f})", row["criterion"]]
            cells += [f"{shown[rule]:.4f}" for rule in RULES]
            cells += [str(Estimate(**shown[f"by class - {rule}"])) for rule in RULES[:2]]
            lines.append([*cells, "yes" if row["by class wins"] else ""])
    return markdown_table(heads, lines, heads[:4])


def named_groups(words: Iterable[str], sets: Iterable[str]) -> dict[str, str]:
    """Split `SET=REGEX`; `InputError` for another form, or a set that is not there."""
    groups: dict[str, str] = {}
    for word in words:
        name, equals, expression = word.partition("=")
        if not (equals and expression) or name not in {*sets}:
            raise InputError(f"--groups {word} is not SET=REGEX of one of the sets {', '.join(sets)}")
        groups[name] = expression
    return groups


def run(options: ThresholdOptions) -> int:
    """Study every set, decide, write."""
    files = named_files(options.sets)
    groups = named_groups(options.groups, files)
    refuse_overwrite([options.output], files.values())
    sets: dict[str, Any] = {}
    for name, file in files.items():
        dump = read_dump(file)
        if FLOAT not in dump.networks:
            raise InputError(f"{file} has the networks {', '.join(dump.networks)}, and none that is called {FLOAT}")
        sets[name] = study_set(dump, groups.get(name), options)
        print("\n".join(study_table({name: sets[name]})), flush=True)
    decision = judge_study(sets)
    content = {"command": command_line(), "decision": decision, "sets": sets}
    write_text(options.output, json.dumps(content, indent=1) + "\n")
    print(json.dumps(decision, indent=1), options.output, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("thresholds.py", (ThresholdOptions, run), about=__doc__))
