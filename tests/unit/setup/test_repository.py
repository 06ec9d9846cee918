"""What others meet first: workflows, issue forms, citation, notices and versions agree with the repository."""

from __future__ import annotations

import re
import subprocess
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


def test_scripts_run_where_git_was_told_to_write_windows_line_ends(tmp_path):
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=b", "-c", "commit.gpgSign=false"]
    made, cloned = tmp_path / "made", tmp_path / "cloned"
    names = (".gitattributes", "patch_yolov9.sh", "requirements/runtime.txt", "data/demo/gelan-digits.pt")
    for name in names:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes((ROOT / name).read_bytes())
    for words in (["init", "--quiet"], ["add", "--force", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, "-C", made, *words], check=True)
    subprocess.run([*git, "clone", "--quiet", made, cloned], check=True)
    assert [name for name in names if (cloned / name).read_bytes() != (ROOT / name).read_bytes()] == []


def test_one_version_everywhere():
    first = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    cited = read(ROOT / "CITATION.cff")["version"]
    assert [models.quantize.__version__, cited, first[1]] == [VERSION] * 3


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_given_by_name(path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), f"{action} does not say its version"
    content = read(path)
    assert content["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in content["jobs"].values())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_ask_for_the_environment_in_words_that_hold(path):
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(names) == len(set(names))
    (asked,) = [field for field in fields if field["id"] == "environment"]
    assert "`python scripts/make_report.py --environment" in asked["attributes"]["description"]
    assert asked["validations"] == {"required": True}
    text = "\n\n".join(str(text) for field in form["body"] for text in field["attributes"].values())
    assert problems(text.replace("RUN...", "RUN").replace("SIZE", "640")) == []


@pytest.mark.parametrize("name", ["SECURITY.md", ".github/pull_request_template.md"])
def test_other_pages_say_what_is_so(name):
    assert problems((ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent) == []
