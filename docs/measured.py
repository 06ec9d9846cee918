"""Results in benchmarks/results/ as records: reading them, selecting, and means with standard errors.

photographs-h200.json   eight detectors and two segmentation models: PTQ, QAT, FP16 and INT8 engines; further
                        calibration methods, rates and steps of QAT, over seeds (some of them on a CPU)
qat-steps-h200.json     seven further detectors, less trained: PTQ and QAT over seeds, and INT8 engines
cards-h200.json         yolov9-s on playing cards: calibration methods, QAT, engines of PTQ and of QAT
cells-h200.json         yolov9-s and -t on blood cells: calibration methods and QAT
cells-yolov9-t.json     another yolov9-t on blood cells: calibration methods
garbage-h200.json       yolov9-s and -t on litter: calibration methods and QAT
garbage-h100.json       yolov9-m and -c on litter: the same; yolov9-s of garbage-h200.json: rates of QAT, over seeds
robots-h200.json        yolov9-s on robots that fails in FP32 on some images: calibration methods and QAT
defaults-h200.json      four yolov9-s by all defaults of 28 November; cells and cards split anew
detectors-h200.json     ten detectors on six sets by all defaults of 29 November, and with the head's last convolutions
                        in FP16; two of them with more steps of QAT and with the box term of its loss times 3
latency-h200.json       FP16 and INT8 engines of yolov9-t, -s and -c with random weights: the JSON of benchmark_trt.py
engines-h200.json       engines of five models with random weights, with 0 and 2 auxiliary streams and with uploads
streams-h200.json       engines with 0, 2 and 3 auxiliary streams, and with more layers in FP16
qat-stop-h200.json      losses on held-out images in long runs of QAT, and their errors
cpu-*.json              INT8 on CPUs, beside NNCF and ONNX Runtime: what benchmarks/cpu.py writes
openvino-simulation.json, openvino-nncf-cells.json
                        AP in OpenVINO, of the simulation and of NNCF, on all images of cells

PTQ is calibrated by percentile 99.999 unless a line says otherwise, and in detectors-h200.json by `auto`. Agreement is
1 for a model with itself.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.score import Resampled, difference_error

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks/results"
STREAMS, ENGINES = "streams-h200", "engines-h200"
PHOTOGRAPHS, QAT_STEPS, BY_DEFAULT, LATENCY = "photographs-h200", "qat-steps-h200", "defaults-h200", "latency-h200"
TEN_DETECTORS = "detectors-h200"
REPORTS = ("cards-h200", "cells-h200", "garbage-h100", "garbage-h200", "robots-h200", "cells-yolov9-t", TEN_DETECTORS)
UNSEEN = ("plates", "palms", "kuih")  # sets that were not used before the defaults were chosen
LAST_CONVOLUTIONS = " with head: last-conv-float"  # behind PTQ or QAT, in states
ON_A_CPU = " (a CPU)"  # behind others, where a CPU computed them
# Detectors of TEN_DETECTORS whose FP32 model reports a box with a score near 1 that is as large as the image, or
# outside of it, on at least one image. They are not left out, but means are given without them, too.
DOUBTFUL = ("yolov9-t, plates", "yolov9-t, palms")
FAILS_IN_FP32 = "robots-h200"  # its FP32 model reports up to 110 boxes as large as the image on some images
IMAGES = {  # in the validation split; 210/154: another split of the same images, training/validation
    "litter": 670,
    "robots": 800,
    "cells": 72,
    "cards": 67,
    "nuclei": 166,
    "plates": 161,
    "palms": 146,
    "kuih": 260,
    "cells 210/154": 154,
    "cards 210/153": 153,
}
GROUPS = {"robots": 13}  # that standard errors are over; on other sets they are over images
SIZES = "tsmc"  # last letters of detectors, from the smallest on
USUAL_STEPS = "QAT, 450 steps at 3e-5"
USUAL_EPOCHS = "10"
# QAT by the default of the day, the one of today first. Ten epochs have 200 or 110 steps on cells and cards, 240
# on palms and 280 on plates.
DEFAULTS = (
    *(USUAL_STEPS, "QAT, 110 steps at 3e-5", "QAT, 200 steps at 3e-5"),
    *("QAT, 240 steps at 3e-5", "QAT, 280 steps at 3e-5", "QAT, 200 steps at 6.7e-5", "QAT, 1620 steps at 3e-5"),
)


@dataclass(frozen=True)
class Result:
    """One state of a model, evaluated once.

    Attributes:
        file: name of the JSON file, without its ending.
        training: the same text for results of the same FP32 weights.
        network: such as `yolov9-s`.
        images: the set of images, a key of IMAGES.
        state: `PTQ`, a calibration method behind it unless that is percentile 99.999; `QAT, STEPS steps at RATE`;
            `INT8 engine`, `FP16 engine`.
        seed: of the calibration and of QAT.
        fp32: AP of the FP32 model.
        value: AP of boxes minus that of the FP32 model.
        error: the standard error of `value`, over images or groups; None where it was not kept.
        agreement: with the FP32 model; nan where it was not measured.
        row: the entry of the file.
    """

    file: str
    training: str
    network: str
    images: str
    state: str
    seed: int
    fp32: float
    value: float
    error: float | None
    agreement: float
    row: dict[str, Any]

    @property
    def name(self) -> str:
        """Model and set."""
        return f"{self.network}, {self.images}"

    @property
    def width(self) -> float:
        """Number of standard errors in half of a 95 % interval."""
        return interval_width(GROUPS.get(self.images))

    @property
    def has_masks(self) -> bool:
        """Whether it is a segmentation model."""
        return "-seg" in self.network

    def is_changed(self, score: str) -> bool:
        """Whether the difference of `recall` or `precision` to FP32 lies outside of its 95 % interval around 0."""
        difference, error = self.row[f"{score}_to_float"], self.row[f"{score}_error"]
        return bool(abs(difference) >= self.width * error)

    def difference(self, score: str) -> str:
        """The difference of `recall`, `precision` or `mask` AP to FP32 with its standard error, as text."""
        return with_error(self.row[f"{score}_to_float"], self.row[f"{score}_error"])


def interval_width(groups: int | None) -> float:
    """Return the number of standard errors in half of a 95 % interval: 2, and more for fewer than 30 groups.

    For those it is Student's t quantile times sqrt(n / (n - 1)), by which the bootstrap's standard error is too small.
    """
    if groups is None or groups >= 30:
        return 2.0
    from scipy import stats

    return float(stats.t.ppf(0.975, groups - 1)) * math.sqrt(groups / (groups - 1))


# Reading


def read_results() -> list[Result]:
    """Read all files."""
    results = [*photographs(), *plain_rows(QAT_STEPS), *plain_rows(BY_DEFAULT)]
    for name in REPORTS:
        results += reports(FOLDER / f"{name}.json")
    return results


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file of results."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def photographs() -> Iterator[Result]:
    """Yield the results of photographs-h200.json; the seed of its `rows` is 57."""
    content = load(FOLDER / f"{PHOTOGRAPHS}.json")
    fp32 = {row["network"]: row["ap"] for row in content["rows"] if row["state"] == "float"}
    for row in [*content["rows"], *content["seeds"]]:
        if "to_float" in row and row["state"] != "PTQ-auto":  # which is in `PTQ by auto`, or equal to `PTQ`
            state = USUAL_STEPS if row["state"] == "QAT" else row["state"].replace("PTQ-", "PTQ ")
            yield row_result(PHOTOGRAPHS, row, state, fp32[row["network"]])


def plain_rows(file: str) -> Iterator[Result]:
    """Yield the results of a file whose rows have their differences to FP32."""
    for row in load(FOLDER / f"{file}.json")["rows"]:
        state = row["state"]
        if "engine" in state:
            state = "INT8 engine"
        elif setting := re.fullmatch(r"QAT, (?:auto \()?([\d.e-]+)\)?, (\d+) x (\d+)(?: steps)?", state):
            rate, epochs, steps = setting.groups()
            state = f"QAT, {int(epochs) * int(steps)} steps at {rate}"
            if epochs != USUAL_EPOCHS:
                state += f" in {epochs} epochs"
        yield row_result(file, row, state, row["float"])


def row_result(file: str, row: dict[str, Any], state: str, fp32: float) -> Result:
    """Return the result of a row that has its difference to FP32 and the standard error."""
    name = row["network"]
    network, images, _ = name.split(", ")
    scores = (fp32, row["to_float"], row["error"], row["agreement"])
    return Result(file, f"{file}: {name}", network, images, state, row.get("seed", 57), *scores, row)


def reports(path: Path) -> Iterator[Result]:
    """Yield the results of a file that holds the report rows of the programs that ran.

    Its keys are networks, or networks with sets: `yolov9-s, cells`; the file's name has the set otherwise.
    """
    of_file = path.stem.partition("-")[0].replace("garbage", "litter")
    for name, content in load(path).items():
        network, _, images = name.partition(", ")
        images = images or of_file
        weights = content["inputs"]["--weights"]  # a hash
        training = f"{path.stem}: {name}" if weights == "trained here" else weights
        rows = {step: entry["result"] for step, entry in content["steps"].items() if entry["result"]}
        base = rows.pop("float")
        for step, row in rows.items():
            setting, _, seed = step.partition(", seed ")
            state = state_of_step(setting, images)
            agreement = row.get("agreement") or math.nan
            scores = (base["ap"], row["ap"] - base["ap"], paired_error(row, base), agreement)
            yield Result(path.stem, training, network, images, state, int(seed or 57), *scores, row)


def state_of_step(setting: str, images: str) -> str:
    """Return the state that a step's name means.

    QAT without a rate is the default of 26 November: ten epochs, at a rate that depended on the number of images.
    """
    if setting in ("float engine", "QAT engine"):
        return {"float engine": "FP16 engine", "QAT engine": "INT8 engine"}[setting]
    if setting == "QAT":
        return "QAT, 200 steps at 6.7e-5" if images in ("cells", "cards") else "QAT, 1620 steps at 3e-5"
    if rate_and_steps := re.fullmatch(r"QAT (\S+) x (\d+)", setting):
        rate, steps = rate_and_steps.groups()
        return f"QAT, {steps} steps at {'4.5e-5' if rate == 'auto' else rate}"
    return setting


def paired_error(row: dict[str, Any], base: dict[str, Any], score: str = "ap") -> float | None:
    """Return the standard error of a difference of AP, or of `agreement`, over the same resampled images.

    It is None where they were not kept.
    """
    texts = [str(entry.get(f"{score}_resampled", "")) for entry in (row, base)]
    if "" in texts:
        return None
    return difference_error(*map(Resampled.from_text, texts))


# Selecting: by state and training, never by value


def select(results: Iterable[Result], state: str) -> list[Result]:
    """Return the results in a state: the first of each training and seed, since some are in two places."""
    first: dict[tuple[str, int], Result] = {}
    for result in results:
        if result.state == state:
            first.setdefault((result.training, result.seed), result)
    return list(first.values())


def by_training(results: Iterable[Result]) -> list[list[Result]]:
    """Return the results of each training."""
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.training, []).append(result)
    return list(grouped.values())


def detectors(results: Iterable[Result]) -> list[Result]:
    """Return the results without those of segmentation models."""
    return [result for result in results if not result.has_masks]


def default_qat(results: Sequence[Result]) -> list[Result]:
    """Return the QAT runs of a training by the default of today, or else by that of an earlier day."""
    for state in DEFAULTS:
        if runs := select(results, state):
            return runs
    return []


def by_default(results: Sequence[Result], state: str) -> list[Result]:
    """Return results with the calibration that `auto` chose where it was measured, or else with percentile 99.999."""
    with_auto = "QAT by auto" if state == USUAL_STEPS else f"{state} by auto"
    return select(results, with_auto) or select(results, state)


def deployed_engines(results: Sequence[Result]) -> list[Result]:
    """Return the INT8 engine after QAT of each training that has one."""
    engines: list[Result] = []
    for training in by_training(results):
        engines += by_default(training, "INT8 engine")
    return engines


# Computing and writing


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    return statistics.fmean(values)


def mean_with_error(results: Sequence[Result]) -> tuple[float, float]:
    """Return the mean of differences to FP32, and its standard error over images.

    Models on the same images err together, so their errors are added up; errors of different sets are independent.
    """
    errors = dict.fromkeys((result.images for result in results), 0.0)
    for result in results:
        errors[result.images] += math.nan if result.error is None else result.error
    return mean(result.value for result in results), math.hypot(*errors.values()) / len(results)


def paired_runs(runs: Sequence[Result], base: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Return the runs of two states of a training that have the same seed."""
    of_seed = {run.seed: run for run in base}
    return [(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]


def difference_of_runs(pairs: Sequence[tuple[Result, Result]], score: str) -> tuple[float, float]:
    """Return the mean difference of `ap` or `agreement` of pairs, and its standard error √(image² + seed²/n)."""
    values = [run.row[score] - base.row[score] for run, base in pairs]
    over_images = mean(paired_error(run.row, base.row, score) or math.nan for run, base in pairs)
    if len(values) == 1:
        return values[0], over_images
    return mean(values), math.hypot(over_images, statistics.stdev(values) / math.sqrt(len(values)))


def over_trainings(values: Sequence[float]) -> str:
    """Return the mean of values, its standard error by their spread, and their range, as text."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    positive = sum(1 for value in values if value > 0)
    limits = f"from {min(values):+.4f} to {max(values):+.4f}"
    return f"{mean(values):+.4f} ± {error:.4f}, {limits}, above 0 in {positive} of {len(values)}"


def mean_and_lowest(values: Sequence[float], form: str) -> str:
    """Return the mean and in brackets the smallest value, as text."""
    return f"{mean(values):{form}} ({min(values):{form}})"


def with_error(value: float, error: float | None) -> str:
    """Return a difference and, where it is known, its standard error, as text."""
    return f"{value:+.4f}" if error is None else f"{value:+.4f} ± {error:.4f}"


def list_of_networks(networks: Sequence[str]) -> str:
    """Return text such as `yolov9-t, -s`."""
    family = networks[0][:-1]
    return ", ".join([networks[0], *(name.replace(family, "-") for name in networks[1:])])
