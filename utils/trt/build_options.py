"""Options and settings of a build, and the profile that options describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from utils.core.errors import InputError
from utils.core.options import DeviceOptions, Options, height_width, option
from utils.trt.tensorrt_api import BUILDER_OPTIONS, Api

# Auxiliary streams of a build without --max-aux-streams. TensorRT 8.6.0 uses none by itself; on an H200, INT8 engines
# with two take less time as CUDA graphs (docs/auxiliary-streams.md).
AUX_STREAMS = 2
Range = tuple[int, int, int]  # min, opt, max
build_option = partial(option, group="building")


class BuildOptions(DeviceOptions):
    """Options of programs that build engines, which change the speed of an engine."""

    tactic_sources_off: list[str] = build_option([], "such as CUBLAS CUBLAS_LT CUDNN", metavar="NAME")
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = build_option(
        None, "0 to 5 (default: TensorRT's)", metavar="N"
    )
    max_aux_streams: Annotated[int, Field(ge=0, le=64)] | None = build_option(
        None,
        "streams beside the main one that layers may be spread over (default: 2; TensorRT-RTX: its choice)",
        metavar="N",
    )
    version_compatible: bool = build_option(
        False, "an engine that the lean runtime of this version runs, too, which is slower"
    )
    hardware_compatible: Literal["ampere+", "same-cc"] | None = build_option(
        None, "an engine for every GPU from Ampere on, or, from 10.9 on, of this compute capability, which is slower"
    )
    strip_weights: bool = build_option(
        False, "an engine without weights, from 10.0 on: loading reads them from the ONNX file"
    )
    tune: Annotated[float, Field(gt=0, le=10_080)] | None = build_option(  # a week at most
        None, "of each engine: for so long try options that are not given here, and keep the fastest", metavar="MINUTES"
    )

    def build_config(self, **others: Any) -> BuildConfig:
        """Build a config from these options; `others` are fields that they do not have, or have in another form."""
        names = type(self).model_fields.keys() & BuildConfig.model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        return BuildConfig(**(values | others))


BUILD_OPTIONS = tuple(name for name in BuildOptions.model_fields if name not in DeviceOptions.model_fields)


class BuildConfig(BuildOptions):
    """Settings of a build: the options that change its speed, and the shapes and GPUs that it is for."""

    batch: Range | None = None  # images, for a file of dynamic batch (default: `input_spec.DEFAULT_BATCH`)
    height: Range | None = None  # pixels, for a file of dynamic size
    width: Range | None = None
    # best: INT8 where the file has Q/DQ, else FP16. A strongly typed network has the precision of its file.
    precision: Literal["best", "fp16", "fp32"] = "best"
    workspace: int | None = None  # MiB of GPU memory that kernels may use; None: three quarters of the free memory
    timing_cache: str | Path | None = None  # of measured kernels; None: beside the engine; '' for none
    targets: tuple[str, ...] = ()  # architectures to build for without such a GPU, such as SM89 (TensorRT-RTX)
    allow_fp32: bool = False  # build a file with an FP32 float part where TensorRT cannot choose FP16 by itself
    progress: bool = True

    @property
    def sources_off(self) -> list[str]:
        """The tactic sources that are switched off: `tactic_sources_off`, or those of the environment variable."""
        names = self.tactic_sources_off
        if not names:
            names = os.environ.get("TRT_TACTIC_SOURCES_OFF", "").replace(",", " ").split()
        return sorted(name.upper() for name in names)

    @property
    def builder_options(self) -> dict[str, Any]:
        """Values of the BUILDER_OPTIONS that are set."""
        values = {name: getattr(self, name) for name in BUILDER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def options(self) -> dict[str, Any]:
        """Options that are set instead of the defaults, as JSON holds them: names of fields and their values."""
        options = self.builder_options
        if self.sources_off:
            options["tactic_sources_off"] = self.sources_off
        return options

    def with_streams(self, api: Api) -> BuildConfig:
        """Return the config with the number of auxiliary streams that `api` builds for it; TensorRT-RTX chooses it."""
        if self.max_aux_streams is not None or api.is_rtx:
            return self
        return self.model_copy(update={"max_aux_streams": AUX_STREAMS})

    @model_validator(mode="after")
    def _ranges_ascend(self) -> BuildConfig:
        for name in ("batch", "height", "width"):
            values = getattr(self, name)
            if values is not None and not 0 < values[0] <= values[1] <= values[2]:
                raise InputError(f"{name} {values}: expected min <= opt <= max, all positive")
        return self


def profile_ranges(options: Options) -> dict[str, Any]:
    """`batch`, `height` and `width` of a `BuildConfig`, by the options `batch_size` and `imgsz`.

    Each is one value, or min, opt and max; two numbers of `imgsz` are one height and width. Others: `InputError`.
    """
    values: Any = options  # whose classes have these two
    imgsz = values.imgsz
    if imgsz and [type(size) for size in imgsz] == [int, int]:
        imgsz = [tuple(imgsz)]
    ranges: dict[str, Any] = {"batch": _min_opt_max(values.batch_size, options.flag("batch_size"))}
    sizes = _min_opt_max(imgsz, options.flag("imgsz"))
    if sizes is None:
        return {**ranges, "height": None, "width": None}
    sides = [height_width(size) for size in sizes]
    ranges["height"] = tuple(height for height, _ in sides)
    ranges["width"] = tuple(width for _, width in sides)
    return ranges


def _min_opt_max(values: Sequence[Any] | None, flag: str) -> tuple[Any, Any, Any] | None:
    """Three values from one or three, None for none; `InputError` for other numbers of values.

    >>> _min_opt_max([8], "--batch-size"), _min_opt_max([1, 8, 16], "--batch-size")
    ((8, 8, 8), (1, 8, 16))
    """
    if not values:
        return None
    if len(values) not in (1, 3):
        raise InputError(f"{flag} takes one number, or three: min opt max")
    return (values[0], values[len(values) // 2], values[-1])
