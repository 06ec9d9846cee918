#!/usr/bin/env python3
"""Measure what INT8 costs in AP, and what it gains in time: train, quantize, export, build, evaluate, time.

    python benchmarks/accuracy.py --data datasets/digits-640/data.yaml --networks yolov9-s --epochs 12
    python benchmarks/accuracy.py --data data/coco.yaml --weights yolov9-c-converted.pt -- --optimization-level 2
    python benchmarks/accuracy.py --data datasets/cells/data.yaml --networks yolov9-t --quick --device cpu

YOLOV9_CHECKOUT, or --checkout, is a patched checkout, whose programs do the work. Their reports lie in --output, and a
step that has ended is not run again. Without a GPU or TensorRT, ONNX Runtime evaluates and times the exported files.
Options behind -- are for benchmark_trt.py. --quick tries all of it in minutes on a CPU.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where benchmarks/ and utils/ lie

from benchmarks import steps
from benchmarks.steps import ENGINE_PYTHON, Setup, input_file
from utils.core.errors import InputError
from utils.core.files import write_text
from utils.core.options import Count, Workers, option
from utils.core.run_folder import held
from utils.core.score import Difference
from utils.core.text import markdown_table
from utils.jobs.pipeline.steps import RunStep, StepError, Words
from utils.reports.schema import Report, Row

TRAINING = {  # upstream's networks → images a batch, and the highest learning rate of AdamW
    "yolov9-t": (64, 0.0015),
    "yolov9-s": (64, 0.0015),
    "yolov9-m": (48, 0.001),
    "yolov9-c": (48, 0.001),
}
SETTINGS = {  # a state's name → the options of `qat.py quantize` that make it
    "PTQ": "--qat never",
    "PTQ-99.999": "--qat never --percentile 99.999",
    "PTQ-99.99": "--qat never --percentile 99.99",
    "PTQ-mse": "--qat never --calib-method mse",
    "PTQ-max": "--qat never --calib-method max",
    "QAT": "",
}
QUICK = {"epochs": 1, "batch_size": 8, "workers": 2}  # of --quick, which also shortens calibration and QAT
QUICK_QAT: Words = ["--calib-images", "20", "--epochs", "1", "--iters", "5", "--batch-size", "4"]


class AccuracyOptions(steps.StudyOptions):
    """The study of accuracy."""

    data: str = option(..., "dataset's YAML", metavar="FILE")
    networks: list[Literal["yolov9-t", "yolov9-s", "yolov9-m", "yolov9-c"]] = option([], "of upstream's, to train")
    weights: list[str] = option([], "trained FP32 checkpoints, as reparameterization.py leaves them", metavar="FILE")
    output: str = option("runs/accuracy", "where results lie", metavar="DIR")
    workers: Workers = option(8, "processes that read images", metavar="N")
    groups: str = option("", "images that are resampled together, see qat.py quantize", metavar="FILE|REGEX")
    quick: bool = option(
        False, "try whether it works here, without a valid result: one epoch, few iterations, two settings"
    )
    settings: str = option("", "YAML of states, NAME: options of qat.py quantize (default: SETTINGS)", metavar="FILE")
    seeds: list[int] = option([57], "each setting is measured with each of them", metavar="N")
    deploy: list[str] = option(
        ["QAT"], "settings that are exported and timed, with the first seed, or none", metavar="NAME"
    )
    timed_batches: list[Count] = option([1, 8], "batch sizes; AP is that of the engine of the last", metavar="N")
    epochs: Count = option(20, "of the training", group="training", metavar="N")
    batch_size: Count | None = option(None, "of the training (default: the network's)", group="training", metavar="N")
    hyp: str = option("", "of the training (default: data/demo/hyp.digits-640.yaml)", group="training", metavar="FILE")


@dataclass(frozen=True)
class NetworkStudy:
    """All that is done with a network, in order.

    Attributes:
        weights: the trained FP32 checkpoint; None: the network is trained first.
        settings: a state's name → options of `qat.py quantize`.
    """

    name: str
    weights: Path | None
    settings: Mapping[str, str]
    options: AccuracyOptions
    setup: Setup
    folder: Path

    @property
    def data(self) -> Words:
        """Options of programs that read images."""
        return ["--data", input_file(self.options.data, "--data"), "--workers", str(self.options.workers)]

    @property
    def size(self) -> Words:
        """Options of programs that take a size and a device."""
        return ["--imgsz", str(self.options.imgsz), *self.setup.device]

    def place(self, name: str) -> Words:
        """Options of programs that measure AP: where their run folder lies."""
        place: Words = ["--project", self.folder, "--exist-ok", "--name", name]
        return ["--groups", self.options.groups, *place] if self.options.groups else place

    def steps(self) -> Iterator[RunStep]:
        """Train, if there are no weights, evaluate, quantize, export, time, evaluate what was exported."""
        weights = self.weights or self.folder / "float.pt"
        if self.weights is None:
            yield from self.training(weights)
        command: Words = ["qat.py", "eval", "--weights", weights, *self.data, *self.size, "--save-json"]
        yield RunStep("float", [*command, *self.place("float")], self.folder / "float/report.json")
        for setting, words in self.settings.items():
            for seed in self.options.seeds:
                yield self.quantization(weights, f"{setting}-seed-{seed}", seed, shlex.split(words))
        if self.options.deploy != ["none"]:
            yield from self.deployment(weights)

    def training(self, weights: Path) -> Iterator[RunStep]:
        """Train the network, and convert it to `weights`."""
        batch, rate = TRAINING[self.name]
        last = self.folder / "train/weights/last.pt"
        hyp = input_file(self.options.hyp or str(self.setup.checkout / "data/demo/hyp.digits-640.yaml"), "--hyp")
        content = yaml.safe_load(hyp.read_text(encoding="utf-8"))
        content |= {"lr0": rate, "warmup_bias_lr": rate}
        write_text(self.folder / "hyp.yaml", yaml.safe_dump(content))
        command: Words = ["scripts/run_upstream.py", "--fast", "train_dual.py", *self.data, *self.size]
        command += ["--cfg", self.setup.checkout / f"models/detect/{self.name}.yaml", "--weights", "", "--cache", "ram"]
        command += ["--hyp", self.folder / "hyp.yaml", "--optimizer", "AdamW", "--cos-lr", "--noval", "--noplots"]
        command += ["--batch-size", str(self.options.batch_size or batch), "--epochs", str(self.options.epochs)]
        command += ["--project", self.folder, "--exist-ok", "--name", "train"]
        yield RunStep("train", command, last, resume=(last, ["--resume", last]))
        command = ["reparameterization.py", "--weights", last, "--save", weights, "--device", "cpu"]
        yield RunStep("convert", command, weights)

    def quantization(self, weights: Path, name: str, seed: int, words: Sequence[str]) -> RunStep:
        """Quantize with the options of a setting."""
        run = self.folder / name
        command: Words = ["qat.py", "quantize", "--weights", weights, *self.data, *self.size, "--seed", str(seed)]
        if self.options.quick:
            command += QUICK_QAT
        command += [*words, *self.place(name)]
        return RunStep(name, command, run / "report.json", resume=(run / "weights/last.pt", ["--resume", run]))

    def deployment(self, weights: Path) -> Iterator[RunStep]:
        """Export the FP32 model and the settings of --deploy, time the files, and evaluate each."""
        files = {state: self.folder / f"{self.name}-{state}.onnx" for state in ("float", *self.options.deploy)}
        for state, file in files.items():
            yield self.export(weights, state, file)
        has_engines = not self.setup.no_engines
        ran = "engine" if has_engines else "ONNX"
        interpreter = ENGINE_PYTHON if has_engines else sys.executable
        float_file, *int8_files = files.values()
        name = f"times-{ran}"
        command: Words = ["scripts/benchmark_trt.py", *int8_files, "--baseline", float_file, *self.setup.timing]
        command += ["--batch-size", *map(str, self.options.timed_batches)]
        command += ["--project", self.folder, "--exist-ok", "--name", name]
        yield RunStep(name, command, self.folder / name / "benchmark.json", interpreter=interpreter)
        for state, file in files.items():
            built = file
            if has_engines:
                built = file.with_name(f"{file.stem}-b{self.options.timed_batches[-1]}.engine")
            name = f"{state}-{ran}"
            command = ["val_trt.py", "--engine-file", built, *self.data]
            if not has_engines:
                command += ["--device", "cpu"]
            if state != "float":
                command += ["--reference", weights]
            command += ["--save-json", *self.place(name)]
            yield RunStep(name, command, self.folder / name / "report.json", interpreter=interpreter)

    def export(self, weights: Path, state: str, file: Path) -> RunStep:
        """Export the FP32 model, or the best checkpoint of a setting's first seed."""
        source = weights
        if state != "float":
            report = self.folder / f"{state}-seed-{self.options.seeds[0]}/report.json"
            source = report.parent / "weights" / Path(last_row(report).file).name
        data, size = self.data[:2], self.size
        command: Words = ["export_qat.py", "--weights", source, *data, *size, "--output", file, "--include", "onnx"]
        command += ["--simplify", "--dynamic", "batch", "--typing", self.setup.typing]
        return RunStep(f"export-{state}", command, file)


