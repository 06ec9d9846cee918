"""The library's texts, docstrings and comments name files that exist, here or in upstream's checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("utils/**/*.py")])
UPSTREAM = {"detect.py", "train.py", "train_dual.py", "val.py", "export.py", "model.py", "yolo.py", "models/common.py",
            "models/experimental.py", "models/yolo.py", "utils/general.py", "utils/__init__.py"}  # fmt: skip
NAME = re.compile(r"(?<![\w./*-])\w[\w/]*\.(?:py|sh)\b")


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(path):
    """They lie beside the module or, by their path or name, in the project."""
    names = set(NAME.findall(path.read_text(encoding="utf-8"))) - UPSTREAM - {module.name for module in LIBRARY}
    folders = (path.parent, ROOT, ROOT / "scripts")
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []
