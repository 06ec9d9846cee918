#!/usr/bin/env python3
"""What INT8 costs networks in AP, and what it gains in time: train, quantize, export, build, evaluate, time.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where benchmarks/ and utils/ lie

from benchmarks import steps
from benchmarks.steps import RunStep, Setup, StepError, Words, input_file
from utils.core.errors import InputError
from utils.core.files import write_text
from utils.core.options import Count, Workers, option
from utils.core.run_folder import held
from utils.core.score import Difference
from utils.core.text import markdown_table
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
    """What is measured."""

    data: str = option(..., "dataset's YAML", metavar="FILE")
    networks: list[Literal["yolov9-t", "yolov9-s", "yolov9-m", "yolov9-c"]] = option([], "of upstream's, to train")
    weights: list[str] = option([], "trained float checkpoints, as reparameterization.py leaves them", metavar="FILE")
    output: str = option("runs/accuracy", "where results lie", metavar="DIR")
    workers: Workers = option(8, "processes that read images", metavar="N")
    groups: str = option("", "images that are resampled together, see qat.py quantize", metavar="FILE|REGEX")
    quick: bool = option(False, "an epoch, a few iterations and two settings: whether it works here, not a result")
    settings: str = option("", "YAML, a state's name: options of qat.py quantize (default: SETTINGS)", metavar="FILE")
    seeds: list[int] = option([57], "each setting is measured with each of them", metavar="N")
    deploy: list[str] = option(
        ["QAT"], "settings that are exported and timed, with the first seed, or none", metavar="NAME"
    )
    timed_batches: list[Count] = option([1, 8], "batch sizes; AP is that of the engine of the last", metavar="N")
    epochs: Count = option(20, "of the training", group="training", metavar="N")
    batch_size: Count | None = option(None, "of the training (default: the network's)", group="training", metavar="N")
    hyp: str = option("", "of the training (default: data/demo/hyp.digits-640.yaml)", group="training", metavar="FILE")


def network_steps(
    name: str, weights: Path | None, settings: Mapping[str, str], options: AccuracyOptions, setup: Setup, folder: Path
) -> Iterator[RunStep]:
    """All that is done with a network, in order; without `weights` it is trained first."""
    data: Words = ["--data", input_file(options.data, "--data"), "--workers", str(options.workers)]
    size: Words = ["--imgsz", str(options.imgsz), *setup.device]
    place: Words = ["--project", folder, "--exist-ok", "--name"]
    if options.groups:
        place = ["--groups", options.groups, *place]
    if weights is None:
        batch, rate = TRAINING[name]
        last, weights = folder / "train/weights/last.pt", folder / "float.pt"
        hyp = input_file(options.hyp or str(setup.checkout / "data/demo/hyp.digits-640.yaml"), "--hyp")
        content = {**yaml.safe_load(hyp.read_text(encoding="utf-8")), "lr0": rate, "warmup_bias_lr": rate}
        write_text(folder / "hyp.yaml", yaml.safe_dump(content))
        command: Words = ["scripts/run_upstream.py", "--fast", "train_dual.py", *data, *size]
        command += ["--cfg", setup.checkout / f"models/detect/{name}.yaml", "--weights", "", "--cache", "ram"]
        command += ["--hyp", folder / "hyp.yaml", "--optimizer", "AdamW", "--cos-lr", "--noval", "--noplots"]
        command += ["--batch-size", str(options.batch_size or batch), "--epochs", str(options.epochs)]
        command += ["--project", folder, "--exist-ok", "--name", "train"]
        yield RunStep("train", command, last, resume=(last, ["--resume", last]))
        command = ["reparameterization.py", "--weights", last, "--save", weights, "--device", "cpu"]
        yield RunStep("convert", command, weights)

    command = ["qat.py", "eval", "--weights", weights, *data, *size, "--save-json", *place, "float"]
    yield RunStep("float", command, folder / "float/report.json")
    for setting, words in settings.items():
        for seed in options.seeds:
            run = folder / f"{setting}-seed-{seed}"
            command = ["qat.py", "quantize", "--weights", weights, *data, *size, "--seed", str(seed)]
            command += [*(QUICK_QAT if options.quick else []), *shlex.split(words), *place, run.name]
            yield RunStep(run.name, command, run / "report.json", (run / "weights/last.pt", ["--resume", run]))

    deployed = [] if options.deploy == ["none"] else ["float", *options.deploy]
    files = {state: folder / f"{name}-{state}.onnx" for state in deployed}
    for state, file in files.items():
        report = folder / f"{state}-seed-{options.seeds[0]}/report.json"
        source = weights if state == "float" else report.parent / "weights" / Path(last_row(report).file).name
        command = ["export_qat.py", "--weights", source, *data[:2], *size, "--output", file, "--include", "onnx"]
        yield RunStep(f"export-{state}", [*command, "--simplify", "--dynamic", "batch", "--typing", setup.typing], file)
    if not deployed:
        return
    ran, engines = ("ONNX", False) if setup.no_engines else ("engine", True)
    float_file, *int8_files = files.values()
    command = ["scripts/benchmark_trt.py", *int8_files, "--baseline", float_file, *setup.timing]
    command += ["--batch-size", *map(str, options.timed_batches), "--project", folder, "--exist-ok", "--name"]
    times = folder / f"times-{ran}"
    yield RunStep(times.name, [*command, times.name], times / "benchmark.json", tensorrt=engines)
    for state, file in files.items():
        built = file.with_name(f"{file.stem}-b{options.timed_batches[-1]}.engine") if engines else file
        run = folder / f"{state}-{ran}"
        command = ["val_trt.py", "--engine-file", built, *data, *([] if engines else ["--device", "cpu"])]
        command += [] if state == "float" else ["--reference", weights]
        yield RunStep(run.name, [*command, "--save-json", *place, run.name], run / "report.json", tensorrt=engines)


def last_row(report: Path) -> Row:
    """What a run came to."""
    return Report.load(report).rows[-1]


def over_seeds(rows: list[Row], base: Row) -> Difference | None:
    """Mean difference of n > 1 runs to the float network; its error, if all are known, is √(image² + seed² / n)."""
    differences = [row.difference(base) for row in rows]
    values = [one.value for one in differences if one]
    errors = [one.error for one in differences if one and one.error is not None]
    if len(errors) < len(rows):
        return None
    seed = statistics.variance(values) / len(values)
    return Difference(statistics.mean(values), math.sqrt(statistics.mean(errors) ** 2 + seed))


def ap_table(output: Path) -> list[str]:
    """Lines of Markdown: of each network in `output` a row for each step with a report, with its scores and times."""
    rows: dict[str, dict[str, Row]] = {}  # by network and step, in the order in which they ended
    times: dict[tuple[str, str, int], dict[str, Any]] = {}  # of a file, as what it ran, at a batch size
    measured_on: set[str] = set()
    for done in sorted(output.glob("*/done/*"), key=lambda path: path.stat().st_mtime_ns):
        network, run = done.parents[1].name, done.parents[1] / done.name
        if (run / "report.json").is_file():
            rows.setdefault(network, {})[run.name] = last_row(run / "report.json")
        elif (run / "benchmark.json").is_file():
            where, timed = steps.read_times(run / "benchmark.json")
            times |= {(row["model"], run.name.removeprefix("times-"), row["batch"]): row for row in timed}
            measured_on.add(where)
    batches = sorted({batch for *_, batch in times})
    heads = ["network", "state", "AP", "to float", "agreement", "recall at float's threshold", "AP by size"]
    heads += [*(f"ms, batch {one}" for one in batches), *["images/s"][: len(batches)]]
    lines = []
    for network, of_step in rows.items():
        base, settings = of_step.get("float"), dict[str, list[Row]]()
        for step, row in of_step.items():
            settings.setdefault(step.partition("-seed-")[0], []).append(row)
            state, _, ran = step.rpartition("-")
            timed = [times.get((f"{network}-{state}", ran, batch), {}) for batch in batches]
            speed = [f"{one['ms']:.2f}" if one.get("ms") else "" for one in timed]
            speed += [f"{rate:,.0f}" if (rate := one.get("images_per_second")) else "" for one in timed[-1:]]
            lines.append([network, step, *scores(row, None if step == "float" else base), *speed])
        for setting, runs in settings.items():
            if base and len(runs) > 1 and (difference := over_seeds(runs, base)):
                mean = f"{statistics.mean(row.ap or 0 for row in runs):.4f}"
                line = [network, f"{setting}, mean of {len(runs)} seeds", mean, str(difference)]
                lines.append([*line, *[""] * (len(heads) - len(line))])
    over = " or ".join(sorted({row.resampled_over for of_step in rows.values() for row in of_step.values()}))
    return [
        *markdown_table(heads, lines, heads[:2]), "",
        *(f"Median milliseconds of a batch, all files in turns: {where}." for where in sorted(measured_on)),
        f"±: standard error of the difference, over {over}; of a mean of n seeds √(image² + seed²/n).",
        "Agreement: AP with the float network's detections as labels.",
    ]  # fmt: skip


def scores(row: Row, base: Row | None) -> list[str]:
    """AP, its difference to float, agreement, the difference of recall at float's threshold, AP of small to large."""
    agreement = "" if row.agreement is None else f"{row.agreement:.4f}"
    at, base_at = row.at_threshold, base and base.at_threshold
    recall = str(at.difference(base_at, "recall")) if at and base_at else ""
    sizes = ", ".join(f"{size} {ap:.4f}" for size, ap in row.ap_by_size.items())
    return [f"{row.ap or 0:.4f}", str(row.difference(base) or "") if base else "", agreement, recall, sizes]


