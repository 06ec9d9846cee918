#!/usr/bin/env bash
# Set up what the tests need and run them: lint, unit and contract tests, goldens and integration tests in a checkout,
# golden numbers once more with other instructions, coverage. Those that need a GPU say why they are skipped;
# scripts/test_gpu.sh runs them.
#
#   ./scripts/test.sh                          everything
#   ./scripts/test.sh --unit                   only that part; also --lint, --golden, --integration, and several of them
#   ./scripts/test.sh --unit -- -k recipe -x   what follows -- goes to pytest; coverage is not judged then
#
# The environment is .venv/, the rest lies in build/; what is there already is used again. Exit code: 0 if all passed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

main() {
  parse_arguments "$@"
  local started=$SECONDS
  setup_environment --dev
  if wanted golden || wanted integration; then
    setup_checkout
    setup_demo_set
  fi
  say "set up in $((SECONDS - started)) s"
  cd "$OVERLAY_ROOT"
  mkdir -p "$OVERLAY_BUILD/tests"
  export COVERAGE_FILE=$OVERLAY_BUILD/tests/coverage # each process adds its own suffix
  rm -f "$COVERAGE_FILE" "$COVERAGE_FILE".*
  # Tests start hundreds of processes. What they import is compiled once, beside the results and not among the sources.
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$OVERLAY_BUILD/tests/bytecode
  # Memory of large networks is used again, not given back to the system after each copy (glibc, see mallopt).
  export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000
  results=() failed=0
  if wanted lint; then lint; fi
  if wanted unit; then judge "unit tests" pytest_in "$OVERLAY_ROOT" --cov tests/unit tests/contracts tests/gpu; fi
  local folders=() names='' name
  for name in golden integration; do # in one process, which imports and starts a fork server once
    if wanted "$name"; then folders+=("$OVERLAY_ROOT/tests/$name") names+="${names:+ and }$name"; fi
  done
  if [ -n "$names" ]; then judge "$names tests" pytest_in "$YOLOV9_CHECKOUT" "${folders[@]}"; fi
  if [ ${#parts[@]} = 4 ] && [ ${#pytest_arguments[@]} = 0 ]; then
    judge "golden numbers with the oldest instructions" golden_numbers_again
    judge coverage coverage_report
  fi
  say "results, after $((SECONDS - started)) s"
  printf '   %s\n' "${results[@]}"
  exit "$failed"
}

parse_arguments() {
  parts=() pytest_arguments=()
  while [ $# -gt 0 ]; do
    case $1 in
      --lint | --unit | --golden | --integration) parts+=("${1#--}") ;;
      --) shift; pytest_arguments=("$@"); break ;;
      -h | --help) usage; exit 0 ;;
      *) die 2 "unknown argument $1; arguments for pytest come after --" ;;
    esac
    shift
  done
  if [ ${#parts[@]} = 0 ]; then parts=(lint unit golden integration); fi
}

wanted() { case " ${parts[*]} " in *" $1 "*) ;; *) return 1 ;; esac; }

# Run a part; all parts run, so that one look shows everything that is wrong.
judge() { # NAME COMMAND...
  if run_part "$@"; then results+=("$1: passed"); else results+=("$1: FAILED") failed=1; fi
}

lint() {
  local tool
  for tool in "ruff check ." "ruff format --check ." mypy; do judge "$tool" "$PYTHON" -m $tool; done
  "$PYTHON" tests/house.py --against "${HOUSE_BASE:-origin/main}" # for the reader of a pull request; tests hold the limits
}

# A file's tests stay in one process, which makes their networks once; tests/conftest.py says which files come first.
# Coverage is that of unit and contract tests alone: what others add would take a minute to measure.
pytest_in() ( # FOLDER [--cov] ARGUMENTS...
  local command=(-m pytest)
  cd "$1" || exit
  if [ "$2" = --cov ]; then command=(-m coverage run --rcfile="$OVERLAY_ROOT/pyproject.toml" -m pytest) && shift; fi
  "$PYTHON" "${command[@]}" -c "$OVERLAY_ROOT/pyproject.toml" --rootdir="$OVERLAY_ROOT" --numprocesses=auto --maxprocesses=4 \
    --dist=loadfile --no-loadscope-reorder --durations=10 "${@:2}" ${pytest_arguments[@]+"${pytest_arguments[@]}"}
)

# Golden numbers hold on every processor, so they are computed once more as another one does it. SSE41 and `default` are
# the lowest that oneDNN and ATen take on x86-64: this run differs from the first on every processor, also on one that
# has AVX2 and no more. Left out are the golden files whose numbers are exact, or which have none.
golden_numbers_again() {
  local files=("$OVERLAY_ROOT"/tests/golden/test_{demo,files_of_1_0,upstream_ap}.py)
  ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default pytest_in "$YOLOV9_CHECKOUT" "${files[@]}"
}

coverage_report() {
  "$PYTHON" -m coverage combine --quiet && "$PYTHON" -m coverage report
}

main "$@"
