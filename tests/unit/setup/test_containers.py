"""The containers' files agree with the repository, with each other and with their page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documentation import ROOT

PAGE = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCKERFILES]
# what a context leaves out, with the patterns of .dockerignore that these names are written in
IGNORED = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and arguments of each instruction; continued lines are joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def arguments(path: Path) -> dict[str, str]:
    found = dict(value.split("=", 1) for name, value in instructions(path) if name == "ARG")
    return {name: value.strip('"') for name, value in found.items()}


def copied(path: Path) -> list[str]:
    return [word for name, value in instructions(path) if name == "COPY" for word in value.split()[:-1]]


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "containers/compose.yaml").read_text(encoding="utf-8"))


def variables(text: str) -> dict[str, str]:
    """The variables of compose in a text, with their defaults."""
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_in_the_context(path):
    words = copied(path)
    assert words
    for word in words:
        assert (ROOT / word).exists(), word
        assert not any(Path(word).match(pattern) for pattern in IGNORED), f".dockerignore leaves {word} out"
    ran = [word for name, value in instructions(path) if name == "RUN" for word in value.split() if word[:2] == "./"]
    assert ran
    for word in ran:
        assert (ROOT / word).exists(), word


def test_compose_builds_what_is_there_with_arguments_that_are_there():
    services = compose()["services"]
    built = {name: service["build"] for name, service in services.items() if "build" in service}
    assert {build["dockerfile"] for build in built.values()} == set(NAMES)
    for build in built.values():
        assert (ROOT / "containers" / build["context"]).resolve() == ROOT
        known = arguments(ROOT / build["dockerfile"])
        for name, value in build["args"].items():
            assert variables(value) == {name: known[name]}  # the Dockerfile's own default
