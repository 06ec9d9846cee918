#!/usr/bin/env python3
"""Check a Python environment for install_dependencies.sh; run by that environment's python, and needs only pip.

environment.py check SET        what is missing or outside the bounds; exit code 1 if there is anything
environment.py constraints SET  the constraints to install the set with
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # a new environment has no packaging of its own
from pip._vendor.packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[1] / "requirements"


def constraints(name: str) -> list[str]:
    """Return the tested versions, except for packages that are installed and within the set's bounds: these stay.

    NVIDIA's builds of torch for Jetson and for its containers come from elsewhere and must not be replaced.
    """
    replaced = unmet(name)
    versions = {package: version for package, version in installed().items() if package not in replaced}
    lines = []
    for requirement in requirements(FOLDER / "constraints.txt"):
        package = str(canonicalize_name(requirement.name))
        if package == "torchvision" and "torch" in versions:
            continue  # the installer finds the one that fits the installed torch
        lines.append(f"{package}=={versions[package]}" if package in versions else str(requirement))
    return lines


def unmet(name: str) -> dict[str, str]:
    """Return the direct requirements of a set that are missing or outside the bounds: package → problem."""
    problems: dict[str, str] = {}
    versions = installed()
    for requirement in requirements(FOLDER / f"{name}.txt"):
        package = str(canonicalize_name(requirement.name))
        version = versions.get(package)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            problems[package] = f"{requirement} is needed, and {version or 'none'} is installed"
    return problems


def requirements(path: Path) -> Iterator[Requirement]:
    """Yield the requirements in a file and in those that it includes."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r"):
            yield from requirements(path.parent / text.removeprefix("-r").strip())
        elif text:
            yield Requirement(text)


def installed() -> dict[str, str]:
    """Return package → version."""
    versions = {}
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if name:  # a folder that pip left has none
            versions[str(canonicalize_name(name))] = package.version
    return versions


if __name__ == "__main__":
    action, chosen = sys.argv[1:]
    if action == "check":
        sys.exit("\n".join(unmet(chosen).values()) or 0)
    print("\n".join(constraints(chosen)))
