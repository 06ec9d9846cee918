#!/usr/bin/env python3
"""Make a YOLOv9 checkout of PyPI's wheel yolo9, which is upstream as a package; standard library only.

    python scripts/yolov9_from_wheel.py yolo9-1.0.18-py3-none-any.whl SHA256 DIR

The wheel's modules import each other as yolo9.models, yolo9.utils and so on; a checkout has models/ and utils/ at its
top. What has to change for that, and what the package does differently where this project needs upstream's behaviour,
is described by rules, which look for statements in the parsed source. A rule that does not find exactly what it was
written for ends the program with one line and exit code 1: the wheel is then another version.
scripts/get_yolov9.sh calls this where GitHub cannot be reached, and compares the result with the one that is known.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where interrupts.py lies

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import ast
import email
import hashlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

PACKAGE, VERSION = "yolo9", "1.0.18"
OWN_FILES = ("__init__.py", "data/__ini__.py", "data/class_names.py")  # of the package; upstream has no such files
STAMP = """# Where this checkout comes from

PyPI's wheel {name} {version} ({name}-{version}-py3-none-any.whl), SHA-256
{sha256},
turned into a checkout by scripts/yolov9_from_wheel.py of the overlay. It holds upstream YOLOv9 at about commit 5b1ea9a,
with the package's own changes. These were made to it:

- absolute imports lose the prefix `{name}.`;
- two imports that would close a circle go back into the functions that use them: `models.yolo` in
  `models/experimental.py` and `export` in `models/common.py`;
- `torch.load` is called without `weights_only=False`, which would let a checkpoint run code;
- `non_max_suppression` takes the first output of a network, as upstream does, not the first image of it;
- `requirements.txt` holds the requirements that the wheel declares; the package's own files ({own}) are left out.

The wheel does not have `README.md`, `data/images/`, `figure/`, `scripts/` and `tools/`.
"""

Edit = tuple[int, int, bytes]  # from, to, and what stands there afterwards


class Unexpected(Exception):
    """The wheel is not what the rules were written for."""


class Source:
    """A Python file: its bytes, its syntax tree, and where a node of the tree lies in the bytes."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data
        try:
            self.tree = ast.parse(data, name)
        except (SyntaxError, ValueError) as error:
            raise Unexpected(f"{name} is not Python: {error}") from error
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.stmt | ast.expr | ast.alias | ast.keyword) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.stmt | ast.expr | ast.alias | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def line(self, node: ast.stmt) -> tuple[int, int]:
        """The whole line that a statement stands on."""
        return self._lines[node.lineno - 1], self._lines[node.lineno]

    def changed(self, edits: list[Edit]) -> Source:
        data = self.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text + data[end:]
        return Source(self.name, data)

    def function(self, path: str) -> ast.FunctionDef:
        """A function of the module, or a method as Class.method."""
        body = self.tree.body
        for name in path.split("."):
            found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
            if len(found) != 1:
                raise Unexpected(f"{self.name}: expected one definition of {path}, found {len(found)}")
            body = found[0].body
        if not isinstance(found[0], ast.FunctionDef):
            raise Unexpected(f"{self.name}: expected {path} to be a function, found a class")
        return found[0]


def without_prefix(source: Source) -> Source:
    """Take the package's name out of absolute imports. What is imported under which name stays the same."""
    edits: list[Edit] = []
    prefix = f"{PACKAGE}."

    def cut(start: int, before: bytes) -> None:
        found = source.data[start : start + len(before) + len(prefix)]
        if found != before + prefix.encode():
            raise Unexpected(f"{source.name}: expected {before.decode()}{prefix} in an import, found {found!r}")
        edits.append((start + len(before), start + len(found), b""))

    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > len(PurePosixPath(source.name).parent.parts):
                raise Unexpected(f"{source.name}: an import reaches the package itself: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
            cut(source.start(node), b"from ")
            node.module = (node.module or "").removeprefix(prefix)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if f"{alias.name}.".startswith(prefix):
                    if alias.asname is None:
                        raise Unexpected(f"{source.name}: an import without a name of its own: {ast.unparse(node)}")
                    cut(source.start(alias), b"")
                    alias.name = alias.name.removeprefix(prefix)
    new = source.changed(edits)
    if ast.dump(new.tree) != ast.dump(source.tree):
        raise Unexpected(f"{source.name}: its imports are written in a way that cannot be changed line by line")
    for node in ast.walk(new.tree):
        if PACKAGE in (getattr(node, "id", ""), getattr(node, "attr", "")) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and PACKAGE in node.value
        ):
            raise Unexpected(f"{source.name}: {PACKAGE} is named outside an import: {ast.unparse(node)}")
    return new


