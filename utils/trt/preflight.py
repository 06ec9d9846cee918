"""Before a build, which takes minutes: what is asked for, what the ONNX file holds, and whether both and TensorRT fit.

    file = OnnxFile.read("yolov9-c-int8.onnx")
    decision = decide(file, load_tensorrt(), gpu(), BuildConfig(batch=(1, 8, 16)))

How the network is typed follows from the file and from what TensorRT can do ("Strongly Typed Networks", developer
guide): a file whose float part is FP16 is built in its own types; one in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from utils.core.errors import InputError
from utils.core.files import read_onnx
from utils.core.input_spec import DEFAULT_BATCH, FLOATS, InputSpec
from utils.core.options import DeviceOptions, Options, height_width, one_size, option
from utils.runners.base import imgsz_of, literal
from utils.trt.tensorrt_api import BUILDER_OPTIONS, Api, Gpu

BUILDING = "building"
Minutes = Annotated[float, Field(gt=0, le=10_080)]  # a week at most
Precision = Literal["best", "fp16", "fp32"]
Range = tuple[int, int, int]  # min, opt, max
SOURCES_OFF = "TRT_TACTIC_SOURCES_OFF"


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
    tiling_level: Literal["fast", "moderate", "full"] | None = option(
        None, "how long to look for kernels that share the L2 cache, from 10.9 on (default: TensorRT's, not)",
        group=BUILDING,
    )  # fmt: skip
    max_tactics: Annotated[int, Field(ge=1, le=100_000)] | None = option(
        None, "kernels that are measured for a layer, from 10.9 on (default: TensorRT's choice)", group=BUILDING,
        metavar="N",
    )  # fmt: skip
    version_compatible: bool = option(
        False, "an engine that the lean runtime of this version runs, too, which is slower", group=BUILDING
    )
    hardware_compatible: Literal["ampere+", "same-cc"] | None = option(
        None, "an engine for every GPU from Ampere on, or, from 10.9 on, of this compute capability, which is slower",
        group=BUILDING,
    )  # fmt: skip
    strip_weights: bool = option(
        False, "an engine without weights, from 10.0 on: loading reads them from the ONNX file", group=BUILDING
    )
    tune: Minutes | None = option(
        None, "of each engine: for so long try options that are not given here, and keep the fastest", group=BUILDING,
        metavar="MINUTES",
    )  # fmt: skip

    def build_config(self, **others: Any) -> BuildConfig:
        """How engines are built; `others` are further fields."""
        return BuildConfig(**{name: getattr(self, name) for name in BUILD_OPTIONS}, **others)


BUILD_OPTIONS = tuple(name for name in BuildOptions.model_fields if name not in DeviceOptions.model_fields)


class BuildConfig(BuildOptions):
    """How an engine is built: beside what changes how fast it is, what it is built for.

    Attributes:
        batch: images, min, opt and max; for a file of dynamic batch (default: `input_spec.DEFAULT_BATCH`).
        height, width: pixels, min, opt and max; for a file of dynamic size.
        precision: `best`: INT8 where the file has Q/DQ, else FP16; `fp16`, `fp32`: for float files. A strongly typed
            network has the precision of its file.
        workspace: bytes of GPU memory that kernels may use; None: three quarters of what is free.
        timing_cache: file of measured kernels; None: beside the engine, by GPU and version; '' for none.
        targets: architectures to build for without such a GPU, such as SM89 (TensorRT-RTX).
        allow_fp32: build a file with an FP32 float part where TensorRT cannot choose FP16 by itself.
        progress: show a progress bar.
    """

    batch: Range | None = None
    height: Range | None = None
    width: Range | None = None
    precision: Precision = "best"
    workspace: int | None = None
    timing_cache: str | Path | None = None
    targets: tuple[str, ...] = ()
    allow_fp32: bool = False
    progress: bool = True

    @property
    def sources_off(self) -> list[str]:
        """The tactic sources that are not to be used: `tactic_sources_off`, or those of the environment variable."""
        names = self.tactic_sources_off or os.environ.get(SOURCES_OFF, "").replace(",", " ").split()
        return [name.upper() for name in names]

    @property
    def builder_options(self) -> dict[str, Any]:
        """Those of BUILDER_OPTIONS that were asked for, and their values."""
        values = {name: getattr(self, name) for name in BUILDER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for instead of the defaults, as JSON holds it: names of fields and their values."""
        off = sorted(self.sources_off)
        return {**self.builder_options, **({"tactic_sources_off": off} if off else {})}

    @model_validator(mode="after")
    def _ranges_ascend(self) -> BuildConfig:
        for name in ("batch", "height", "width"):
            values = getattr(self, name)
            if values is not None and not 0 < values[0] <= values[1] <= values[2]:
                raise InputError(f"{name} {values}: expected min <= opt <= max, all positive")
        return self


