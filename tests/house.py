#!/usr/bin/env python3
"""The size and the density of the house, measured from the files that git tracks.

python tests/house.py                    the hard limits, and how large product, tests and documents are
python tests/house.py --list             and the names behind each number
python tests/house.py --against REF      sizes as differences to another commit, such as origin/main
python tests/house.py --shrink           remove from tests/house_exceptions.json what is no exception any more

Lines are not bound, since a bound on lines makes lines dense. What makes a function or a statement hard to read is
bound. Code that breaks these limits already is listed in tests/house_exceptions.json, which may only shrink.
"""

import argparse
import ast
import functools
import io
import json
import math
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from imports import imported_modules

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tests/house_exceptions.json"
PRODUCT = ("models", "utils", "scripts", "benchmarks", "examples")  # and the root's programs
ENTRIES = {"main", "run"}  # names that every program or job may have

MOST_BRANCHES = 20  # of a function, conditional expressions and comprehensions counted
MOST_NODES = 60  # of the syntax tree in a simple statement
# Looked at by a person at each release, and raised with a reason: the whole product is unfolded, --source runs in
# threads, and quickstart.sh and val_trt.sh are steps in Python
MOST_NODES_OF_PRODUCT = 255_000
MOST_WORDS = {"README.md": 750}  # of a page
MOST_WORDS_OF_A_PAGE = 900
ROOM = 50  # words that a listed page may grow by, at least, so that a row of a table is no reason to divide it
MOST_LONG_NUMBERS = 12  # of a page, outside of tables and code: numbers with at least four digits
LIMITS = {  # what the exceptions are exceptions to, in words
    "branches": f"a function has at most {MOST_BRANCHES}: divide it",
    "long statements": f"a statement has at most {MOST_NODES} nodes of the syntax tree: write it in several",
    "arithmetic on booleans": "write an `if` in place of a product or a sum with a truth value",
    "words": f"a page has at most {MOST_WORDS_OF_A_PAGE} words (README {MOST_WORDS['README.md']}): divide it",
    "long numbers": f"a page has at most {MOST_LONG_NUMBERS} in its prose: put them into a table",
}

BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert, ast.Delete)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


class Measure(NamedTuple):
    """A number with a hard limit, and the names that were counted."""

    what: str
    count: int
    limit: int
    names: Sequence[str] = ()


class Size(NamedTuple):
    """How much there is to read: lines as written, lines with code, nodes of the syntax tree (of Python), and words."""

    lines: int = 0
    code_lines: int = 0
    nodes: int = 0
    words: int = 0

    @property
    def nodes_a_line(self) -> float:
        """Nodes of the syntax tree for each line with code: how dense the code is."""
        return self.nodes / self.code_lines if self.code_lines else 0.0


# Which files there are, and what is in them


