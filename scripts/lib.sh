# shellcheck shell=bash
# Shell functions that the scripts share. Source this file from bash, after `set -euo pipefail`. The functions say what
# they do, use again what is there already, and end the script with one line when they fail. OVERLAY_ROOT is this
# repository, or a patched checkout; OVERLAY_BUILD (default: build/), OVERLAY_VENV (.venv/) and YOLOV9_CHECKOUT (build/yolov9) can be set beforehand.

unset CDPATH # with which cd prints, and goes elsewhere
OVERLAY_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OVERLAY_BUILD=${OVERLAY_BUILD:-$OVERLAY_ROOT/build}
OVERLAY_VENV=${OVERLAY_VENV:-$OVERLAY_ROOT/.venv}
YOLOV9_CHECKOUT=${YOLOV9_CHECKOUT:-$OVERLAY_BUILD/yolov9}

# Ctrl-C ends the script. Our programs answer it themselves with exit code 130, and bash would go on with what comes next.
interrupted() { exit 130; }
trap interrupted INT

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; } # the comment at the top of the script
say() { printf '== %s\n' "$*"; }
die() { # EXIT_CODE MESSAGE
  printf 'error: %s\n' "${*:2}" >&2
  exit "$1"
}

# Set PYTHON, the interpreter to start from: itself, else python3. MAXIMUM: the last 3.x that will do.
find_python() { # [MAXIMUM]
  local version wanted="3.10 or newer"
  if [ $# = 1 ]; then wanted="3.10 to 3.$1"; fi
  PYTHON=${PYTHON:-python3}
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version="not there"
  if ! [[ $version =~ ^3\.([0-9]+)$ ]] || ((BASH_REMATCH[1] < 10 || BASH_REMATCH[1] > ${1:-99})); then
    die 2 "$PYTHON is $version; Python $wanted is needed (PYTHON=/path/to/python3 chooses one)"
  fi
}

# Is there an NVIDIA GPU that this machine's driver answers for (or a Jetson)?
has_gpu() {
  [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] || [ -e /etc/nv_tegra_release ]
}

run_part() { # NAME COMMAND...
  local name=$1 started=$SECONDS status=0
  shift
  say "$name"
  "$@" || status=$?
  [ "$status" != 0 ] || say "$name: done in $((SECONDS - started)) s"
  [ "$status" = 0 ] || say "$name: failed after $((SECONDS - started)) s (exit code $status)"
  return "$status"
}

# Start a program of this folder on ONNX [IMGSZ] [options], which is how users of yolov9-qat type it.
start_on_onnx() { # PROGRAM ITS_OPTIONS ARGUMENTS...
  local program=$1 options onnx=${3:-} size=()
  read -r -a options <<<"$2"
  case $onnx in
    -h | --help) usage; exit 0 ;;
    '') die 2 "expected an ONNX file; $(basename "$0") --help says more" ;;
  esac
  shift 3
  while [[ ${1:-} =~ ^[^-] ]]; do size+=("$1") && shift; done
  [ ${#size[@]} = 0 ] || size=(--imgsz "${size[@]}")
  exec "${PYTHON:-python3}" "$OVERLAY_ROOT/scripts/$program" "$onnx" ${size[@]+"${size[@]}"} ${options[@]+"${options[@]}"} "$@"
}

setup_environment() { # [arguments of install_dependencies.sh]
  "$OVERLAY_ROOT/install_dependencies.sh" --venv "$OVERLAY_VENV" "$@" || exit $?
  PYTHON=$OVERLAY_VENV/bin/python
  export PYTHON
}

setup_checkout() {
  "$OVERLAY_ROOT/scripts/get_yolov9.sh" "$YOLOV9_CHECKOUT" || exit $?
  "$OVERLAY_ROOT/patch_yolov9.sh" "$YOLOV9_CHECKOUT" --force || exit $?
  export YOLOV9_CHECKOUT
}

setup_demo_set() { # [SUFFIX OF THE FOLDER, arguments of make_digits.py]
  DEMO_DATA=$OVERLAY_BUILD/digits${1:-}/data.yaml
  "$PYTHON" "$OVERLAY_ROOT/data/demo/make_digits.py" "$OVERLAY_BUILD/digits${1:-}" "${@:2}" || exit $?
  export DEMO_DATA
}
