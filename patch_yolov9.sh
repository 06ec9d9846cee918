#!/usr/bin/env bash
# Copy this overlay into a YOLOv9 checkout, or take it out again: ./patch_yolov9.sh DIR [--dry-run] [--revert] [--force]
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$(realpath -- "${BASH_SOURCE[0]}")")/scripts/lib.sh"
find_python
exec "$PYTHON" -B "$OVERLAY_ROOT/scripts/patch_overlay.py" "$@"
