"""The job behind `scripts/build_engine.py`: an ONNX file built as a TensorRT engine, and compared with ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from utils.core.errors import InputError
from utils.core.files import check_file, refuse_overwrite
from utils.core.options import IMAGE_SIZE_FLAGS, BatchSize, Field, ImageSize, image_size, option
from utils.jobs.open import need, need_tensorrt
from utils.trt.build_options import BuildOptions, profile_ranges
from utils.trt.engine_file import ENGINE_SUFFIXES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EngineOptions(BuildOptions):
    """Build a TensorRT engine from an ONNX file."""

    OFTEN = ("batch_size", "imgsz", "output", "optimization_level", "tune", "device")
    onnx: Path = option(..., "as export_qat.py writes it", positional=True, metavar="ONNX")
    output: Path | None = option(None, "the engine (default: ONNX with .engine)", metavar="FILE")
    batch_size: list[BatchSize] | None = option(
        None, "one, or min opt max, for a file of dynamic batch (default: 1 8 16)", metavar="N"
    )
    imgsz: list[ImageSize | tuple[ImageSize, ImageSize]] | None = option(
        None,
        "size for a file of dynamic size: 640; or 320 640 960 (min opt max); or 384 640 or 384x640 (height and width) "
        "(default: the file's own)",
        *IMAGE_SIZE_FLAGS,
        metavar="PX",
        type=image_size,
    )
    precision: Literal["best", "fp16", "fp32"] = option(
        "best", "precision of the layers of a file without quantizers (default: best, which is FP16)"
    )
    workspace: Annotated[int, Field(ge=1, le=1 << 22)] | None = option(
        None, "memory for kernels in MiB (default: 3/4 of what is free)", metavar="MIB"
    )
    timing_cache: str | None = option(None, "default: beside the engine, by GPU and version", metavar="FILE")
    no_timing_cache: bool = option(False, "measure every kernel anew")
    target: list[str] = option([], "TensorRT-RTX: GPUs to build for, e.g. SM89", metavar="SM")
    allow_fp32: bool = option(False, "allow an FP32 engine if this TensorRT cannot build an FP32 file in FP16")
    check: Annotated[int, Field(ge=0, le=64)] = option(
        4,
        "compare the engine with ONNX Runtime on N generated images, at least 2 (default: 4; 0: no comparison)",
        metavar="N",
    )
    generate_graph: bool = option(False, "also report on the engine's layers, and draw them as SVG")

    @property
    def engine(self) -> Path:
        """The file to write."""
        return self.output or self.onnx.with_suffix(".engine")

    @property
    def should_inspect(self) -> bool:
        """Whether to report on the layers; not with --target, since they are timed on the GPU that runs the engine."""
        return self.generate_graph and not self.target


def run(options: EngineOptions) -> None:
    """Build, report on the layers if that was asked for, and compare with ONNX Runtime."""
    check_build_options(options)
    need_tensorrt()
    need("torch", "onnx")
    from utils.trt import layers, tensorrt_api
    from utils.trt.tune import build_or_tune

    if options.should_inspect:
        layers.graphviz()  # raises where it is not installed, before the long build
    device = tensorrt_api.use_device(options.device, for_engines=not options.target)
    timing_cache = "" if options.no_timing_cache else options.timing_cache
    config = options.build_config(**profile_ranges(options), timing_cache=timing_cache, targets=tuple(options.target))
    engine = options.engine
    if engine.exists():
        logger.info("%s exists and will be replaced", engine)
    build_or_tune(options.onnx, engine, config)
    logger.info("engine: %s", engine)
    if options.should_inspect:
        layers.inspect_engine(engine, draw=True, device=options.device)
    elif options.generate_graph:
        logger.info(
            "to report on the layers, run scripts/inspect_engine.py %s --generate-graph on its GPU", engine.name
        )
    if options.check and not options.target:
        compare(options, device)


def check_build_options(options: EngineOptions) -> None:
    """Raise `InputError` for options that exclude each other, or a file that is missing or would be overwritten."""
    check_file(options.onnx, "expected an ONNX file, as export_qat.py writes it")
    engine = options.engine
    refuse_overwrite(written_files(options), [options.onnx])
    if engine.suffix.lower() not in ENGINE_SUFFIXES:
        raise InputError(f"--output {engine} is not the name of an engine; expected {' or '.join(ENGINE_SUFFIXES)}")
    if options.timing_cache and options.no_timing_cache:
        raise InputError("--timing-cache names a file and --no-timing-cache asks for none; give one of them")
    if not options.target:
        return
    if options.tune:
        raise InputError("--tune times engines on this GPU, and --target builds for others; give one of them")
    options.reject_unused(["check"], "with --target, whose engine need not run here")
    portable = ["version_compatible", "hardware_compatible", "strip_weights"]
    options.reject_unused(portable, "with --target, whose engine is for the GPUs that it names")


def written_files(options: EngineOptions) -> Iterator[Path]:
    """Yield the files that a build writes, except the default timing cache, whose name cannot clash."""
    engine = options.engine
    yield engine
    yield engine.with_name(f"{engine.name}.json")
    if options.timing_cache:
        yield Path(options.timing_cache)
    if options.should_inspect:
        yield engine.with_suffix(".layers.json")
        yield engine.with_suffix(".svg")


def compare(options: EngineOptions, device: torch.device) -> None:
    """Compare the engine with ONNX Runtime; `QatError` if their outputs differ too much."""
    if find_spec("onnxruntime") is None:
        logger.info("not compared with ONNX Runtime, which is not installed; val_trt.py shows whether AP dropped")
        return
    from utils.jobs.check_engine import check_engine

    logger.info("%s", check_engine(options.engine, options.onnx, device, options.check))
