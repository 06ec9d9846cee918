#!/usr/bin/env python3
"""What INT8 costs networks in AP, and what it gains in time: train, quantize, export, build, evaluate, time.

    python benchmarks/accuracy.py --data datasets/digits-640/data.yaml --networks yolov9-s --epochs 12
    python benchmarks/accuracy.py --data data/coco.yaml --weights yolov9-c-converted.pt -- --optimization-level 2
    python benchmarks/accuracy.py --data datasets/cells/data.yaml --networks yolov9-t --quick --device cpu

YOLOV9_CHECKOUT, or --checkout, is a patched checkout, whose programs do the work. What they found lies in --output,
and a step whose result is there is not run again. Without a GPU or TensorRT, ONNX Runtime evaluates and times the
exported files. Options behind -- are for benchmark_trt.py. --quick tries all of it in minutes on a CPU.
"""

from __future__ import annotations

import hashlib
import json
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
from benchmarks.steps import RunStep, Setup, StepError, StepRunner, Words, input_file, step_folder
from utils.core.errors import InputError
from utils.core.files import file_hash
from utils.core.options import Count, option
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
    "PTQ 99.99": "--qat never --percentile 99.99",
    "PTQ mse": "--qat never --calib-method mse",
    "PTQ auto": "--qat never --calib-method auto",
    "PTQ max": "--qat never --calib-method max",
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
    workers: int = option(8, "processes that read images, for each GPU", ge=0, le=256, metavar="N")
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
    gpus: Count = option(1, "that train a network together", group="training", metavar="N")


def training_steps(name: str, options: AccuracyOptions, setup: Setup, data: Path, folder: Path) -> Iterator[RunStep]:
    """Upstream's train_dual.py, and the conversion to the network that is deployed, `float.pt`."""
    batch, rate = TRAINING[name]
    last = folder / "train/weights/last.pt"
    given = input_file(options.hyp or str(setup.checkout / "data/demo/hyp.digits-640.yaml"), "--hyp")
    hyp = {**yaml.safe_load(given.read_text(encoding="utf-8")), "lr0": rate, "warmup_bias_lr": rate}
    (folder / "hyp.yaml").write_text(yaml.safe_dump(hyp), encoding="utf-8")
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.gpus)]
    command: Words = [
        *(together if options.gpus > 1 else []),
        *("scripts/run_upstream.py", "--fast", "train_dual.py", "--data", data, "--hyp", folder / "hyp.yaml"),
        *("--cfg", setup.checkout / f"models/detect/{name}.yaml", "--weights", "", "--imgsz", str(options.imgsz)),
        *("--batch-size", str(options.batch_size or batch), "--epochs", str(options.epochs), "--optimizer", "AdamW"),
        *("--cos-lr", "--cache", "ram", "--workers", str(options.workers), "--noval", "--noplots", *setup.device),
        *("--project", folder, "--name", "train", "--exist-ok"),
    ]
    yield RunStep("train", command, last, resume=(last, ["--resume", last]))
    command = ["reparameterization.py", "--weights", last, "--save", folder / "float.pt", "--device", "cpu"]
    yield RunStep("convert", command, folder / "float.pt")


def grouped(options: AccuracyOptions) -> list[str]:
    """`--groups` of the programs that evaluate."""
    return ["--groups", options.groups] if options.groups else []


def quantizing_steps(
    weights: Path, options: AccuracyOptions, settings: Mapping[str, str], setup: Setup, data: Path, folder: Path
) -> Iterator[RunStep]:
    """AP of the float network, and of each setting with each seed."""
    images: Words = ["--data", data, "--imgsz", str(options.imgsz), "--workers", str(options.workers), *setup.device]
    place: Words = [*grouped(options), "--project", folder, "--exist-ok", "--name"]
    command: Words = ["qat.py", "eval", "--weights", weights, *images, *place, "float"]
    yield RunStep("float", command, folder / "float/report.json", read_report)
    for setting, words in settings.items():
        for seed in options.seeds:
            step = f"{setting}, seed {seed}"
            run = folder / step_folder(step)
            command = ["qat.py", "quantize", "--weights", weights, *images, "--seed", str(seed)]
            command += [*(QUICK_QAT if options.quick else []), *shlex.split(words), *place, run.name]
            yield RunStep(step, command, run / "report.json", read_report, (run / "weights/last.pt", ["--resume", run]))


