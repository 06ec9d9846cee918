#!/usr/bin/env bash
# Make a Python environment with everything that this project needs. Running it again is quick and changes nothing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/lib.sh"

usage() {
  cat <<'TEXT'
usage: ./install_dependencies.sh [options]

Where:
  --venv DIR              the virtual environment to use or make (default: .venv in the current folder)
  --system                install into the current Python environment instead; a torch that is new enough stays
What:
  --runtime               only what evaluating and benchmarking needs, for a Jetson
  --dev                   also what scripts/test.sh needs
  --tensorrt              also TensorRT, on a machine with an NVIDIA GPU
  --trex, --no-trex       also graphviz, which draws engine graphs (default: no)
  --quantizer NAME        pytorch-quantization: also that library (default: torch, which is always there)
  --defaults              ask nothing: it never does; accepted because users of yolov9-qat type it
Other:
  --dry-run               print what would be done
  -h, --help              print this

PYTHON=/path/to/python3 chooses the interpreter (3.10 to 3.13). Package indexes and proxies are those that pip is set up for.
Versions are in requirements/. Exit code: 0 when all but optional parts is there, 1 for a failure, 2 for a bad argument.
TEXT
}

main() {
  parse_arguments "$@"
  find_python 13
  if [ "$dry_run" = yes ]; then
    print_plan
    return
  fi
  if [ "$system" = yes ]; then use_system; else use_venv; fi
  if is_up_to_date; then
    say "$set_name: installed already"
  else
    install_set
  fi
  install_optional_parts
  print_summary
}

parse_arguments() {
  venv=.venv system=no set_name=quantize tensorrt=no trex=no quantizer=torch dry_run=no not_installed=()
  local venv_given=no runtime=no dev=no
  while [ $# -gt 0 ]; do
    case $1 in
      --venv) [ -n "${2:-}" ] || die 2 "--venv needs a folder"; venv=$2 venv_given=yes; shift ;;
      --venv=?*) venv=${1#--venv=} venv_given=yes ;;
      --system) system=yes ;;
      --runtime) runtime=yes ;;
      --dev) dev=yes ;;
      --tensorrt) tensorrt=yes ;;
      --trex) trex=yes ;;
      --no-trex) trex=no ;;
      --quantizer) [ -n "${2:-}" ] || die 2 "--quantizer needs a name"; quantizer=$2; shift ;;
      --quantizer=*) quantizer=${1#--quantizer=} ;;
      --defaults) ;;
      --dry-run) dry_run=yes ;;
      -h | --help) usage; exit 0 ;;
      *) die 2 "unknown argument $1 (-h lists what there is)" ;;
    esac
    shift
  done
  case $quantizer in
    torch | pytorch-quantization) ;;
    modelopt) die 2 "--quantizer modelopt was removed in 2.0: use --quantizer torch, which gives the same results" ;;
    *) die 2 "--quantizer $quantizer is not known; choose torch or pytorch-quantization" ;;
  esac
  [ "$system$venv_given" != yesyes ] || die 2 "--system and --venv exclude each other"
  [ "$runtime$dev" != yesyes ] || die 2 "--runtime and --dev exclude each other: the tests need everything"
  [ "$runtime" = no ] || [ "$quantizer" = torch ] || die 2 "--runtime and --quantizer $quantizer exclude each other"
  if [ "$runtime" = yes ]; then set_name=runtime; fi
  if [ "$dev" = yes ]; then set_name=dev; fi
}

print_plan() {
  say "python: $("$PYTHON" -c 'import sys; print(sys.version.split()[0], sys.executable)')"
  if [ "$system" = yes ]; then say "into: its own environment"; else say "into: the virtual environment $venv"; fi
  say "install: requirements/$set_name.txt within requirements/constraints.txt"
  [ "$quantizer" = torch ] || say "install: $quantizer"
  if [ "$trex" = yes ]; then say "install: graphviz"; fi
  if [ "$tensorrt" = yes ] && has_gpu; then
    say "install: TensorRT"
  else
    say "skip: TensorRT ($(why_no_tensorrt))"
  fi
}

why_no_tensorrt() {
  if ! has_gpu; then
    echo "no NVIDIA GPU was found on this machine"
  else
    echo "not asked for; --tensorrt installs it"
  fi
}

use_system() {
  python=$("$PYTHON" -c 'import sys; print(sys.executable)')
  if [ -z "${PIP_BREAK_SYSTEM_PACKAGES:-}" ] && environment managed; then
    die 1 "$python belongs to the operating system, which forbids installing into it; leave --system out" \
      "(a virtual environment is made), or set PIP_BREAK_SYSTEM_PACKAGES=1"
  fi
  say "installing into the environment of $python"
}

use_venv() {
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    PYTHON=$venv/bin/python
    find_python 13
    say "using the virtual environment $venv"
  else
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null || echo file)" ]; then
      die 2 "$venv exists and is no virtual environment; choose another folder with --venv"
    fi
    say "making the virtual environment $venv"
    make_venv
  fi
  python=$(cd "$venv" && pwd)/bin/python
}

make_venv() {
  local log
  if log=$("$PYTHON" -m venv --clear "$venv" 2>&1); then return; fi
  if command -v uv >/dev/null && uv venv --quiet --clear --seed --python "$PYTHON" "$venv"; then return; fi
  printf '%s\n' "$log" >&2
  die 1 "$PYTHON cannot make a virtual environment (above); on Debian and Ubuntu: apt-get install python3-venv"
}

