"""What is decided before a build: typing, shapes, precision; and what is refused, because the build takes minutes.

How the network is typed follows from the file and from what TensorRT can do ("Strongly Typed Networks", developer
guide): a file whose float part is FP16 is built in its own types; one in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from utils.core.errors import InputError
from utils.core.input_spec import DEFAULT_BATCH
from utils.trt.build_config import BuildConfig, Range
from utils.trt.onnx_summary import OnnxFile
from utils.trt.tensorrt_api import Gpu

if TYPE_CHECKING:
    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec


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


def decide(file: OnnxFile, api: Api | Trtexec, gpu: Gpu | None, config: BuildConfig) -> Decision:
    """Settle what has to be known before a build.

    Raises:
        InputError: file, TensorRT, GPU and what is asked for do not go together.
    """
    typing = choose_typing(file, api, config)
    if file.scaled_bytes and not api.strongly_typed:
        # TensorRT 8.6.0 makes one kernel of the product and the QuantizeLinear, and loses the factor, without an error
        raise InputError(
            f"{file.path} takes bytes and multiplies them by 1/255 in front of a QuantizeLinear, and engines of "
            f"{api.name} leave that product out (measured with 8.6.0); export it again, with --typing weak"
        )
    check_target(api, gpu, config.targets)
    half = file.half if typing == "strong" else config.precision != "fp32"
    precision = "int8" if file.quantized else "fp16" if half else "fp32"
    if config.precision not in ("best", precision):
        raise InputError(
            f"--precision {config.precision} does nothing: {api.name} builds {file.path} in its own types, "
            f"{precision.upper()}; leave it out"
        )
    return Decision(typing, precision, profile_shapes(file, config))


def choose_typing(file: OnnxFile, api: Api | Trtexec, config: BuildConfig) -> Literal["weak", "strong"]:
    """How this TensorRT has to read this file.

    Raises:
        InputError: it cannot; the message says how to export the file instead.
    """
    if api.max_opset is not None and file.opset > api.max_opset:
        raise InputError(
            f"{file.path} has opset {file.opset}, and {api.name} reads up to {api.max_opset}; "
            f"export it with {'' if _is_deepstreams(file) else '--typing weak '}--opset 17"
        )
    if file.quantized and config.precision != "best":
        raise InputError(
            f"{file.path} holds quantizers, so its engine is INT8; an {config.precision.upper()} engine to compare "
            "with is built from the float model's ONNX"
        )
    if file.half_scales and not api.strongly_typed:
        raise InputError(
            f"{file.path} is strongly typed (its scales are FP16), which {api.name} does not read; "
            f"export it with {'--opset 17' if _is_deepstreams(file) else '--typing weak'}"
        )
    if file.half_scales or not api.weakly_typed or (file.half and file.quantized):
        if not file.half and not config.allow_fp32 and config.precision != "fp32":
            raise InputError(
                f"{file.path} is in FP32, and {api.name} builds what the file says: the engine would be slow; "
                f"{_in_fp16(file)}give build_engine.py --allow-fp32"
            )
        return "strong"
    return "weak"


def _is_deepstreams(file: OnnxFile) -> bool:
    """Whether export_yoloV9.py wrote the file, where --opset decides how it is typed."""
    return file.metadata.get("form") == "deepstream"


def _in_fp16(file: OnnxFile) -> str:
    """How to export the file in FP16, or ''."""
    if not _is_deepstreams(file):
        return "export it with --typing strong (a float network too), or "
    return "export it with --opset 19, or " if file.quantized else ""


def check_target(api: Api | Trtexec, gpu: Gpu | None, targets: Sequence[str]) -> None:
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
        how = f"--target with one of {', '.join(known)}" if known else "--target SM89 and the like"
        raise InputError(
            "torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; val_trt.py and "
            "benchmark_trt.py --device cpu run the .onnx file here, and build_engine.py builds ahead of time with "
            f"TensorRT-RTX (requirements/rtx.txt) and {how}"
        )


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
                same = (
                    f"give --batch-size {size}" if word == "batch" else "build it with build_engine.py without --imgsz"
                )
                raise InputError(
                    f"{file.path} has a static {word} of {size}, and {'/'.join(map(str, asked))} was asked for; "
                    f"{same}, export it for that {word}, or export it with --dynamic"
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
    min_shape, opt_shape, max_shape = (file.input_spec.own(sizes) for sizes in zip(*axes, strict=True))
    return {name: (min_shape, opt_shape, max_shape)}


def _default_size(file: OnnxFile, word: str) -> Range:
    try:
        height, width = json.loads(file.metadata.get("imgsz", "[640, 640]"))
        side = int(height if word == "height" else width)
    except (ValueError, TypeError) as error:
        raise InputError(f"{file.path} does not say its image size; give --imgsz") from error
    return (side, side, side)
