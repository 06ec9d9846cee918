"""README, docs/, set-up, releases and containers: true, and at one with what is there."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import documentation
import house
import pytest
import torch
import yaml
from documentation import LINK, PAGES, PYTHON_PROGRAMS, ROOT, named, problems
from packaging.requirements import Requirement
from small_networks import chain

import models.quantize
from models.quantize.modules import QuantConv2d
from utils import upstream

README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs/index.md").read_text(encoding="utf-8")
MOST_CHARACTERS = 160  # of a line outside of tables
LARGEST_PICTURE = 150_000  # bytes


def test_readme_leads_to_every_page_and_program():
    """By way of docs/index.md and docs/commands.md."""
    assert {"docs/index.md", "docs/commands.md"} <= set(LINK.findall(README))
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert pages - set(LINK.findall(INDEX)) == set()
    table = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    programs = {program for program in PYTHON_PROGRAMS if "/" not in program}
    assert {program for program in programs if not re.search(rf"`python {re.escape(program)}\b", table)} == set()


def linked(section: str) -> list[Path]:
    """The pages that a section of docs/index.md lists, of docs/ alone."""
    text = INDEX.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [ROOT / "docs" / name for name in LINK.findall(text) if not name.startswith("..")]


HOW_TO, TROUBLESHOOT = linked("How-to"), linked("Troubleshoot")


def long_lines(text: str) -> list[int]:
    """The numbers of the lines outside of tables that are longer than `MOST_CHARACTERS`."""
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if len(line) > MOST_CHARACTERS and not line.startswith("|")]


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_no_line_of_a_page_is_longer_than_160_characters(page):
    assert long_lines(page.read_text(encoding="utf-8")) == []


def lacks_of_a_how_to(text: str) -> list[str]:
    """What a how-to lacks: its goal, a command, what that prints, and what to do if it fails."""
    _, _, failures = text.partition("\n## If it fails\n")
    languages = [language for language, _ in documentation.FENCE.findall(text)]
    lacks = {
        "goal": not re.match(r"# [^\n]+\n\n\*\*Goal\*\*: ", text),
        "command": not {"bash", "sh"} & set(languages),
        "output": "text" not in languages,
        "if it fails": not failures.strip(),
    }
    return [part for part, is_missing in lacks.items() if is_missing]


@pytest.mark.parametrize("page", HOW_TO, ids=lambda path: path.name)
def test_a_how_to_has_a_goal_a_command_its_output_and_what_if_it_fails(page):
    assert lacks_of_a_how_to(page.read_text(encoding="utf-8")) == []
    assert page.relative_to(ROOT).as_posix() not in house.exceptions()["words"], "a how-to is short without exception"


def lacks_of_entries(text: str) -> list[str]:
    """The entries of a troubleshooting page without symptom, cause or fix."""
    entries = re.split(r"^## ", documentation.FENCE.sub("", text), flags=re.MULTILINE)[1:]
    entries = [entry for entry in entries if not entry.startswith("What good looks like")]
    return [
        f"{entry.partition(chr(10))[0]}: {word}"
        for entry in entries
        for word in ("Symptom", "Cause", "Fix")
        if f"**{word}**" not in entry
    ]


@pytest.mark.parametrize("page", TROUBLESHOOT, ids=lambda path: path.name)
def test_an_entry_of_troubleshooting_has_symptom_cause_and_fix(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("\n## ") > 3
    assert lacks_of_entries(text) == []


def test_the_bounds_of_pages_find_what_breaks_them():
    assert (len(HOW_TO) > 15, len(TROUBLESHOOT)) == (True, 6)
    assert long_lines("a\n" + "b" * 161 + "\n|" + "c" * 200) == [2]
    page = "# A\n\n**Goal**: b.\n\n```bash\npython qat.py\n```\n\n```text\nc\n```\n\n## If it fails\n\n- d\n"
    assert lacks_of_a_how_to(page) == []
    broken = {"goal": "**Goal**", "command": "bash", "output": "text", "if it fails": "## If it fails"}
    for part, text in broken.items():
        assert lacks_of_a_how_to(page.replace(text, "yaml", 1)) == [part]
    entry = "# A\n\n## B\n\n- **Symptom**: c\n- **Cause**: d\n- **Fix**: e\n"
    assert lacks_of_entries(entry) == []
    assert lacks_of_entries(entry.replace("**Cause**", "")) == ["B: Cause"]


def test_pictures_are_small_and_used():
    """A page loads at once, and nothing lies in docs/ that no page shows."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
    pictures = [path for kind in ("png", "jpg", "svg") for path in ROOT.glob(f"docs/**/*.{kind}")]
    assert pictures
    for path in pictures:
        assert path.stat().st_size <= LARGEST_PICTURE, path
        assert f"{path.name})" in pages, path


