"""ONNX file → TensorRT engine. What cannot work is refused before the build, which takes minutes.

    result = build("yolov9-c.onnx", "yolov9-c.engine", BuildConfig(batch=(1, 8, 8)))

How the network is typed follows from the file and from what TensorRT can do ("Strongly Typed Networks", developer
guide): a file whose float part is FP16 is built in its own types; one in FP32 by flags, where TensorRT has them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.quantize.errors import InputError, QatError
from utils.cli import atomic_path
from utils.engine import onnx_file, tensorrt_api
from utils.engine.engine_file import EngineNote
from utils.engine.onnx_file import OnnxFile
from utils.engine.progress import build_progress
from utils.engine.tensorrt_api import Api, Gpu, Log

logger = logging.getLogger(__name__)

Precision = Literal["best", "fp16", "fp32"]
Range = tuple[int, int, int]  # min, opt, max


@dataclass(frozen=True)
class BuildConfig:
    """How an engine is built.

    Attributes:
        batch: pictures, min, opt and max; for a file of free batch.
        height, width: pixels, min, opt and max; for a file of free size.
        precision: `best`: INT8 where the file has Q/DQ, else FP16; `fp16` and `fp32` without INT8. A strongly typed
            network has the precision of its file.
        workspace: bytes of GPU memory that kernels may use; None: three quarters of what is free, over `shares`.
        shares: builds that run side by side.
        timing_cache: file of measured kernels; None: beside the engine, by GPU and version; '' for none.
        tactic_sources_off: sources of kernels that are not to be used, such as CUBLAS; if empty, those that the
            environment variable TRT_TACTIC_SOURCES_OFF lists.
        optimization_level: 0 to 5, TensorRT's own default if None.
        timing_iterations: runs of each kernel that is measured; TensorRT's own default if None.
        targets: architectures to build for without such a GPU, such as SM89 (TensorRT-RTX).
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
    timing_iterations: int | None = None
    targets: tuple[str, ...] = ()
    allow_fp32: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "height", "width"):
            values = getattr(self, name)
            if values is not None and not 0 < values[0] <= values[1] <= values[2]:
                raise InputError(f"{name} {values}: expected min <= opt <= max, all positive")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise InputError(f"optimization level {self.optimization_level} is outside 0 to 5")


@dataclass(frozen=True)
class BuildResult:
    """What was built; `note` also lies beside the engine."""

    path: Path
    size_bytes: int
    note: EngineNote


def build(onnx: str | Path, engine: str | Path, config: BuildConfig, api: Api | None = None) -> BuildResult:
    """Build an engine; the file appears under its name only when it is whole.

    Raises:
        InputError: file, shapes, TensorRT and GPU do not fit each other, or the parser refuses the file.
        QatError: TensorRT found no engine.
    """
    api = api or tensorrt_api.load()
    file = onnx_file.read(onnx)
    gpu = tensorrt_api.gpu()
    typing = choose_typing(file, api, config)
    check_target(api, gpu, config.targets)
    shapes = profile_shapes(file, config)
    log, engine = api.log(), Path(engine)
    builder = api.module.Builder(log.handle)
    network = builder.create_network(_network_flags(api, typing))
    parser = _parse(api, network, log, file)
    setup = builder.create_builder_config()
    _configure(api, setup, builder, config, file, typing, gpu)
    if shapes:
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        setup.add_optimization_profile(profile)
    cache = _cache_path(engine, config, api, gpu)
    began = time.perf_counter()
    with _timing_cache(api, setup, cache), build_progress(api, setup, engine.name, config.progress):
        plan = builder.build_serialized_network(network, setup)
    seconds = time.perf_counter() - began
    del parser  # it holds the weights until here
    if plan is None:
        raise QatError(f"{api.name} could not build {file.path}: {log.reason('it gives no reason')}")
    content = bytes(plan)
    with atomic_path(engine) as temporary:
        temporary.write_bytes(content)
    note = EngineNote(
        onnx=str(file.path),
        api=api.name,
        gpu=" ".join(config.targets) or (gpu.name if gpu else ""),
        typing=typing,
        precision=_precision(file, config, typing),
        profile={name: [list(shape) for shape in triple] for name, triple in shapes.items()},
        metadata=dict(file.metadata),
        seconds=round(seconds, 1),
        warnings=tuple(log.warnings),
    )
    note.save(engine)
    logger.info("%s: %.1f MB, built in %.0f s by %s for %s", engine, len(content) / 1e6, seconds, api.name, note.gpu)
    return BuildResult(engine, len(content), note)


def choose_typing(file: OnnxFile, api: Api, config: BuildConfig) -> Literal["weak", "strong"]:
    """How this TensorRT has to read this file.

    Raises:
        InputError: it cannot; the message says how to export the file instead.
    """
    if api.max_opset is not None and file.opset > api.max_opset:
        raise InputError(
            f"{file.path} has opset {file.opset}, and {api.name} reads up to {api.max_opset}; "
            "export it with --typing weak --opset 17"
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
                "export it with --typing strong (a float network with --half), or give --allow-fp32"
            )
        return "strong"
    return "weak"


def check_target(api: Api, gpu: Gpu | None, targets: Sequence[str]) -> None:
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
            else "TensorRT-RTX builds ahead of time without one: pip install tensorrt-rtx, then --target SM89"
        )
        raise InputError(f"torch sees no NVIDIA GPU, and an engine is built on the GPU that it is for; {how}")


