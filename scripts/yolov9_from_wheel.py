#!/usr/bin/env python3
"""Make a YOLOv9 checkout of PyPI's wheel yolo9, which is upstream as a package; standard library only.

    python scripts/yolov9_from_wheel.py yolo9-1.0.18-py3-none-any.whl DIR

scripts/get_yolov9.sh calls this where GitHub cannot be reached. It compares the git tree of the checkout, so the text
is edited without parsing it. README.md, data/images/, figure/, scripts/ and tools/ are not in the wheel.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

OWN_FILES = ("__init__.py", "data/__ini__.py", "data/class_names.py")  # of the package; upstream has no such files
# Regular expressions and what takes their place. The package's prefix goes, and so does `weights_only=False`, which
# would let a checkpoint run code. Two imports that would close a circle go back into the functions that use them.
# `non_max_suppression` takes the first output of a network, as upstream does, not the first image of it.
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


def make_checkout(wheel: Path, folder: Path) -> None:
    """Write the checkout that the wheel holds into a folder, which is made if it is missing."""
    with zipfile.ZipFile(wheel) as archive:
        files = [checkout_file(path, archive.read(path)) for path in archive.namelist()]
    for name, data in files:
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def checkout_file(path: str, data: bytes) -> tuple[str, bytes]:
    """Return a file of the wheel as upstream has it: its name, '' if upstream has no such file, and its content."""
    if path.endswith("/METADATA"):
        requirements = re.findall(r"^Requires-Dist: (.*\n)", data.decode(), re.MULTILINE)
        return "requirements.txt", "".join(requirements).encode()
    if path.endswith("/licenses/LICENSE.md"):
        return "LICENSE.md", data
    name = path.removeprefix("yolo9/")
    if name == path or name in OWN_FILES:
        return "", b""
    if name.endswith(".py"):
        text = data.decode()
        for pattern, replacement in (*EVERY_FILE, *ONE_FILE.get(name, ())):
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        data = text.encode()
    return name, data


if __name__ == "__main__":
    make_checkout(Path(sys.argv[1]), Path(sys.argv[2]))
