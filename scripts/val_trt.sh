#!/usr/bin/env bash
# Evaluate a checkpoint as an engine: export, build, evaluate.
#
#   ./scripts/val_trt.sh WEIGHTS DATA IMGSZ [--generate-graph]
#
#   WEIGHTS           quantized or FP32 checkpoint (.pt); an .onnx file is only built, an .engine only evaluated
#   DATA              dataset's YAML
#   IMGSZ             input size in pixels: 640, or height and width as 384x640 or 384 640
#   --generate-graph  also report on the engine's layers, and draw them as SVG with graphviz
#
# Run it in the patched checkout. ONNX file and engine lie beside WEIGHTS, such as WEIGHTS-int8.onnx; the result goes
# to runs/val_trt/. A second call uses these files again where options, files and software are the same, and says so;
# records and logs lie in WEIGHTS-int8.steps/.
# BATCH (default: '1 8 16') is the engine's range of batches; EXPORT_ARGS, BUILD_ARGS and VAL_ARGS are passed on.
# PYTHON=/path/to/python3 chooses the interpreter. Exit code: 0 done, 1 failed, 2 the input cannot be used.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 3 ] || die 2 "expected WEIGHTS, DATA and IMGSZ; val_trt.sh --help says more"
exec "${PYTHON:-python3}" "$OVERLAY_ROOT/scripts/evaluate_as_engine.py" "$@"
