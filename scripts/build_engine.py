#!/usr/bin/env python3
"""Build a TensorRT engine from an ONNX file; minutes, on the GPU that the engine is for.

    python scripts/build_engine.py yolov9-c-int8.onnx --imgsz 640 --batch-size 1 8 16
    python scripts/build_engine.py yolov9-c-int8.onnx --tune 20          # the fastest of what 20 minutes can build
    python scripts/build_engine.py yolov9-c-int8.onnx --target SM89      # TensorRT-RTX, on a machine without a GPU

Writes the engine (default: beside the ONNX file) and ENGINE.json, which says what it was built from and for what.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import IMAGE_SIZE_FLAGS, add_build_options, add_device, run_program
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import InputError, QatError
from utils.core.input_files import check_file
from utils.core.output_paths import refuse_overwrite
from utils.jobs.dependencies import need, need_tensorrt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("utils.build_engine")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "build_engine.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("onnx", type=Path, metavar="ONNX", help="as export_qat.py writes it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the engine (default: ONNX with .engine)")
    parser.add_argument("--batch-size", type=bounded("batch_size"), nargs="+", metavar="N",
                        help="one, or min opt max, for a file of dynamic batch (default: 1 8 16)")  # fmt: skip
    parser.add_argument(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
                        help="one, or min opt max, for a file of dynamic size (default: the file's own)")  # fmt: skip
    parser.add_argument(
        "--precision", choices=("best", "fp16", "fp32"), default="best",
        help="of a float file, where TensorRT chooses (default: best: FP16; a quantized file is INT8)",
    )  # fmt: skip
    parser.add_argument(
        "--workspace", type=bounded("workspace"), metavar="MB", help="memory for kernels (default: 3/4 of what is free)"
    )
    caches = parser.add_mutually_exclusive_group()
    caches.add_argument("--timing-cache", metavar="FILE", help="default: beside the engine, by GPU and version")
    caches.add_argument("--no-timing-cache", action="store_true", help="measure every kernel anew")
    add_build_options(parser)
    parser.add_argument(
        "--target", nargs="+", default=[], metavar="SM", help="TensorRT-RTX: GPUs to build for, e.g. SM89"
    )
    parser.add_argument("--allow-fp32", action="store_true",
                        help="build an FP32 file where TensorRT cannot choose FP16 by itself")  # fmt: skip
    parser.add_argument(
        "--check", type=bounded("engine_check"), default=4, metavar="N",
        help="compare the engine with ONNX Runtime on N images, two at least (default: 4; 0: do not)",
    )  # fmt: skip
    parser.add_argument("--generate-graph", action="store_true", help="also report on its layers, and draw them as SVG")
    parser.add_argument("--trtexec", action="store_true", help="build with NVIDIA's trtexec instead")
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Build, and look inside if that was asked for."""
    engine = args.output or args.onnx.with_suffix(".engine")
    check_file(args.onnx, "expected an ONNX file, as export_qat.py writes it")
    refuse_overwrite(outputs(engine, args), [args.onnx])
    if args.tune and args.trtexec:
        raise InputError("--tune builds with TensorRT's Python module; leave --trtexec out")
    if args.tune and args.target:
        raise InputError("--tune times engines, and those of --target are for GPUs elsewhere; leave one of them out")
    if args.target:
        refuse_idle(args, ["check"], "with --target, whose engine need not run here")
    need_tensorrt(args.trtexec)
    if args.generate_graph and not args.target:
        from utils.trt.layer_report import graphviz

        graphviz()  # refuses before the long build
        need_tensorrt()
    need("torch", "onnx")
    from utils.trt import tensorrt_api
    from utils.trt.build_config import BuildConfig

    device = (tensorrt_api.use_device if args.target else tensorrt_api.engine_device)(args.device)
    for name in ("batch_size", "imgsz"):
        if getattr(args, name) is not None and len(getattr(args, name)) not in (1, 3):
            raise InputError(f"--{name.replace('_', '-')} takes one number, or three: min opt max")
    sizes = _three(args.imgsz)
    config = BuildConfig.given(
        args,
        batch=_three(args.batch_size),
        height=sizes,
        width=sizes,
        precision=args.precision,
        workspace=None if args.workspace is None else args.workspace << 20,
        timing_cache="" if args.no_timing_cache else args.timing_cache,
        targets=tuple(args.target),
        allow_fp32=args.allow_fp32,
    )
    if args.trtexec:
        from utils.trt import trtexec

        trtexec.build(args.onnx, engine, config, trtexec.find())
    else:
        from utils.trt.tune import build_or_tune

        build_or_tune(args.onnx, engine, config)
    logger.info("engine: %s", engine)
    if args.generate_graph and args.target:
        logger.info(
            "layers are measured on the GPU: run scripts/inspect_engine.py %s --generate-graph there", engine.name
        )
    elif args.generate_graph:
        from utils.jobs.inspect_engine import look_inside

        look_inside(engine, draw=True, device=args.device)
    if args.check and not args.target:
        compare_with_onnx(engine, args, device)
    return 0


def compare_with_onnx(engine: Path, args: argparse.Namespace, device: torch.device) -> None:
    """Say how far the engine's results are from ONNX Runtime's.

    Raises:
        QatError: they are those of something else.
    """
    from utils.trt import tensorrt_api
    from utils.trt.engine_file import EngineNote

    if importlib.util.find_spec("onnxruntime") is None:
        logger.info("not compared with ONNX Runtime, which is not installed; val_trt.py shows whether AP is as it was")
        return
    if args.trtexec:
        api = tensorrt_api.load() if tensorrt_api.installed() is not None else None
        if api is None or not EngineNote.load(engine).made_by(api, tensorrt_api.gpu(device.index)):
            logger.info("not compared with ONNX Runtime: this needs TensorRT's Python module, of trtexec's version")
            return
    from utils.jobs import check_engine

    found = check_engine.check(engine, args.onnx, device, args.check)
    logger.info("%s", found)
    if found.problem:
        raise QatError(
            f"{engine} does not compute what {args.onnx} computes: {found.problem}; see what AP val_trt.py finds "
            "before you use it, or build with another --optimization-level, or from a file exported with --keep-layers "
            "(--check 0 leaves this comparison out)"
        )


def outputs(engine: Path, args: argparse.Namespace) -> Iterator[Path]:
    """What is written; the timing cache that is named by GPU and version cannot be anything else."""
    yield engine
    yield engine.with_name(f"{engine.name}.json")
    if args.timing_cache:
        yield Path(args.timing_cache)
    if args.generate_graph and not args.target:
        yield from (engine.with_suffix(suffix) for suffix in (".layers.json", ".svg"))


def _three(values: Sequence[int] | None) -> tuple[int, int, int] | None:
    if values is None:
        return None
    smallest, opt, largest = list(values) * (3 // len(values))
    return smallest, opt, largest


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
