#!/usr/bin/env python3
"""Show what an engine is made of: layers by precision and time, INT8 coverage, reformatting, the slowest layers.

    python scripts/inspect_engine.py yolov9-c-int8.engine --generate-graph
    python scripts/inspect_engine.py yolov9-c-int8.onnx --runtime openvino     # its layers on this CPU

Writes ENGINE.layers.json (a list with name, precision, ms, ... of each layer), and ENGINE.svg with --generate-graph.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial
from pathlib import Path

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_file
from utils.core.options import BatchSize, RuntimeOptions, option
from utils.jobs.open import need, need_tensorrt


class InspectOptions(RuntimeOptions):
    """Layers of an engine, or of an ONNX file in OpenVINO."""

    file: Path = option(..., "a TensorRT engine; with --runtime openvino an ONNX file", positional=True, metavar="FILE")
    batch_size: BatchSize | None = option(None, "images (default: what the engine is best for)", metavar="N")
    generate_graph: bool = option(False, "draw the layers as SVG, with graphviz")


def report_on_layers(options: InspectOptions) -> None:
    """Report."""
    check_file(options.file, "expected an engine")
    if options.openvino:
        if options.file.suffix.lower() != ".onnx":
            raise InputError(f"{options.file} is not an ONNX file; OpenVINO runs .onnx files only: leave --runtime out")
        options.reject_unused(["generate_graph"], "with OpenVINO, which names layers and not what connects them")
        need("torch", "openvino")
        from utils.jobs import openvino_layers

        openvino_layers.run(options.file, options.openvino, options.float_precision, options.batch_size or 1)
        return
    if options.file.suffix == ".onnx":
        todo = "--runtime openvino shows its layers on a CPU, and scripts/build_engine.py builds an engine of it"
        raise InputError(f"{options.file} is an ONNX file; expected an engine: {todo}")
    need("torch")
    need_tensorrt()
    from utils.trt import layers

    if options.generate_graph:
        layers.graphviz()  # refuses before an engine is loaded
    layers.inspect_engine(options.file, batch=options.batch_size, draw=options.generate_graph, device=options.device)


main = partial(run_program, "inspect_engine.py", (InspectOptions, report_on_layers), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