def last_row(report: Path) -> Row:
    """The last row of a report: what a run came to."""
    return Report.load(report).rows[-1]


def over_seeds(rows: list[Row], base: Row) -> Difference | None:
    """Mean difference of n > 1 runs to the FP32 model, and its error √(image² + seed² / n); None if one is unknown."""
    differences = [row.difference(base) for row in rows]
    values = [difference.value for difference in differences if difference]
    errors = [difference.error for difference in differences if difference and difference.error is not None]
    if len(errors) < len(rows):
        return None
    seed = statistics.variance(values) / len(values)
    return Difference(statistics.mean(values), math.sqrt(statistics.mean(errors) ** 2 + seed))


Times = dict[tuple[str, str, int], dict[str, Any]]  # a file's name, what ran it, batch size → its row


@dataclass(frozen=True)
class Results:
    """The results of all networks in a folder.

    Attributes:
        rows: by network and step, in the order in which the steps ended.
        measured_on: the machines on which the times were measured, in words.
    """

    rows: dict[str, dict[str, Row]] = field(default_factory=dict)
    times: Times = field(default_factory=dict)
    measured_on: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, output: Path) -> Results:
        """Read the results of the steps that have ended."""
        results = cls()
        for done in sorted(output.glob("*/done/*"), key=lambda path: path.stat().st_mtime_ns):
            network, run = done.parents[1].name, done.parents[1] / done.name
            if (run / "report.json").is_file():
                results.rows.setdefault(network, {})[run.name] = last_row(run / "report.json")
            elif (run / "benchmark.json").is_file():
                machine, timed = steps.read_times(run / "benchmark.json")
                results.measured_on.add(machine)
                for row in timed:
                    results.times[row["model"], run.name.removeprefix("times-"), row["batch"]] = row
        return results

    @property
    def batches(self) -> list[int]:
        """The batch sizes that were timed."""
        return sorted({batch for *_, batch in self.times})

    def speed(self, network: str, step: str) -> list[str]:
        """Cells of a step: milliseconds at each batch size, images a second at the last."""
        state, _, ran = step.rpartition("-")
        timed = [self.times.get((f"{network}-{state}", ran, batch), {}) for batch in self.batches]
        cells = [f"{row['ms']:.2f}" if row.get("ms") else "" for row in timed]
        for row in timed[-1:]:
            rate = row.get("images_per_second")
            cells.append(f"{rate:,.0f}" if rate else "")
        return cells

    def lines(self, network: str) -> Iterator[list[str]]:
        """Cells of a network: a line for each step, then one for each setting with several seeds."""
        settings: dict[str, list[Row]] = {}
        base = self.rows[network].get("float")
        for step, row in self.rows[network].items():
            settings.setdefault(step.partition("-seed-")[0], []).append(row)
            yield [network, step, *scores(row, None if step == "float" else base), *self.speed(network, step)]
        for setting, runs in settings.items():
            difference = over_seeds(runs, base) if base and len(runs) > 1 else None
            if difference:
                mean = statistics.mean(row.ap or 0 for row in runs)
                yield [network, f"{setting}, mean of {len(runs)} seeds", f"{mean:.4f}", str(difference)]


