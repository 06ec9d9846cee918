#!/usr/bin/env bash
# Set everything up and take an FP32 model to an evaluated INT8 ONNX file, with a report. Where there is an NVIDIA GPU,
# TensorRT is installed too, and FP16 and INT8 engines are built and evaluated beside it; elsewhere OpenVINO runs INT8 and
# FP32 on the CPU.
#
#   ./scripts/quickstart.sh                                     the demo: handwritten digits on photographs
#   ./scripts/quickstart.sh --segments                          the same with masks: instance segmentation
#   ./scripts/quickstart.sh --weights my.pt --data my.yaml
#
#   --weights FILE  FP32 checkpoint of upstream's train.py or train_dual.py, or of Ultralytics (default: the demo model)
#   --data FILE     dataset's YAML with train and val (default: the demo set, which is drawn in build/digits)
#   --segments      the demo model and the demo set with masks; the set is drawn in build/digits-segments
#   --imgsz PX      input size, 640 or 384x640 (default: 320 for the demo, else that of the training)
#   --batch-size N  images a batch (default: 10)
#   --epochs N      epochs of QAT (default: 5)
#   --iters N       iterations an epoch, at most (default: 30, with --segments 60; it takes minutes on two CPU cores)
#   --device D      cpu, or a CUDA device such as 0 (default: 0 if there is one)
#   --output DIR    where the results go (default: runs/quickstart)
#   --resume        continue the QAT in --output also where programs or libraries have changed since
#   -h, --help      print this
#
# What is installed, downloaded or drawn already is used again. The same command continues where an earlier one stopped,
# and says what it reuses; a step whose options or files have changed runs again, and replaces its result in --output.
# Exit code: 0 done, 1 failed, 2 a bad argument, 130 interrupted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

main() {
  check_arguments "$@"
  local started=$SECONDS
  if [ "$device" = cpu ]; then setup_environment; else setup_environment --tensorrt; fi
  setup_checkout
  [ -n "$data" ] || use_demo_set
  say "set up in $((SECONDS - started)) s; the run starts"
  cd "$OVERLAY_ROOT"
  export PYTHON
  exec "$PYTHON" "$YOLOV9_CHECKOUT/scripts/quickstart.py" --checkout "$YOLOV9_CHECKOUT" --demo "$OVERLAY_ROOT/data/demo" \
    --output "$OVERLAY_ROOT/runs/quickstart" "${arguments[@]}"
}

# What can be refused before the set-up, which takes minutes. Set `arguments`, in which paths are absolute.
check_arguments() {
  local weights=''
  data='' device='' segments=no arguments=()
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --resume | --segments)
        [ "$1" = --resume ] || segments=yes
        arguments+=("$1"); shift; continue
        ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
      --weights | --data) [ -f "${2:-}" ] || die 2 "$1 ${2:-} does not exist, or is no file" ;;
      --imgsz | --batch-size | --epochs | --iters | --device | --output) [ -n "${2:-}" ] || die 2 "$1 needs a value" ;;
      *) die 2 "unknown argument $1; scripts/quickstart.sh --help lists them" ;;
    esac
    case $1 in
      --weights) weights=$2 ;;
      --data) data=$2 ;;
      --device) device=$2 ;;
    esac
    case $1 in
      --weights | --data | --output) arguments+=("$1" "$(absolute "$2")") ;;
      *) arguments+=("$1" "$2") ;;
    esac
    shift 2
  done
  [ "$segments" = no ] || [ -z "$weights$data" ] || die 2 "--segments is the demo with masks; leave --weights and --data out"
  [ -z "$weights" ] || [ -n "$data" ] || die 2 "--weights needs --data, the dataset that the model was trained on"
}

absolute() { realpath -m -- "$1"; }

use_demo_set() {
  if [ "$segments" = yes ]; then setup_demo_set -segments --segments; else setup_demo_set; fi
  arguments+=(--data "$(absolute "$DEMO_DATA")")
}

main "$@"
