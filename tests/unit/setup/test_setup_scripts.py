"""The set-up files agree with each other and with what is in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "requirements/constraints.txt"
REQUIREMENTS = sorted({*ROOT.glob("requirements/*.txt")} - {CONSTRAINTS})
SHELL_SCRIPTS = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"]
)


def test_the_manifest_lists_the_library_the_programs_and_the_demo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    listed = {*patch_overlay.overlay_files(ROOT)}
    wanted = [path for pattern in ("*.py", "data/**/*", "models/**/*", "utils/**/*") for path in ROOT.glob(pattern)]
    files = {path.relative_to(ROOT).as_posix() for path in wanted if path.is_file() and path.suffix != ".pyc"}
    assert files - listed == set()
    assert not {"models/__init__.py", "utils/__init__.py"} & listed, "they are upstream's"
    hidden = [path for path in listed if path.startswith((".", "benchmarks/")) or "/." in path or "__pycache__" in path]
    assert hidden == []


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_requirement_has_a_lower_bound_and_the_tested_version_is_within(path: Path):
    tested = {requirement.name: next(iter(requirement.specifier)) for requirement in requirements(CONSTRAINTS)}
    for requirement in requirements(path):
        assert any(bound.operator in (">=", "==") for bound in requirement.specifier), requirement
        pin = tested.get(requirement.name)
        assert pin is None or pin.operator != "==" or requirement.specifier.contains(pin.version), requirement


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_is_valid_bash(script: str):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert script == "scripts/lib.sh" or os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", [s for s in SHELL_SCRIPTS if s != "scripts/lib.sh"])
def test_answers_help_without_setting_anything_up(script: str, tmp_path: Path):
    result = run(script, "-h", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"usage|\./scripts/", result.stdout)
    assert not list(tmp_path.iterdir())


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [ROOT / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=60)
