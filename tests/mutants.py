#!/usr/bin/env python3
"""How many planted mistakes does the suite find? A random sample of mutants of four rooms, and which of them survive.

    pip install cosmic-ray
    python tests/mutants.py --number 600 --seed 45 --output mutants.json

cosmic-ray says what can be mutated; places are drawn at random, as many in each room, and one mutation for each. A
mutant meets the files of unit and contract tests that run its line (measured first, with coverage), the quickest first,
as many as take `--limit` seconds without the mutant, until a test fails. Golden and integration tests do not take part.
Results go to --output, and as text beside it; a run that was stopped goes on. `tests/mutants/` holds those of the suite
before and after it was halved.
"""

from __future__ import annotations

import argparse
import ast
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
SHARED = (
    "cv2 hypothesis matplotlib.pyplot onnx onnxruntime pandas pycocotools.mask pydantic torch torchvision"  # imports
)


def annotated(tree: ast.Module) -> set[int]:
    """Lines of annotated arguments, and those that hold an annotation and compute nothing: mutants change nothing."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        noted = node.returns if isinstance(node, ast.FunctionDef) else getattr(node, "annotation", None)
        if noted is not None:
            lines.update(range(noted.lineno, (noted.end_lineno or 0) + 1))
    computing = {
        one.lineno for one in ast.walk(tree) if isinstance(one, ast.BinOp | ast.Compare | ast.BoolOp | ast.Call)
    }
    arguments = {one.lineno for one in ast.walk(tree) if isinstance(one, ast.arg) and one.annotation is not None}
    return lines - computing | arguments


def sample(root: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """Mutants, as many in each room: file, line, operator and its occurrence."""
    draw = random.Random(seed)
    mutants: list[dict[str, Any]] = []
    for room in ROOMS:
        places: dict[tuple[str, Any, Any], list[dict[str, Any]]] = defaultdict(list)
        paths = sorted(path.relative_to(root) for path in (root / room).rglob("*.py"))
        noted = {str(path): annotated(ast.parse((root / path).read_text())) for path in paths}
        with use_db(":memory:") as items:
            init(paths, items, {})
            for item in items.work_items:
                (mutation,) = item.mutations
                line, path = mutation.start_pos[0], mutation.module_path.as_posix()
                if line not in noted[path]:
                    places[(path, mutation.start_pos, mutation.end_pos)].append(
                        {
                            "file": path,
                            "line": line,
                            "operator": mutation.operator_name,
                            "occurrence": mutation.occurrence,
                        }
                    )
        chosen = draw.sample(sorted(places), min(number // len(ROOMS), len(places)))
        mutants += [
            {"room": room, **draw.choice(sorted(places[place], key=lambda m: m["operator"]))} for place in chosen
        ]
    return mutants


class Contexts:
    """A pytest plugin: what a test runs is counted for its file, and how long each file takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds = measured, Counter[str]()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        file = item.nodeid.partition("::")[0]
        self.measured.switch_context(file)
        started = time.perf_counter()
        yield
        self.seconds[file] += time.perf_counter() - started


