"""Before a build, which takes minutes: what is asked for, what the ONNX file holds, and whether both and TensorRT fit.

    file = OnnxFile.read("yolov9-c-int8.onnx")
    decision = decide(file, load_tensorrt(), gpu(), BuildConfig(batch=(1, 8, 16)))

How the network is typed follows from the file and from what TensorRT can do ("Strongly Typed Networks", developer
guide): a file whose float part is FP16 is built in its own types; one in FP32 by flags, where TensorRT has them.
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
    """Options of programs that build engines: what changes how fast an engine is."""

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
        """How engines are built; `others` are fields that these options do not have, or have in another form."""
        names = type(self).model_fields.keys() & BuildConfig.model_fields.keys()
        return BuildConfig(**{**{name: getattr(self, name) for name in names}, **others})


BUILD_OPTIONS = tuple(name for name in BuildOptions.model_fields if name not in DeviceOptions.model_fields)


class BuildConfig(BuildOptions):
    """How an engine is built: beside what changes how fast it is, what it is built for."""

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
        """The tactic sources that are not to be used: `tactic_sources_off`, or those of the environment variable."""
        names = self.tactic_sources_off or os.environ.get("TRT_TACTIC_SOURCES_OFF", "").replace(",", " ").split()
        return sorted(name.upper() for name in names)

    @property
    def builder_options(self) -> dict[str, Any]:
        """Those of BUILDER_OPTIONS that were asked for, and their values."""
        values = {name: getattr(self, name) for name in BUILDER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for instead of the defaults, as JSON holds it: names of fields and their values."""
        return {**self.builder_options, **({"tactic_sources_off": self.sources_off} if self.sources_off else {})}

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
    given: dict[str, Any] = {name: getattr(options, name) for name in ("batch_size", "imgsz")}
    if given["imgsz"] and list(map(type, given["imgsz"])) == [int, int]:
        given["imgsz"] = [tuple(given["imgsz"])]
    for name, values in given.items():
        if values and len(values) not in (1, 3):
            raise InputError(f"{options.flag(name)} takes one number, or three: min opt max")
        given[name] = (values[0], values[len(values) // 2], values[-1]) if values else None
    sides = [height_width(size) for size in given["imgsz"] or ()]
    height, width = (tuple(side[index] for side in sides) or None for index in (0, 1))
    return {"batch": given["batch_size"], "height": height, "width": width}


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
        """Read a file's description; raises as `read_onnx`, or `InputError` for a file that takes INT8 images."""
        return cls.of_model(read_onnx(path), Path(path))

    @classmethod
    def of_model(cls, model: Any, path: Path) -> OnnxFile:
        """The description of a loaded ModelProto; `path` is the file it came from."""
        graph = model.graph
        stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
        stored |= {node.output[0]: item.t.data_type for node in graph.node for item in node.attribute}  # of a Constant
        quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
        scales = {stored.get(node.input[1]) for node in quantizers}
        zero_points = {stored.get(name) for node in quantizers for name in node.input[2:]}
        weights = {stored.get(node.input[1]) for node in graph.node if node.op_type == "Conv"}
        inputs = tuple(TensorSpec.of_onnx(value) for value in graph.input if value.name not in stored)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        return cls(
            path=path,
            inputs=inputs,
            outputs=tuple(map(TensorSpec.of_onnx, graph.output)),
            opset=max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0),
            quantized=bool(quantizers),
            half=FLOAT16 in scales | weights,
            half_scales=FLOAT16 in scales,
            unsigned=UINT8 in zero_points,
            plugins=any(node.op_type.endswith("_TRT") for node in graph.node),
            data_dependent=any(node.op_type in DATA_DEPENDENT for node in graph.node),
            metadata=metadata,
            input_spec=InputSpec.of_file(metadata, inputs[0].dtype, inputs[0].shape) if inputs else InputSpec(),
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


UINT8, FLOAT16 = 2, 10  # TensorProto's numbers of them


class Decision(NamedTuple):
    """What is settled about a build before it begins."""

    typing: Literal["weak", "strong"]  # how this TensorRT has to read the file
    precision: str  # int8, fp16 or fp32
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]  # see `profile_shapes`


def decide(file: OnnxFile, api: Api, gpu: Gpu | None, config: BuildConfig) -> Decision:
    """Settle what has to be known before a build: how this TensorRT reads this file, its precision and its profile.

    Raises:
        InputError: file, TensorRT, GPU and what is asked for do not go together; it says how to export the file.
    """
    check_target(api, gpu, config.targets)
    for name, value in config.builder_options.items():
        if lacking := api.lacks(name, value):
            word = f" {value}" if isinstance(value, str) else ""
            raise InputError(f"{api.name} has no {lacking}; leave out --{name.replace('_', '-')}{word}")
    if file.unsigned:
        raise InputError(
            f"{file.path} has quantizers of UINT8, as OpenVINO's files have them, and TensorRT takes INT8 only; export "
            "it without --target"
        )
    if not api.strongly_typed and (file.half_scales or file.opset > MAX_OPSET):
        raise InputError(
            f"{file.path} has opset {file.opset}{' and FP16 scales' * file.half_scales}, which {api.name} does not "
            f"read; export it with --typing weak --opset {MAX_OPSET} (export_yoloV9.py: --opset {MAX_OPSET})"
        )
    strong = file.half_scales or not api.weakly_typed
    if strong and not (file.half or config.allow_fp32 or config.precision == "fp32"):
        raise InputError(
            f"{file.path} is in FP32, and {api.name} builds what the file says: the engine would be slow; export it "
            "with --typing strong, a float network too (export_yoloV9.py: --opset 19, a quantized one), or give "
            "build_engine.py --allow-fp32"
        )
    half = file.half if strong else config.precision != "fp32"
    precision = "int8" if file.quantized else "fp16" if half else "fp32"
    if config.precision not in ("best", precision):
        raise InputError(
            f"--precision {config.precision} does nothing: {api.name} builds {file.path} as {precision.upper()}, as "
            "the file says; leave it out, or give the float model's ONNX, exported for that precision"
        )
    return Decision("strong" if strong else "weak", precision, profile_shapes(file, config))


def check_target(api: Api, gpu: Gpu | None, targets: Sequence[str]) -> None:
    """Raise `InputError` where there is no GPU and no target, or this TensorRT builds nothing or not for a target."""
    if not api.builds:
        raise InputError(f"{api.name} builds no engines; install TensorRT itself, or build elsewhere")
    known = ", ".join(api.ahead_of_time)
    if unknown := [target for target in targets if target not in api.ahead_of_time]:
        builds = f"builds for {known}" if known else "builds only for the GPU it runs on, TensorRT-RTX more"
        raise InputError(f"{api.name} does not know --target {', '.join(unknown)}; it {builds}")
    if gpu is None and not targets:
        raise InputError(
            "torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; val_trt.py runs an ONNX file "
            "here, as scripts/benchmark_trt.py --device cpu does; scripts/build_engine.py builds ahead of time with "
            f"TensorRT-RTX (requirements/rtx.txt of this overlay's clone) and --target with one of {known or 'SM89'}"
        )


def profile_shapes(file: OnnxFile, config: BuildConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → min, opt and max shape, for the dynamic axes; empty when none is.

    Raises:
        InputError: a range was asked for where the file's shape is static, or a size is no multiple of the stride.
    """
    name, shape = file.image
    height, width = imgsz_of(file.metadata) or (640, 640)
    known_stride = literal(file.metadata.get("stride", ""))
    stride = known_stride if isinstance(known_stride, int) else 1
    asked = {"batch": config.batch, "channels": None, "height": config.height, "width": config.width}
    defaults = (DEFAULT_BATCH, (file.input_spec.channels,) * 3, (height,) * 3, (width,) * 3)
    ranges: list[Range] = []
    for (axis, wanted), size, default in zip(asked.items(), shape, defaults, strict=True):
        if size is None:
            ranges.append(wanted or default)
        elif wanted in (None, (size, size, size)):
            ranges.append((size, size, size))
        else:
            flag = f"--batch-size {size}" if axis == "batch" else "no --imgsz"
            raise InputError(
                f"{file.path} has a static {axis} of {size}, and {'/'.join(map(str, wanted))} was asked for; give "
                f"{flag}, export it for that {axis}, or export it with --dynamic"
            )
        if size is None and axis in ("height", "width") and any(value % stride for value in ranges[-1]):
            raise InputError(f"{axis} {ranges[-1]}: all must be multiples of {stride}, the stride")
    if None not in shape:
        return {}
    return {name: tuple(file.input_spec.own(sizes) for sizes in zip(*ranges, strict=True))}
