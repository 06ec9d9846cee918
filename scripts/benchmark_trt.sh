#!/usr/bin/env bash
# Time engines over batch sizes 1, 4, 8 and 12, INT8 against FP16, in one run.
#
#   ./scripts/benchmark_trt.sh ONNX [IMGSZ] [--baseline FLOAT_ONNX] [other arguments of scripts/benchmark_trt.py]
#
#   ONNX        the quantized model, exported with --dynamic; engines are built beside it
#   IMGSZ       input size in pixels: 640, or height and width as 384x640 or 384 640 (default: that of the file)
#   --baseline  the FP32 model, exported the same way: its FP16 engines are what is compared with
#
# Figures are those of trtexec: CUDA graph, spin wait, no data transfers. PYTHON=/path/to/python3 chooses the interpreter.
# Exit code: 0 done, 1 failed, 2 the input cannot be used.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"
start_on_onnx benchmark_trt.py "--useCudaGraph --useSpinWait --noDataTransfers" "$@"
