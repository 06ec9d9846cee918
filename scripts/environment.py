#!/usr/bin/env python3
"""What install_dependencies.sh asks of a Python environment; run by that environment's python, and needs only pip.

environment.py check SET        what is missing, too old or cannot be imported; exit code 1 if there is anything
environment.py constraints SET  the constraints to install the set with
environment.py summary          Python and the libraries that matter, in one line
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
STAMP = Path(sys.prefix, ".yolov9_overlay_installed")  # hashes of the sets that were imported, with all versions
RUNTIME = ("torch", "torchvision", "cv2", "onnx", "onnxruntime", "pycocotools.mask", "matplotlib", "thop")
QUANTIZE = (*RUNTIME, "onnxslim", "tensorboard", "sklearn", "skimage")
IMPORTS = {  # what proves that a set works
    "runtime": RUNTIME,
    "quantize": QUANTIZE,
    "dev": (*QUANTIZE, "pytest", "coverage", "mypy"),
    "tensorrt": ("tensorrt",),
    "pytorch-quantization": ("pytorch_quantization",),
}


def missing_parts(name: str) -> list[str]:
    """Say what of a set is missing, too old or broken. Imports take half a minute: what they proved is noted."""
    if problems := list(unmet(name).values()):
        return problems
    stamp = hashlib.sha256(repr((name, sys.version, sorted(installed_versions().items()))).encode()).hexdigest()
    with suppress(OSError):
        if stamp in STAMP.read_text(encoding="utf-8").split():
            return []
    for module in IMPORTS[name]:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
            problems.append(f"import {module}: {type(error).__name__}: {error}")
    if not problems:
        with suppress(OSError), STAMP.open("a", encoding="utf-8") as file:  # packages may be in the user's own folder
            file.write(stamp + "\n")
    return problems


def constraints(name: str) -> list[str]:
    """The tested versions, except for what is installed and meets the bounds: that is kept.

    NVIDIA's builds of torch for Jetson and for its containers come from elsewhere and must not be replaced.
    """
    replaced = unmet(name)
    kept = {package: version for package, version in installed_versions().items() if package not in replaced}
    tested = {wanted.name: str(wanted) for wanted in requirements(FOLDER / "constraints.txt")}
    if "torch" in kept:
        tested.pop("torchvision", None)  # which one fits that torch, the installer finds out
    return [f"{package}=={kept[package]}" if package in kept else line for package, line in tested.items()]


def unmet(name: str) -> dict[str, str]:
    """Package → what is wrong with it, for the direct requirements of a set that are missing or too old."""
    problems, versions = {}, installed_versions()
    for wanted in requirements(FOLDER / f"{name}.txt"):
        version = versions.get(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            problems[wanted.name] = f"{wanted} is needed, and {version or 'none'} is installed"
    return problems


def requirements(path: Path) -> Iterator[Any]:
    """The requirements in a file and in those that it includes."""
    from pip._vendor.packaging.requirements import Requirement  # a new environment has no packaging of its own

    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r"):
            yield from requirements(path.parent / text.removeprefix("-r").strip())
        elif text:
            yield Requirement(text)


def installed_versions() -> dict[str, str]:
    """Package → version, with the names as the files in requirements/ write them."""
    found = [(str(package.metadata["Name"]), package.version) for package in metadata.distributions()]
    return {**{re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}, **dict(found)}


def versions() -> list[str]:
    """Python and the libraries that matter, with their versions."""
    found = {"Python": sys.version.split()[0], **installed_versions()}
    names = ("Python", "torch", "torchvision", "onnx", "onnxruntime", "numpy", "tensorrt")
    return [", ".join(f"{name} {found[name]}" for name in names if name in found)]


if __name__ == "__main__":
    actions: dict[str, Callable[..., list[str]]]
    actions = {"check": missing_parts, "constraints": constraints, "summary": versions}
    action, *arguments = sys.argv[1:]
    lines = actions[action](*arguments)
    print("\n".join(lines))
    sys.exit(1 if action == "check" and lines else 0)