def min_opt_max(options: Options, name: str) -> Range | None:
    """The option `name` of a profile, one number or three; None if it was not given.

    Raises:
        InputError: there are others.
    """
    values = getattr(options, name)
    if values is not None and len(values) not in (1, 3):
        raise InputError(f"{options.flag(name)} takes one number, or three: min opt max")
    return None if values is None else (values[0], values[len(values) // 2], values[-1])


def min_opt_max_sizes(options: Options, name: str = "imgsz") -> dict[str, Any]:
    """`height` and `width` of a `BuildConfig` by the option `name`: as `min_opt_max`, or of one height and width.

    Raises:
        InputError: there are others.
    """
    given = getattr(options, name)
    if given and list(map(type, given)) == [int, int]:
        options = options.model_copy(update={name: [one_size(given)]})
    sizes = min_opt_max(options, name)
    height, width = zip(*map(height_width, sizes), strict=True) if sizes else (None, None)
    return {"height": height, "width": width}


# TensorProto's number of a type → torch's name
ONNX_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64",
    16: "bfloat16",
}  # fmt: skip
FLOAT16 = 10
MAX_OPSET = 17  # of the parser before strong typing; those that know that read all that torch exports
DATA_DEPENDENT = ("NonMaxSuppression", "NonZero")


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file in words.

    Attributes:
        inputs, outputs: name → shape; None where the size is dynamic.
        opset: version of the operators.
        quantized: whether there are QuantizeLinear or DequantizeLinear nodes.
        half: whether weights or scales are FP16: the types of a strongly typed network are in the file.
        half_scales: whether quantizers have FP16 scales (opset 19), which weakly typed TensorRT does not read.
        plugins: whether there are nodes of TensorRT's own, such as EfficientNMS_TRT.
        data_dependent: whether the size of a result is only known once it is computed, as NonMaxSuppression's.
        metadata: its properties.
        input_spec: the form in which it takes images.
        types: of inputs and outputs, torch's names for them.
    """

    path: Path
    inputs: dict[str, tuple[int | None, ...]]
    outputs: dict[str, tuple[int | None, ...]]
    opset: int
    quantized: bool
    half: bool
    half_scales: bool
    plugins: bool
    data_dependent: bool
    metadata: Mapping[str, str]
    input_spec: InputSpec = FLOATS
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> OnnxFile:
        """Read a file's description.

        Raises:
            InputError: the file is missing, is no ONNX, or is truncated.
            DependencyError: onnx is not installed.
        """
        return cls.of_model(read_onnx(path), Path(path))

    @classmethod
    def of_model(cls, model: Any, path: Path) -> OnnxFile:
        """The description of a loaded ModelProto; `path` is the file it came from."""
        graph = model.graph
        stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            for item in node.attribute if node.op_type == "Constant" else ():
                if item.name == "value":
                    stored[node.output[0]] = item.t.data_type
        quantizers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
        scales = {stored.get(node.input[1]) for node in quantizers}
        weights = {stored.get(node.input[1]) for node in graph.node if node.op_type == "Conv" and len(node.input) > 1}
        values = [value for value in graph.input if value.name not in stored]
        shapes: dict[str, tuple[int | None, ...]] = {}
        types: dict[str, str] = {}
        for value in (*values, *graph.output):
            tensor = value.type.tensor_type
            types[value.name] = ONNX_TYPES.get(tensor.elem_type, f"type {tensor.elem_type}")
            shapes[value.name] = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
        inputs = {value.name: shapes[value.name] for value in values}
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        return cls(
            path=path,
            inputs=inputs,
            outputs={value.name: shapes[value.name] for value in graph.output},
            opset=max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0),
            quantized=bool(quantizers),
            half=FLOAT16 in scales or FLOAT16 in weights,
            half_scales=FLOAT16 in scales,
            plugins=any(node.op_type.endswith("_TRT") for node in graph.node),
            data_dependent=any(node.op_type in DATA_DEPENDENT for node in graph.node),
            metadata=metadata,
            input_spec=FLOATS if len(inputs) != 1 else InputSpec.of_file(
                metadata, types[values[0].name], inputs[values[0].name]
            ),
            types=types,
        )  # fmt: skip

    @property
    def tensors(self) -> dict[str, list[Any]]:
        """Inputs and outputs by name: type and shape, as an engine's note and JSON hold them."""
        shapes = {**self.inputs, **self.outputs}
        return {name: [self.types[name], list(shape)] for name, shape in shapes.items()}

    @property
    def image(self) -> tuple[str, tuple[int | None, ...]]:
        """Name of the input that takes images, and its shape as batch, channels, height and width.

        Raises:
            InputError: there is not exactly one such input.
        """
        if len(self.inputs) != 1 or any(len(shape) != 4 for shape in self.inputs.values()):
            raise InputError(
                f"{self.path} takes {dict(self.inputs)}; expected one input [batch, channels, height, width]"
            )
        ((name, shape),) = self.inputs.items()
        return name, self.input_spec.nchw(shape)


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


def decide(file: OnnxFile, api: Api, gpu: Gpu | None, config: BuildConfig) -> Decision:
    """Settle what has to be known before a build: how this TensorRT reads this file, its precision and its profile.

    Raises:
        InputError: file, TensorRT, GPU and what is asked for do not go together; it says how to export the file.
    """
    check_target(api, gpu, config.targets)
    for name, value in config.builder_options.items():
        if lacking := api.lacks(name, value):
            given = f" {value}" if isinstance(value, str) else ""
            raise InputError(f"{api.name} has no {lacking}; leave out --{name.replace('_', '-')}{given}")
    by_opset = file.metadata.get("form") == "deepstream"  # of export_yoloV9.py, where --opset decides on the typing
    if not api.strongly_typed and (file.half_scales or file.opset > MAX_OPSET):
        raise InputError(
            f"{file.path} has opset {file.opset}{' and FP16 scales' * file.half_scales}, which {api.name} does not "
            f"read; export it with {'' if by_opset else '--typing weak '}--opset {MAX_OPSET}"
        )
    strong = file.half_scales or not api.weakly_typed
    if strong and not (file.half or config.allow_fp32 or config.precision == "fp32"):
        better = "--opset 19" if by_opset else "--typing strong (a float network too)"
        in_fp16 = "" if by_opset and not file.quantized else f"export it with {better}, or "
        raise InputError(
            f"{file.path} is in FP32, and {api.name} builds what the file says: the engine would be slow; "
            f"{in_fp16}give build_engine.py --allow-fp32"
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
    """Check that there is something to build for.

    Raises:
        InputError: there is no GPU and no target, a target that this TensorRT does not know, or it only runs engines.
    """
    if not api.builds:
        raise InputError(f"{api.name} builds no engines; install TensorRT itself, or build elsewhere")
    known = api.ahead_of_time
    if unknown := [target for target in targets if target not in known]:
        builds = f"builds for {', '.join(known)}" if known else "builds only for the GPU it runs on, TensorRT-RTX more"
        raise InputError(f"{api.name} does not know --target {', '.join(unknown)}; it {builds}")
    if gpu is None and not targets:
        how = f"--target with one of {', '.join(known)}" if known else "--target SM89 and the like"
        raise InputError(
            "torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; val_trt.py runs an ONNX file "
            "here, as scripts/benchmark_trt.py --device cpu does; scripts/build_engine.py builds ahead of time with "
            f"TensorRT-RTX (requirements/rtx.txt of this overlay's clone) and {how}"
        )


def profile_shapes(file: OnnxFile, config: BuildConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → min, opt and max shape, for the dynamic axes; empty when none is.

    Raises:
        InputError: a range was asked for where the file's shape is static, or a size is no multiple of the stride.
    """
    name, shape = file.image
    height, width = imgsz_of(file.metadata) or (640, 640)
    defaults = (DEFAULT_BATCH, (file.input_spec.channels,) * 3, (height,) * 3, (width,) * 3)
    stride = literal(file.metadata.get("stride", ""))
    stride = stride if isinstance(stride, int) else 1
    axes: list[Range] = []
    for axis, size, asked, default in zip(
        ("batch", "channels", "height", "width"), shape, (config.batch, None, config.height, config.width), defaults,
        strict=True,
    ):  # fmt: skip
        if size is not None and asked not in (None, (size, size, size)):
            way = f"give --batch-size {size}" if axis == "batch" else "run build_engine.py without --imgsz"
            raise InputError(
                f"{file.path} has a static {axis} of {size}, and {'/'.join(map(str, asked))} was asked for; "
                f"{way}, export it for that {axis}, or export it with --dynamic"
            )
        axes.append((size, size, size) if size is not None else asked or default)
        if size is None and axis in ("height", "width") and any(value % stride for value in axes[-1]):
            raise InputError(f"{axis} {'/'.join(map(str, axes[-1]))}: all must be multiples of {stride}, the stride")
    if None not in shape:
        return {}
    min_shape, opt_shape, max_shape = (file.input_spec.own(sizes) for sizes in zip(*axes, strict=True))
    return {name: (min_shape, opt_shape, max_shape)}
