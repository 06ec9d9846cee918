#!/usr/bin/env python3
"""How many planted mistakes does the suite find? A random sample of mutants of four rooms, and which of them survive.

    pip install cosmic-ray
    python tests/mutants.py --number 600 --seed 45 --output mutants.json

cosmic-ray says what can be mutated; places are drawn at random, as many in each room, and one mutation for each. A
mutant meets the files of unit and contract tests that run its line (measured first, with coverage), the quickest first,
as many as take `--limit` seconds without the mutant, until a test fails. Golden and integration tests do not take part.
Results go to --output, and as text beside it; a run that was stopped goes on. `tests/mutants/` holds those of the suite
before and after it was halved, and after the code was unfolded.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import Any

import coverage
import pytest
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db

ROOMS = ("models/quantize", "utils/onnx_graph", "utils/evaluation", "utils/trt")
TESTS = ("tests/unit", "tests/contracts")
SHARED = "cv2 matplotlib.pyplot onnx onnxruntime pandas pycocotools.mask pydantic torch torchvision"
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
Mutant = dict[str, Any]  # room, file, line, operator, occurrence; later its outcome


def annotated(tree: ast.Module) -> set[int]:
    """Lines of annotated arguments, and those that hold an annotation and compute nothing: mutants change nothing."""
    lines, computing, arguments = set[int](), set[int](), set[int]()
    for node in ast.walk(tree):
        noted = node.returns if isinstance(node, ast.FunctionDef) else getattr(node, "annotation", None)
        if noted is not None:
            lines.update(range(noted.lineno, (noted.end_lineno or 0) + 1))
        if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp | ast.Call):
            computing.add(node.lineno)
        if isinstance(node, ast.arg) and node.annotation is not None:
            arguments.add(node.lineno)
    return lines - computing | arguments


def sample(root: Path, number: int, seed: int) -> list[Mutant]:
    """Mutants, as many in each room."""
    draw, mutants = random.Random(seed), list[Mutant]()
    for room in ROOMS:
        places: dict[tuple[str, Any, Any], list[Mutant]] = defaultdict(list)
        paths = sorted(path.relative_to(root) for path in (root / room).rglob("*.py"))
        noted = {str(path): annotated(ast.parse((root / path).read_text())) for path in paths}
        with use_db(":memory:") as items:
            init(paths, items, {})
            for (one,) in (item.mutations for item in items.work_items):
                path, line = one.module_path.as_posix(), one.start_pos[0]
                if line not in noted[path]:
                    mutant = {"file": path, "line": line, "operator": one.operator_name, "occurrence": one.occurrence}
                    places[(path, one.start_pos, one.end_pos)].append(mutant)
        chosen = draw.sample(sorted(places), min(number // len(ROOMS), len(places)))
        mutants += [
            {"room": room, **draw.choice(sorted(places[place], key=lambda m: m["operator"]))} for place in chosen
        ]
    return mutants


class Contexts:
    """A pytest plugin: what a test runs is counted for its file, how long each file takes, and which ones fail."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds, self.failed = measured, Counter[str](), set[str]()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        file = item.nodeid.partition("::")[0]
        self.measured.switch_context(file)
        started = time.perf_counter()
        yield
        self.seconds[file] += time.perf_counter() - started

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid.partition("::")[0])


