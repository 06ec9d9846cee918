"""Docstrings and comments of the library name files that exist, here or in upstream's checkout."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted([*ROOT.glob("models/**/*.py"), *ROOT.glob("utils/**/*.py")])
UPSTREAM = {"detect.py", "train.py", "train_dual.py", "val.py", "export.py", "model.py", "models/common.py",
            "models/experimental.py", "models/yolo.py", "utils/general.py", "utils/__init__.py"}  # fmt: skip
NAME = re.compile(r"(?<![\w./*-])[\w/]+\.(?:py|sh)\b")


def words_of(source: str) -> str:
    """Comments, and texts that stand on lines of their own: docstrings."""
    found, fresh = [], True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and fresh):
            found.append(token.string)
        fresh = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
    return "\n".join(found)


def missing(source: str, folder: Path) -> list[str]:
    """The files that are named and lie neither beside the module nor, by their path or name, in the project."""
    names = NAME.findall(words_of(source))
    return [
        name
        for name in names
        if name not in UPSTREAM
        and not any((place / name).exists() for place in (folder, ROOT, ROOT / "scripts"))
        and not ("/" not in name and any(path.name == name for path in LIBRARY))
    ]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(path):
    assert missing(path.read_text(encoding="utf-8"), path.parent) == []