def run(options: AccuracyOptions, timing: list[str]) -> int:
    """Measure every network; 1 if a step failed, after the others."""
    settings = {name: SETTINGS[name] for name in ("PTQ", "QAT")} if options.quick else SETTINGS
    if options.quick:
        options = options.model_copy(update={k: v for k, v in QUICK.items() if k not in options.model_fields_set})
    if options.settings:
        settings = yaml.safe_load(input_file(options.settings, "--settings").read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not all(isinstance(one, str) for pair in settings.items() for one in pair):
            raise InputError(f"--settings {options.settings}: expected a state's name: options of qat.py quantize")
    if unknown := {*options.deploy} - {*settings, "none"}:
        raise InputError(f"--deploy {' '.join(unknown)} is none of the settings {', '.join(settings)}, or none alone")
    trained = {Path(file).stem: input_file(file, "--weights") for file in options.weights}
    names = [*options.networks, *(Path(file).stem for file in options.weights)]
    if not names or len(set(names)) < len(names):
        raise InputError("give --networks, or --weights, each of another name")
    setup = Setup.of(options, str(input_file(options.data, "--data")), timing)
    output, failed = Path(options.output).resolve(), False
    for name in names:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with held(folder):
                for step in network_steps(name, trained.get(name), settings, options, setup, folder):
                    setup.run(step, folder)
        except StepError as error:
            print(f"error: {error}", flush=True)
            failed = True
    table = "\n".join(ap_table(output))  # also of networks that another process measures
    write_text(output / "accuracy.md", table + "\n")
    print(f"\n{table}\n\n{output / 'accuracy.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(steps.run_benchmark("accuracy.py", AccuracyOptions, run, __doc__))