def baseline(root: Path, output: str) -> None:
    """Run the suite once; write as JSON which test files run which line, seconds of each, and files that fail."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    measured = coverage.Coverage(data_file=None, source=list(ROOMS), branch=False, config_file=False)
    plugin = Contexts(measured)
    measured.start()
    pytest.main([*QUIET, *TESTS], plugins=[plugin])
    measured.stop()
    data = measured.get_data()
    lines = {
        Path(file).relative_to(root).as_posix(): {
            line: sorted(set(contexts) - {""}) for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    Path(output).write_text(json.dumps({"lines": lines, "seconds": plugin.seconds, "failed": sorted(plugin.failed)}))


def files_for(mutant: Mutant, base: dict[str, Any], limit: float) -> list[str]:
    """The test files that meet a mutant: those that run its line, or, of a line that is run at import, its file."""
    lines, seconds = base["lines"].get(mutant["file"], {}), Counter(base["seconds"])
    files = set(lines.get(str(mutant["line"]), ())) or {file for found in lines.values() for file in found}
    own = Path(mutant["file"]).parts[1]
    chosen: list[str] = []
    for file in sorted(files - set(base["failed"]), key=lambda file: (own not in file, seconds[file])):
        if not chosen or sum(seconds[one] for one in (*chosen, file)) <= limit:
            chosen.append(file)
    return chosen


def run_files(tree: str, files: list[str]) -> None:
    """In a forked child: pytest on these files of the mutated tree."""
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = True
    with open(tree + ".log", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os._exit(int(pytest.main(["-x", "--tb=line", *QUIET, *files])))


def judge(mutant: Mutant, tree: Path, base: dict[str, Any], limit: float) -> Mutant:
    """Plant one mutant in a tree, run the tests that meet it, and take it out again."""
    path, files = tree / mutant["file"], files_for(mutant, base, limit)
    source = path.read_text()
    try:
        mutated = mutate_code(source, get_operator(mutant["operator"])(), mutant["occurrence"])
    except AttributeError:  # ExceptionReplacer, at `except module.Error`
        mutated = None
    if mutated is None or mutated == source:
        return {**mutant, "outcome": "no mutant"}
    child = get_context("fork").Process(target=run_files, args=(str(tree), files))
    try:
        path.write_text(mutated)
        if files:
            child.start()
            child.join(60 + 6 * sum(base["seconds"].get(file, 0) for file in files))
            if child.is_alive():
                os.killpg(child.pid or 0, signal.SIGKILL)
                child.join()
    finally:
        path.write_text(source)
    if files and child.exitcode:
        return {**mutant, "outcome": "killed", "files": len(files)}
    lines = difflib.ndiff(source.splitlines(), mutated.splitlines())
    diff = [f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-"]
    return {**mutant, "outcome": "survived", "files": len(files), "diff": diff}


def table(results: list[Mutant]) -> str:
    """Of each room: mutants, and the share that is killed; then each survivor, with its line before and after."""
    rows = []
    for room in (*ROOMS, ""):
        found = [r for r in results if r["room"].startswith(room) and r["outcome"] != "no mutant"]
        killed = sum(r["outcome"] == "killed" for r in found)
        rows.append(f"{room or 'all':20} {len(found):5} mutants, {killed:4} killed: {killed / max(1, len(found)):.1%}")
    survivors = (r for r in results if r["outcome"] == "survived")
    for r in sorted(survivors, key=lambda r: (r["file"], r["line"])):
        rows += ["", f"{r['file']}:{r['line']}{'' if r.get('files') else ', which no test runs'}", *r["diff"]]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="tree to judge")
    parser.add_argument("--number", type=int, default=600)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--limit", type=float, default=20, help="seconds of tests for a mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("mutants.json"))
    parser.add_argument("--baseline", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    root, output = arguments.root.resolve(), arguments.output.resolve()
    if arguments.baseline:
        baseline(root, arguments.baseline)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    base_path = output.with_suffix(".baseline.json")
    if not base_path.is_file():
        command = [sys.executable, __file__, "--root", str(root), "--baseline", str(base_path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    base = json.loads(base_path.read_text())
    seconds, failing = sum(base["seconds"].values()), base["failed"] or "none"
    sys.stdout.write(f"{len(base['seconds'])} files of tests take {seconds:.0f} s; failing: {failing}\n")
    os.chdir(root)
    results = json.loads(output.read_text()) if output.is_file() else []
    known = {(r["file"], r["operator"], r["occurrence"]) for r in results}
    mutants = sample(root, arguments.number, arguments.seed)
    todo = [m for m in mutants if (m["file"], m["operator"], m["occurrence"]) not in known]
    random.Random(arguments.seed).shuffle(todo)
    for name in SHARED.split():  # imported once, before children are forked
        __import__(name)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        trees: Queue[Path] = Queue()
        for number in range(arguments.workers):
            tree = Path(folder) / f"tree{number}"
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".git", ".gpu", ".venv", "build", "__pycache__"))
            for words in ("init -q", "add -A"):  # some tests ask git for the files
                subprocess.run(["git", *words.split()], cwd=tree, check=True)
            trees.put(tree)

        def one(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                results.append(judge(mutant, tree, base, arguments.limit))
            finally:
                trees.put(tree)
            output.write_text(json.dumps(results, indent=1))

        list(pool.map(one, todo))
    output.with_suffix(".txt").write_text(table(results))
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