# Is the set there, complete and working? The stamp says that an installation of just these requirements ended well.
is_up_to_date() {
  local fingerprint
  fingerprint=$(environment fingerprint "$set_name") || return 1
  grep -qsx "$fingerprint" "$(stamp_file)" && environment check "$set_name" --quick >/dev/null
}

install_set() {
  local constraints log status=0
  choose_installer
  say "installing $set_name with $installer (a first time fetches about 5 GB, most of it torch)"
  constraints=$(mktemp)
  environment constraints "$set_name" >"$constraints" || status=$?
  [ "$status" != 0 ] || pip_install -r "$OVERLAY_ROOT/requirements/$set_name.txt" -c "$constraints" || status=$?
  rm -f "$constraints"
  [ "$status" = 0 ] || die 1 "the packages of requirements/$set_name.txt could not be installed; the reason is above$(environment hint)"
  say "checking that it can be imported (half a minute)"
  log=$(environment check "$set_name" 2>/dev/null) ||
    die 1 "what was installed does not work: $(printf '%s' "$log" | tr '\n' ';')"
  write_stamp
}

environment() { "$python" "$OVERLAY_ROOT/scripts/environment.py" "$@"; }

stamp_file() { "$python" -c 'import sys; print(sys.prefix + "/.yolov9_overlay_installed")'; }

write_stamp() {
  local part
  # An environment that cannot be written to (packages went to the user's folder) is checked anew each time.
  for part in runtime quantize dev; do
    environment fingerprint "$part"
    [ "$part" != "$set_name" ] || break
  done 2>/dev/null >"$(stamp_file)" || true
}

choose_installer() {
  installer=pip uv=()
  if uv --version >/dev/null 2>&1; then
    uv=(uv)
  elif "$python" -m uv --version >/dev/null 2>&1; then
    uv=("$python" -m uv)
  elif [ "$system" = no ] && "$python" -m pip install --quiet uv >/dev/null 2>&1; then
    uv=("$python" -m uv)
  fi
  if [ ${#uv[@]} -gt 0 ]; then
    installer=uv
    eval "$(environment uv-settings)"
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 || [ "$installer" = uv ] ||
    die 1 "$python has no pip; on Debian and Ubuntu: apt-get install python3-pip"
}

pip_install() { # ARGUMENTS...
  if [ "$installer" = uv ]; then
    if "${uv[@]}" pip install --python "$python" ${PIP_BREAK_SYSTEM_PACKAGES:+--break-system-packages} "$@"; then
      return
    fi
    warn "uv could not install that; trying pip"
  fi
  "$python" -m pip install "$@"
}

install_optional_parts() {
  if [ "$quantizer" != torch ]; then
    optional_packages "$quantizer" "everything, with the quantizers of this project (--quantizer torch)"
  fi
  if [ "$trex" = yes ]; then install_graphviz; fi
  if [ "$tensorrt" = no ] || ! has_gpu; then
    skipped TensorRT "$(why_no_tensorrt)" "quantizing, training, exporting, and evaluating ONNX files on ONNX Runtime"
  else
    optional_packages tensorrt "quantizing, training, exporting, and evaluating ONNX files on ONNX Runtime"
  fi
}

skipped() { # NAME REASON WHAT_WORKS_WITHOUT_IT
  not_installed+=("$1: $2. Without it works: $3.")
}

optional_packages() { # NAME WHAT_WORKS_WITHOUT_IT
  local constraints log status=0
  if environment check "$1" >/dev/null 2>&1; then
    say "$1: installed already"
    return
  fi
  say "installing $1"
  choose_installer
  if [ "$1" = tensorrt ]; then installer=pip; fi # its set-up program calls pip
  constraints=$(mktemp)
  environment constraints "$1" >"$constraints" # the tested versions, and a torch that is new enough stays
  log=$(pip_install -r "$OVERLAY_ROOT/requirements/$1.txt" -c "$constraints" 2>&1) || status=$?
  rm -f "$constraints"
  if [ "$status" != 0 ]; then
    printf '%s\n' "$log" >&2
    skipped "$1" "it could not be installed (above): $(printf '%s\n' "$log" | grep -i error | tail -n 1)" "$2"
  elif ! log=$(environment check "$1" 2>/dev/null); then
    skipped "$1" "it is installed but does not work: $log" "$2"
  fi
}

install_graphviz() {
  local works="everything but drawing engine graphs" log
  if command -v dot >/dev/null; then
    say "graphviz: installed already"
  elif ! command -v apt-get >/dev/null; then
    skipped graphviz "its program dot is a system package and there is no apt-get; use your package manager" "$works"
  elif [ "$(id -u)" != 0 ]; then
    skipped graphviz "its program dot is a system package; run: sudo apt-get install graphviz" "$works"
  else
    say "installing graphviz"
    if ! log=$({ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y graphviz; } 2>&1); then
      skipped graphviz "apt-get install graphviz failed: $(printf '%s\n' "$log" | tail -n 1)" "$works"
    fi
  fi
}

print_summary() {
  local line
  say "ready: $(environment summary)"
  for line in ${not_installed[@]+"${not_installed[@]}"}; do say "not installed: $line"; done
  if [ "$system" = no ]; then say "to use it: source $venv/bin/activate"; fi
}

main "$@"
