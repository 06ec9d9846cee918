"""The error messages of the source, found in its syntax tree: what is raised as a `QatError`, and by which programs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.imports import imported_modules

ROOT = Path(__file__).resolve().parents[1]
VALUE = "…"  # in place of a file, an option's value or a number
ERRORS = {"InputError": 2, "CheckpointError": 2, "RecipeError": 2, "DataError": 2, "DependencyError": 2, "QatError": 1}
SOURCE = ("*.py", "scripts/*.py", "models/**/*.py", "utils/**/*.py")
PROGRAMS = ("*.py", "scripts/*.py")
SUBJECTS = {  # the first that a module's path begins with
    "utils/trt": "TensorRT",
    "utils/onnx_graph": "ONNX file",
    "utils/evaluation": "dataset, evaluation",
    "utils/jobs/convert": "annotations",
    "utils/upstream": "checkpoint, YOLOv9 checkout",
    "utils/serving": "Triton",
    "utils/reports": "report",
    "utils/runners": "running a file",
    "models": "checkpoint, quantization",
    "utils/core": "files, options",
    "": "options of the command",
}


class Message(NamedTuple):
    """A message, the exit code behind it, what it is about, and the programs that can reach where it is raised."""

    text: str
    exit_code: int
    subject: str
    programs: tuple[str, ...]


def messages() -> list[Message]:
    """Return all messages, sorted by their first word; a message that is raised in several places is there once."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for pattern in SOURCE for path in ROOT.glob(pattern)}
    programs = programs_of_modules(trees)
    places: dict[tuple[str, int], set[str]] = {}
    subjects: dict[str, str] = {}
    for path, tree in sorted(trees.items()):
        for error, text in raised(tree):
            places.setdefault((text, ERRORS[error]), set()).update(programs.get(path, ()))
            subjects.setdefault(text, subject_of(path))
    found = [Message(text, code, subjects[text], tuple(sorted(names))) for (text, code), names in places.items()]
    return sorted(found, key=lambda message: (first_words(message.text), message))


def subject_of(path: Path) -> str:
    """Return what the messages of a module are about."""
    name = path.relative_to(ROOT).as_posix()
    return next(subject for prefix, subject in SUBJECTS.items() if name.startswith(prefix))


def first_words(text: str) -> str:
    """Return a message from its first letter on, in small letters: what it is sorted by."""
    return re.sub(r"^[\W_]+", "", text).lower()


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class and each possible text of every error that a module raises; no text that has no words."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Module)):
            continue
        assigned = texts_assigned(function)
        for node in own_nodes(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = getattr(node.exc.func, "id", "")
                if name in ERRORS:
                    for text in texts(node.exc.args[0], assigned):
                        if len(re.findall(r"[a-z]{2,}", text)) > 1:
                            yield name, text


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from own_nodes(child)


def texts_assigned(function: ast.AST) -> dict[str, ast.expr]:
    """Return what is last assigned to each plain name in a function."""
    values: dict[str, ast.expr] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return values


def texts(node: ast.expr, assigned: dict[str, ast.expr]) -> list[str]:
    """Return the texts that an expression may have, with VALUE for what is known at run time only."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        alternatives = [""]
        for part in node.values:
            endings = texts(part, assigned)
            alternatives = [text + ending for text in alternatives for ending in endings]
        return [re.sub(f"{VALUE}+", VALUE, text) for text in alternatives]
    if isinstance(node, ast.FormattedValue):
        return texts(node.value, assigned) if isinstance(node.value, ast.IfExp) else [VALUE]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        endings = texts(node.right, assigned)
        return [text + ending for text in texts(node.left, assigned) for ending in endings]
    if isinstance(node, ast.IfExp):
        return [*texts(node.body, assigned), *texts(node.orelse, assigned)]
    if isinstance(node, ast.Name) and node.id in assigned:
        return texts(assigned[node.id], {name: value for name, value in assigned.items() if name != node.id})
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "no_file" and len(node.args) > 1:
        return [f"{VALUE} does not exist; {text}" for text in texts(node.args[1], assigned)]
    return [VALUE]


def programs_of_modules(trees: dict[Path, ast.Module]) -> dict[Path, set[str]]:
    """Return, for each module, the programs that import it, at their start or later, directly or through others."""
    modules = {}
    for path in trees:
        dotted = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        modules[dotted.removesuffix(".__init__")] = path
    imports = {path: {modules[name] for name in imported(tree) if name in modules} for path, tree in trees.items()}
    programs: dict[Path, set[str]] = {}
    for program in [path for pattern in PROGRAMS for path in ROOT.glob(pattern)]:
        waiting, reached = [program], {program}
        while waiting:
            waiting += imports[waiting.pop()] - reached
            reached.update(waiting)
        for path in reached:
            programs.setdefault(path, set()).add(program.name)
    return programs


def imported(tree: ast.Module) -> set[str]:
    """Return the dotted names that a module imports, wherever the import stands, and the jobs that qat.py names."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return imported_modules(tree) | {f"utils.jobs.{text}" for text in constants if isinstance(text, str)}
