"""Hooks of .pre-commit-config.yaml: they check what scripts/test.sh checks, with the tools of the environment."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ".venv/bin/python -m "


def test_the_hooks_are_the_lint_of_the_test_script_and_the_links_of_documents():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"], "versions are those of requirements/"
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert [entry for entry in entries if not entry.startswith(PYTHON)] == []
    script = (ROOT / "scripts/test.sh").read_text()
    tools = re.search(r"for tool in (.+); do judge .* -m \$tool", script)[1]
    linted = [quoted or word for quoted, word in re.findall(r'"([^"]+)"|(\S+)', tools)]
    commands = [entry.removeprefix(PYTHON) for entry in entries]
    assert commands[: len(linted)] == linted
    others = [word for command in commands[len(linted) :] for word in command.split() if "/" in word]
    assert others == ["tests/unit/test_docs.py"]
    assert all((ROOT / word).is_file() for word in others)
    dev = (ROOT / "requirements/dev.txt").read_text()
    assert all(re.search(rf"^{command.split()[0]}\b", dev, re.MULTILINE) for command in commands)