OTHERS = [ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", ".github/pull_request_template.md")]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.name)
def test_page_says_what_is_so(page):
    text = page.read_text(encoding="utf-8")
    found = problems(text, page.parent)
    if page.name in ("CHANGELOG.md", "errors.md"):  # of earlier versions too, whose files and flags may be gone
        found = [problem for problem in found if problem.startswith("the link")]
    assert found == []


UPSTREAM = {"detect.py", "train.py", "segment/train.py", "segment/train_dual.py", "train_dual.py", "val.py",
            "export.py", "model.py", "yolo.py", "models/common.py", "models/experimental.py", "models/yolo.py",
            "utils/general.py", "utils/__init__.py"}  # fmt: skip


def test_files_that_the_code_names_are_there():
    """They lie beside the module or, by path or name, in the project; a patched checkout has no documents."""
    library = [path for part in ("models/**/*.py", "utils/**/*.py") for path in ROOT.glob(part)]
    for path in [*library, *ROOT.glob("*.py"), *ROOT.glob("scripts/[!y]*.py")]:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r'"[^"\n]+\bdocs/\w+\.md\b(?! of the overlay)', text) == [], path
        names = {*re.findall(r"(?<![\w./*-])\w[\w/]*\.(?:py|sh)\b", text), *documentation.FILE.findall(text)}
        folders = (path.parent, ROOT, ROOT / "scripts", ROOT / "data/demo", ROOT / "examples")
        missing = {name for name in names - UPSTREAM if not any((folder / name).exists() for folder in folders)}
        assert missing - {module.name for module in library} == set(), path


def test_the_walks_of_contributing_name_what_is_there():
    files = named("*.py", "models/**/*.py", "utils/**/*.py")
    code = "\n".join((ROOT / name).read_text("utf-8") for name in files)
    walks = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Three walks")[2].partition("\n## ")[0]
    for owner, name in re.findall(r"^ {4,}[\w.]*?(\w*)\.?\b(\w+)(?![\w.])", walks, re.MULTILINE):
        body = re.search(rf"^class {owner}\b.*?(?=^\S)", code, re.M | re.S) if owner[:1].isupper() else None
        assert re.search(rf"^ *(?:def )?{name}[(:]", body[0] if body else code, re.M), f"{owner}.{name}"


def bash(line: str) -> str:
    return f"# A page\n\n```bash\n{line}\n```\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bash("python qat.py quantize --weight a.pt"), "unrecognized arguments: --weight a.pt"),
        (bash("cd yolov9 && python quantize.py"), "quantize.py is no program of this repository"),
        (bash("./scripts/quickstart.sh --fast"), "scripts/quickstart.sh has no --fast"),
        (bash("curl https://example.org"), "curl is no program"),
        ("see `utils/trt/gone.py`", "there is no utils/trt/gone.py"),
        ("see `gone.py --gone`", "there is no gone.py"),
        ("see `--gone`", "no program has --gone"),
        ("[a](docs/gone.md)", "the link docs/gone.md leads to no file"),
        ("[a](docs/placement.md#gone)", "the link docs/placement.md#gone leads to no heading"),
    ],
)
def test_what_is_not_so_is_found(text, problem):
    assert any(problem in one for one in problems(text)), problems(text)