def ap_table(output: Path) -> list[str]:
    """Markdown table of the networks in `output`: a row for each step with a report, with its scores and times."""
    results = Results.read(output)
    heads = ["network", "state", "AP", "to float", "agreement", "recall at float's threshold", "AP by size"]
    heads += [f"ms, batch {batch}" for batch in results.batches]
    if results.batches:
        heads.append("images/s")
    lines = []
    for network in results.rows:
        for line in results.lines(network):
            lines.append(line + [""] * (len(heads) - len(line)))
    rows = [row for of_step in results.rows.values() for row in of_step.values()]
    over = " or ".join(sorted({row.resampled_over for row in rows}))
    return [
        *markdown_table(heads, lines, heads[:2]),
        "",
        *(f"Median milliseconds of a batch, all files in turns: {machine}." for machine in sorted(results.measured_on)),
        f"±: standard error of the difference, over {over}; for a mean of n seeds it is √(image² + seed²/n).",
        "Agreement: AP with the FP32 model's detections as labels.",
    ]


def scores(row: Row, base: Row | None) -> list[str]:
    """AP, its difference to float, agreement, the difference of recall at float's threshold, AP of small to large."""
    agreement = "" if row.agreement is None else f"{row.agreement:.4f}"
    recall = ""
    if base and row.at_threshold and base.at_threshold:
        recall = str(row.at_threshold.difference(base.at_threshold, "recall"))
    sizes = ", ".join(f"{size} {ap:.4f}" for size, ap in row.ap_by_size.items())
    difference = str(row.difference(base) or "") if base else ""
    return [f"{row.ap or 0:.4f}", difference, agreement, recall, sizes]


