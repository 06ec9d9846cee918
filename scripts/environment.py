#!/usr/bin/env python3
"""What install_dependencies.sh asks of a Python environment; run by that environment's python, and needs only pip.

environment.py check SET        what is missing or too old; exit code 1 if there is anything
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
    """The tested versions, except for what is installed and meets the bounds: that is kept.

    NVIDIA's builds of torch for Jetson and for its containers come from elsewhere and must not be replaced.
    """
    replaced = unmet(name)
    kept = {package: version for package, version in installed().items() if package not in replaced}
    tested = {str(canonicalize_name(wanted.name)): str(wanted) for wanted in requirements(FOLDER / "constraints.txt")}
    if "torch" in kept:
        tested.pop("torchvision", None)  # which one fits that torch, the installer finds out
    return [f"{package}=={kept[package]}" if package in kept else line for package, line in tested.items()]


def unmet(name: str) -> dict[str, str]:
    """Package → what is wrong with it, for the direct requirements of a set that are missing or too old."""
    problems: dict[str, str] = {}
    versions = installed()
    for wanted in requirements(FOLDER / f"{name}.txt"):
        version = versions.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            problems[canonicalize_name(wanted.name)] = f"{wanted} is needed, and {version or 'none'} is installed"
    return problems


def requirements(path: Path) -> Iterator[Requirement]:
    """The requirements in a file and in those that it includes."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r"):
            yield from requirements(path.parent / text.removeprefix("-r").strip())
        elif text:
            yield Requirement(text)


def installed() -> dict[str, str]:
    """Package → version."""
    found = ((package.metadata["Name"], package.version) for package in metadata.distributions())
    return {str(canonicalize_name(name)): version for name, version in found if name}  # a folder that pip left has none


if __name__ == "__main__":
    action, chosen = sys.argv[1:]
    if action == "check":
        sys.exit("\n".join(unmet(chosen).values()) or 0)
    print("\n".join(constraints(chosen)))
