#!/usr/bin/env python3
"""The size of the house: what a reader has to own, measured from the files that git tracks.

python tests/house.py            the table
python tests/house.py --list     and the names behind each number
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("models", "utils", "scripts", "benchmarks", "examples")  # and the root's programs
ENTRIES = {"main", "run"}  # names that every program or job may have


class Measure(NamedTuple):
    """One row of the table: a number, its limit, what the second edition aims at, and the names that were counted."""

    what: str
    count: int
    limit: int
    aim: int
    names: Sequence[str] = ()


def tracked(*suffixes: str) -> list[Path]:
    """The files of the working tree that git tracks, with one of these endings."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name.endswith(suffixes)]
    return [path for path in paths if (ROOT / path).is_file()]


def lines(paths: list[Path]) -> int:
    """All lines of files, blank ones and comments too."""
    return sum(len((ROOT / path).read_bytes().splitlines()) for path in paths)


def imported(tree: ast.Module) -> set[str]:
    """Dotted names that a module imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imported_modules(tree: ast.Module) -> set[str]:
    """The same, and what each name stands in: `from a.b import c` may be a name of `a.b`, or a module."""
    names = imported(tree)
    return names | {name.rpartition(".")[0] for name in names}


def single_importers(trees: dict[Path, ast.Module]) -> list[str]:
    """Modules that exactly one other imports; a package's `__init__.py` is its face, and no importer."""
    modules = {path.with_suffix("").as_posix().replace("/", "."): path for path in trees if path.name != "__init__.py"}
    importers: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in imported_modules(tree) & set(modules):
            if path != modules[name] and path.name != "__init__.py":
                importers[name].add(path)
    return [f"{modules[name]} ← {next(iter(by))}" for name, by in sorted(importers.items()) if len(by) == 1]


def used_once(tree: ast.Module) -> Iterator[str]:
    """Private functions of a module that one place in it mentions; what a function says of itself does not count."""
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("_"):
            inside = {*ast.walk(function)}
            names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in inside]
            if names.count(function.name) == 1:
                yield function.name


def defined_twice(trees: dict[Path, ast.Module]) -> list[str]:
    """Public functions and classes of one name in several modules; examples stand alone, and do not count."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        if path.parts[0] == "examples":
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].append(path.as_posix())
    twice = {name: where for name, where in sorted(places.items()) if len(where) > 1 and name not in ENTRIES}
    return [f"{name}: {', '.join(where)}" for name, where in twice.items()]


def knows_processes(tree: ast.Module) -> bool:
    """Whether a module has to do with training on several GPUs."""
    return bool(imported_modules(tree) & {"torch.distributed", "utils.core.distributed"})


def measure() -> list[Measure]:
    """All rows of the table."""
    python, shell = ([path for path in tracked(suffix) if path.parts[0] in PRODUCT or len(path.parts) == 1]
                     for suffix in (".py", ".sh"))  # fmt: skip
    tests = [path for path in tracked(".py") if path.parts[0] == "tests"]
    documents = [path for path in tracked(".md") if path.parts[0] == "docs"]
    jobs = [path for path in python if path.parts[:2] == ("utils", "jobs")]
    trees = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in python}
    single, twice = single_importers(trees), defined_twice(trees)
    once = [f"{path}: {name}" for path, tree in trees.items() for name in used_once(tree)]
    parallel = [path.as_posix() for path, tree in trees.items() if knows_processes(tree)]
    return [
        Measure("lines of the product", lines([*python, *shell]), 22_000, 22_000),
        Measure("Python modules", len(python), 135, 140),
        Measure("modules with one importer", len(single), 20, 20, single),
        Measure("private functions used once", len(once), 70, 120, once),
        Measure("public names defined twice", len(twice), 0, 0, twice),
        Measure("files that know several processes", len(parallel), 8, 8, parallel),
        Measure("files in utils/jobs", len(jobs), 20, 24, [path.as_posix() for path in jobs]),
        Measure("lines of tests", lines(tests), 22_000, 22_000),
        Measure("lines of TensorRT's stand-in", lines([Path("tests/support/fake_tensorrt.py")]), 300, 300),
        Measure("lines of docs", lines(documents), 1_500, 1_500),
    ]


def main() -> int:
    """Print the table."""
    for row in measure():
        print(f"{row.what:36} {row.count:>7,}   at most {row.limit:>7,}   aim {row.aim:>7,}")
        if "--list" in sys.argv:
            print(*(f"    {name}" for name in row.names), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
