#!/usr/bin/env python3
"""Build a TensorRT engine from an ONNX file; minutes, on the GPU that the engine is for.

    python scripts/build_engine.py yolov9-c-int8.onnx --imgsz 640 --batch-size 1 8 16
    python scripts/build_engine.py yolov9-c-int8.onnx --tune 20          # the fastest of what 20 minutes can build
    python scripts/build_engine.py yolov9-c-int8-strong.onnx --target SM89    # TensorRT-RTX, on a machine without a GPU

Writes the engine (default: beside the ONNX file) and ENGINE.json, which says what it was built from and for what.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import logging
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_file, refuse_overwrite
from utils.core.options import IMAGE_SIZE_FLAGS, BatchSize, Field, ImageSize, image_size, option
from utils.jobs.open import need, need_tensorrt
from utils.trt.build_options import BuildOptions, profile_ranges
from utils.trt.engine_file import ENGINE_SUFFIXES

logger = logging.getLogger("utils.build_engine")


class EngineOptions(BuildOptions):
    """Build a TensorRT engine from an ONNX file."""

    OFTEN = ("batch_size", "imgsz", "output", "optimization_level", "tune", "device")
    onnx: Path = option(..., "as export_qat.py writes it", positional=True, metavar="ONNX")
    output: Path | None = option(None, "the engine (default: ONNX with .engine)", metavar="FILE")
    batch_size: list[BatchSize] | None = option(
        None, "one, or min opt max, for a file of dynamic batch (default: 1 8 16)", metavar="N"
    )
    imgsz: list[ImageSize | tuple[ImageSize, ImageSize]] | None = option(
        None, "one, or min opt max, or height and width (384 640 or 384x640), for a file of dynamic size (default: the "
        "file's own)", *IMAGE_SIZE_FLAGS, metavar="PX", type=image_size,
    )  # fmt: skip
    precision: Literal["best", "fp16", "fp32"] = option(
        "best", "of a float file, where TensorRT chooses (default: best: FP16; a quantized file is INT8)"
    )
    workspace: Annotated[int, Field(ge=1, le=1 << 22)] | None = option(
        None, "memory for kernels (default: 3/4 of what is free)", metavar="MB"
    )
    timing_cache: str | None = option(None, "default: beside the engine, by GPU and version", metavar="FILE")
    no_timing_cache: bool = option(False, "measure every kernel anew")
    target: list[str] = option([], "TensorRT-RTX: GPUs to build for, e.g. SM89", metavar="SM")
    allow_fp32: bool = option(False, "build an FP32 file where TensorRT cannot choose FP16 by itself")
    check: Annotated[int, Field(ge=0, le=64)] = option(
        4, "compare the engine with ONNX Runtime on N images, two at least (default: 4; 0: do not)", metavar="N"
    )
    generate_graph: bool = option(False, "also report on its layers, and draw them as SVG")


def main(options: EngineOptions) -> None:
    """Build, and look inside if that was asked for."""
    engine = options.output or options.onnx.with_suffix(".engine")
    check_file(options.onnx, "expected an ONNX file, as export_qat.py writes it")
    written = [engine, engine.with_name(f"{engine.name}.json")]
    written += [Path(options.timing_cache)] if options.timing_cache else []  # that of another name is nothing else
    if options.generate_graph and not options.target:
        written += [engine.with_suffix(suffix) for suffix in (".layers.json", ".svg")]
    refuse_overwrite(written, [options.onnx])
    if engine.suffix.lower() not in ENGINE_SUFFIXES:
        raise InputError(f"--output {engine} is not the name of an engine; expected {' or '.join(ENGINE_SUFFIXES)}")
    if options.timing_cache and options.no_timing_cache:
        raise InputError("--timing-cache names a file and --no-timing-cache wants none; give one of them")
    if options.tune and options.target:
        raise InputError("--tune times engines, and those of --target are for GPUs elsewhere; leave one of them out")
    if options.target:
        options.reject_unused(["check"], "with --target, whose engine need not run here")
        portable = ["version_compatible", "hardware_compatible", "strip_weights"]
        options.reject_unused(portable, "with --target, whose engine is for the GPUs that it names")
    need_tensorrt()
    need("torch", "onnx")
    from utils.trt import layers, tensorrt_api

    if options.generate_graph and not options.target:
        layers.graphviz()  # refuses before the long build
    from utils.trt.tune import build_or_tune

    device = tensorrt_api.use_device(options.device, for_engines=not options.target)
    timing_cache = "" if options.no_timing_cache else options.timing_cache
    config = options.build_config(**profile_ranges(options), timing_cache=timing_cache, targets=tuple(options.target))
    if engine.exists():
        logger.info("replaces %s", engine)
    build_or_tune(options.onnx, engine, config)
    logger.info("engine: %s", engine)
    if options.generate_graph and options.target:
        logger.info("layers are measured on the GPU: scripts/inspect_engine.py %s --generate-graph there", engine.name)
    elif options.generate_graph:
        layers.inspect_engine(engine, draw=True, device=options.device)
    if options.check and not options.target and find_spec("onnxruntime") is None:
        logger.info("not compared with ONNX Runtime, which is not installed; val_trt.py shows whether AP is as it was")
    elif options.check and not options.target:
        from utils.jobs.check_engine import check_engine

        logger.info("%s", check_engine(engine, options.onnx, device, options.check))


run = partial(run_program, "build_engine.py", (EngineOptions, main), about=__doc__)

if __name__ == "__main__":
    sys.exit(run())
