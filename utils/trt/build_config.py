"""What is decided before a build: typing, shapes, precision; and what is refused, because the build takes minutes.

How the network is typed follows from the file and from what TensorRT can do ("Strongly Typed Networks", developer
guide): a file whose float part is FP16 is built in its own types; one in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from utils.core.errors import InputError
from utils.core.input_form import INPUT_FORMATS, InputFormat
from utils.trt.onnx_summary import OnnxFile
from utils.trt.tensorrt_api import Gpu

Precision = Literal["best", "fp16", "fp32"]
Range = tuple[int, int, int]  # min, opt, max
DEFAULT_BATCH: Range = (1, 8, 16)
SOURCES_OFF = "TRT_TACTIC_SOURCES_OFF"
# Fields of BuildConfig that change which kernels an engine has, and their words; a default value is not mentioned.
OPTIONS = {
    "optimization_level": "level {}", "max_aux_streams": "{} streams", "timing_iterations": "{} timing iterations",
    "input_format": "{} input",
}  # fmt: skip


class Abilities(Protocol):
    """What a builder can do: `tensorrt_api.Api`, or trtexec."""

    @property
    def name(self) -> str:
        """Name and version, such as 'TensorRT 10.13.0'."""

    @property
    def weakly_typed(self) -> bool:
        """Whether builder flags choose the precision; else the ONNX file does."""

    @property
    def strongly_typed(self) -> bool:
        """Whether a network can be built in the types that the ONNX file has."""

    @property
    def max_opset(self) -> int | None:
        """The last ONNX operator set that is read; None where no file of ours exceeds it."""

    @property
    def ahead_of_time(self) -> tuple[str, ...]:
        """Architectures such as 'SM89' that engines can be built for without such a GPU."""

    @property
    def input_formats(self) -> tuple[str, ...]:
        """Those of INPUT_FORMATS that it has."""


@dataclass(frozen=True)
class BuildConfig:
    """How an engine is built.

    Attributes:
        batch: images, min, opt and max; for a file of dynamic batch (default: DEFAULT_BATCH).
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
        input_format: how INT8 images lie in the engine's memory. linear: channel after channel; chw4, chw32: 4 or 32
            channels of a pixel side by side, those that images lack being 0, as TensorRT's INT8 kernels read them.
            None: linear, unless `tune` finds a faster one.
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
    input_format: InputFormat | None = None

    @classmethod
    def given(cls, args: argparse.Namespace, **others: Any) -> BuildConfig:
        """What the options of `utils.cli.add_build_options` say; `others` are further fields."""
        return cls(
            tactic_sources_off=tuple(args.tactic_sources_off),
            optimization_level=args.optimization_level,
            max_aux_streams=args.max_aux_streams,
            timing_iterations=args.timing_iterations,
            tune=args.tune,
            build_limit=args.build_limit,
            **others,
        )

    @property
    def sources_off(self) -> tuple[str, ...]:
        """The tactic sources that are not to be used: those given, or those of the environment variable."""
        return self.tactic_sources_off or tuple(os.environ.get(SOURCES_OFF, "").replace(",", " ").split())

    @property
    def image_format(self) -> InputFormat:
        """How INT8 images lie in the engine's memory."""
        return self.input_format or "linear"

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for instead of the defaults, as JSON holds it: names of fields and their values."""
        usual = (None, "linear")
        given = {name: value for name in OPTIONS if (value := getattr(self, name)) not in usual}
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


def describe_options(options: Mapping[str, Any]) -> str:
    """Options in the words of tables, such as 'level 2, 3 streams'; tactic sources are left out."""
    words = [text.format(options[name]) for name, text in OPTIONS.items() if name in options]
    return ", ".join(words) or "TensorRT's own"


@dataclass(frozen=True)
class Decision:
    """What is settled about a build before it begins.

    Attributes:
        typing: how this TensorRT has to read the file.
        precision: 'int8', 'fp16' or 'fp32'.
        shapes: input → min, opt and max shape, see `profile_shapes`.
    """

    typing: Literal["weak", "strong"]
    precision: str
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]


def decide(file: OnnxFile, api: Abilities, gpu: Gpu | None, config: BuildConfig) -> Decision:
    """Settle what has to be known before a build.

    Raises:
        InputError: file, TensorRT, GPU and what is asked for do not go together.
    """
    typing = choose_typing(file, api, config)
    check_input_format(file, api, config)
    check_target(api, gpu, config.targets)
    return Decision(typing, precision_of(file, config, typing), profile_shapes(file, config))


def choose_typing(file: OnnxFile, api: Abilities, config: BuildConfig) -> Literal["weak", "strong"]:
    """How this TensorRT has to read this file.

    Raises:
        InputError: it cannot; the message says how to export the file instead.
    """
    if api.max_opset is not None and file.opset > api.max_opset:
        raise InputError(
            f"{file.path} has opset {file.opset}, and {api.name} reads up to {api.max_opset}; "
            "export it with --typing weak --opset 17"
        )
    if file.quantized and config.precision != "best":
        raise InputError(
            f"{file.path} holds quantizers, so its engine is INT8; an {config.precision.upper()} engine to compare "
            "with is built from the float model's ONNX"
        )
    if file.half_scales and not api.strongly_typed:
        raise InputError(
            f"{file.path} is strongly typed (its scales are FP16), which {api.name} does not read; "
            "export it with --typing weak"
        )
    if file.half_scales or not api.weakly_typed or (file.half and file.quantized):
        if not file.half and not config.allow_fp32 and config.precision != "fp32":
            raise InputError(
                f"{file.path} is in FP32, and {api.name} builds what the file says: the engine would be slow; "
                "export it with --typing strong (a float network too), or give --allow-fp32"
            )
        return "strong"
    return "weak"


def check_target(api: Abilities, gpu: Gpu | None, targets: Sequence[str]) -> None:
    """Check that there is something to build for.

    Raises:
        InputError: no GPU and no target, or a target that this TensorRT does not know.
    """
    known = api.ahead_of_time
    unknown = [target for target in targets if target not in known]
    if unknown and not known:
        raise InputError(f"{api.name} builds only for the GPU it runs on; --target is for TensorRT-RTX")
    if unknown:
        raise InputError(f"{api.name} does not know {', '.join(unknown)}; it builds for {', '.join(known)}")
    if gpu is None and not targets:
        how = (
            f"give --target with one of {', '.join(known)}"
            if known
            else "TensorRT-RTX builds ahead of time without one (requirements/rtx.txt, then --target SM89)"
        )
        raise InputError(f"torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; {how}")


def check_input_format(file: OnnxFile, api: Abilities, config: BuildConfig) -> None:
    """Check that images can lie in the engine's memory as `config` says, and that it reads them right.

    An engine of TensorRT 8.6.0 that took bytes gave other results than the file in ONNX Runtime, without an error.

    Raises:
        InputError: they cannot, or it does not.
    """
    if file.input_form.kind == "uint8" and not api.strongly_typed:
        raise InputError(
            f"{file.path} takes bytes, and engines of {api.name} compute something else from them (measured with "
            "8.6.0); export it with --input int8, which uploads as little, or without --input"
        )
    wanted = config.image_format
    if wanted not in INPUT_FORMATS:
        raise InputError(f"input format {wanted!r} is none of {', '.join(INPUT_FORMATS)}")
    if wanted == "linear":
        return
    if file.input_form.kind != "int8":
        raise InputError(
            f"--input-format {wanted} is for files that take INT8 images, and {file.path} takes {file.input_form}; "
            "export it with --input int8"
        )
    if wanted not in api.input_formats:
        raise InputError(f"{api.name} has no input format {wanted}; it has {', '.join(api.input_formats)}")


def profile_shapes(file: OnnxFile, config: BuildConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → min, opt and max shape, for the dynamic axes; empty when none is.

    Raises:
        InputError: a range was asked for where the file's shape is static, or a size is no multiple of the stride.
    """
    name, shape = file.image
    wanted: tuple[Range | None, ...] = (config.batch, None, config.height, config.width)
    words = ("batch", "channels", "height", "width")
    stride = int(file.metadata.get("stride", "1")) if file.metadata.get("stride", "1").isdigit() else 1
    axes: list[Range] = []
    for size, asked, word in zip(shape, wanted, words, strict=True):
        if size is not None:
            if asked is not None and asked != (size, size, size):
                raise InputError(
                    f"{file.path} has a static {word} of {size}, and {'/'.join(map(str, asked))} was asked for; "
                    f"export it for that {word}, or with --dynamic"
                )
            axes.append((size, size, size))
            continue
        if asked is None and word != "batch":
            asked = _default_size(file, word)
        asked = asked or DEFAULT_BATCH
        if word in ("height", "width") and any(value % stride for value in asked):
            raise InputError(f"{word} {'/'.join(map(str, asked))}: all must be multiples of {stride}, the stride")
        axes.append(asked)
    if None not in shape:
        return {}
    min_shape, opt_shape, max_shape = (file.input_form.own(sizes) for sizes in zip(*axes, strict=True))
    return {name: (min_shape, opt_shape, max_shape)}


def _default_size(file: OnnxFile, word: str) -> Range:
    try:
        height, width = json.loads(file.metadata.get("imgsz", "[640, 640]"))
        side = int(height if word == "height" else width)
    except (ValueError, TypeError) as error:
        raise InputError(f"{file.path} does not say its image size; give --imgsz") from error
    return (side, side, side)


def precision_of(file: OnnxFile, config: BuildConfig, typing: str) -> str:
    """What the engine computes in: 'int8', 'fp16' or 'fp32'."""
    if file.quantized:
        return "int8"
    if typing == "strong":
        return "fp16" if file.half else "fp32"
    return "fp32" if config.precision == "fp32" else "fp16"