def tracked(*suffixes: str) -> list[Path]:
    """The files of the working tree that git tracks, with one of these endings."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name.endswith(suffixes)]
    return [path for path in paths if (ROOT / path).is_file()]


def kind_of(path: Path) -> str | None:
    """The part of the house that a file belongs to: product, tests or documents; None for other files."""
    if path.suffix in (".py", ".sh") and (path.parts[0] in PRODUCT or len(path.parts) == 1):
        return "product"
    if path.suffix == ".py" and path.parts[0] == "tests":
        return "tests"
    if path.suffix == ".md" and (path.parts[0] == "docs" or len(path.parts) == 1):
        return "documents"
    return None


@functools.cache
def syntax_trees() -> dict[Path, ast.Module]:
    """The syntax tree of every Python file of the product."""
    paths = [path for path in tracked(".py") if kind_of(path) == "product"]
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in paths}


# Sizes, which are reported and not bound


def size_of(path: Path, text: str) -> Size:
    """The size of one file."""
    lines = text.splitlines()
    if path.suffix == ".md":
        return Size(lines=len(lines), words=words_in(text))
    if path.suffix != ".py":
        return Size(lines=len(lines))
    return Size(lines=len(lines), code_lines=len(code_lines(text)), nodes=nodes_in(ast.parse(text)))


def code_lines(text: str) -> set[int]:
    """The numbers of the lines of a Python file that hold code: no blank ones, comments and docstrings."""
    docstrings = {node.lineno for node in ast.walk(ast.parse(text)) if is_docstring(node)}
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begins, ends = token.start[0], token.end[0]
        if token.type in NO_CODE or (token.type == tokenize.STRING and begins in docstrings):
            continue
        numbers.update(range(begins, ends + 1))
    return numbers


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text that nothing uses."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def nodes_in(tree: ast.AST) -> int:
    """The nodes of a syntax tree, as `ast.walk` gives them."""
    return sum(1 for _ in ast.walk(tree))


def sizes(texts: Iterable[tuple[Path, str]]) -> dict[str, Size]:
    """The size of product, tests and documents."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * len(Size._fields))
    for path, text in texts:
        kind = kind_of(path)
        if kind is not None:
            totals[kind] = [total + more for total, more in zip(totals[kind], size_of(path, text), strict=True)]
    return {kind: Size(*total) for kind, total in totals.items()}


def texts_of_the_tree() -> Iterator[tuple[Path, str]]:
    """Every file of the working tree that has a size."""
    for path in tracked(".py", ".sh", ".md"):
        yield path, (ROOT / path).read_text(encoding="utf-8")


def texts_of_a_commit(commit: str) -> Iterator[tuple[Path, str]]:
    """Every file of a commit that has a size."""
    listed = git("ls-tree", "-r", "--name-only", "-z", commit)
    for name in listed.split("\0"):
        if name.endswith((".py", ".sh", ".md")):
            yield Path(name), git("show", f"{commit}:{name}")


def git(*words: str) -> str:
    """What git prints; raises `CalledProcessError` where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout


# What is hard to read, and may only become less


def branches_of(function: ast.AST) -> int:
    """The branches of a function: statements, `and` and `or`, conditional expressions, loops of comprehensions."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def branchy_functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """The functions with too many branches, by their names with those of their classes, and how many they have."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from branchy_functions(node, within)
            continue
        name = f"{within}{node.name}"
        if isinstance(node, FUNCTIONS) and branches_of(node) > MOST_BRANCHES:
            yield name, branches_of(node)
        yield from branchy_functions(node, f"{name}.")


