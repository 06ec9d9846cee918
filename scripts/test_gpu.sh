#!/usr/bin/env bash
# Test engines on an NVIDIA GPU: quantize and export the demo model, build its engine, compare it.
#
#   ./scripts/test_gpu.sh [arguments for pytest]
#
# Needs torch with CUDA and TensorRT (install_dependencies.sh --dev --tensorrt), and a patched checkout.
#   PYTHON           interpreter that quantizes and exports (default: python3)
#   ENGINE_PYTHON    interpreter that has TensorRT, pytest and torch (default: PYTHON)
#   YOLOV9_CHECKOUT  patched checkout (default: build/yolov9, as scripts/test.sh makes it)
# Files lie in build/gpu and are used again. Exit code: pytest's.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
PYTHON=${PYTHON:-python3}
engine_python=${ENGINE_PYTHON:-$PYTHON}
build=$OVERLAY_BUILD/gpu
[ -d "$YOLOV9_CHECKOUT/.yolov9_overlay" ] || die 2 "$YOLOV9_CHECKOUT is no patched checkout; run ./patch_yolov9.sh on one"
mkdir -p "$build"
export DEMO_DATA=$OVERLAY_BUILD/digits/data.yaml DEMO_ONNX=$build/int8.onnx DEMO_REPORT=$build/demo/report.json

program() { (cd "$YOLOV9_CHECKOUT" && "$PYTHON" "$@"); }

say "the demo set"
"$PYTHON" "$OVERLAY_ROOT/data/demo/make_digits.py" "$OVERLAY_BUILD/digits"
if [ ! -f "$DEMO_ONNX" ]; then
  say "quantize and export the demo model"
  program qat.py quantize --weights data/demo/gelan-digits.pt --data "$DEMO_DATA" --imgsz 320 \
    --qat never --no-eval-origin --project "$build" --name demo --exist-ok
  quantized=("$build"/demo/weights/ptq_ap_*.pt)
  wanted='from utils.trt import tensorrt_api; print(tensorrt_api.load_tensorrt().typing)'
  typing=$(cd "$OVERLAY_ROOT" && "$engine_python" -c "$wanted" 2>/dev/null) || typing=strong
  program export_qat.py --weights "${quantized[0]}" --imgsz 320 --dynamic batch --simplify --device cpu \
    --typing "$typing" --output "$DEMO_ONNX"
fi
say "tests"
cd "$OVERLAY_ROOT"
exec "$engine_python" -m pytest -m gpu -rA tests/gpu tests/contracts "$@"
