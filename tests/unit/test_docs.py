"""README and docs/: short enough to be read, linked together, and true as far as commands and names go."""

from __future__ import annotations

import re

import documentation
import pytest
from documentation import LINK, PAGES, PYTHON_PROGRAMS, ROOT, SHELL_PROGRAMS, commands, problems

MOST_LINES = 140  # of README: what a new user reads in five minutes


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_can_be_read_in_five_minutes():
    assert len(readme().splitlines()) <= MOST_LINES


def test_readme_links_to_every_page():
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert pages <= set(LINK.findall(readme()))


def test_readme_names_every_program_of_a_user():
    text = readme()
    for program in PYTHON_PROGRAMS:
        if "/" not in program:
            assert re.search(rf"`python {re.escape(program)}\b", text), program


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_page_says_what_is_so(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    found = problems(text, page.parent)
    if page.name == "CHANGELOG.md":  # of earlier versions too, whose files and flags may be gone
        found = [problem for problem in found if problem.startswith("the link")]
    assert found == []


def test_the_pages_commands_are_seen():
    seen = {word.removeprefix("./") for page in PAGES for words in commands(page.read_text("utf-8")) for word in words}
    assert {"qat.py", "export_qat.py", "val_trt.py", "reparameterization.py", "scripts/quickstart.sh"} <= seen
    assert seen & {*PYTHON_PROGRAMS} > {"qat.py"}
    assert seen & {*SHELL_PROGRAMS} > {"scripts/quickstart.sh"}


def test_files_that_the_code_names_are_there():
    """Messages say which file to touch, and of documents that they are the overlay's: a patched checkout has none."""
    code = [path for part in ("*.py", "models/**/*.py", "utils/**/*.py", "scripts/*.py") for path in ROOT.glob(part)]
    texts = [path.read_text(encoding="utf-8") for path in code]
    assert re.findall(r'"[^"\n]+\bdocs/\w+\.md\b(?! of the overlay)', "\n".join(texts)) == []
    named = {file for text in texts for file in documentation.FILE.findall(text)}
    assert {file for file in named if not (ROOT / file).exists()} == {"utils/general.py"}  # upstream's
    assert {"models/quantize/rules.py", "utils/upstream/description.py"} <= named


def bash(line: str) -> str:
    return f"# A page\n\n```bash\n{line}\n```\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bash("python qat.py quantize --weight a.pt"), "unrecognized arguments: --weight a.pt"),
        (bash("cd yolov9 && python quantize.py"), "quantize.py is no program of this repository"),
        (bash("./scripts/quickstart.sh --fast"), "scripts/quickstart.sh has no --fast"),
        (bash("curl https://example.org"), "curl is no program"),
        (bash("python qat.py eval \\\n  --weights a/yolov9-t.pt"), "qat.py refuses yolov9-t.pt"),
        ("```sh\ndocker run a python3 qat.py quantize --weights /data/yolov9-c.pt\n```\n", "refuses yolov9-c.pt"),
        ("`python qat.py eval --epochs`", "qat.py has no --epochs"),
        ("see `utils/trt/gone.py`", "there is no utils/trt/gone.py"),
        ("see `verify.vanish`", "verify.py has no vanish"),
        ("[a](docs/placement.md#gone)", "the link docs/placement.md#gone leads to no heading"),
    ],
)
def test_what_is_not_so_is_found(text, problem):
    found = problems(text)
    assert len(found) >= 1
    assert any(problem in one for one in found), found
