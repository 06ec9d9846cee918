"""get_yolov9.sh and patch_yolov9.sh on the real upstream; the sources are the checkout that these tests run in."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(script: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [ROOT / script, *arguments], PLAIN | {"PYTHON": sys.executable, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_checkout_holds_the_overlay_as_it_is_now(checkout):
    for path in json.loads((checkout / ".yolov9_overlay/manifest.json").read_text())["files"]:
        assert (checkout / path).read_bytes() == (ROOT / path).read_bytes(), "run patch_yolov9.sh again"


def test_without_github_pypis_wheel_becomes_a_checkout(checkout, tmp_path):
    """Its git tree is compared, so it holds what was once tested. The YAMLs are equal, and it can be patched."""
    programs, folder = tmp_path / "programs", tmp_path / "from pypi"
    programs.mkdir()
    fake = programs / "git"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *ls-remote*) exit 128 ;; esac\nexec {shutil.which("git")} "$@"\n')
    fake.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for words in ("in ", "already, "):  # the second time it is there
        result = run("scripts/get_yolov9.sh", folder, PATH=path)
        assert (result.returncode, f"{words}" in result.stdout) == (0, True), result.stderr
        assert "from PyPI's yolo9==1.0.18" in result.stdout
    for file in checkout.glob("models/*/*.yaml"):
        assert (folder / file.relative_to(checkout)).read_bytes() == file.read_bytes()
    assert run("patch_yolov9.sh", folder).returncode == 0
    assert {line[:3] for line in git(folder, "status", "--porcelain").splitlines()} == {"?? "}, (
        "upstream's may not change"
    )
    program = "from utils import upstream; upstream.build_model('models/detect/yolov9-t.yaml')"
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=PLAIN, check=True)
    assert list(folder.rglob("__pycache__"))
    assert run("patch_yolov9.sh", folder, "--revert").returncode == 0
    assert git(folder, "status", "--porcelain", "--ignored") == ""


def test_a_repository_of_ones_own_is_taken(checkout, tmp_path):
    result = run("scripts/get_yolov9.sh", tmp_path / "my yolov9", YOLOV9_SOURCE=str(checkout))
    assert result.returncode == 0, result.stderr
    assert git(tmp_path / "my yolov9", "status", "--porcelain") == ""
