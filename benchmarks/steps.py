"""Programs of a patched checkout as steps: each has a result, and a step whose result is there is not run again."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from utils.core.errors import InputError, QatError
from utils.core.files import write_text
from utils.core.options import ImageSize, Options, add_options, option

logger = logging.getLogger("benchmarks")

RESULTS = "results.json"
Words = list[str | Path]
Parsed = TypeVar("Parsed", bound=Options)


class StepError(QatError):
    """The program of a step failed; the message names its log."""


class StudyOptions(Options):
    """What both benchmarks take."""

    checkout: str = option("", "the patched checkout (default: the variable YOLOV9_CHECKOUT)", metavar="DIR")
    imgsz: ImageSize = option(640, "input size in pixels", "--imgsz", "--img", metavar="PX")
    device: Literal["", "cpu"] = option("", "cpu, or the GPUs of CUDA_VISIBLE_DEVICES", metavar="D")
    typing: Literal["", "weak", "strong"] = option("", "of exported files (default: as TensorRT wants it, or weak)")


@dataclass(frozen=True)
class Setup:
    """What the programs are called with.

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
        """Find the checkout and TensorRT.

        Raises:
            InputError: there is no patched checkout.
        """
        checkout = Path(options.checkout or os.environ.get("YOLOV9_CHECKOUT", "")).resolve()
        if not (checkout / "scripts/benchmark_trt.py").is_file():
            raise InputError(f"--checkout {checkout} is no checkout that patch_yolov9.sh has patched")
        if options.device == "cpu":
            cpu = ["--device", "cpu"]
            return cls(checkout, "--device cpu", options.typing or "weak", cpu, [*cpu, *timing])
        command = [engine_python(), "scripts/check_engine_setup.py", data]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=checkout, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["check_engine_setup.py failed"])[-1].removeprefix("error: ")
            logger.info("no engines: %s", why)
            return cls(checkout, why, options.typing or "weak", [], ["--device", "cpu", *timing])
        alone = ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]
        return cls(checkout, "", options.typing or done.stdout.split()[-1], [], [*alone, *timing])


@dataclass(frozen=True)
class RunStep:
    """A program to run.

    Attributes:
        name: what the result is called, within the folder.
        command: a program of the checkout, or an option of Python itself such as -m, then its options.
        output: the file that the program leaves.
        read: `output` → what the results keep of it, as JSON has it.
        resume: a file, and options that are added to the command if a killed run has left that file.
        tensorrt: whether ENGINE_PYTHON runs the program, an interpreter that has TensorRT.
    """

    name: str
    command: Sequence[str | Path]
    output: Path
    read: Callable[[Path], Any] = lambda _: None
    resume: tuple[Path, Words] | None = None
    tensorrt: bool = False


class StepRunner:
    """Runs steps and keeps what they found in `folder/results.json`; what they print goes to `folder/logs`.

    Attributes:
        content: `inputs`, and by the step's name in `steps` its `command`, `seconds` and `result`.
    """

    def __init__(self, checkout: Path, folder: Path, inputs: Mapping[str, str]) -> None:
        """Read what is there already.

        Args:
            inputs: name of an input → a digest of it.

        Raises:
            InputError: the results in `folder` are of other inputs.
        """
        self.checkout, self.folder = checkout, folder
        self.content: dict[str, Any] = {"inputs": dict(inputs), "steps": {}}
        if (folder / RESULTS).is_file():
            self.content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        if others := [name for name, value in inputs.items() if self.content["inputs"].get(name) != value]:
            raise InputError(f"the results in {folder} are of other {' and '.join(others)}; choose another --output")

    def run(self, step: RunStep) -> Any:
        """Give the result of a step, for which its program runs unless its output is there.

        Raises:
            InputError: the result that is there was made by another command.
            StepError: the program failed.
        """
        words = [str(word) for word in step.command]
        command = [Path(word).name if os.path.isabs(word) else word for word in words]  # the same on another machine
        known = self.content["steps"].get(step.name)
        if known and step.output.exists():
            if known["command"] != command:
                before = shlex.join(known["command"])
                raise InputError(f"{step.name} in {self.folder} was made by {before}; choose another --output")
            return known["result"]
        if step.resume and step.resume[0].exists():
            words += map(str, step.resume[1])
        began = time.monotonic()
        log = self.folder / "logs" / f"{step_folder(step.name)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        logger.info("%s: %s; %s says how far it is", self.folder.name, step.name, log)
        words = [engine_python() if step.tensorrt else sys.executable, *words]
        with log.open("a", encoding="utf-8") as output:
            code = subprocess.run(
                words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.checkout, check=False
            ).returncode
        if code or not step.output.exists():
            ended = f"ended with exit code {code}" if code else f"left no {step.output.name}"
            said = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-300:]
            raise StepError(f"{self.folder.name}: {step.name} {ended}: {said}; see {log}")
        seconds, result = round(time.monotonic() - began, 1), step.read(step.output)
        self.content["steps"][step.name] = {"command": command, "seconds": seconds, "result": result}
        write_json(self.content, self.folder / RESULTS)
        return result


def step_folder(step: str) -> str:
    """The name of a step as that of a folder or a file."""
    return step.replace(", ", "-").replace(" ", "-")


def write_json(content: Any, path: Path) -> None:
    """Write JSON; a crash leaves no half file."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def input_file(path: str, option: str) -> Path:
    """The absolute path of a file that is given.

    Raises:
        InputError: there is no such file.
    """
    if not Path(path).is_file():
        raise InputError(f"{option} {path} does not exist; expected a file")
    return Path(path).resolve()


def engine_python() -> str:
    """The interpreter that has TensorRT: the variable ENGINE_PYTHON, or this one."""
    return os.environ.get("ENGINE_PYTHON") or sys.executable


def read_times(path: Path) -> dict[str, Any]:
    """`benchmark.json` → what it was measured on; for each file and batch size milliseconds, images/s, or an error."""
    content = json.loads(path.read_text(encoding="utf-8"))
    names = ("model", "batch", "precision", "images_per_second", "error")
    rows = [{name: row[name] for name in names} for row in content["rows"]]
    for row, measured in zip(rows, content["rows"], strict=True):
        row["ms"] = measured["figures"] and measured["figures"]["latency"]["median"]
    on = f"{content['device']['Selected Device']}, {content['software']}, {content['date']}"
    return {"measured_on": on, "rows": rows}


def parser_of(kind: type[Options], about: str) -> argparse.ArgumentParser:
    """The command line of a program, without what stands behind `--`."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser, kind)
    return parser


def main(kind: type[Parsed], about: str, run: Callable[[Parsed, list[str]], int]) -> int:
    """Run a program: `run` gets its options, and the words behind `--`, which are for `benchmark_trt.py`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    try:
        return run(kind.parsed(parser_of(kind, about).parse_args(words[:cut])), words[cut + 1 :])
    except QatError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
