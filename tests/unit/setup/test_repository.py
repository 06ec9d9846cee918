"""What others meet first: workflows, issue forms, citation, notices and versions agree with the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documentation import ROOT, problems

import models.quantize

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_one_version_everywhere():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (newest, *_), (released, *_) = (re.findall(rf"^## (\d[\d.]*){end}", changes, re.MULTILINE)
                                    for end in ("", r" - \d{4}-\d\d-\d\d$"))  # fmt: skip
    assert models.quantize.__version__ == VERSION
    assert newest + ".dev0" * (newest != released) == VERSION
    assert read(ROOT / "CITATION.cff")["version"] == released


@pytest.mark.parametrize("name", ["SECURITY.md", ".github/pull_request_template.md"])
def test_other_pages_say_what_is_so(name):
    assert problems((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent) == []