def deployed_steps(
    states: Mapping[str, Path], options: AccuracyOptions, setup: Setup, data: Path, folder: Path
) -> Iterator[RunStep]:
    """Files of networks, their times, and the AP of each; as engines, where there are some.

    Args:
        states: a name → its checkpoint; `float` comes first.
    """
    ran, engines = ("ONNX", False) if setup.no_engines else ("engine", True)
    place: Words = ["--project", folder, "--exist-ok", "--name"]
    files = {state: folder / f"{folder.name}-{step_folder(state)}.onnx" for state in states}
    for state, file in files.items():
        command: Words = ["export_qat.py", "--weights", states[state], "--imgsz", str(options.imgsz), *setup.device]
        command += ["--data", data, "--include", "onnx", "--simplify", "--dynamic", "batch", "--typing", setup.typing]
        yield RunStep(f"export {file.stem}", [*command, "--output", file], file)
    baseline, *quantized = files.values()
    command = ["scripts/benchmark_trt.py", *quantized, "--baseline", baseline, *setup.timing]
    command += ["--batch-size", *map(str, options.timed_batches), *place, f"times-{ran}"]
    yield RunStep(f"times, {ran}", command, folder / f"times-{ran}/benchmark.json", steps.read_times, tensorrt=engines)
    for state, file in files.items():
        built = file.with_name(f"{file.stem}-b{options.timed_batches[-1]}.engine") if engines else file
        run = folder / f"{step_folder(state)}-{ran}"
        command = ["val_trt.py", "--engine-file", built, "--data", data, "--workers", str(options.workers)]
        command += [] if engines else ["--device", "cpu"]
        command += [] if file is baseline else ["--reference", states["float"]]
        command += [*grouped(options), *place, run.name]
        yield RunStep(f"{state} {ran}", command, run / "report.json", read_report, tensorrt=engines)


def read_report(path: Path) -> dict[str, Any]:
    """`report.json` → its last row as JSON, with the file's name alone; without the samples and curves of the run."""
    row = Report.load(path).rows[-1]
    return {**row.model_dump(mode="json", exclude={"f1"}), "file": Path(row.file).name}


def over_seeds(rows: list[Row], base: Row) -> Difference | None:
    """Mean difference to the float network of a setting's runs; its error is √(image² + seed² / n).

    Args:
        rows: of n seeds, two or more.
        base: the float network.

    Returns:
        None where a difference or its error is not known.
    """
    differences = [row.difference(base) for row in rows]
    values = [one.value for one in differences if one]
    errors = [one.error for one in differences if one and one.error is not None]
    if len(errors) < len(rows):
        return None
    seed = statistics.variance(values) / len(values)
    return Difference(statistics.mean(values), math.sqrt(statistics.mean(errors) ** 2 + seed))


