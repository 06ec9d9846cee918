"""The job behind `scripts/val_trt.sh`: a checkpoint, exported, built as an engine, and evaluated."""

from __future__ import annotations

import os
import subprocess
import sys
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


def run(options: EngineApOptions) -> int:
    """Check, export, build, evaluate; return the exit code of the check where that fails."""
    weights, interpreter = options.weights, os.environ.get("PYTHON", sys.executable)
    if weights.suffix not in KINDS:
        raise InputError(f"{weights} is neither .pt, .onnx nor .engine")
    size = [part for word in options.imgsz for part in word.split("x")]
    graph: Words = ["--generate-graph"] if options.generate_graph else []
    # What would only be noticed after the export and the build, which take minutes
    check = [interpreter, PROGRAMS / "scripts/check_engine_setup.py", options.data, *graph]
    if weights.suffix == ".pt":
        check += ["--weights", weights]
    answer = subprocess.run(check, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if answer.returncode:
        return answer.returncode
    lines = answer.stdout.splitlines()

    onnx, typing = weights, lines[-1]
    if weights.suffix == ".pt":
        onnx = Path(lines[-2])
    engine = weights if weights.suffix == ".plan" else onnx.with_suffix(".engine")
    folder = None if weights.suffix in (".engine", ".plan") else onnx.with_suffix(".steps")
    pipeline = Pipeline(folder, Path.cwd(), software_of(PROGRAMS) if folder else {})

    def step(name: str, title: str, program: str, *words: str | Path, output: Path | None = None) -> RunStep:
        return RunStep(name, [PROGRAMS / program, *words], output, title=title, interpreter=interpreter)

    if weights.suffix == ".pt":
        words: Words = ["--weights", weights, "--imgsz", *size, "--include", "onnx", "--simplify"]
        words += ["--dynamic", "batch", "--typing", typing, "--output", onnx, *words_of("EXPORT_ARGS")]
        pipeline.run(step("export", "export to ONNX", "export_qat.py", *words, output=onnx))
    if folder is not None:
        words = [onnx, "--imgsz", *size, "--output", engine, "--check", "0"]
        if batch := words_of("BATCH"):
            words += ["--batch-size", *batch]
        words += [*graph, *words_of("BUILD_ARGS")]
        pipeline.run(step("build", "build the engine", "scripts/build_engine.py", *words, output=engine))
    elif options.generate_graph:
        pipeline.run(step("inspect", "inspect the engine", "scripts/inspect_engine.py", engine, *graph))
    words = ["--engine-file", engine, "--data", options.data, "--imgsz", *size, *words_of("VAL_ARGS")]
    pipeline.run(step("evaluate", "evaluate it", "val_trt.py", *words))
    return 0


def words_of(variable: str) -> list[str]:
    """Return the words in a variable of the environment."""
    return os.environ.get(variable, "").split()
