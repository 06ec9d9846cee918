"""Checks before a build, which takes minutes: options, ONNX file and TensorRT must fit each other.

    file = OnnxFile.read("yolov9-c-int8.onnx")
    decision = decide(file, load_tensorrt(), gpu(), BuildConfig(batch=(1, 8, 16)))

The typing of the network follows from the file and from TensorRT ("Strongly Typed Networks", developer guide): a file
whose float part is FP16 is built in its own types; a file in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from utils.core.errors import InputError
from utils.core.files import read_onnx
from utils.core.input_spec import DEFAULT_BATCH, InputSpec
from utils.core.options import DeviceOptions, Options, height_width, option
from utils.core.output_form import OutputForm
from utils.runners.base import TensorSpec, imgsz_of, literal
from utils.trt.tensorrt_api import BUILDER_OPTIONS, Api, Gpu

Range = tuple[int, int, int]  # min, opt, max
build_option = partial(option, group="building")


class BuildOptions(DeviceOptions):
    """Options of programs that build engines, which change the speed of an engine."""

    tactic_sources_off: list[str] = build_option([], "such as CUBLAS CUBLAS_LT CUDNN", metavar="NAME")
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = build_option(
        None, "0 to 5 (default: TensorRT's)", metavar="N"
    )
    max_aux_streams: Annotated[int, Field(ge=0, le=64)] | None = build_option(
        None, "streams beside the main one that layers may be spread over (default: TensorRT's choice)", metavar="N"
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
    workspace: int | None = None  # MiB of GPU memory that kernels may use; None: three quarters of what is free
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
        """Those of BUILDER_OPTIONS that are set, and their values."""
        values = {name: getattr(self, name) for name in BUILDER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def options(self) -> dict[str, Any]:
        """Options that are set instead of the defaults, as JSON holds them: names of fields and their values."""
        options = self.builder_options
        if self.sources_off:
            options["tactic_sources_off"] = self.sources_off
        return options

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
    """Three values from one or three, None for none; `InputError` for other numbers of values."""
    if not values:
        return None
    if len(values) not in (1, 3):
        raise InputError(f"{flag} takes one number, or three: min opt max")
    return (values[0], values[len(values) // 2], values[-1])


MAX_OPSET = 17  # of the parser before strong typing; those that know that read all that torch exports
DATA_DEPENDENT = ("NonMaxSuppression", "NonZero")


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file in words."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    quantized: bool  # there are QuantizeLinear or DequantizeLinear nodes
    half: bool  # weights or scales are FP16: the types of a strongly typed network are in the file
    half_scales: bool  # quantizers have FP16 scales (opset 19), which weakly typed TensorRT does not read
    unsigned: bool  # quantizers round to UINT8, as in files for OpenVINO
    plugins: bool  # there are nodes of TensorRT's own, such as EfficientNMS_TRT
    data_dependent: bool  # the size of a result is only known once it is computed, as NonMaxSuppression's
    metadata: Mapping[str, str]
    input_spec: InputSpec

    @classmethod
    def read(cls, path: str | Path) -> OnnxFile:
        """Read a file's description; raises as `read_onnx`, or `InputError` for a file with INT8 images as input."""
        return cls.of_model(read_onnx(path), Path(path))

    @classmethod
    def of_model(cls, model: Any, path: Path) -> OnnxFile:
        """The description of a loaded ModelProto; `path` is the file it came from."""
        graph = model.graph
        type_of = {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            for item in node.attribute:  # of a Constant the value
                type_of[node.output[0]] = item.t.data_type
        quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
        scales = {type_of.get(node.input[1]) for node in quantizers}
        zero_points = {type_of.get(name) for node in quantizers for name in node.input[2:]}
        weights = {type_of.get(node.input[1]) for node in graph.node if node.op_type == "Conv"}
        inputs = tuple(TensorSpec.of_onnx(value) for value in graph.input if value.name not in type_of)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        opsets = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
        input_spec = InputSpec()
        if inputs:
            input_spec = InputSpec.of_file(metadata, inputs[0].dtype, inputs[0].shape)
        return cls(
            path=path,
            inputs=inputs,
            outputs=tuple(TensorSpec.of_onnx(value) for value in graph.output),
            opset=max(opsets, default=0),
            quantized=bool(quantizers),
            half=FLOAT16 in scales or FLOAT16 in weights,
            half_scales=FLOAT16 in scales,
            unsigned=UINT8 in zero_points,
            plugins=any(node.op_type.endswith("_TRT") for node in graph.node),
            data_dependent=any(node.op_type in DATA_DEPENDENT for node in graph.node),
            metadata=metadata,
            input_spec=input_spec,
        )

    @property
    def form(self) -> OutputForm:
        """The form of the outputs, with or without NMS and masks."""
        return OutputForm.of(self.metadata, {spec.name: spec.shape for spec in self.outputs})

    @property
    def tensors(self) -> dict[str, list[Any]]:
        """Inputs and outputs by name: type and shape, as an engine's note and JSON hold them."""
        return {spec.name: [spec.dtype, list(spec.shape)] for spec in (*self.inputs, *self.outputs)}

    @property
    def image(self) -> tuple[str, tuple[int | None, ...]]:
        """Name and shape (batch, channels, height, width) of the input for images; `InputError` if it is not alone."""
        if [len(spec.shape) for spec in self.inputs] != [4]:
            inputs = ", ".join(map(str, self.inputs)) or "nothing"
            raise InputError(f"{self.path} takes {inputs}; expected one input [batch, channels, height, width]")
        return self.inputs[0].name, self.input_spec.nchw(self.inputs[0].shape)


UINT8 = 2  # TensorProto's numbers of types
FLOAT16 = 10


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