def test_the_example_quantizes_and_calibrates_a_network(monkeypatch):
    load = create_autospec(upstream.load_float, return_value=SimpleNamespace(model=chain()))
    monkeypatch.setattr(upstream, "load_float", load)
    monkeypatch.setattr(upstream, "fuse", create_autospec(upstream.fuse, side_effect=lambda model: model))
    names = {"batches": [torch.rand(2, 3, 32, 32)] * 2}
    test = doctest.DocTestParser().get_doctest(models.quantize.__doc__, {}, "models.quantize", None, None)
    test.globs = names  # not the copy
    result = doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None, clear_globs=False)
    assert (result.failed, result.attempted > 0) == (0, True)
    model = names["model"]
    assert isinstance(model.model[6], QuantConv2d)
    assert any(float(one.amax) != 1 for one in model.activation_quantizers.values())


REQUIREMENTS = sorted({*ROOT.glob("requirements/*.txt")} - {ROOT / "requirements/constraints.txt"})
SHELL_SCRIPTS = [*named("*.sh", "scripts/*.sh"), ".ci/run"]
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def test_one_version_everywhere():
    changes, version = (ROOT / "CHANGELOG.md").read_text("utf-8"), (ROOT / "VERSION").read_text("utf-8").strip()
    (newest, *_), (released, *_) = (re.findall(rf"^## (\d[\d.]*){end}", changes, re.MULTILINE)
                                    for end in ("", r" - \d{4}-\d\d-\d\d$"))  # fmt: skip
    assert models.quantize.__version__ == version == newest + ".dev0" * (newest != released)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == released


def test_the_manifest_lists_the_library_the_programs_and_the_demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    listed = {*patch_overlay.overlay_files(ROOT)}
    wanted = {name for name in named("*.py", "data/**/*", "models/**/*", "utils/**/*") if (ROOT / name).is_file()}
    missing = {name for name in wanted - listed if not name.endswith(".pyc")}
    assert missing == {"models/__init__.py", "utils/__init__.py"}, "they are upstream's in a checkout"
    assert [name for name in listed if re.search(r"^\.|^benchmarks/|/\.|__pycache__", name)] == []


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_requirement_has_a_lower_bound_and_the_tested_version_is_within(path):
    tested = {one.name: next(iter(one.specifier)) for one in requirements(ROOT / "requirements/constraints.txt")}
    for requirement in requirements(path):
        assert any(bound.operator in (">=", "==") for bound in requirement.specifier), requirement
        pin = tested.get(requirement.name)
        assert pin is None or pin.operator != "==" or requirement.specifier.contains(pin.version), requirement


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_a_script_is_valid_and_answers_help_without_setting_anything_up(script, tmp_path):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    if script == "scripts/lib.sh":
        return
    assert os.access(ROOT / script, os.X_OK)
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [ROOT / script, "-h"], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=60
    )
    assert (result.returncode, [*tmp_path.iterdir()]) == (0, []), result.stderr
    assert re.search(r"usage|\./scripts/", result.stdout)


def instructions(path: Path, kind: str) -> list[str]:
    """The arguments of each instruction of a kind; continued lines are joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return re.findall(rf"^{kind}\s+(.*)", re.sub(r"\\\n\s*", "", "\n".join(lines)), re.MULTILINE)


def test_containers_copy_and_run_what_is_there_with_arguments_that_are_there():
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]
    compose = yaml.safe_load((ROOT / "containers/compose.yaml").read_text(encoding="utf-8"))
    built = [service["build"] for service in compose["services"].values() if "build" in service]
    assert {ROOT / build["dockerfile"] for build in built} == {*DOCKERFILES}
    for path in DOCKERFILES:
        copied = [word for words in instructions(path, "COPY") for word in words.split()[:-1]]
        ran = [word for words in instructions(path, "RUN") for word in words.split() if word.startswith("./")]
        assert min(len(copied), len(ran)) > 0
        assert [word for word in (*copied, *ran) if not (ROOT / word).exists()] == []
        assert [word for word in copied if any(Path(word).match(pattern) for pattern in ignored)] == []
    for build in built:
        assert (ROOT / "containers" / build["context"]).resolve() == ROOT
        known = dict(argument.split("=", 1) for argument in instructions(ROOT / build["dockerfile"], "ARG"))
        for name, value in build["args"].items():  # the Dockerfile's own default
            assert dict(re.findall(r"\$\{(\w+):-([^}]*)\}", value)) == {name: known[name].strip('"')}
