"""Shared parts of the studies: options, the patched checkout with the programs to run, and reading measured times."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from utils import cli
from utils.core.errors import InputError
from utils.core.options import ImageSize, Options, option
from utils.jobs.pipeline.steps import Pipeline, RunStep, engine_typing

ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON") or sys.executable  # the interpreter that has TensorRT


class StudyOptions(Options):
    """Options of both studies."""

    checkout: str = option("", "the patched checkout (default: the variable YOLOV9_CHECKOUT)", metavar="DIR")
    imgsz: ImageSize = option(640, "input size in pixels", "--imgsz", "--img", metavar="PX")
    device: Literal["", "cpu"] = option("", "cpu, or the GPUs of CUDA_VISIBLE_DEVICES", metavar="D")
    typing: Literal["", "weak", "strong"] = option("", "of exported files (default: as TensorRT wants it, or weak)")


@dataclass(frozen=True)
class Setup:
    """The options that programs are called with.

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
            raise InputError(f"--checkout {checkout} is not a checkout that patch_yolov9.sh has patched")
        on_cpu = ["--device", "cpu"]
        problem = "--device cpu"
        if options.device != "cpu":
            typing, problem = engine_typing(ENGINE_PYTHON, checkout, checkout, data)
            if not problem:
                alone = ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]
                return cls(checkout, "", options.typing or typing, [], [*alone, *timing])
            print(f"no engines: {problem}", flush=True)
        device = on_cpu if options.device else []
        return cls(checkout, problem, options.typing or "weak", device, [*on_cpu, *timing])

    def run(self, step: RunStep, folder: Path) -> None:
        """Run a program unless it has run; what it prints goes to `folder/logs`.

        Raises:
            InputError: the output that is there was made by another command.
            StepError: the program failed.
        """
        Pipeline(folder, self.checkout, only_commands=True).run(step)


def input_file(path: str, option: str) -> Path:
    """The absolute path of a file that must be there."""
    if not Path(path).is_file():
        raise InputError(f"{option} {path} does not exist; expected a file")
    return Path(path).resolve()


def read_times(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Read `benchmark.json`: the machine in words, and the rows with `ms`, the median latency, None without figures."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [{**row, "ms": row["figures"] and row["figures"]["latency"]["median"]} for row in content["rows"]]
    return f"{content['device']['Selected Device']}, {content['software']}, {content['date']}", rows


def run_benchmark(name: str, kind: type[Options], run: Callable[[Any, list[str]], int], about: str) -> int:
    """Run a benchmark: `run` gets its options, and the words behind `--`, which are for `benchmark_trt.py`."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    return cli.run_program(name, (kind, lambda options: run(options, words[cut + 1 :])), words[:cut], about=about)