def long_statements(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Simple statements with too many nodes: line, and nodes. A docstring is one node.

    A module's table, a constant that is a list, a tuple, a set or a mapping, is read entry by entry, and counts so.
    """
    for node in ast.walk(tree):
        if not isinstance(node, SIMPLE_STATEMENTS):
            continue
        for part in entries_of(node) if node in tree.body else [node]:
            if nodes_in(part) > MOST_NODES:
                yield part.lineno, nodes_in(part)


def entries_of(statement: ast.stmt) -> list[ast.AST]:
    """The entries of a table that a statement assigns; the statement itself where it assigns something else."""
    value = getattr(statement, "value", None)
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return list(value.elts)
    return list(value.values) if isinstance(value, ast.Dict) else [statement]


def is_boolean(node: ast.AST) -> bool:
    """Whether an expression is a truth value, by its form."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "isinstance", "any", "all", "hasattr")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):  # `count or 0` is a number
        return all(map(is_boolean, node.values))
    return isinstance(node, ast.Compare)


def is_choice(node: ast.AST) -> bool:
    """Whether an expression, times a name, is more likely there or not there than repeated.

    A list of numbers or of None is repeated to be filled, and a constant text to draw a line.
    """
    if isinstance(node, ast.List):
        return not all(isinstance(one, ast.Constant) and not isinstance(one.value, str) for one in node.elts)
    return isinstance(node, ast.JoinedStr)


def boolean_arithmetic(tree: ast.Module) -> Iterator[int]:
    """Lines that calculate with truth values: `["--flag"] * config.half`, `total += value is None`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and is_boolean(node.value) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield node.lineno
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
            continue
        sides = (node.left, node.right)
        repeats = isinstance(node.op, ast.Mult) and any(map(is_choice, sides))
        by_a_name = any(isinstance(side, (ast.Name, ast.Attribute)) for side in sides)
        if any(map(is_boolean, sides)) or (repeats and by_a_name):
            yield node.lineno


def words_in(text: str) -> int:
    """The words of a page: with a letter or a digit in them, which bars and dashes of tables have not."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def long_numbers_in(page: str) -> list[str]:
    """The numbers with at least four digits in the prose of a page: outside of tables, code and addresses."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    prose = "\n".join(line for line in prose.splitlines() if not line.lstrip().startswith("|"))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", prose)
    numbers = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w])", prose)
    return [number for number in numbers if len(re.sub(r"^0?\.|\D", "", number)) >= 4]


def room_for(words: int) -> int:
    """How many words a listed page may have: full hundreds, which leave at least `ROOM`."""
    return math.ceil((words + ROOM) / 100) * 100


@functools.cache
def breaches() -> dict[str, dict[str, int]]:
    """What breaks a limit: kind of limit → place → how many; of words, how many the page has room for."""
    branches: dict[str, int] = {}
    statements, arithmetic = Counter[str](), Counter[str]()
    for path, tree in syntax_trees().items():
        branches |= {f"{path}: {name}": count for name, count in branchy_functions(tree)}
        statements[path.as_posix()] = len(list(long_statements(tree)))
        arithmetic[path.as_posix()] = len(list(boolean_arithmetic(tree)))
    words: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for path in tracked(".md"):
        if path.parts[0] != "docs" and path.name not in MOST_WORDS:
            continue
        if path.parts[:2] == ("docs", "reference"):  # written by docs/build.py, and looked up rather than read
            continue
        text, name = (ROOT / path).read_text(encoding="utf-8"), path.as_posix()
        if words_in(text) > MOST_WORDS.get(name, MOST_WORDS_OF_A_PAGE):
            words[name] = room_for(words_in(text))
        if len(long_numbers_in(text)) > MOST_LONG_NUMBERS:
            numbers[name] = len(long_numbers_in(text))
    return {
        "branches": branches,
        "long statements": {place: count for place, count in statements.items() if count},
        "arithmetic on booleans": {place: count for place, count in arithmetic.items() if count},
        "words": words,
        "long numbers": numbers,
    }


def exceptions() -> dict[str, dict[str, int]]:
    """What is known to break a limit, as `breaches` has it."""
    content: dict[str, dict[str, int]] = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    return content


def lines_of(limit: str, path: str) -> list[int]:
    """The lines of a Python file that break a limit of statements; empty for the other limits."""
    tree = syntax_trees().get(Path(path))
    if tree is None or limit not in ("long statements", "arithmetic on booleans"):
        return []
    return [line for line, _ in long_statements(tree)] if limit == "long statements" else [*boolean_arithmetic(tree)]


def raised(commit: str) -> list[str]:
    """The exceptions that are larger than in another commit, or new."""
    try:
        before: dict[str, dict[str, int]] = json.loads(git("show", f"{commit}:{EXCEPTIONS.relative_to(ROOT)}"))
    except subprocess.CalledProcessError:
        return []
    return [
        f"{limit}, {place}: {count}, before {before.get(limit, {}).get(place, 0)}"
        for limit, places in exceptions().items()
        for place, count in places.items()
        if count > before.get(limit, {}).get(place, 0)
    ]


def shrink() -> None:
    """Take out of the exceptions what is better now; nothing is added or raised."""
    now = breaches()
    smaller = {
        limit: {place: min(count, now[limit][place]) for place, count in places.items() if place in now[limit]}
        for limit, places in exceptions().items()
    }
    EXCEPTIONS.write_text(json.dumps(smaller, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# What the house is made of, bound by numbers


def single_importers(trees: dict[Path, ast.Module]) -> list[str]:
    """Modules that exactly one other imports; a package's `__init__.py` is its face, and no importer.

    Left out are jobs that a program imports: a job is what one program does.
    """
    modules = {path.with_suffix("").as_posix().replace("/", "."): path for path in trees if path.name != "__init__.py"}
    importers: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in imported_modules(tree) & set(modules):
            if path != modules[name] and path.name != "__init__.py":
                importers[name].add(path)
    single = {name: next(iter(by)) for name, by in sorted(importers.items()) if len(by) == 1}
    return [f"{modules[name]} ← {by}" for name, by in single.items() if not is_job_of_program(modules[name], by)]


def is_job_of_program(module: Path, importer: Path) -> bool:
    """Tell whether a module is a job, and what imports it is a program."""
    return module.parts[:2] == ("utils", "jobs") and importer.parts[0] not in ("models", "utils")


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
    """The numbers with a hard limit."""
    trees = syntax_trees()
    single, twice = single_importers(trees), defined_twice(trees)
    parallel = [path.as_posix() for path, tree in trees.items() if knows_processes(tree)]
    nodes = sum(nodes_in(tree) for tree in trees.values())
    return [
        Measure("modules with one importer", len(single), 20, single),
        Measure("public names defined twice", len(twice), 0, twice),
        Measure("files that know several processes", len(parallel), 8, parallel),
        Measure("nodes of the product", nodes, MOST_NODES_OF_PRODUCT),
    ]


# The report


def size_lines(now: dict[str, Size], before: dict[str, Size] | None) -> Iterator[str]:
    """A line for each part of the house: its size, and in brackets the difference to `before`."""

    def number(kind: str, value: Callable[[Size], float], form: str) -> str:
        text = format(value(now[kind]), form)
        if before is None:
            return text
        difference = value(now[kind]) - value(before.get(kind, Size()))
        return f"{text} ({format(difference, '+' + form)})"

    for kind in now:
        if kind == "documents":
            yield f"{kind}: {number(kind, lambda size: size.words, ',d')} words"
            continue
        lines, nodes = number(kind, lambda size: size.lines, ",d"), number(kind, lambda size: size.nodes, ",d")
        dense = number(kind, lambda size: size.nodes_a_line, ".2f")
        yield f"{kind}: {lines} lines, {nodes} nodes of Python, {dense} nodes a line of code"


def base_commit(reference: str) -> str | None:
    """The commit to compare with: `reference`, or HEAD's parent where that is HEAD itself; None without one."""
    for name in (reference, "HEAD^"):
        try:
            commit = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
        except subprocess.CalledProcessError:
            continue
        if commit != git("rev-parse", "HEAD").strip():
            return commit
    return None


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--against", metavar="REF")
    parser.add_argument("--shrink", action="store_true")
    options = parser.parse_args()
    if options.shrink:
        shrink()
    before = None
    if options.against:
        commit = base_commit(options.against)
        if commit is None:
            print(f"{options.against} is not in this clone: sizes without differences")
        else:
            before = sizes(texts_of_a_commit(commit))
            print(f"in brackets: the difference to {commit[:8]}")
            print(*(f"exception raised: {line}" for line in raised(commit)), sep="\n")
    print(*size_lines(sizes(texts_of_the_tree()), before), sep="\n")
    for row in measure():
        print(f"{row.what}: {row.count:,}, at most {row.limit:,}")
        if options.list:
            print(*(f"    {name}" for name in row.names), sep="\n")
    for limit, places in breaches().items():
        print(f"exceptions, {limit}: {len(places)}")
        if options.list:
            for place, count in sorted(places.items()):
                lines = lines_of(limit, place)
                print(f"    {place}: {count}" + (f", lines {', '.join(map(str, lines))}" if lines else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
