#!/usr/bin/env bash
# Build a TensorRT engine from an ONNX file, beside it.
#
#   ./scripts/generate_trt_engine.sh ONNX [IMGSZ] [--generate-graph] [--tune MINUTES] [others of scripts/build_engine.py]
#
#   ONNX              as export_qat.py writes it
#   IMGSZ             input size in pixels: 640, or height and width as 384x640 or 384 640 (default: that of the file)
#   --generate-graph  also report on the engine's layers, and draw them as SVG with graphviz
#   --tune MINUTES    build with several options, time the engines in turns, and keep the fastest
#
# PYTHON=/path/to/python3 chooses the interpreter. Exit code: 0 done, 1 failed, 2 the input cannot be used.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"
start_on_onnx build_engine.py "" "$@"
