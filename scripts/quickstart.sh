#!/usr/bin/env bash
# Set everything up and take a float model to an evaluated INT8 ONNX file, with a report. Where there is an NVIDIA GPU,
# TensorRT is installed too, and FP16 and INT8 engines are built and evaluated beside it; elsewhere OpenVINO runs INT8 and
# FP32 on the CPU.
#
#   ./scripts/quickstart.sh                                     the demo: handwritten digits on photographs
#   ./scripts/quickstart.sh --segments                          the same with masks: instance segmentation
#   ./scripts/quickstart.sh --weights my.pt --data my.yaml
#
#   --weights FILE  float checkpoint of upstream's train.py or train_dual.py, or of Ultralytics (default: the demo model)
#   --data FILE     dataset's YAML with train and val (default: the demo set, which is drawn in build/digits)
#   --segments      the demo model and the demo set with masks; the set is drawn in build/digits-segments
#   --imgsz PX      input size, 640 or 384x640 (default: 320 for the demo, else that of the training)
#   --batch-size N  images a batch (default: 10)
#   --epochs N      epochs of QAT (default: 5)
#   --iters N       iterations an epoch, at most (default: 30, with --segments 60; it takes minutes on two CPU cores)
#   --device D      cpu, or a CUDA device such as 0 (default: 0 if there is one)
#   --output DIR    where the results go (default: runs/quickstart); an earlier run's results there are replaced
#   --resume        continue an interrupted run in --output instead
#   -h, --help      print this
#
# What is installed, downloaded or drawn already is used again. Exit code: 0 done, 1 failed, 2 a bad argument, 130 interrupted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

speed="INT8's speed shows in TensorRT and in OpenVINO" # where neither ran; else what a benchmark says
engines=no                                  # yes: they were built
typing=strong                               # as export_qat.py without TensorRT; else as TensorRT here wants it
MARK=.quickstart # lies in the folders that this program has made

main() {
  parse_arguments "$@"
  local started=$SECONDS status=0
  if [ "$device" = cpu ]; then setup_environment; else setup_environment --tensorrt; fi
  setup_checkout
  [ -n "$data" ] || use_demo_set
  say "set up in $((SECONDS - started)) s; the run starts"
  started=$SECONDS
  make_run_folder
  convert
  quantize
  export_network
  evaluate_network "$onnx" onnx
  build_engines || status=$?
  [ "$status" != 130 ] || exit 130
  if [ "$status" = 0 ] && [ "$engines" = no ]; then run_on_cpu || status=$?; fi
  [ "$status" != 130 ] || exit 130
  write_report
  if [ "$status" != 0 ]; then
    say "quickstart: a step failed, see above; the rest is in $run/report.html"
    return "$status"
  fi
  say "$speed"
  [ "$own" = no ] || show_five_commands
  say "quickstart: done in $((SECONDS - started)) s after setting up; open $run/report.html"
}

parse_arguments() {
  weights='' data='' imgsz='' batch_size=10 epochs=5 iters='' device='' run=$OVERLAY_ROOT/runs/quickstart resume=no segments=no evaluated=()
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --resume) resume=yes; shift; continue ;;
      --segments) segments=yes; shift; continue ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
      --weights | --data) [ -f "${2:-}" ] || die 2 "$1 ${2:-} does not exist, or is no file" ;;
      --imgsz | --batch-size | --epochs | --iters | --device | --output) [ -n "${2:-}" ] || die 2 "$1 needs a value" ;;
      *) die 2 "unknown argument $1; scripts/quickstart.sh --help lists them" ;;
    esac
    case $1 in
      --weights) weights=$(absolute "$2") ;;
      --data) data=$(absolute "$2") ;;
      --output) run=$(absolute "$2") ;;
      --imgsz) imgsz=$2 ;;
      --batch-size) batch_size=$2 ;;
      --epochs) epochs=$2 ;;
      --iters) iters=$2 ;;
      --device) device=$2 ;;
    esac
    shift 2
  done
  [ "$segments" = no ] || [ -z "$weights$data" ] || die 2 "--segments is the demo with masks; leave --weights and --data out"
  [ -z "$weights" ] || [ -n "$data" ] || die 2 "--weights needs --data, the dataset that the model was trained on"
  if [ -n "$weights" ]; then own=yes; else own=no imgsz=${imgsz:-320}; fi
  if [ "$segments" = yes ]; then weights=$OVERLAY_ROOT/data/demo/gelan-digits-seg.pt iters=${iters:-60}; fi
  iters=${iters:-30} weights=${weights:-$OVERLAY_ROOT/data/demo/gelan-digits.pt}
  size=(${imgsz:+--imgsz "$imgsz"})
  cd "$OVERLAY_ROOT"
}

