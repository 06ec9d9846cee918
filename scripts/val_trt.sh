#!/usr/bin/env bash
# Evaluate a checkpoint as an engine: export, build, evaluate.
#
#   ./scripts/val_trt.sh WEIGHTS DATA IMGSZ [--generate-graph]
#
#   WEIGHTS           quantized or float checkpoint (.pt); an .onnx file is only built, an .engine only evaluated
#   DATA              dataset's YAML
#   IMGSZ             input size in pixels: 640, or height and width as 384x640 or 384 640
#   --generate-graph  also report on the engine's layers, and draw them as SVG with graphviz
#
# Run it in the patched checkout. ONNX file and engine lie beside WEIGHTS, such as WEIGHTS-int8.onnx; the result goes
# to runs/val_trt/.
# BATCH (default: '1 8 16') is the engine's range of batches; EXPORT_ARGS, BUILD_ARGS and VAL_ARGS are passed on.
# PYTHON=/path/to/python3 chooses the interpreter. Exit code: 0 done, 1 failed, 2 the input cannot be used.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"
python=${PYTHON:-python3}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -ge 3 ] || die 2 "expected WEIGHTS, DATA and IMGSZ; val_trt.sh --help says more"
weights=$1 data=$2 graph=()
IFS=x read -r -a imgsz <<<"$3"
shift 3
for option in "$@"; do
  case $option in
    --generate-graph) graph=(--generate-graph) ;;
    [0-9]*) imgsz+=("$option") ;;
    *) die 2 "unknown argument $option; val_trt.sh --help lists them" ;;
  esac
done
case $weights in *.pt | *.onnx | *.engine | *.plan) ;; *) die 2 "$weights is neither .pt, .onnx nor .engine" ;; esac
# What would only be noticed after the export and the build, which take minutes
checked=("$data")
case $weights in *.pt) checked+=(--weights "$weights") ;; esac
setup=$("$python" "$OVERLAY_ROOT/scripts/check_engine_setup.py" "${checked[@]}" ${graph[@]+"${graph[@]}"})

onnx=$weights typing=${setup##*$'\n'} # the last line; the one before it names the ONNX file
case $weights in *.pt) setup=${setup%$'\n'*} onnx=${setup##*$'\n'} ;; esac
engine=${onnx%.*}.engine
case $weights in *.plan) engine=$weights ;; esac
batch=()
if [ -n "${BATCH:-}" ]; then read -r -a batch <<<"--batch-size $BATCH"; fi
read -r -a export_args <<<"${EXPORT_ARGS:-}"
read -r -a build_args <<<"${BUILD_ARGS:-}"
read -r -a val_args <<<"${VAL_ARGS:-}"
case $weights in
  *.pt)
    say "export to ONNX"
    "$python" "$OVERLAY_ROOT/export_qat.py" --weights "$weights" --imgsz "${imgsz[@]}" --include onnx --simplify --dynamic batch \
      --typing "$typing" --output "$onnx" ${export_args[@]+"${export_args[@]}"}
    ;;
esac
case $weights in
  *.pt | *.onnx)
    say "build the engine"
    "$python" "$OVERLAY_ROOT/scripts/build_engine.py" "$onnx" --imgsz "${imgsz[@]}" --output "$engine" --check 0 ${batch[@]+"${batch[@]}"} \
      ${graph[@]+"${graph[@]}"} ${build_args[@]+"${build_args[@]}"}
    ;;
  *)
    [ ${#graph[@]} = 0 ] || "$python" "$OVERLAY_ROOT/scripts/inspect_engine.py" "$engine" --generate-graph
    ;;
esac
say "evaluate it"
"$python" "$OVERLAY_ROOT/val_trt.py" --engine-file "$engine" --data "$data" --imgsz "${imgsz[@]}" ${val_args[@]+"${val_args[@]}"}
