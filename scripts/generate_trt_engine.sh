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
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
if [ $# -lt 1 ]; then
  echo "error: expected an ONNX file; generate_trt_engine.sh --help says more" >&2
  exit 2
fi
onnx=$1 size=()
shift
while [[ "${1:-}" =~ ^[^-] ]]; do size+=("$1") && shift; done
[ ${#size[@]} = 0 ] || size=(--imgsz "${size[@]}")
exec "${PYTHON:-python3}" "$here/build_engine.py" "$onnx" ${size[@]+"${size[@]}"} "$@"