# The commands that the programs name next are run elsewhere, in the checkout.
absolute() { realpath -m -- "$1"; }

use_demo_set() {
  if [ "$segments" = yes ]; then setup_demo_set -segments --segments; else setup_demo_set; fi
  data=$(absolute "$DEMO_DATA")
}

# Only a folder that this program has made is used again: --output could name any folder, also one of a training.
make_run_folder() {
  if [ "$resume" = yes ]; then
    [ -f "$run/weights/last.pt" ] || die 2 "there is no run to resume in $run"
  elif [ ! -f "$run/$MARK" ] && [ -n "$(find "$run" -type f ! -name .lock 2>/dev/null)" ]; then
    die 2 "$run holds files that are no quickstart's; choose another --output, or delete it"
  fi
  { mkdir -p "$run" && touch "$run/$MARK"; } 2>/dev/null || die 2 "cannot write to $run"
  trap say_how_to_go_on EXIT
}

# What QAT has trained is lost when the same command runs again.
say_how_to_go_on() {
  [ $? = 0 ] || [ ! -f "$run/weights/last.pt" ] ||
    say "the same command with --resume continues this run; without it this run is replaced"
}

program() { # WHAT_IS_DONE NAME ARGUMENTS...: one of the overlay's programs, in the patched checkout
  run_part "$1" "$PYTHON" "$YOLOV9_CHECKOUT/$2" "${@:3}" --device "$device"
}

# What train_dual.py writes has an auxiliary branch, which is for training only.
convert() {
  trained=$weights
  [ "$own" = yes ] || return 0
  local converted
  converted=$run/$(basename "$weights" .pt)-converted.pt
  [ "$resume" = yes ] || rm -f "$converted" # of another network, whose file had the same name
  [ "$resume" = yes ] || program "convert, if it has an auxiliary branch" reparameterization.py --weights "$weights" \
    --save "$converted" --if-needed
  [ ! -f "$converted" ] || weights=$converted
}

quantize() {
  local arguments=(--weights "$weights" --data "$data" ${size[@]+"${size[@]}"} --batch-size "$batch_size" --epochs "$epochs"
    --iters "$iters" --project "$(dirname "$run")" --name "$(basename "$run")" --exist-ok)
  [ "$resume" = no ] || arguments+=(--resume "$run")
  program "1/4 quantize: float, PTQ, QAT" qat.py quantize "${arguments[@]}"
  local found=("$run"/weights/qat_best*.pt)
  best=${found[0]}
}

# Two files: ONNX Runtime and TensorRT to 10.11 take the weakly typed one, TensorRT from 10.12 and RTX the strongly typed.
export_network() {
  onnx=${best%.pt}-int8.onnx export=(--data "$data" ${size[@]+"${size[@]}"} --include onnx --simplify --dynamic batch)
  local kind
  for kind in strong weak; do
    program "2/4 export to ONNX, ${kind}ly typed" export_qat.py --weights "$best" "${export[@]}" --typing $kind
  done
}

evaluate_network() { # FILE NAME [REFERENCE [OPTIONS]]: its row goes to $run/NAME/report.json
  program "3/4 evaluate $(basename "$1")${4:+ (${*:4})}" val_trt.py --engine-file "$1" --data "$data" \
    --reference "${3:-$weights}" --batch-size "$batch_size" --project "$run" --name "$2" --exist-ok "${@:4}" || return $?
  evaluated+=("$run/$2")
}

export_float() { # [OPTIONS]: the float model, to compare with; its file is `float`
  float=$run/weights/float.onnx
  program "3/4 export the float model, to compare with" export_qat.py --weights "$weights" "${export[@]}" \
    --output "$float" "$@"
}