def ap_table(networks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: for each network a row for each state, with its scores and times.

    Args:
        networks: name → what a `StepRunner` keeps.
    """
    results = {
        name: {step: entry["result"] for step, entry in content["steps"].items() if entry["result"]}
        for name, content in networks.items()
    }
    timed = {
        (name, step.removeprefix("times, ")): one
        for name, found in results.items() for step, one in found.items() if step.startswith("times, ")
    }  # fmt: skip
    times = {(row["model"], ran, row["batch"]): row for (_, ran), one in timed.items() for row in one["rows"]}
    batches = sorted({batch for *_, batch in times})
    heads = ["network", "state", "AP", "to float", "agreement", "recall at float's threshold"]
    heads += [*(f"ms, batch {one}" for one in batches), *["images/s"][: len(batches)]]
    lines, resampled = [], []
    for name, found in results.items():
        rows = {step: Row.model_validate(one) for step, one in found.items() if not step.startswith("times")}
        base = rows.get("float")
        settings: dict[str, list[Row]] = {}
        for step, row in rows.items():
            settings.setdefault(step.partition(", seed ")[0], []).append(row)
            state, _, ran = step.rpartition(" ")
            mine = [times.get((f"{name}-{step_folder(state)}", ran, batch), {}) for batch in batches]
            speed = [f"{one['ms']:.2f}" if one.get("ms") else "" for one in mine]
            speed += [f"{rate:,.0f}" if (rate := one.get("images_per_second")) else "" for one in mine[-1:]]
            lines.append([name, step, *scores(row, None if step == "float" else base), *speed])
            resampled.append(row.resampled_over)
        for setting, runs in settings.items():
            if base and len(runs) > 1 and (difference := over_seeds(runs, base)):
                mean = f"{statistics.mean(row.ap or 0 for row in runs):.4f}"
                lines.append([name, f"{setting}, mean of {len(runs)} seeds", mean, str(difference)])
                lines[-1] += [""] * (len(heads) - len(lines[-1]))
    where = "; ".join(dict.fromkeys(one["measured_on"] for one in timed.values()))
    remarks = [f"Median milliseconds of a batch, all files in turns: {where}."] if where else []
    over = " or ".join(dict.fromkeys(resampled))
    remarks += [
        f"±: standard error of the difference, over {over}; of a mean of n seeds √(image² + seed²/n).",
        "Agreement: AP with the float network's detections as labels.",
    ]
    return [*markdown_table(heads, lines, heads[:2]), "", *remarks]


def scores(row: Row, base: Row | None) -> list[str]:
    """AP, its difference to the float network, agreement, and the difference of recall at that network's threshold."""
    agreement = "" if row.agreement is None else f"{row.agreement:.4f}"
    recall = str(row.at.difference(base.at, "recall")) if row.at and base and base.at else ""
    return [f"{row.ap or 0:.4f}", str(row.difference(base) or "") if base else "", agreement, recall]


def run(options: AccuracyOptions, timing: list[str]) -> int:
    """Measure every network; 1 if a step failed, after the others."""
    data = input_file(options.data, "--data")
    settings = {name: SETTINGS[name] for name in ("PTQ", "QAT")} if options.quick else SETTINGS
    if options.quick:
        options.reject_unused(list(QUICK), "with --quick, which sets them")
        options = options.model_copy(update=QUICK)
    if options.settings:
        settings = yaml.safe_load(input_file(options.settings, "--settings").read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not all(isinstance(one, str) for pair in settings.items() for one in pair):
            raise InputError(f"--settings {options.settings}: expected a state's name: options of qat.py quantize")
    deployed = [] if options.deploy == ["none"] else options.deploy
    if unknown := sorted(set(deployed) - set(settings)):
        raise InputError(f"--deploy {', '.join(unknown)} is none of the settings {', '.join(settings)}, or none alone")
    trained = {Path(file).stem: input_file(file, "--weights") for file in options.weights}
    names = [*options.networks, *(Path(file).stem for file in options.weights)]
    if not names or len(set(names)) < len(names):
        raise InputError("give --networks, or --weights, each of another name")
    setup = Setup.of(options, str(data), timing)
    content = yaml.safe_load(data.read_text(encoding="utf-8"))
    content.pop("path", None)  # which differs between machines
    dataset = hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
    output, failed = Path(options.output).resolve(), False
    for name in names:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = trained.get(name, folder / "float.pt")
        with held(folder):
            inputs = {"--data": dataset, "--weights": file_hash(weights) if name in trained else "trained here"}
            runner = StepRunner(setup.checkout, folder, inputs)
            try:
                for step in () if name in trained else training_steps(name, options, setup, data, folder):
                    runner.run(step)
                for step in quantizing_steps(weights, options, settings, setup, data, folder):
                    runner.run(step)
                states = {"float": weights}
                for state in deployed:
                    chosen = f"{state}, seed {options.seeds[0]}"
                    file = runner.content["steps"][chosen]["result"]["file"]
                    states[state] = folder / step_folder(chosen) / "weights" / file
                for step in deployed_steps(states, options, setup, data, folder) if deployed else ():
                    runner.run(step)
            except StepError as error:
                steps.logger.error("error: %s", error)
                failed = True
    results = sorted(output.glob(f"*/{steps.RESULTS}"))  # also of networks that another process measures
    networks = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in results}
    steps.write_json(networks, output / "accuracy.json")
    steps.logger.info("\n%s\n\n%s", "\n".join(ap_table(networks)), output / "accuracy.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(steps.main(AccuracyOptions, __doc__, run))
