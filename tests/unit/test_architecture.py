"""The floors: imports run downwards. The doors: who may import upstream and TensorRT. And the size of the house."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import house
import pytest
from documentation import PYTHON_PROGRAMS, ROOT
from imports import imported

LIBRARY = sorted({*ROOT.glob("models/**/*.py"), *ROOT.glob("utils/**/*.py")} - {*ROOT.glob("*s/__init__.py")})
COMMANDS = [f"qat.py {command}" for command in ("quantize", "sensitive", "calibrate", "eval")]
PROGRAMS = [name for name in PYTHON_PROGRAMS if not name.startswith("benchmarks/")]
ROOMS = sorted({path.parent.relative_to(ROOT).as_posix() for path in LIBRARY} - {"models", "utils"})
FLOORS = {  # the longest prefix that fits; `utils.cli` is beside the ground
    "utils.core": 0, "utils.upstream": 1, "utils.runners": 1, "utils.cli": 1, "models": 2, "utils.evaluation": 2,
    "utils.onnx_graph": 2, "utils.trt": 2, "utils.reports": 2, "utils.serving": 2, "utils.jobs": 3,
}  # fmt: skip


def module_of(path: Path) -> str:
    """The dotted name of a file of the library."""
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


OURS = {module_of(path) for path in LIBRARY}
OURS |= {name.rpartition(".")[0] for name in OURS}


def doors(source: str) -> set[str]:
    """Which of the guarded things a module imports."""
    found = set()
    for name in imported(ast.parse(source)):
        top = name.split(".")[0]
        if top.startswith("tensorrt"):
            found.add("TensorRT")
        elif top in ("models", "utils") and not {name, name.rpartition(".")[0]} & (OURS - {"models", "utils"}):
            found.add("upstream")
    return found


UPSTREAM = {f"utils/upstream/{name}.py" for name in ("checkout", "dataset", "network", "shims")}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_downwards_and_go_through_the_doors(path):
    """utils/trt/tensorrt_api.py imports TensorRT by name, which this walk does not see."""
    source = path.read_text(encoding="utf-8")
    assert doors(source) <= ({"upstream"} if path.relative_to(ROOT).as_posix() in UPSTREAM else set())
    assert arrows_up(module_of(path), source) == []


@pytest.mark.parametrize("program", [*PROGRAMS, *COMMANDS, "scripts/run_upstream.py"])
def test_help_answers_at_once_and_without_heavy_imports(program):
    command = [sys.executable, "-X", "importtime", *program.split(), "-h"]
    began = time.perf_counter()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-500:]
    assert "usage" in result.stdout.lower() or "python " in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert not loaded & {"torch", "onnx", "onnxruntime", "tensorrt", "cv2", "matplotlib", "numpy"}
    assert time.perf_counter() - began < 10  # a second on an idle machine; what costs time is named above


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_of_a_room_is_on_its_map(room):
    text = (ROOT / room / "__init__.py").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / room).glob("*.py")} - {"__init__.py"}
    assert {name for name in files if not re.search(rf"\b{re.escape(name[:-3])}\b", text)} == set()


def floor(module: str) -> int:
    """The floor that a module is on: it imports from lower ones only."""
    return next(number for prefix, number in FLOORS.items() if f"{module}.".startswith(f"{prefix}."))


def room(module: str) -> str:
    """The folder, or the file beside the folders, that a module belongs to."""
    return ".".join(module.split(".")[:2])


def arrows_up(module: str, source: str) -> list[str]:
    """Imports of a module that run upwards, or to another room on its own floor."""
    found = set()
    for name in imported(ast.parse(source)):
        target = name if name in OURS else name.rpartition(".")[0]
        if target in OURS - {"models", "utils"} and room(target) != room(module) and floor(target) >= floor(module):
            found.add(target)
    return sorted(found)


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("utils.core.files", "def f():\n    from utils.general import LOGGER", ({"upstream"}, [])),
        ("utils.core.files", "import tensorrt as trt", ({"TensorRT"}, [])),
        ("utils.core.files", "from utils import upstream", (set(), ["utils.upstream"])),
        ("utils.runners.base", "from utils.evaluation import nms", (set(), ["utils.evaluation.nms"])),
        ("models.reparam", "from models.quantize import placement", (set(), ["models.quantize.placement"])),
    ],
)
def test_the_walk_sees_a_forbidden_import(module, line, found):
    assert (doors(line), arrows_up(module, line)) == found


@pytest.mark.parametrize("row", house.measure(), ids=lambda row: row.what)
def test_the_house_keeps_its_limits(row):
    assert row.count <= row.limit, (
        f"{row.what}: {row.count}, and the limit in tests/house.py is {row.limit}. Raise it there, and give the reason "
        f"in the commit's message. {row.names}"
    )


@pytest.mark.parametrize("limit", ["branches", "long statements", "arithmetic on booleans", "words", "long numbers"])
def test_nothing_is_harder_to_read_than_the_listed_exceptions(limit):
    """What got better is taken out of the list, which may only shrink: `python tests/house.py --shrink`."""
    now, listed = house.breaches()[limit], house.exceptions()[limit]
    worse = {place: count for place, count in now.items() if count > listed.get(place, 0)}
    lines = {place: found for place in worse if (found := house.lines_of(limit, place))}
    listed_before = {place: listed.get(place, 0) for place in worse}
    assert worse == {}, f"{limit}: {house.LIMITS[limit]} (listed: {listed_before}; all of these lines: {lines})"
    better = {place: count for place, count in listed.items() if now.get(place, 0) < count}
    assert better == {}, "run `python tests/house.py --shrink` and commit the shorter list"


def test_what_is_counted():
    source = "def run(): ...\ndef same(): ...\n"
    other = ast.parse("from utils import a\nfrom utils.core import distributed\ndef same(): ...\ndef run(): ...\n")
    trees = {Path("utils/a.py"): ast.parse(source), Path("utils/b.py"): other}
    assert house.defined_twice(trees) == ["same: utils/a.py, utils/b.py"]
    assert house.single_importers(trees) == ["utils/a.py ← utils/b.py"]
    job, program = ast.parse("x = 1"), ast.parse("from utils.jobs import c")
    assert house.single_importers({Path("utils/jobs/c.py"): job, Path("scripts/d.py"): program}) == []
    assert len(house.single_importers({Path("utils/jobs/c.py"): job, Path("utils/d.py"): program})) == 1
    assert [house.knows_processes(tree) for tree in trees.values()] == [False, True]


BRANCHES = """
def f(items):
    if items and len(items) > 1 or not items:
        return [a if a else b for a, b in items if a]
    for item in items:
        try:
            while item: ...
        except ValueError: ...