def baseline(root: Path, output: str) -> None:
    """Run the suite once; write as JSON which test files run which line, seconds of each, and files that fail."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    measured = coverage.Coverage(data_file=None, source=list(ROOMS), branch=False, config_file=False)
    plugin = Contexts(measured)
    failed: set[str] = set()

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.add(report.nodeid.partition("::")[0])

    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS], plugins=[plugin, Failures()])
    measured.stop()
    data = measured.get_data()
    lines = {}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        lines[Path(file).relative_to(root).as_posix()] = {
            line: sorted(set(found) - {""}) for line, found in contexts.items()
        }
    Path(output).write_text(json.dumps({"lines": lines, "seconds": plugin.seconds, "failed": sorted(failed)}))


def files_for(mutant: dict[str, Any], base: dict[str, Any], limit: float) -> list[str]:
    """The test files that meet a mutant: those that run its line, or, of a line that is run at import, its file."""
    lines = base["lines"].get(mutant["file"], {})
    files = set(lines.get(str(mutant["line"]), ())) or {file for found in lines.values() for file in found}
    seconds = base["seconds"]
    own = Path(mutant["file"]).parts[1]
    ordered = sorted(files - set(base["failed"]), key=lambda file: (own not in file, seconds.get(file, 0)))
    chosen, taken = [], 0.0
    for file in ordered:
        if chosen and taken + seconds.get(file, 0) > limit:
            continue
        chosen.append(file)
        taken += seconds.get(file, 0)
    return chosen


def run_files(tree: str, files: list[str], log: str) -> None:
    """In a forked child: pytest on these files of the mutated tree."""
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = True
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", *files])
    os._exit(int(code))


def judge(mutant: dict[str, Any], tree: Path, base: dict[str, Any], limit: float) -> dict[str, Any]:
    """Plant one mutant in a tree, run the tests that meet it, and take it out again."""
    path = tree / mutant["file"]
    source = path.read_text()
    mutated = mutate_code(source, get_operator(mutant["operator"])(), mutant["occurrence"])
    if mutated is None or mutated == source:
        return {**mutant, "outcome": "no mutant"}
    files = files_for(mutant, base, limit)
    if not files:
        return {**mutant, "outcome": "survived", "files": 0, "diff": diff(source, mutated)}
    expected = sum(base["seconds"].get(file, 0) for file in files)
    try:
        path.write_text(mutated)
        child = get_context("fork").Process(target=run_files, args=(str(tree), files, str(tree) + ".log"))
        child.start()
        child.join(60 + 6 * expected)
        late = child.is_alive()
        if late:
            os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
    finally:
        path.write_text(source)
    outcome = "survived" if child.exitcode == 0 else "killed"
    result = {**mutant, "outcome": outcome, "late": late, "files": len(files)}
    return result if outcome == "killed" else {**result, "diff": diff(source, mutated)}


def diff(source: str, mutated: str) -> list[str]:
    """The lines that a mutation changed, before and after."""
    pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
    return [line for old, new in pairs if old != new for line in (f"- {old.strip()}", f"+ {new.strip()}")]


def table(results: list[dict[str, Any]]) -> str:
    """Of each room: mutants, and the share that is killed; then each survivor, with its line before and after."""
    rows = []
    for room in (*ROOMS, ""):
        found = [r for r in results if r["room"].startswith(room) and r["outcome"] != "no mutant"]
        killed = sum(r["outcome"] == "killed" for r in found)
        rows.append(f"{room or 'all':20} {len(found):5} mutants, {killed:4} killed: {killed / max(1, len(found)):.1%}")
    survivors = sorted((r for r in results if r["outcome"] == "survived"), key=lambda r: (r["file"], r["line"]))
    for r in survivors:
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
    root = arguments.root.resolve()
    if arguments.baseline:
        baseline(root, arguments.baseline)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    base_path = arguments.output.with_suffix(".baseline.json")
    if not base_path.is_file():
        command = [sys.executable, __file__, "--root", str(root), "--baseline", str(base_path.resolve())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    base = json.loads(base_path.read_text())
    seconds, failing = sum(base["seconds"].values()), base["failed"] or "none"
    sys.stdout.write(f"{len(base['seconds'])} files of tests take {seconds:.0f} s; failing: {failing}\n")

    os.chdir(root)
    mutants = sample(root, arguments.number, arguments.seed)
    results = json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    known = {(r["file"], r["operator"], r["occurrence"]) for r in results}
    todo = [m for m in mutants if (m["file"], m["operator"], m["occurrence"]) not in known]
    random.Random(arguments.seed).shuffle(todo)
    for name in SHARED.split():
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(arguments.workers):
            tree = Path(folder) / f"tree{number}"
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".git", ".gpu", ".venv", "build", "__pycache__"))
            subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
            subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
            trees.put(tree)

        def one(mutant: dict[str, Any]) -> None:
            tree = trees.get()
            try:
                results.append(judge(mutant, tree, base, arguments.limit))
            finally:
                trees.put(tree)
            arguments.output.write_text(json.dumps(results, indent=1))

        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(one, todo))
    arguments.output.with_suffix(".txt").write_text(table(results))
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
