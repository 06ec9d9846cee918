"""get_yolov9.sh and patch_yolov9.sh on the real upstream; the sources are the checkout that these tests run in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"PYTHON": sys.executable, **variables}
    command = [ROOT / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def pristine(checkout: Path, tmp_path: Path) -> Path:
    """Upstream as it was fetched, without the overlay."""
    folder = tmp_path / "my yolov9"
    result = run("scripts/get_yolov9.sh", folder, YOLOV9_SOURCE=str(checkout))
    assert result.returncode == 0, result.stderr
    return folder


def test_the_checkout_holds_the_overlay_as_it_is_now(checkout: Path):
    for path in json.loads((checkout / ".yolov9_overlay/manifest.json").read_text())["files"]:
        assert (checkout / path).read_bytes() == (ROOT / path).read_bytes(), "run patch_yolov9.sh again"


def test_patch_and_revert_leave_git_status_clean(pristine: Path):
    assert git(pristine, "status", "--porcelain") == ""
    result = run("patch_yolov9.sh", pristine)
    assert result.returncode == 0, result.stderr
    changes = git(pristine, "status", "--porcelain").splitlines()
    assert changes
    assert all(line.startswith("?? ") for line in changes), "no file of upstream's may change"
    program = "import models.yolo, utils.dataloaders, models.quantize, utils.upstream"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    program = "from utils.upstream.checkout import import_upstream; import_upstream(); " + program
    subprocess.run([sys.executable, "-c", program], cwd=pristine, env=environment, check=True)
    assert list(pristine.rglob("__pycache__"))
    assert run("patch_yolov9.sh", pristine, "--revert").returncode == 0
    assert git(pristine, "status", "--porcelain", "--ignored") == ""


TRAINED = """
from pathlib import Path
from utils import upstream
for name in ("detect/yolov9-t", "detect/gelan-e", "segment/gelan-c-seg"):  # every class of the others, too
    upstream.build_model(Path("models") / f"{name}.yaml")
print(upstream.load_float("runs/train/exp/weights/last.pt").nc)
"""


@pytest.mark.slow
def test_without_github_pypis_wheel_becomes_a_checkout_that_trains(checkout: Path, demo_data: Path, tmp_path: Path):
    """It is the same code: the YAMLs are equal, patching and reverting work, and upstream's train.py runs."""
    programs, folder, data = tmp_path / "programs", tmp_path / "from pypi", tmp_path / "data"
    programs.mkdir()
    fake = programs / "git"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *ls-remote*) exit 128 ;; esac\nexec {shutil.which("git")} "$@"\n')
    fake.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    result = run("scripts/get_yolov9.sh", folder, PATH=path)
    assert result.returncode == 0, result.stderr
    assert "yolo9==1.0.18" in git(folder, "log", "--format=%s")
    yamls = [file.relative_to(checkout) for file in checkout.glob("models/*/*.yaml")]
    assert yamls
    for file in yamls:
        assert (folder / file).read_bytes() == (checkout / file).read_bytes()
    again = run("scripts/get_yolov9.sh", folder, PATH=path)
    assert (again.returncode, "already, from PyPI's yolo9==1.0.18" in again.stdout) == (0, True)

    assert run("patch_yolov9.sh", folder).returncode == 0
    train(folder, few_images(demo_data, data))
    built = subprocess.run([sys.executable, "-c", TRAINED], cwd=folder, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout) == (0, "10\n"), built.stderr
    shutil.rmtree(folder / "runs")
    assert run("patch_yolov9.sh", folder, "--revert").returncode == 0
    for cached in list(folder.rglob("__pycache__")):  # of modules that upstream's own program imported
        shutil.rmtree(cached)
    assert git(folder, "status", "--porcelain", "--ignored") == ""


def few_images(demo_data: Path, folder: Path) -> Path:
    """A data.yaml of four images of each half of the demo set."""
    for half in ("train", "val"):
        for image in sorted((demo_data.parent / "images" / half).iterdir())[:4]:
            label = demo_data.parent / "labels" / half / f"{image.stem}.txt"
            for source in (image, label):
                target = folder / source.relative_to(demo_data.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    text = "\n".join(line for line in demo_data.read_text().splitlines() if not line.startswith("path:"))
    (folder / "data.yaml").write_text(f"path: {folder}\n{text}\n")
    return folder / "data.yaml"


def train(folder: Path, data: Path) -> None:
    """One epoch of upstream's train.py, in the checkout."""
    command = [sys.executable, "scripts/run_upstream.py", "train.py", "--data", data, "--weights", "", "--epochs", "1"]
    command += ["--cfg", "data/demo/gelan-digits.yaml", "--hyp", "data/demo/hyp.digits.yaml", "--imgsz", "64"]
    command += ["--batch-size", "4", "--workers", "0", "--device", "cpu", "--noplots"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "not writeable" not in result.stdout + result.stderr  # of label caches, which are switched off


def test_a_folder_without_git(pristine: Path, tmp_path: Path):
    shutil.rmtree(pristine / ".git")
    result = run("scripts/get_yolov9.sh", tmp_path / "copy", YOLOV9_SOURCE=str(pristine))
    assert result.returncode == 0, result.stderr
    assert git(tmp_path / "copy", "status", "--porcelain") == ""
    (pristine / "val.py").write_text("changed")
    result = run("scripts/get_yolov9.sh", tmp_path / "changed", YOLOV9_SOURCE=str(pristine))
    assert (result.returncode, "is not YOLOv9 at commit" in result.stderr) == (1, True)
    assert not (tmp_path / "changed").exists()
