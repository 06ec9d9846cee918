#!/usr/bin/env python3
"""Make a YOLOv9 checkout of PyPI's wheel yolo9, which is upstream as a package; standard library only.

    python scripts/yolov9_from_wheel.py yolo9-1.0.18-py3-none-any.whl SHA256 DIR

scripts/get_yolov9.sh calls this where GitHub cannot be reached. The wheel is known by its SHA-256 and the checkout by
its git tree, which get_yolov9.sh compares, so the text is edited without parsing it.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from pathlib import Path

NAME, VERSION = "yolo9", "1.0.18"
OWN_FILES = ("__init__.py", "data/__ini__.py", "data/class_names.py")  # of the package; upstream has no such files
STAMP = """# Where this checkout comes from

PyPI's wheel {name} {version} ({name}-{version}-py3-none-any.whl), SHA-256
{sha256},
turned into a checkout by scripts/yolov9_from_wheel.py of the overlay. It holds upstream YOLOv9 at about commit 5b1ea9a,
with the package's own changes. These were made to it:

- absolute imports lose the prefix `{name}.`;
- two imports that would close a circle go back into the functions that use them: `models.yolo` in
  `models/experimental.py` and `export` in `models/common.py`;
- `torch.load` is called without `weights_only=False`, which would let a checkpoint run code;
- `non_max_suppression` takes the first output of a network, as upstream does, not the first image of it;
- `requirements.txt` holds the requirements that the wheel declares; the package's own files ({own}) are left out.

The wheel does not have `README.md`, `data/images/`, `figure/`, `scripts/` and `tools/`.
"""
# Regular expressions and what takes their place, in every file and in single ones. An import that is needed later than
# at the top of a module is removed there and put before the line that needs it.
EVERY_FILE = ((r"^( *)(from|import) yolo9\.", r"\1\2 "), (r", weights_only=False", ""))
ONE_FILE = {
    "models/experimental.py": (
        (r"^from models.yolo import Detect, Model\n", ""),
        (r"^( +)(.*Ensemble\(\))", r"\1from models.yolo import Detect, Model\n\1\2"),
    ),
    "models/common.py": (
        (r"^from export import export_formats\n", ""),
        (r"^( +)(.*export_formats\(\))", r"\1from export import export_formats\n\1\2"),
    ),
    "utils/general.py": ((r"\bprediction\[0\]\[0\]", "prediction[0]"),),
}


def rewritten(name: str, text: str) -> str:
    """A Python file of the package as a file of a checkout."""
    for pattern, replacement in (*EVERY_FILE, *ONE_FILE.get(name, ())):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def make_checkout(wheel: Path, sha256: str, folder: Path) -> None:
    """Write the checkout that the wheel holds into a folder, which is made if it is missing."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
        sys.exit(f"error: {wheel.name} does not have the SHA-256 {sha256}; it is damaged, or another file")
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    info = f"{NAME}-{VERSION}.dist-info"
    requirements = re.findall(r"^Requires-Dist: (.*\n)", content[f"{info}/METADATA"].decode(), re.MULTILINE)
    files = {
        "LICENSE.md": content[f"{info}/licenses/LICENSE.md"],
        "requirements.txt": "".join(requirements).encode(),
        "UPSTREAM.md": STAMP.format(name=NAME, version=VERSION, sha256=sha256, own=", ".join(OWN_FILES)).encode(),
    }
    for path, data in content.items():
        name = path.removeprefix(f"{NAME}/")
        if name != path and name not in OWN_FILES:
            files[name] = rewritten(name, data.decode()).encode() if name.endswith(".py") else data
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    try:
        make_checkout(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except OSError as error:
        sys.exit(f"error: {error}")