def import_into(source: Source, module: str, names: tuple[str, ...], function: str) -> Source:
    """Move an import from the top of a module to the start of the one function that uses it."""
    found = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and node.module == module and not node.level
    ]
    if len(found) != 1 or tuple((alias.name, alias.asname) for alias in found[0].names) != tuple(
        (name, None) for name in names
    ):
        raise Unexpected(f"{source.name}: expected one line: from {module} import {', '.join(names)}")
    start, end = source.line(found[0])
    text = source.data[start:end].strip()
    target = source.function(function)
    inside = {id(node) for node in ast.walk(target)}
    uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id in names]
    if {node.id for node in uses} != set(names) or any(id(node) not in inside for node in uses):
        raise Unexpected(f"{source.name}: expected {', '.join(names)} to be used in {function} and nowhere else")
    if text != ast.unparse(found[0]).encode():
        raise Unexpected(f"{source.name}: expected {ast.unparse(found[0])} on a line of its own")
    first = target.body[1 if ast.get_docstring(target) else 0]
    place = source.start(first)
    line = text + b"\n" + b" " * first.col_offset
    return source.changed([(start, end, b""), (place, place, line)])


def load_with_defaults(source: Source) -> Source:
    """Call torch.load without weights_only=False, as upstream does; run_upstream.py decides what may be loaded."""
    edits: list[Edit] = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not any(keyword.arg == "weights_only" for keyword in node.keywords):
            continue
        last = node.keywords[-1]
        before: list[ast.expr | ast.keyword] = [*node.args, *node.keywords[:-1]]
        if ast.unparse(node.func) != "torch.load" or ast.unparse(last) != "weights_only=False" or not before:
            raise Unexpected(f"{source.name}: expected torch.load(..., weights_only=False), found {ast.unparse(node)}")
        edits.append((max(source.end(argument) for argument in before), source.end(last), b""))
    return source.changed(edits)


def first_output(source: Source) -> Source:
    """NMS of a network's outputs takes the first of them, which is of all images; the package takes its first image."""
    target = source.function("non_max_suppression")
    found = [node for node in ast.walk(target) if isinstance(node, ast.Assign)]
    found = [node for node in found if ast.unparse(node) == "prediction = prediction[0][0]"]
    if len(found) != 1 or not isinstance(found[0].value, ast.Subscript):
        raise Unexpected(f"{source.name}: expected one prediction[0][0] in non_max_suppression, found {len(found)}")
    return source.changed([(source.end(found[0].value.value), source.end(found[0].value), b"")])


RULES: dict[str, Callable[[Source], Source]] = {
    "models/experimental.py": lambda s: import_into(s, "models.yolo", ("Detect", "Model"), "attempt_load"),
    "models/common.py": lambda s: import_into(s, "export", ("export_formats",), "DetectMultiBackend._model_type"),
    "utils/general.py": first_output,
}


def rewritten(name: str, data: bytes) -> bytes:
    """A Python file of the package as a file of a checkout."""
    source = load_with_defaults(without_prefix(Source(name, data)))
    return RULES[name](source).data if name in RULES else source.data


def files_of(wheel: Path, sha256: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file of the checkout."""
    data = wheel.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Unexpected(f"{wheel.name} does not have the SHA-256 {sha256}; it is damaged, or another file")
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = f"{PACKAGE}-{VERSION}.dist-info"
    ours = {name.removeprefix(f"{PACKAGE}/") for name in content if name.startswith(f"{PACKAGE}/")}
    wanted = {*OWN_FILES, *RULES}
    if missing := sorted(wanted - ours) + [name for name in (f"{info}/METADATA",) if name not in content]:
        raise Unexpected(f"{wheel.name} lacks {', '.join(missing)}; the rules are for {PACKAGE} {VERSION}")
    metadata = email.message_from_bytes(content[f"{info}/METADATA"])
    licence = f"{info}/licenses/LICENSE.md"
    if licence not in content:
        raise Unexpected(f"{wheel.name} lacks {licence}")
    for name in sorted(ours - set(OWN_FILES)):
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise Unexpected(f"{wheel.name} holds a file outside its folder: {name}")
        text = content[f"{PACKAGE}/{name}"]
        yield name, rewritten(name, text) if name.endswith(".py") else text
    yield "LICENSE.md", content[licence]
    yield "requirements.txt", "".join(f"{line}\n" for line in metadata.get_all("Requires-Dist", [])).encode()
    stamp = STAMP.format(name=PACKAGE, version=VERSION, sha256=sha256, own=", ".join(OWN_FILES))
    yield "UPSTREAM.md", stamp.encode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help=f"wheel of {PACKAGE} {VERSION}")
    parser.add_argument("sha256", metavar="SHA256", help="its SHA-256, in hexadecimal")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the checkout goes; made if it is missing")
    args = parser.parse_args(argv)
    try:
        files = dict(files_of(args.wheel, args.sha256))  # all of them before anything is written
        for name, data in files.items():
            path = args.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.write_bytes(data)
            except OSError as error:
                raise Unexpected(f"cannot write {path}: {error.strerror}") from error
    except (Unexpected, OSError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
