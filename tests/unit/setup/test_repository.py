"""Files of set-up, releases and containers agree with each other and with what is in the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documentation import ROOT, named
from packaging.requirements import Requirement

import models.quantize

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
    assert {name for name in wanted - listed if not name.endswith(".pyc")} == set()
    assert not {"models/__init__.py", "utils/__init__.py"} & listed, "they are upstream's"
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