# INT8 and FP16 engines and their rows; one line that says why, where there can be none.
build_engines() {
  local wanted status=0 float int8=$onnx problem=$run/no-engines.txt
  if [ "$device" = cpu ]; then
    say "no engines: --device is cpu"
    return
  fi
  wanted=$("$PYTHON" "$YOLOV9_CHECKOUT/scripts/check_engine_setup.py" "$data" --device "$device" 2>"$problem") || status=$?
  problem=$(tail -n 1 "$problem" && rm "$problem")
  [ "$status" != 130 ] || return 130
  if [ "$status" != 0 ]; then
    problem=${problem##*error: }
    say "no engines: ${problem%%;*}"
    return
  fi
  typing=${wanted##*$'\n'}
  if [ "$typing" = strong ]; then int8=${best%.pt}-int8-strong.onnx; fi
  export_float --typing "$typing" || return $?
  engines=yes
  evaluate_engine "$float" fp16 || return $?
  evaluate_engine "$int8" int8 || return $?
  program "3/4 INT8 against FP16, two builds of each" scripts/benchmark_trt.py \
    "$int8" --baseline "$float" --batch-size 1 "$batch_size" --builds 2 --optimization-level 2 --useCudaGraph \
    --project "$run" --name benchmark --exist-ok || return $?
  speed=$(grep "^INT8 against FP16" "$run/benchmark/benchmark.md")
}

evaluate_engine() { # ONNX NAME
  local engine=$run/weights/$2.engine
  # level 2 measures the kernels that promise most: engines as fast within some percent, in less than half the time
  program "3/4 build the $2 engine" scripts/build_engine.py "$1" --output "$engine" --optimization-level 2 \
    --batch-size 1 "$batch_size" "$batch_size" --check 0 || return $?
  evaluate_network "$engine" "$2"
}

# INT8 and FP32 in OpenVINO, with their times. The demo network is too small to become faster, so one of real size is
# timed beside it, with random weights.
run_on_cpu() {
  local float log=$run/cpu-speed.txt
  if ! "$PYTHON" -c "import openvino" 2>/dev/null; then
    say "no INT8 on this CPU: OpenVINO is not installed (./install_dependencies.sh --openvino)"
    return
  fi
  export_float --check 0 || return $?
  evaluate_network "$onnx" openvino "$float" --runtime openvino || return $?
  if [ "$own" = yes ]; then
    program "3/4 time INT8 against FP32 on this CPU" scripts/benchmark_trt.py "$onnx" --baseline "$float" \
      --runtime openvino --batch-size 1 --builds 2 --project "$run" --name benchmark --exist-ok || return $?
    speed=$(grep "^INT8 against FP32" "$run/benchmark/benchmark.md")
  else
    run_part "3/4 time a network of real size, with random weights" "$PYTHON" "$YOLOV9_CHECKOUT/scripts/cpu_speed.py" |
      tee "$log" || return $?
    speed=$(grep "INT8 against FP32" "$log")
  fi
}

write_report() {
  local note="PTQ and QAT simulate INT8 in PyTorch, and ONNX Runtime convolves in FP32 on a CPU:"
  run_part "4/4 report" "$PYTHON" "$YOLOV9_CHECKOUT/scripts/make_report.py" "$run" "${evaluated[@]}" --title "YOLOv9 quickstart" \
    --note "$note their ms/image say nothing about the speed of INT8." --note "$speed"
}

# Those of docs/your-model.md, for this model: QAT in full, with the defaults of qat.py.
show_five_commands() {
  local float=$trained name set int8 suffix=-int8-strong
  [ "$typing" = strong ] || suffix=-int8
  name=$(basename "$trained" .pt) set=$(realpath -- "$data")
  # files of such weights have the run's name, see qat.py
  if [[ ${name,,} =~ ^(best|last)([^a-z0-9]|$) ]]; then name=$(basename "$run"); fi
  [ "$weights" = "$trained" ] || float=${trained%.pt}-converted.pt
  float=$(realpath -m -- "$float")
  say "to go on with a whole QAT of this model:"
  show_command cd "$YOLOV9_CHECKOUT"
  show_command . "$OVERLAY_VENV/bin/activate"
  [ "$weights" = "$trained" ] || show_command python reparameterization.py --weights "$(realpath -- "$trained")" --save "$float"
  show_command python qat.py quantize --weights "$float" --data "$set" ${size[@]+"${size[@]}"} --name "$name"
  int8=runs/qat/$name/weights/$(basename "$best" .pt)$suffix
  show_command python export_qat.py --weights "runs/qat/$name/weights/$(basename "$best")" --include onnx --simplify \
    --dynamic batch --typing "$typing"
  show_command scripts/generate_trt_engine.sh "$int8.onnx"
  show_command python val_trt.py --engine-file "$int8.engine" --data "$set" --reference "$float"
}

show_command() { printf '%q ' "$@" && echo; } # as it is typed

main "$@"
