#!/usr/bin/env python3
"""Check what evaluating an engine needs before export and build, which take minutes: data, TensorRT, a GPU.

    python scripts/check_engine_setup.py data/coco.yaml --weights yolov9-c-converted.pt

Prints the ONNX file that is exported of --weights, and how this TensorRT wants it to be typed: weak or strong.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.core.options import DeviceOptions, option
from utils.jobs.open import need, need_tensorrt


class CheckOptions(DeviceOptions):
    """Check what evaluating an engine needs before export and build."""

    data: str = option(..., "dataset's YAML", positional=True, metavar="DATA")
    weights: str | None = option(None, "checkpoint that is to be exported", metavar="FILE")
    generate_graph: bool = option(False, "is graphviz there too?")


def check_setup(options: CheckOptions) -> None:
    """Check, and print the typing."""
    from utils.evaluation.data_yaml import load_data
    from utils.trt import tensorrt_api
    from utils.trt.layers import graphviz
    from utils.trt.preflight import check_target

    load_data(options.data).paths("val")
    need_tensorrt()
    if options.generate_graph:
        graphviz()
    need("torch")
    tensorrt_api.use_device(options.device, for_engines=False)
    api = tensorrt_api.load_tensorrt()
    check_target(api, tensorrt_api.gpu(), ())
    if options.weights:
        from models.quantize import checkpoint
        from utils.jobs.export import output_files
        from utils.onnx_graph.export_config import ExportConfig
        from utils.onnx_graph.output_formats import plain

        quantized = checkpoint.kind(options.weights) == "quantized"
        print(*output_files(options.weights, None, [plain()], ExportConfig(typing=api.typing), quantized))
    print(api.typing)


main = partial(run_program, "check_engine_setup.py", (CheckOptions, check_setup), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