def read_settings(options: AccuracyOptions) -> Mapping[str, str]:
    """Settings to measure: a state's name → options of `qat.py quantize`; `InputError` where --deploy has others."""
    settings: Any = SETTINGS
    if options.quick:
        settings = {name: SETTINGS[name] for name in ("PTQ", "QAT")}
    if options.settings:
        settings = yaml.safe_load(input_file(options.settings, "--settings").read_text(encoding="utf-8"))
        texts = [text for pair in settings.items() for text in pair] if isinstance(settings, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"--settings {options.settings}: expected a state's name: options of qat.py quantize")
    unknown = {*options.deploy} - {*settings, "none"}
    if unknown:
        names = ", ".join(settings)
        raise InputError(f"--deploy {' '.join(unknown)} is not a setting; expected some of {names}, or none")
    return dict(settings)


def run(options: AccuracyOptions, timing: list[str]) -> int:
    """Measure every network; 1 if a step failed, after the others."""
    settings = read_settings(options)
    if options.quick:
        changes = {name: value for name, value in QUICK.items() if name not in options.model_fields_set}
        options = options.model_copy(update=changes)
    trained = {Path(file).stem: input_file(file, "--weights") for file in options.weights}
    names = [*options.networks, *(Path(file).stem for file in options.weights)]
    if not names or len(set(names)) < len(names):
        raise InputError("give --networks, or --weights, each of another name")
    setup = Setup.of(options, str(input_file(options.data, "--data")), timing)
    output = Path(options.output).resolve()
    has_failed = False
    for name in names:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        study = NetworkStudy(name, trained.get(name), settings, options, setup, folder)
        try:
            with held(folder):
                for step in study.steps():
                    setup.run(step, folder)
        except StepError as error:
            print(f"error: {error}", flush=True)
            has_failed = True
    table = "\n".join(ap_table(output))  # also of networks that another process measures
    write_text(output / "accuracy.md", table + "\n")
    print(f"\n{table}\n\n{output / 'accuracy.md'}")
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(steps.run_benchmark("accuracy.py", AccuracyOptions, run, __doc__))
