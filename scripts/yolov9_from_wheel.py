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
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            name, data = path.removeprefix("yolo9/"), archive.read(path)
            if path.endswith("/METADATA"):
                requirements = re.findall(r"^Requires-Dist: (.*\n)", data.decode(), re.MULTILINE)
                files["requirements.txt"] = "".join(requirements).encode()
            elif path.endswith("/licenses/LICENSE.md"):
                files["LICENSE.md"] = data
            elif name != path and name not in OWN_FILES:
                for pattern, replacement in (*EVERY_FILE, *ONE_FILE.get(name, ())) if name.endswith(".py") else ():
                    data = re.sub(pattern, replacement, data.decode(), flags=re.MULTILINE).encode()
                files[name] = data
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    make_checkout(Path(sys.argv[1]), Path(sys.argv[2]))
