#!/usr/bin/env python3
"""What install_dependencies.sh asks of a Python environment; standard library only, run by that environment's python.

Actions:
    environment.py check SET [--quick]   name every requirement of the set that is not met; exit code 1 if there is one
    environment.py constraints SET       the constraints to install the set with
    environment.py hint                  why installing may have failed, to be put behind a sentence; or nothing
    environment.py fingerprint SET       a hash of what the set asks for and of the Python version
    environment.py managed               exit code 0 if the operating system forbids installing into it (PEP 668)
    environment.py uv-settings           shell lines that give uv the package indexes that pip is configured with
    environment.py summary               Python and the libraries that matter, in one line
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import hashlib
import importlib
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from utils.core import console

ACTIONS = ("check", "constraints", "hint", "fingerprint", "managed", "uv-settings", "summary")
FOLDER = Path(__file__).resolve().parents[1] / "requirements"
# What proves that a set works.
IMPORTS = {
    "runtime": ("torch", "torchvision", "cv2", "onnx", "onnxruntime", "pycocotools.mask", "matplotlib", "thop"),
    "quantize": ("onnxslim", "tensorboard", "sklearn", "skimage"),
    "dev": ("pytest", "coverage", "mypy"),
    "tensorrt": ("tensorrt",),
    "rtx": ("tensorrt_rtx_bindings",),
    "pytorch-quantization": ("pytorch_quantization",),
}
QUICK_IMPORTS = ("torch", "cv2", "onnxruntime")
# pip's settings and what uv calls them (each may be a list, as pip writes it: separated by spaces or lines)
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
}


def files_of(name: str) -> list[Path]:
    """The requirement files of a set: its own and those that it includes with -r, those first."""
    path = FOLDER / f"{name}.txt"
    included = re.findall(r"^-r\s+(\S+)\.txt", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [file for other in included for file in files_of(other)] + [path]


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a requirement or constraint file that name a package."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text and not text.startswith("-"):
            yield text


def _requirement(text: str) -> Any:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

    return Requirement(text)


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def unmet(name: str) -> Iterator[str]:
    """Say what of a set's direct requirements is missing or too old."""
    for path in files_of(name):
        for line in lines_of(path):
            wanted = _requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate():
                continue
            try:
                found = metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                yield f"{wanted.name} is not installed ({line} is needed)"
                continue
            if not wanted.specifier.contains(found, prereleases=True):
                yield f"{wanted.name} {found} is installed ({line} is needed)"


def failing_imports(name: str, quick: bool) -> Iterator[str]:
    """Import what a set is for, and say what went wrong."""
    modules = [module for path in files_of(name) for module in IMPORTS[path.stem]]
    for module in modules:
        if quick and module not in QUICK_IMPORTS:
            continue
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
            yield f"import {module}: {type(error).__name__}: {error}"


def constraints(name: str) -> Iterator[str]:
    """The tested versions, except for what is installed and meets the bounds: that is kept.

    NVIDIA's builds of torch for Jetson and for its containers come from elsewhere and must not be replaced.
    """
    not_met = {line.split()[0] for line in unmet(name)}
    installed = {_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    kept = {package: version for package, version in installed.items() if package not in not_met}
    for line in lines_of(FOLDER / "constraints.txt"):
        package = _requirement(line).name
        if package in kept:
            yield f"{package}=={kept[package]}"
        elif not (package == "torchvision" and "torch" in kept):  # the one that fits that torch is up to the installer
            yield line


def hint() -> str:
    """What to do where NVIDIA's torch stays and has no torchvision: each of PyPI's wants the one torch of PyPI's."""
    installed = {_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    torch = installed.get("torch", "")
    if "torchvision" in installed or not re.match(r"[\d.]+(a|b|rc|\.dev)\d", torch):
        return ""
    return f"; torch {torch} is not PyPI's, whose torchvision does not fit it: first install one that was built for it"


def fingerprint(name: str) -> str:
    """A hash that changes with the requirements of a set, the constraints, and the Python version."""
    content = b"".join(path.read_bytes() for path in [*files_of(name), FOLDER / "constraints.txt"])
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def uv_settings() -> Iterator[str]:
    """Shell lines that set for uv what pip is configured with; what the user has set for uv stays."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    output = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, errors="replace").stdout
    found = {}
    for line in output.splitlines():  # such as: global.index-url='https://...'; environment variables come last and win
        match = re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)=(['\"])(.*)\2", line.strip())
        if match and match[1] in UV_NAMES:
            values = match[3].encode().decode("unicode_escape").split()
            found[match[1]] = " ".join(values)
    for key, value in found.items():
        if UV_NAMES[key] not in os.environ:
            value = value.replace(" ", ",") if key == "find-links" else value
            yield f"export {UV_NAMES[key]}={shlex.quote(value)}"
    if "extra-index-url" in found and "UV_INDEX_STRATEGY" not in os.environ:
        yield "export UV_INDEX_STRATEGY=unsafe-best-match"  # pip looks at all indexes alike


def managed() -> bool:
    """Does the operating system forbid installing into this environment (PEP 668)?"""
    return sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()


def summary() -> str:
    """Python and the libraries that matter, with their versions."""
    words = [f"Python {sys.version.split()[0]}"]
    for package in ("torch", "torchvision", "onnx", "onnxruntime", "numpy", "tensorrt"):
        try:
            words.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(words)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} -h lists what there is)\n")


def main(argv: list[str] | None = None) -> int:
    console.guard()
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("set", nargs="?", choices=tuple(IMPORTS))
    parser.add_argument("--quick", action="store_true", help="import only what is quick to import")
    args = parser.parse_args(argv)
    if args.set is None and args.action in ("check", "constraints", "fingerprint"):
        parser.error(f"{args.action} needs a SET")
    if args.action == "check":
        problems = list(unmet(args.set)) or list(failing_imports(args.set, args.quick))
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    if args.action == "managed":
        return 0 if managed() else 1
    if args.action == "uv-settings":
        print("\n".join(uv_settings()))
    elif args.action == "summary":
        print(summary())
    elif args.action == "hint":
        print(hint())
    elif args.action == "constraints":
        print("\n".join(constraints(args.set)))
    else:
        print(fingerprint(args.set))
    return 0


if __name__ == "__main__":
    sys.exit(main())
