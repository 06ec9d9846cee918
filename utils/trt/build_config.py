"""How an engine is built: what can be asked for, and what of it tables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from utils.core.errors import InputError
from utils.core.options import DeviceOptions, Options, option

BUILDING = "building"
OF_BUILDS = ("tactic_sources_off", "optimization_level", "max_aux_streams", "timing_iterations", "build_limit", "tune")
Minutes = Annotated[float, Field(gt=0, le=10_080)]  # a week at most
Precision = Literal["best", "fp16", "fp32"]
Range = tuple[int, int, int]  # min, opt, max
SOURCES_OFF = "TRT_TACTIC_SOURCES_OFF"
# Fields of BuildConfig that change which kernels an engine has, and their words; a default value is not mentioned.
OPTIONS = {
    "optimization_level": "level {}", "max_aux_streams": "{} streams", "timing_iterations": "{} timing iterations",
}  # fmt: skip


@dataclass(frozen=True)
class BuildConfig:
    """How an engine is built.

    Attributes:
        batch: images, min, opt and max; for a file of dynamic batch (default: `input_form.DEFAULT_BATCH`).
        height, width: pixels, min, opt and max; for a file of dynamic size.
        precision: `best`: INT8 where the file has Q/DQ, else FP16; `fp16`, `fp32`: for float files. A strongly typed
            network has the precision of its file.
        workspace: bytes of GPU memory that kernels may use; None: three quarters of what is free, over `shares`.
        shares: builds that run side by side.
        timing_cache: file of measured kernels; None: beside the engine, by GPU and version; '' for none.
        tactic_sources_off: sources of kernels that are not to be used, such as CUBLAS; if empty, those that the
            environment variable TRT_TACTIC_SOURCES_OFF lists (`sources_off`).
        optimization_level: 0 to 5, TensorRT's own default if None.
        max_aux_streams: streams beside the main one that layers may be spread over, at most; TensorRT's choice if None.
        timing_iterations: runs of each kernel that is measured; TensorRT's own default if None.
        targets: architectures to build for without such a GPU, such as SM89 (TensorRT-RTX).
        tune: minutes for trying options that are None here and keeping the fastest engine; None: build one engine.
        build_limit: minutes after which a build is ended; None: never, but for those of `tune`.
        allow_fp32: build a file with an FP32 float part where TensorRT cannot choose FP16 by itself.
        progress: show a progress bar.
    """

    batch: Range | None = None
    height: Range | None = None
    width: Range | None = None
    precision: Precision = "best"
    workspace: int | None = None
    shares: int = 1
    timing_cache: str | Path | None = None
    tactic_sources_off: tuple[str, ...] = ()
    optimization_level: int | None = None
    max_aux_streams: int | None = None
    timing_iterations: int | None = None
    targets: tuple[str, ...] = ()
    tune: float | None = None
    build_limit: float | None = None
    allow_fp32: bool = False
    progress: bool = True

    @property
    def sources_off(self) -> tuple[str, ...]:
        """The tactic sources that are not to be used: those given, or those of the environment variable."""
        return self.tactic_sources_off or tuple(os.environ.get(SOURCES_OFF, "").replace(",", " ").split())

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for instead of the defaults, as JSON holds it: names of fields and their values."""
        given = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        off = sorted(name.upper() for name in self.sources_off)
        return {**given, **({"tactic_sources_off": off} if off else {})}

    def __post_init__(self) -> None:
        for name in ("batch", "height", "width"):
            values = getattr(self, name)
            if values is not None and not 0 < values[0] <= values[1] <= values[2]:
                raise InputError(f"{name} {values}: expected min <= opt <= max, all positive")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise InputError(f"optimization level {self.optimization_level} is outside 0 to 5")
        if self.max_aux_streams is not None and self.max_aux_streams < 0:
            raise InputError(f"{self.max_aux_streams} auxiliary streams: expected 0 or more")


class BuildOptions(DeviceOptions):
    """Options of programs that build engines: what changes how fast an engine is."""

    tactic_sources_off: list[str] = option([], "such as CUBLAS CUBLAS_LT CUDNN", group=BUILDING, metavar="NAME")
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = option(
        None, "0 to 5 (default: TensorRT's)", group=BUILDING, metavar="N"
    )
    max_aux_streams: Annotated[int, Field(ge=0, le=64)] | None = option(
        None, "streams beside the main one that layers may be spread over (default: TensorRT's choice)",
        group=BUILDING, metavar="N",
    )  # fmt: skip
    timing_iterations: Annotated[int, Field(ge=1, le=1000)] | None = option(
        None, "runs of a measured kernel, see TensorRT", group=BUILDING, metavar="N"
    )
    build_limit: Minutes | None = option(None, "end a build that takes longer", group=BUILDING, metavar="MINUTES")
    tune: Minutes | None = option(
        None, "of each engine: for so long try options that are not given here, and keep the fastest", group=BUILDING,
        metavar="MINUTES",
    )  # fmt: skip

    def build_config(self, **others: Any) -> BuildConfig:
        """How engines are built; `others` are further fields."""
        shared = {name: getattr(self, name) for name in OF_BUILDS if name != "tactic_sources_off"}
        return BuildConfig(tactic_sources_off=tuple(self.tactic_sources_off), **shared, **others)


def min_opt_max(options: Options, name: str) -> Range | None:
    """The option `name` of a profile, one number or three; None if it was not given.

    Raises:
        InputError: there are others.
    """
    values = getattr(options, name)
    if values is not None and len(values) not in (1, 3):
        raise InputError(f"{options.flag(name)} takes one number, or three: min opt max")
    return None if values is None else (values[0], values[len(values) // 2], values[-1])


def describe_options(options: Mapping[str, Any]) -> str:
    """Options in the words of tables, such as 'level 2, 3 streams'; tactic sources are left out."""
    words = [text.format(options[name]) for name, text in OPTIONS.items() if name in options]
    return ", ".join(words) or "TensorRT's own"