"""


def test_branches_hide_nowhere():
    """`if`, `and`, `or`; the conditional expression, the loop and the condition of the list; `for`, `while`, except."""
    assert house.branches_of(ast.parse(BRANCHES)) == 3 + 3 + 3
    many = "def f(x):\n" + "    x = 1 if x else 2\n" * 21
    assert list(house.branchy_functions(ast.parse(many))) == [("f", 21)]
    assert list(house.branchy_functions(ast.parse(many.replace("    x = 1 if x else 2\n", "", 1)))) == []
    twice = "".join(f"class {name}:\n" + many.replace("\n", "\n ").replace("def", " def") + "\n" for name in "AB")
    assert list(house.branchy_functions(ast.parse(twice))) == [("A.f", 21), ("B.f", 21)]


def test_long_statements_are_found():
    long = f"a = [{', '.join('f(x)' for _ in range(15))}]"
    assert list(house.long_statements(ast.parse(f"def f():\n    {long}"))) == [(2, 3 + 2 + 15 * 5)]
    assert list(house.long_statements(ast.parse(f'def f():\n    """{"word " * 100}"""\n    a = 1'))) == []
    assert list(house.long_statements(ast.parse(long))) == [], "a table of short entries"
    assert len(list(house.long_statements(ast.parse(f"TABLE = [1, {long.partition('= ')[2]}]")))) == 1


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ('x = ["--fast"] * options.fast', [1]),
        ("x = y * (a > b)", [1]),
        ("count += value is None", [1]),
        ('x = f"{name}: " * several', [1]),
        ("x = 2 * y + 1", []),
        ('x = "-" * width', []),
        ("x = [0] * count + [None] * count", []),
        ("x = a + (b or 0)", []),
        ("x = [run] * wanted", [1]),
        ("x = [0] * (a - b)", []),
        ("x = a > b", []),
        ("count += 1", []),
    ],
)
def test_arithmetic_on_booleans_is_found(line, lines):
    assert list(house.boolean_arithmetic(ast.parse(line))) == lines


def test_words_and_long_numbers_of_a_page():
    page = "From 0.7133 to 0.71, 1,800 images of 640.\n\n| 0.1234 |\n\n```\n0.1234\n```\n`0.1234` [a](b-1234)\n"
    assert house.words_in(page) == 12
    assert house.long_numbers_in(page) == ["0.7133", "1,800"]


def test_sizes_leave_out_what_is_no_code():
    text = '"""A\nmodule."""\n\n# a comment\nx = """a\nb"""\n\n\ndef f():\n    """Do."""\n    return (1,\n        2)\n'
    assert house.code_lines(text) == {5, 6, 9, 11, 12}
    size = house.size_of(Path("utils/a.py"), text)
    assert (size.lines, size.code_lines, size.nodes) == (12, 5, house.nodes_in(ast.parse(text)))
    before = house.sizes([(Path("utils/a.py"), "x = 1\n"), (Path("docs/a.md"), "two words")])
    now = house.sizes([(Path("utils/a.py"), "x = 1\ny = 2\n"), (Path("docs/a.md"), "two more words")])
    assert list(house.size_lines(now, before)) == [
        "product: 2 (+1) lines, 9 (+4) nodes of Python, 4.50 (-0.50) nodes a line of code",
        "documents: 3 (+1) words",
    ]
