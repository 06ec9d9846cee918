#!/usr/bin/env bash
# Make a Python environment with everything that this project needs. Running it again is quick and changes nothing.
#
#   usage: ./install_dependencies.sh [options]
#
#   --venv DIR              the virtual environment to use or make (default: .venv in the current folder)
#   --system                install into the current Python environment instead; a torch that is new enough stays
#   --runtime               only what evaluating and benchmarking needs, for a Jetson
#   --dev                   also what scripts/test.sh needs
#   --tensorrt              also TensorRT, on a machine with an NVIDIA GPU
#   --openvino              also OpenVINO, which runs INT8 on a CPU (without an NVIDIA GPU and with --dev: always)
#   --trex, --no-trex       also graphviz, which draws engine graphs (default: no)
#   --defaults              ask nothing: it never does; accepted because users of yolov9-qat type it
#   -h, --help              print this
#
# PYTHON=/path/to/python3 chooses the interpreter (3.10 to 3.13). Package indexes and proxies are those that pip is set up
# for. Versions are in requirements/. Exit code: 0 when all but optional parts is there, 1 for a failure, 2 for a bad argument.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/scripts/lib.sh"

main() {
  local part onnx_only="quantizing, training, exporting, and evaluating ONNX files on ONNX Runtime"
  skipped=()
  parse_arguments "$@"
  find_python 13
  use_environment
  constraints=$(mktemp)
  trap 'rm -f "$constraints"' EXIT
  install_set "$set_name"
  if ! has_gpu; then
    skipped+=("TensorRT: no NVIDIA GPU was found on this machine. Without it works: $onnx_only.")
  elif [ "$tensorrt" = no ]; then
    skipped+=("TensorRT: not asked for; --tensorrt installs it. Without it works: $onnx_only.")
  else
    install_set tensorrt "$onnx_only"
  fi
  if [ "$openvino" = yes ] || { [ "$set_name" = quantize ] && ! has_gpu; }; then
    install_set openvino "everything but val_trt.py --runtime openvino, which runs INT8 on this CPU"
  fi
  [ "$trex" = no ] || install_graphviz
  say "ready: $(installed_versions)"
  for part in ${skipped[@]+"${skipped[@]}"}; do say "not installed: $part"; done
  [ "$system" = yes ] || say "to use it: source $venv/bin/activate"
}

parse_arguments() {
  venv='' system=no set_name=quantize tensorrt=no openvino=no trex=no
  local runtime=no dev=no
  while [ $# -gt 0 ]; do
    case $1 in
      --venv=?*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
      --venv) [ -n "${2:-}" ] || die 2 "--venv needs a folder"; venv=$2; shift ;;
      --system) system=yes ;;
      --runtime) runtime=yes set_name=runtime ;;
      --dev) dev=yes set_name=dev ;;
      --tensorrt) tensorrt=yes ;;
      --openvino) openvino=yes ;;
      --trex) trex=yes ;;
      --no-trex) trex=no ;;
      --defaults) ;;
      -h | --help) usage; exit 0 ;;
      *) die 2 "unknown argument $1 (-h lists what there is)" ;;
    esac
    shift
  done
  [ "$system" = no ] || [ -z "$venv" ] || die 2 "--system and --venv exclude each other"
  [ "$runtime$dev" != yesyes ] || die 2 "--runtime and --dev exclude each other: the tests need everything"
  venv=${venv:-.venv}
}

# Set `python`, the interpreter of the environment to install into.
use_environment() {
  local log
  if [ "$system" = yes ]; then
    python=$("$PYTHON" -c 'import sys; print(sys.executable)')
    say "installing into the environment of $python"
    return
  fi
  if "$venv/bin/python" -c '' 2>/dev/null; then
    PYTHON=$venv/bin/python
    find_python 13
    say "using the virtual environment $venv"
  elif [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    die 2 "$venv exists and is no virtual environment; choose another folder with --venv"
  else
    say "making the virtual environment $venv"
    log=$("$PYTHON" -m venv --clear "$venv" 2>&1) ||
      die 1 "$PYTHON cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv ($log)"
  fi
  python=$(cd "$venv" && pwd)/bin/python
}

environment() { "$python" "$OVERLAY_ROOT/scripts/environment.py" "$@"; }

# Such as: numpy 2.4.6, onnx 1.23.2
installed_versions() {
  "$python" -m pip list 2>/dev/null | sed -nE 's/^(torch|torchvision|onnx|onnxruntime|openvino|numpy|tensorrt) +/\1 /p' |
    paste -sd , - | sed 's/,/, /g'
}

install_set() { # SET [WHAT_WORKS_WITHOUT_IT]: with the latter the set is optional, and its failure is only told
  if environment check "$1" 2>/dev/null; then
    say "$1: installed already"
    return
  fi
  local size=''
  "$python" -c 'import importlib.util as find; raise SystemExit(not find.find_spec("torch"))' || size=" (about 6 GB, most of it torch)"
  say "installing $1$size"
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 ||
    die 1 "$python has no pip; on Debian and Ubuntu: apt-get install python3-pip"
  environment constraints "$1" >"$constraints" # the tested versions; a torch that is new enough stays
  if ! "$python" -m pip install -r "$OVERLAY_ROOT/requirements/$1.txt" -c "$constraints"; then
    [ $# = 2 ] || die 1 "the packages of requirements/$1.txt could not be installed; the reason is above"
    skipped+=("$1: the reason is above. Without it works: $2.")
  fi
}

install_graphviz() {
  if command -v dot >/dev/null; then
    say "graphviz: installed already"
  elif ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y graphviz; }; then
    skipped+=("graphviz: a system package: sudo apt-get install graphviz. Without it works: everything but drawing engines.")
  fi
}

main "$@"
