"""Checks before a build, which takes minutes: options, ONNX file and TensorRT must fit each other.

    file = OnnxFile.read("yolov9-c-int8.onnx")
    decision = decide(file, load_tensorrt(), gpu(), BuildConfig(batch=(1, 8, 16)))

The typing of the network follows from the file and from TensorRT ("Strongly Typed Networks", developer guide): a file
whose float part is FP16 is built in its own types; a file in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from utils.core.errors import InputError
from utils.core.input_spec import DEFAULT_BATCH
from utils.runners.base import imgsz_of, literal
from utils.trt.build_options import BuildConfig, Range
from utils.trt.onnx_file import OnnxFile
from utils.trt.tensorrt_api import Api, Gpu

MAX_OPSET = 17  # of the parser before strong typing; those that know that read all that torch exports


class Decision(NamedTuple):
    """Typing, precision and profile of a build, settled before it begins."""

    typing: Literal["weak", "strong"]  # in which this TensorRT has to read the file
    precision: str  # int8, fp16 or fp32
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]  # see `profile_shapes`


def decide(file: OnnxFile, api: Api, gpu: Gpu | None, config: BuildConfig) -> Decision:
    """Settle typing, precision and profile of a build.

    Raises:
        InputError: file, TensorRT, GPU and options do not go together; the message tells how to export the file.
    """
    check_target(api, gpu, config.targets)
    _check_options(api, config)
    _check_opset(file, api)
    is_strong = file.half_scales or not api.weakly_typed
    if is_strong and not (file.half or config.allow_fp32 or config.precision == "fp32"):
        raise InputError(
            f"{file.path} is in FP32, and {api.name} builds a file in its own types, so the engine would be slow; "
            "export it with --typing strong, an FP32 model too (export_yoloV9.py: --opset 19, a quantized one), or "
            "give build_engine.py --allow-fp32"
        )
    is_half = file.half if is_strong else config.precision != "fp32"
    if file.quantized:
        precision = "int8"
    elif is_half:
        precision = "fp16"
    else:
        precision = "fp32"
    if config.precision not in ("best", precision):
        raise InputError(
            f"--precision {config.precision} has no effect: {api.name} builds {file.path} as {precision.upper()}, by "
            "the file's types; leave it out, or give the FP32 model's ONNX file, exported for that precision"
        )
    return Decision("strong" if is_strong else "weak", precision, profile_shapes(file, config))


def _check_options(api: Api, config: BuildConfig) -> None:
    """Raise `InputError` for a builder option that this TensorRT does not have."""
    for name, value in config.builder_options.items():
        lacking = api.lacks(name, value)
        if lacking:
            word = f" {value}" if isinstance(value, str) else ""
            raise InputError(f"{api.name} has no {lacking}; leave out --{name.replace('_', '-')}{word}")


def _check_opset(file: OnnxFile, api: Api) -> None:
    """Raise `InputError` for a file with operators or types that this TensorRT does not read."""
    if file.unsigned:
        raise InputError(
            f"{file.path} has UINT8 quantizers, as files for OpenVINO have, but TensorRT reads INT8 only; export it "
            "without --target"
        )
    if not api.strongly_typed and (file.half_scales or file.opset > MAX_OPSET):
        scales = " and FP16 scales" if file.half_scales else ""
        raise InputError(
            f"{file.path} has opset {file.opset}{scales}, which {api.name} does not read; "
            f"export it with --typing weak --opset {MAX_OPSET} (export_yoloV9.py: --opset {MAX_OPSET})"
        )


def check_target(api: Api, gpu: Gpu | None, targets: Sequence[str]) -> None:
    """Raise `InputError` where there is no GPU and no target, or this TensorRT builds nothing or not for a target."""
    if not api.builds:
        raise InputError(f"{api.name} builds no engines; install TensorRT itself, or build elsewhere")
    architectures = ", ".join(api.ahead_of_time)
    unknown = [target for target in targets if target not in api.ahead_of_time]
    if unknown:
        builds = "builds only for the GPU it runs on; TensorRT-RTX builds for others"
        if architectures:
            builds = f"builds for {architectures}"
        raise InputError(f"{api.name} does not know --target {', '.join(unknown)}; it {builds}")
    if gpu is None and not targets:
        raise InputError(
            "torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; val_trt.py and "
            "scripts/benchmark_trt.py --device cpu run an ONNX file here; scripts/build_engine.py builds ahead of time "
            "with TensorRT-RTX (requirements/rtx.txt of this overlay's clone) and --target with one of "
            f"{architectures or 'SM89'}"
        )


def profile_shapes(file: OnnxFile, config: BuildConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → min, opt and max shape, for the dynamic axes; empty when none is.

    Raises:
        InputError: a range is set where the file's shape is static, or a size is not a multiple of the stride.
    """
    name, shape = file.image
    height, width = imgsz_of(file.metadata) or (640, 640)
    channels = file.input_spec.channels
    stride = literal(file.metadata.get("stride", ""))
    settings = {"batch": config.batch, "channels": None, "height": config.height, "width": config.width}
    defaults: tuple[Range, ...] = (DEFAULT_BATCH, (channels,) * 3, (height,) * 3, (width,) * 3)
    ranges: list[Range] = []
    for (axis, setting), size, default in zip(settings.items(), shape, defaults, strict=True):
        if size is not None:
            _check_static(file, axis, size, setting)
            ranges.append((size, size, size))
            continue
        sizes = setting or default
        if axis in ("height", "width") and isinstance(stride, int) and any(value % stride for value in sizes):
            raise InputError(f"{axis} {sizes}: all must be multiples of the stride, {stride}")
        ranges.append(sizes)
    if None not in shape:
        return {}
    return {name: tuple(file.input_spec.own(sizes) for sizes in zip(*ranges, strict=True))}


def _check_static(file: OnnxFile, axis: str, size: int, setting: Range | None) -> None:
    """Raise `InputError` if the setting of an axis that is static in the file differs from its size."""
    if setting is None or setting == (size, size, size):
        return
    flag = f"give --batch-size {size}" if axis == "batch" else "leave --imgsz out"
    raise InputError(
        f"{file.path} has a static {axis} of {size}, not {'/'.join(map(str, setting))}; {flag}, "
        f"export it for that {axis}, or export it with --dynamic"
    )
