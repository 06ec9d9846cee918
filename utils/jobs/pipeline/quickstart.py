"""The job behind `scripts/quickstart.sh`: from a trained model to an evaluated INT8 file, and a report.

Engines are built where there is an NVIDIA GPU and TensorRT; elsewhere OpenVINO runs INT8 beside FP32 on the CPU.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from utils.core.errors import InputError
from utils.core.options import DeviceOptions, option
from utils.core.run_folder import stem_of
from utils.jobs.commands import build_command, export_command
from utils.jobs.pipeline.steps import Pipeline, RunStep, StepError, Words, engine_typing, say, software_of

logger = logging.getLogger(__name__)

MARK = ".quickstart"  # lies in the folders that this job has made
LEVEL = ["--optimization-level", "2"]  # engines as fast within some percent, in less than half the time
NO_SPEED = "INT8's speed shows in TensorRT and in OpenVINO"  # where neither ran
SIMULATED = (
    "PTQ and QAT simulate INT8 in PyTorch, and ONNX Runtime convolves in FP32 on a CPU: their ms/image say nothing "
    "about the speed of INT8."
)


class QuickstartOptions(DeviceOptions):
    """Take a trained model to an evaluated INT8 file, with a report."""

    checkout: Path = option(..., "the patched checkout, whose programs do the work", metavar="DIR")
    demo: Path = option(..., "folder of the demo models", metavar="DIR")
    output: Path = option(..., "where the results go", metavar="DIR")
    data: Path = option(..., "dataset's YAML with train and val", metavar="FILE")
    weights: Path | None = option(None, "FP32 checkpoint (default: the demo model)", metavar="FILE")
    segments: bool = option(False, "the demo model with masks")
    imgsz: str = option("", "input size, 640 or 384x640 (default: 320 for the demo)", metavar="PX")
    batch_size: str = option("10", "images a batch", metavar="N")
    epochs: str = option("5", "epochs of QAT", metavar="N")
    iters: str = option("", "iterations an epoch, at most (default: 30, with --segments 60)", metavar="N")
    resume: bool = option(False, "continue the run in --output, also where options have changed")


class Quickstart:
    """The steps, which share the run's folder.

    Attributes:
        weights: the FP32 model that everything is compared with.
        evaluated: run folders with a row for the report.
        typing: of the ONNX file that engines are built from.
        speed: the sentence about the speed of INT8.
    """

    def __init__(self, options: QuickstartOptions) -> None:
        self.options = options
        self.is_own = options.weights is not None
        self.interpreter = os.environ.get("PYTHON", sys.executable)
        self.run = options.output
        self.trained = options.weights or options.demo / f"gelan-digits{'-seg' if options.segments else ''}.pt"
        self.weights = self.trained
        self.iters = options.iters or ("60" if options.segments else "30")
        self.size: Words = ["--imgsz", options.imgsz] if options.imgsz else []
        if not self.is_own and not options.imgsz:
            self.size = ["--imgsz", "320"]
        self.evaluated: list[Path] = []
        self.typing = "strong"
        self.speed = NO_SPEED
        self.pipeline = Pipeline(self.run, Path.cwd(), software_of(options.checkout))

    def go(self) -> int:
        """Run all steps, and return the exit code."""
        began = time.monotonic()
        self.convert()
        best = self.quantize()
        onnx = self.export(best)
        self.evaluate(onnx, "onnx")
        failure = self.measure_speed(best, onnx)
        self.write_report()
        page = self.run / "report.html"
        if failure:
            logger.info("error: %s", failure)
            say(f"quickstart: a step failed, see above; the rest is in {page}")
            return failure.exit_code
        say(self.speed)
        if self.is_own:
            self.show_commands(best)
        say(f"quickstart: done in {round(time.monotonic() - began)} s after setting up; open {page}")
        return 0

    def step(self, name: str, title: str, program: str, *words: str | Path, output: Path | None = None) -> RunStep:
        """Return a step that runs one of the overlay's programs on the device."""
        command = [self.options.checkout / program, *words, "--device", self.options.device]
        return RunStep(name, command, output, title=title, interpreter=self.interpreter)

    def convert(self) -> None:
        """Convert weights of train_dual.py: their auxiliary branch is for training only."""
        if not self.is_own:
            return
        converted = self.run / f"{self.trained.stem}-converted.pt"
        if not (self.options.resume and converted.exists()):
            words: Words = ["--weights", self.trained, "--save", converted, "--if-needed"]
            title = "convert, if it has an auxiliary branch"
            step = self.step("convert", title, "reparameterization.py", *words, output=converted)
            step = replace(step, needs_output=False)
            if not self.pipeline.is_done(step):
                converted.unlink(missing_ok=True)  # of another model, whose file had the same name
            self.pipeline.run(step)
        if converted.exists():
            self.weights = converted

    def quantize(self) -> Path:
        """Run PTQ and QAT; return the best checkpoint."""
        options = self.options
        words: Words = ["--weights", self.weights, "--data", options.data, *self.size]
        words += ["--batch-size", options.batch_size, "--epochs", options.epochs, "--iters", self.iters]
        words += ["--project", self.run.parent, "--name", self.run.name, "--exist-ok"]
        step = self.step(
            "quantize", "1/4 quantize: FP32, PTQ, QAT", "qat.py", "quantize", *words, output=self.run / "report.json"
        )
        state = self.run / "weights/last.pt"
        step = replace(step, resume=(state, ["--resume", self.run]))
        if not self.best_checkpoints():
            self.pipeline.forget(step)
        self.pipeline.run(step, resume=options.resume)
        return self.best_checkpoints()[0]

    def best_checkpoints(self) -> list[Path]:
        """Return the checkpoints to export; a finished run has one."""
        return sorted((self.run / "weights").glob("qat_best*.pt"))

    def export(self, best: Path) -> Path:
        """Write two ONNX files; return the weakly typed one.

        ONNX Runtime and TensorRT to 10.11 take the weakly typed one, TensorRT from 10.12 and RTX the strongly typed.
        """
        for typing in ("strong", "weak"):
            words: Words = ["--weights", best, *self.export_options(), "--typing", typing]
            title = f"2/4 export to ONNX, {typing}ly typed"
            self.pipeline.run(
                self.step(f"export-{typing}", title, "export_qat.py", *words, output=int8_file(best, typing))
            )
        return int8_file(best, "weak")

    def export_options(self) -> Words:
        """Return the options of each export."""
        return ["--data", self.options.data, *self.size, "--include", "onnx", "--simplify", "--dynamic", "batch"]

    def export_float(self, *words: str) -> Path:
        """Export the FP32 model, to compare with."""
        file = self.run / "weights/float.onnx"
        command: Words = ["--weights", self.weights, *self.export_options(), "--output", file, *words]
        title = "3/4 export the FP32 model, to compare with"
        self.pipeline.run(self.step("export-float", title, "export_qat.py", *command, output=file))
        return file

    def evaluate(self, file: Path, name: str, *words: str, reference: Path | None = None) -> None:
        """Measure the AP of a file: its row goes to NAME/report.json in the run's folder."""
        command: Words = ["--engine-file", file, "--data", self.options.data, "--reference", reference or self.weights]
        command += ["--batch-size", self.options.batch_size, "--project", self.run, "--name", name, "--exist-ok"]
        title = f"3/4 evaluate {file.name}" + (f" ({' '.join(words)})" if words else "")
        output = self.run / name / "report.json"
        self.pipeline.run(self.step(f"evaluate-{name}", title, "val_trt.py", *command, *words, output=output))
        self.evaluated.append(self.run / name)

    def measure_speed(self, best: Path, onnx: Path) -> StepError | None:
        """Compare INT8 as an engine, or in OpenVINO, with the FP32 model; return the failure of a step.

        The report is written without what failed.
        """
        try:
            if not self.build_engines(best):
                self.run_on_cpu(onnx)
        except StepError as failure:
            return failure
        return None

    def build_engines(self, best: Path) -> bool:
        """Build, evaluate and time INT8 and FP16 engines; return False, and say why, where there can be none."""
        device, data = self.options.device, self.options.data
        if device == "cpu":
            say("no engines: --device is cpu")
            return False
        words = [str(data), "--device", device]
        typing, problem = engine_typing(self.interpreter, self.options.checkout, self.pipeline.cwd, *words)
        if problem:
            reason = problem.rpartition("error: ")[2].partition(";")[0]
            say(f"no engines: {reason}")
            return False
        self.typing = typing
        int8 = int8_file(best, typing)
        fp16 = self.export_float("--typing", typing)
        for file, name in ((fp16, "fp16"), (int8, "int8")):
            self.evaluate(self.build_engine(file, name), name)
        words = ["--batch-size", "1", self.options.batch_size, "--builds", "2", *LEVEL, "--useCudaGraph"]
        self.time("3/4 INT8 against FP16, two builds of each", "INT8 against FP16", int8, fp16, *words)
        return True

    def build_engine(self, file: Path, name: str) -> Path:
        """Build the engine of a file."""
        engine, batch = self.run / f"weights/{name}.engine", self.options.batch_size
        words: Words = [file, "--output", engine, *LEVEL, "--batch-size", "1", batch, batch, "--check", "0"]
        title = f"3/4 build the {name} engine"
        self.pipeline.run(self.step(f"build-{name}", title, "scripts/build_engine.py", *words, output=engine))
        return engine

    def time(self, title: str, verdict: str, int8: Path, base: Path, *words: str | Path) -> None:
        """Time an INT8 file, or its engine, beside the FP32 one; the speed is the line that begins with `verdict`."""
        table = self.run / "benchmark/benchmark.md"
        command: Words = [int8, "--baseline", base, *words]
        command += ["--project", self.run, "--name", "benchmark", "--exist-ok"]
        self.pipeline.run(self.step("benchmark", title, "scripts/benchmark_trt.py", *command, output=table))
        self.speed = lines_with(table, f"^{verdict}") or self.speed

    def run_on_cpu(self, onnx: Path) -> None:
        """Evaluate INT8 and FP32 in OpenVINO, and time them.

        The demo model is too small to become faster, so one of real size, with random weights, is timed in its place.
        """
        if subprocess.run([self.interpreter, "-c", "import openvino"], capture_output=True, check=False).returncode:
            say("no INT8 on this CPU: OpenVINO is not installed (./install_dependencies.sh --openvino)")
            return
        base = self.export_float("--check", "0")
        self.evaluate(onnx, "openvino", "--runtime", "openvino", reference=base)
        if self.is_own:
            words = ["--runtime", "openvino", "--batch-size", "1", "--builds", "2"]
            self.time("3/4 time INT8 against FP32 on this CPU", "INT8 against FP32", onnx, base, *words)
            return
        title = "3/4 time a network of real size, with random weights"
        output = self.run / "logs/cpu-speed.log"
        program = self.options.checkout / "scripts/cpu_speed.py"
        self.pipeline.run(RunStep("cpu-speed", [program], output, title=title, interpreter=self.interpreter))
        self.speed = lines_with(output, "INT8 against FP32") or self.speed

    def write_report(self) -> None:
        """Put all rows on one page."""
        command: Words = [self.options.checkout / "scripts/make_report.py", self.run, *self.evaluated]
        command += ["--title", "YOLOv9 quickstart", "--note", SIMULATED, "--note", self.speed]
        self.pipeline.run(RunStep("report", command, title="4/4 report", interpreter=self.interpreter))

    def show_commands(self, best: Path) -> None:
        """Print the commands of docs/your-model.md for this model: QAT in full, with the defaults of qat.py."""
        weights = self.trained
        name = stem_of(weights, self.run)
        commands: list[Sequence[str | Path]] = [["cd", self.options.checkout], [".", f"{sys.prefix}/bin/activate"]]
        if self.weights != self.trained:
            weights = self.trained.with_name(f"{self.trained.stem}-converted.pt")
            commands.append(["python", "reparameterization.py", "--weights", self.trained, "--save", weights])
        data: Words = ["--data", self.options.data]
        commands.append(["python", "qat.py", "quantize", "--weights", weights, *data, *self.size, "--name", name])
        checkpoint = Path("runs/qat", name, "weights", best.name)
        onnx = int8_file(checkpoint, self.typing)
        commands.append([*export_command(str(checkpoint)), "--typing", self.typing])
        commands.append(build_command(str(onnx)))
        engine = onnx.with_suffix(".engine")
        commands.append(["python", "val_trt.py", "--engine-file", engine, *data, "--reference", weights])
        say("to go on with a whole QAT of this model:")
        for command in commands:
            logger.info("%s", shlex.join(map(str, command)))


def run(options: QuickstartOptions) -> int:
    """Check the folder, run the steps, and say after a failure how to continue."""
    prepare_folder(options.output, options.resume)
    try:
        return Quickstart(options).go()
    except (StepError, KeyboardInterrupt):
        say("the same command continues where this one stopped")
        raise


def prepare_folder(folder: Path, resume: bool) -> None:
    """Make and mark the run's folder.

    Only a folder that this job has made is used again: --output could name any folder, also that of a training.
    """
    if resume:
        if not (folder / "weights/last.pt").is_file():
            raise InputError(f"there is no run to resume in {folder}")
    elif not (folder / MARK).is_file() and any(path.is_file() and path.name != ".lock" for path in folder.rglob("*")):
        raise InputError(f"{folder} holds files that are no quickstart's; choose another --output, or delete it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error


def int8_file(checkpoint: Path, typing: str) -> Path:
    """Return the ONNX file that export_qat.py writes of a quantized checkpoint."""
    ending = "-int8-strong.onnx" if typing == "strong" else "-int8.onnx"
    return checkpoint.with_name(f"{checkpoint.stem}{ending}")


def lines_with(file: Path, pattern: str) -> str:
    """Return the lines of a text file in which a pattern is found."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if re.search(pattern, line))
