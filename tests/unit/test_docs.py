"""README, docs/ and the package's example: short enough to be read, linked together, and true."""

import doctest
import re
from types import SimpleNamespace
from unittest.mock import create_autospec

import documentation
import pytest
import torch
from documentation import LINK, PAGES, PYTHON_PROGRAMS, ROOT, problems
from small_networks import chain

import models.quantize
from models.quantize.modules import QuantConv2d
from utils import upstream

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_can_be_read_in_five_minutes_and_leads_to_every_page_and_program():
    assert len(README.splitlines()) <= 140
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")} <= set(LINK.findall(README))
    programs = {program for program in PYTHON_PROGRAMS if "/" not in program}
    assert {program for program in programs if not re.search(rf"`python {re.escape(program)}\b", README)} == set()


OTHERS = [ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", ".github/pull_request_template.md")]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda path: path.name)
def test_page_says_what_is_so(page):
    text = page.read_text(encoding="utf-8")
    found = problems(text, page.parent)
    if page.name == "CHANGELOG.md":  # of earlier versions too, whose files and flags may be gone
        found = [problem for problem in found if problem.startswith("the link")]
    assert found == []


UPSTREAM = {"detect.py", "train.py", "segment/train_dual.py", "train_dual.py", "val.py", "export.py", "model.py",
            "yolo.py", "models/common.py", "models/experimental.py", "models/yolo.py", "utils/general.py",
            "utils/__init__.py"}  # fmt: skip


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
