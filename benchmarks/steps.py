"""Programs of a patched checkout as steps: one that has ended, and whose output is there, is not run again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from utils import cli
from utils.core.errors import InputError, QatError
from utils.core.files import write_text
from utils.core.options import ImageSize, Options, option

Words = list[str | Path]
ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON") or sys.executable  # the interpreter that has TensorRT


class StepError(QatError):
    """The program of a step failed; the message names its log."""


class StudyOptions(Options):
    """What both benchmarks take."""

    checkout: str = option("", "the patched checkout (default: the variable YOLOV9_CHECKOUT)", metavar="DIR")
    imgsz: ImageSize = option(640, "input size in pixels", "--imgsz", "--img", metavar="PX")
    device: Literal["", "cpu"] = option("", "cpu, or the GPUs of CUDA_VISIBLE_DEVICES", metavar="D")
    typing: Literal["", "weak", "strong"] = option("", "of exported files (default: as TensorRT wants it, or weak)")


@dataclass(frozen=True)
class RunStep:
    """A program to run.

    Attributes:
        name: unique in the folder; of a program with `--name` this name.
        command: a program of the checkout, or an option of Python itself such as -m, then its options.
        output: the file that the program leaves.
        resume: a file, and options that are added to the command if a killed run has left that file.
        tensorrt: whether ENGINE_PYTHON runs the program, an interpreter that has TensorRT.
    """

    name: str
    command: Sequence[str | Path]
    output: Path
    resume: tuple[Path, Words] | None = None
    tensorrt: bool = False


@dataclass(frozen=True)
class Setup:
    """What programs are called with.

    Attributes:
        checkout: the patched checkout.
        no_engines: why ONNX Runtime runs the exported files; '' where there are engines.
        typing: of exported files.
        device: options of all programs that take a device.
        timing: options of `benchmark_trt.py`: the engine alone, as a CUDA graph, and those that the user gave.
    """

    checkout: Path
    no_engines: str
    typing: str
    device: list[str]
    timing: list[str]

    @classmethod
    def of(cls, options: StudyOptions, data: str, timing: Sequence[str]) -> Setup:
        """Find the checkout, which must be patched, and TensorRT."""
        checkout = Path(options.checkout or os.environ.get("YOLOV9_CHECKOUT", "")).resolve()
        if not (checkout / "scripts/benchmark_trt.py").is_file():
            raise InputError(f"--checkout {checkout} is no checkout that patch_yolov9.sh has patched")
        device, problem, typing = ["--device", "cpu"], "--device cpu", "weak"
        if options.device != "cpu":
            command = [ENGINE_PYTHON, "scripts/check_engine_setup.py", data]
            done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=checkout, check=False)
            if done.returncode == 0:
                alone = ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]
                return cls(checkout, "", options.typing or done.stdout.split()[-1], [], [*alone, *timing])
            problem = (done.stderr.strip().splitlines() or ["check_engine_setup.py failed"])[-1]
            print(f"no engines: {problem}", flush=True)
        timing = [*device, *timing]
        return cls(checkout, problem, options.typing or typing, device if options.device else [], timing)

    def run(self, step: RunStep, folder: Path) -> Path:
        """Run a program unless it has run; its output. What it prints goes to `folder/logs`.

        Raises:
            InputError: the output that is there was made by another command.
            StepError: the program failed.
        """
        words = [str(word) for word in step.command]
        command, done = shlex.join(words) + "\n", folder / "done" / step.name
        if done.is_file() and step.output.exists():
            if (before := done.read_text(encoding="utf-8")) != command:
                raise InputError(f"{step.name} in {folder} was made by {before.strip()}; choose another --output")
            return step.output
        if step.resume and step.resume[0].exists():
            words += map(str, step.resume[1])
        log = folder / "logs" / f"{step.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{folder.name}: {step.name}; {log} says how far it is", flush=True)
        words = [ENGINE_PYTHON if step.tensorrt else sys.executable, *words]
        with log.open("a", encoding="utf-8") as output:
            code = subprocess.run(
                words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.checkout, check=False
            ).returncode
        if code or not step.output.exists():
            ended = f"ended with exit code {code}" if code else f"left no {step.output.name}"
            raise StepError(f"{folder.name}: {step.name} {ended}; see {log}")
        done.parent.mkdir(exist_ok=True)
        write_text(done, command)
        return step.output


def input_file(path: str, option: str) -> Path:
    """The absolute path of a file that must be there."""
    if not Path(path).is_file():
        raise InputError(f"{option} {path} does not exist; expected a file")
    return Path(path).resolve()


def read_times(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """`benchmark.json` → what it was measured on; its rows, each with `ms`: the median, None where there is none."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [{**row, "ms": row["figures"] and row["figures"]["latency"]["median"]} for row in content["rows"]]
    return f"{content['device']['Selected Device']}, {content['software']}, {content['date']}", rows


def run_benchmark(name: str, kind: type[Options], run: Callable[[Any, list[str]], int], about: str) -> int:
    """Run a benchmark: `run` gets its options, and the words behind `--`, which are for `benchmark_trt.py`."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    return cli.run_program(name, (kind, lambda options: run(options, words[cut + 1 :])), words[:cut], about=about)
