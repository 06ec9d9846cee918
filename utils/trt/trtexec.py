"""NVIDIA's trtexec as builder, where it is installed and asked for.

What its version takes is read from its own help: from TensorRT 11 on there is no `--fp16` and no `--int8`.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import which
from typing import Any

from utils.core.errors import DependencyError, QatError
from utils.core.files import atomic_path
from utils.trt import tensorrt_api
from utils.trt.build import cache_path
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, decide
from utils.trt.tensorrt_api import BUILDER_OPTIONS, BuilderOption

logger = logging.getLogger(__name__)

PLACES = ("/usr/src/tensorrt/bin/trtexec", "/opt/tensorrt/bin/trtexec")  # packages and containers of NVIDIA's


@dataclass(frozen=True)
class Trtexec:
    """The program at `path`, and what it can do."""

    path: str
    builds = True
    ahead_of_time = ()  # it builds for the GPU that is there

    @cached_property
    def _help(self) -> str:
        done = subprocess.run(
            [self.path, "--help"], capture_output=True, encoding="utf-8", check=False, errors="replace"
        )
        return done.stdout + done.stderr

    @cached_property
    def version(self) -> str:
        """The version, such as '8.6.1': from 10 on it prints 101300 for 10.13.0, before 8601 for 8.6.1."""
        match = re.search(r"TensorRT v(\d+)", self._help)
        if not match:
            return "unknown"
        digits = match.group(1)
        parts = (digits[:-4], digits[-4:-2], digits[-2:]) if len(digits) > 4 else (digits[:-3], digits[-3], digits[-2:])
        return ".".join(str(int(part)) for part in parts)

    @property
    def name(self) -> str:
        """Name and version, such as 'TensorRT 8.6.1'."""
        return f"TensorRT {self.version}"

    @property
    def weakly_typed(self) -> bool:
        """Whether its flags choose the precision: it has `--fp16`."""
        return self.knows("--fp16")

    @property
    def strongly_typed(self) -> bool:
        """Whether it builds a network in the types that the ONNX file has."""
        return self.knows("--stronglyTyped") or not self.weakly_typed

    def lacks(self, option: BuilderOption, value: Any) -> str:
        """What its help does not list of an option with this value, such as '--maxTactics'; '' if it lists all."""
        words = [flag.partition("=")[0] for flag in option.arguments(value)]
        words += [option.values[value][1]] if option.values else []
        return next((word for word in words if not word.isdigit() and not self.knows(word)), "")

    def knows(self, flag: str) -> bool:
        """Whether its help lists the flag."""
        return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", self._help) is not None

    def run(self, arguments: Sequence[str]) -> str:
        """Run the program on torch's current GPU, and return what it printed.

        Raises:
            QatError: it failed; the message has its first error.
        """
        import torch

        if torch.cuda.is_available():  # else trtexec takes the first one
            arguments = [*arguments, f"--device={torch.cuda.current_device()}"]
        logger.info("%s %s", self.path, " ".join(arguments))
        done = subprocess.run(
            [self.path, *arguments], capture_output=True, encoding="utf-8", check=False, errors="replace"
        )
        text = done.stdout + done.stderr
        if done.returncode:
            errors = re.findall(r"\[E\] (.*)", text)
            reason = tensorrt_api.readable(errors[0]) if errors else f"it gives no reason, exit code {done.returncode}"
            raise QatError(f"trtexec failed: {reason}")
        return text


def find_trtexec() -> Trtexec:
    """Find the installed trtexec.

    Raises:
        DependencyError: there is none.
    """
    path = which("trtexec") or next((place for place in PLACES if Path(place).is_file()), None)
    if path is None:
        raise DependencyError(
            "trtexec is not on the PATH; the TensorRT wheel does not bring it, NVIDIA's packages and containers do. "
            "Without --trtexec the engine is built by TensorRT's Python module"
        )
    return Trtexec(path)


def build_with_trtexec(onnx: str | Path, engine: str | Path, config: BuildConfig, program: Trtexec) -> EngineNote:
    """Build an engine as `build.build` does.

    Raises:
        InputError: see `build.build`.
        QatError: trtexec failed.
    """
    file, engine = OnnxFile.read(onnx), Path(engine)
    gpu = tensorrt_api.gpu()
    decision = decide(file, program, gpu, config)
    flags = [f"--onnx={file.path}", "--profilingVerbosity=detailed", "--noTF32"]
    if decision.typing == "strong" and program.weakly_typed:
        flags.append("--stronglyTyped")
    if decision.typing == "weak":
        flags += {"int8": ["--fp16", "--int8"], "fp16": ["--fp16"], "fp32": []}[decision.precision]
    flags.append("--skipInference" if program.knows("--skipInference") else "--buildOnly")
    if (cache := cache_path(engine, config, program.name, gpu)) is not None:
        flags.append(f"--timingCacheFile={cache}")
    if config.workspace is not None:
        flags.append(f"--memPoolSize=workspace:{config.workspace >> 20}")
    for name, option in BUILDER_OPTIONS.items():
        if name in config.options:
            flags += option.arguments(config.options[name])
    if config.sources_off:
        flags.append("--tacticSources=" + ",".join(f"-{name.upper()}" for name in config.sources_off))
    for name, shapes in decision.shapes.items():  # there is one input
        for word, shape in zip(("min", "opt", "max"), shapes, strict=True):
            flags.append(f"--{word}Shapes={name}:{'x'.join(map(str, shape))}")
    began = time.perf_counter()
    with atomic_path(engine) as temporary:
        program.run([*flags, f"--saveEngine={temporary}"])
    note = EngineNote.of_build(file, program.name, gpu, config, decision, round(time.perf_counter() - began, 1))
    note.save(engine)
    return note
