"""The job behind `scripts/val_trt.sh`: a checkpoint, exported, built as an engine, and evaluated."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from utils.core.errors import InputError
from utils.core.options import Options, option
from utils.jobs.pipeline.steps import Pipeline, RunStep, Words, software_of

PROGRAMS = Path(__file__).resolve().parents[3]  # where qat.py and the other programs lie
KINDS = (".pt", ".onnx", ".engine", ".plan")


class EngineApOptions(Options):
    """Evaluate a checkpoint as an engine: export, build, evaluate."""

    weights: Path = option(..., "checkpoint, ONNX file or engine", positional=True, metavar="WEIGHTS")
    data: str = option(..., "dataset's YAML", positional=True, metavar="DATA")
    imgsz: list[str] = option(..., "input size in pixels, one or two", positional=True, nargs="+", metavar="PX")
    generate_graph: bool = option(False, "also report on the engine's layers, and draw them as SVG with graphviz")

    @property
    def size(self) -> list[str]:
        """The options of programs that take a size."""
        return ["--imgsz", *(side for word in self.imgsz for side in word.split("x"))]

    @property
    def graph(self) -> list[str]:
        """The options of programs that draw layers."""
        return ["--generate-graph"] if self.generate_graph else []


def run(options: EngineApOptions) -> int:
    """Check, export, build, evaluate; return the exit code of the check where that fails."""
    weights, interpreter = options.weights, os.environ.get("PYTHON", sys.executable)
    if weights.suffix not in KINDS:
        raise InputError(f"{weights}: expected a file that ends in {', '.join(KINDS)}")
    # What would only be noticed after the export and the build, which take minutes
    answer = subprocess.run(
        [interpreter, *check_command(options)], stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    if answer.returncode:
        return answer.returncode
    lines = answer.stdout.splitlines()
    onnx = Path(lines[-2]) if weights.suffix == ".pt" else weights
    engine = weights if weights.suffix == ".plan" else onnx.with_suffix(".engine")
    is_built = weights.suffix in (".engine", ".plan")
    folder = None if is_built else onnx.with_suffix(".steps")
    pipeline = Pipeline(folder, Path.cwd(), {} if is_built else software_of(PROGRAMS))
    steps = steps_for_engine(options, engine) if is_built else steps_to_engine(options, onnx, engine, lines[-1])
    for step in [*steps, evaluation(options, engine)]:
        pipeline.run(replace(step, interpreter=interpreter))
    return 0


def check_command(options: EngineApOptions) -> Words:
    """Return the command that prints the ONNX file of a checkpoint, and the typing that TensorRT here needs."""
    command: Words = [PROGRAMS / "scripts/check_engine_setup.py", options.data, *options.graph]
    if options.weights.suffix == ".pt":
        command += ["--weights", options.weights]
    return command


def steps_to_engine(options: EngineApOptions, onnx: Path, engine: Path, typing: str) -> list[RunStep]:
    """Return the export of a checkpoint, and the build of its engine."""
    steps = []
    if options.weights.suffix == ".pt":
        command: Words = [PROGRAMS / "export_qat.py", "--weights", options.weights, *options.size]
        command += ["--include", "onnx", "--simplify", "--dynamic", "batch", "--typing", typing]
        command += ["--output", onnx, *words_of("EXPORT_ARGS")]
        steps.append(RunStep("export", command, onnx, title="export to ONNX"))
    command = [PROGRAMS / "scripts/build_engine.py", onnx, *options.size, "--output", engine, "--check", "0"]
    if batch := words_of("BATCH"):
        command += ["--batch-size", *batch]
    command += [*options.graph, *words_of("BUILD_ARGS")]
    steps.append(RunStep("build", command, engine, title="build the engine"))
    return steps


def steps_for_engine(options: EngineApOptions, engine: Path) -> list[RunStep]:
    """Return the report on the layers of an engine, if it was asked for."""
    if not options.generate_graph:
        return []
    command: Words = [PROGRAMS / "scripts/inspect_engine.py", engine, *options.graph]
    return [RunStep("inspect", command, title="inspect the engine")]


def evaluation(options: EngineApOptions, engine: Path) -> RunStep:
    """Return the evaluation, which runs each time: its result goes into a new folder."""
    command: Words = [PROGRAMS / "val_trt.py", "--engine-file", engine, "--data", options.data, *options.size]
    return RunStep("evaluate", [*command, *words_of("VAL_ARGS")], title="evaluate it")


def words_of(variable: str) -> list[str]:
    """Return the words in a variable of the environment."""
    return os.environ.get(variable, "").split()