def profile_shapes(file: OnnxFile, config: BuildConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Input → min, opt and max shape, for the axes that are free; empty when none is.

    Raises:
        InputError: a range was asked for where the file is fixed, or a size is no multiple of the stride.
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
                    f"{file.path} has a fixed {word} of {size}, and {'/'.join(map(str, asked))} was asked for; "
                    f"export it for that {word}, or with --dynamic"
                )
            axes.append((size, size, size))
            continue
        if asked is None and word != "batch":
            asked = _default_size(file, word)
        asked = asked or (1, 1, 1)
        if word in ("height", "width") and any(value % stride for value in asked):
            raise InputError(f"{word} {'/'.join(map(str, asked))}: all must be multiples of {stride}, the stride")
        axes.append(asked)
    if None not in shape:
        return {}
    least, best, most = zip(*axes, strict=True)
    return {name: (least, best, most)}


def _default_size(file: OnnxFile, word: str) -> Range:
    import json

    try:
        height, width = json.loads(file.metadata.get("imgsz", "[640, 640]"))
        side = int(height if word == "height" else width)
    except (ValueError, TypeError) as error:
        raise InputError(f"{file.path} does not say its image size; give --imgsz") from error
    return (side, side, side)


def _precision(file: OnnxFile, config: BuildConfig, typing: str) -> str:
    if file.quantized and (config.precision == "best" or typing == "strong"):
        return "int8"
    if typing == "strong":
        return "fp16" if file.half else "fp32"
    return "fp32" if config.precision == "fp32" else "fp16"


def _network_flags(api: Api, typing: str) -> int:
    flags = api.module.NetworkDefinitionCreationFlag
    value = 0
    if hasattr(flags, "EXPLICIT_BATCH"):  # the default, and deprecated, from TensorRT 10
        value |= 1 << int(flags.EXPLICIT_BATCH)
    if typing == "strong" and api.weakly_typed:
        value |= 1 << int(flags.STRONGLY_TYPED)
    return value


def _parse(api: Api, network: Any, log: Log, file: OnnxFile) -> Any:
    parser = api.module.OnnxParser(network, log.handle)
    if not parser.parse_from_file(str(file.path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        reason = tensorrt_api.readable(errors[0].desc()) if errors else log.reason("no reason given")
        known = bool(errors) and hasattr(errors[0], "node_operator")  # from TensorRT 10
        where = f" (node {errors[0].node_name() or 'without a name'}, {errors[0].node_operator()})" if known else ""
        raise InputError(f"{api.name} cannot parse {file.path}{where}: {reason}")
    return parser


def _configure(
    api: Api, setup: Any, builder: Any, config: BuildConfig, file: OnnxFile, typing: str, gpu: Gpu | None
) -> None:
    flags = api.module.BuilderFlag
    if typing == "weak":
        precision = _precision(file, config, typing)
        if precision != "fp32":
            setup.set_flag(flags.FP16)
        setup.clear_flag(flags.TF32)  # what is left in FP32 wants its precision
        if precision == "int8":
            setup.set_flag(flags.INT8)
    workspace = config.workspace
    if workspace is None and gpu is not None:
        workspace = int(gpu.free * 0.75 / config.shares)
    if workspace is not None:
        setup.set_memory_pool_limit(api.module.MemoryPoolType.WORKSPACE, workspace)
    setup.profiling_verbosity = api.module.ProfilingVerbosity.DETAILED
    off = config.tactic_sources_off or tuple(os.environ.get("TRT_TACTIC_SOURCES_OFF", "").replace(",", " ").split())
    if off:
        setup.set_tactic_sources(_tactic_sources(api, setup, off))
    if config.optimization_level is not None:
        setup.builder_optimization_level = config.optimization_level
    if config.timing_iterations is not None:
        setup.avg_timing_iterations = config.timing_iterations
    if config.targets:
        setup.num_compute_capabilities = len(config.targets)
        for index, target in enumerate(config.targets):
            setup.set_compute_capability(getattr(api.module.ComputeCapability, target), index)


def _tactic_sources(api: Api, setup: Any, off: Sequence[str]) -> int:
    sources = api.module.TacticSource
    value = int(setup.get_tactic_sources())
    for name in off:
        source = getattr(sources, name.upper(), None)
        if source is None:
            raise InputError(f"{api.name} has no tactic source {name}; it has {', '.join(sources.__members__)}")
        value &= ~(1 << int(source))
    return value


def _cache_path(engine: Path, config: BuildConfig, api: Api, gpu: Gpu | None) -> Path | None:
    if config.timing_cache == "" or gpu is None:  # kernels are measured on a GPU
        return None
    if config.timing_cache is not None:
        return Path(config.timing_cache)
    key = re.sub(r"[^\w.]+", "-", f"{gpu.name}-{api.name}")
    return engine.with_name(f"{key}.timing.cache")


@contextmanager
def _timing_cache(api: Api, setup: Any, path: Path | None) -> Iterator[None]:
    """Let the build use the measurements in a file, and add its own to it afterwards."""
    if path is None:
        yield
        return
    stored = path.read_bytes() if path.is_file() else b""
    cache = setup.create_timing_cache(stored)
    if cache is None or not setup.set_timing_cache(cache, False):
        logger.warning("%s is from another GPU or TensorRT; kernels are measured anew", path)
        cache = setup.create_timing_cache(b"")
        setup.set_timing_cache(cache, False)
    yield
    made = setup.get_timing_cache()
    if made is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build may have added to it
        now = path.read_bytes() if path.is_file() else b""
        if now and now != stored and (other := setup.create_timing_cache(now)) is not None:
            made.combine(other, False)
        with atomic_path(path) as temporary:
            temporary.write_bytes(bytes(made.serialize()))
