"""The containers' files agree with the repository, with each other and with their page."""

from __future__ import annotations

import re
import shlex
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


def test_the_page_lists_the_build_arguments_and_their_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `(containers/\S+)` \| (.+?) \|", PAGE, re.MULTILINE)
    told = {(name, file): "" if default == "(empty)" else default.strip("`") for name, file, default in rows}
    assert told == {(n, f): v for f, p in zip(NAMES, DOCKERFILES, strict=True) for n, v in arguments(p).items()}


def test_commands_of_the_page_name_files_and_arguments_that_are_there():
    commands = [shlex.split(line) for line in re.findall(r"^docker .+$", PAGE, re.MULTILINE)]
    builds = [words for words in commands if words[1] == "build"]
    assert len(builds) >= 4
    for words in builds:
        file = words[words.index("-f") + 1]
        given = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--build-arg"}
        assert file in NAMES
        assert given <= set(arguments(ROOT / file))
        assert words[-1] == "."
    services = [word for words in commands if words[1] == "compose" for word in words if word in compose()["services"]]
    assert {"triton", "work", "run"} == set(services)
    for words in commands:
        for word in words:
            if word.startswith("/opt/overlay/"):
                assert (ROOT / word.removeprefix("/opt/overlay/")).is_file(), word


def test_compose_builds_what_is_there_with_arguments_that_are_there():
    services = compose()["services"]
    built = {name: service["build"] for name, service in services.items() if "build" in service}
    assert {build["dockerfile"] for build in built.values()} == set(NAMES)
    for build in built.values():
        assert (ROOT / "containers" / build["context"]).resolve() == ROOT
        known = arguments(ROOT / build["dockerfile"])
        for name, value in build["args"].items():
            assert variables(value) == {name: known[name]}  # the Dockerfile's own default
