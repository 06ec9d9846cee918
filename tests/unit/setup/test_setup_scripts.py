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
SHELL_SCRIPTS = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"]
)


def overlay_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import overlay_plan

    return set(overlay_plan.overlay_files(ROOT))


class TestManifest:
    def test_lists_the_library_the_programs_and_the_demo(self, monkeypatch: pytest.MonkeyPatch):
        wanted = [*ROOT.glob("*.py"), *(ROOT / "data").rglob("*")]
        wanted += [*(ROOT / "models").rglob("*"), *(ROOT / "utils").rglob("*")]
        files = {p.relative_to(ROOT).as_posix() for p in wanted if p.is_file() and p.suffix != ".pyc"}
        assert files - overlay_files(monkeypatch) == set()

    def test_leaves_upstreams_packages_to_upstream(self, monkeypatch: pytest.MonkeyPatch):
        assert not {"models/__init__.py", "utils/__init__.py"} & overlay_files(monkeypatch)

    def test_takes_no_bytecode_and_nothing_hidden(self, monkeypatch: pytest.MonkeyPatch):
        for path in overlay_files(monkeypatch):
            assert "__pycache__" not in path
            assert not any(part.startswith(".") for part in path.split("/"))


class TestRequirements:
    @staticmethod
    def read(name: str) -> list[Requirement]:
        lines = (line.split("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
        return [Requirement(line) for line in lines if line and not line.startswith("-")]

    @pytest.mark.parametrize("name", ["runtime.txt", "quantize.txt", "dev.txt"])
    def test_every_requirement_has_a_lower_bound(self, name: str):
        for requirement in self.read(name):
            assert any(s.operator in (">=", "==") for s in requirement.specifier), requirement

    def test_the_tested_combination_is_within_the_bounds(self):
        pins = {r.name: next(iter(r.specifier)) for r in self.read("constraints.txt")}
        for name in ("runtime.txt", "quantize.txt"):
            for requirement in self.read(name):
                pin = pins.get(requirement.name)
                assert pin is None or pin.operator != "==" or requirement.specifier.contains(pin.version), requirement

    def test_what_must_not_be_needed(self):
        for path in (ROOT / "requirements").glob("*.txt"):
            names = {r.name for r in self.read(path.name)}
            assert not names & {"pycuda", "onnx-graphsurgeon", "nvidia-modelopt", "opencv-python"}
            assert "pytorch-quantization" not in names or path.stem == "pytorch-quantization"

    def test_environment_py_knows_every_set(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        import environment

        sets = {p.stem for p in (ROOT / "requirements").glob("*.txt")} - {"constraints"}
        assert set(environment.IMPORTS) == sets


class TestScripts:
    @pytest.mark.parametrize("script", SHELL_SCRIPTS)
    def test_is_valid_bash(self, script: str):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        assert script == "scripts/lib.sh" or os.access(ROOT / script, os.X_OK)

    @pytest.mark.parametrize("script", [s for s in SHELL_SCRIPTS if s != "scripts/lib.sh"])
    def test_answers_help_without_setting_anything_up(self, script: str, tmp_path: Path):
        result = run(script, "-h", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert re.search(r"usage|\./scripts/", result.stdout)
        assert not list(tmp_path.iterdir())

    def test_test_sh_refuses_what_it_does_not_know(self, tmp_path: Path):
        result = run("scripts/test.sh", "--everything", cwd=tmp_path)
        assert result.returncode == 2
        assert "unknown argument --everything" in result.stderr

    def test_a_part_keeps_its_exit_code_and_says_how_long_it_took(self):
        source = f'. "{ROOT}/scripts/lib.sh"; run_part "the part" sh -c "exit 3"'
        result = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=False)
        assert result.returncode == 3
        assert re.search(r"the part: failed after \d+ s \(exit code 3\)", result.stdout)


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [ROOT / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=60)
