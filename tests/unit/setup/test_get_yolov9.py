"""scripts/get_yolov9.sh without a network: folders, stand-ins for git and pip, and addresses that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/get_yolov9.sh"
NO_NETWORK = 'case "$*" in *ls-remote*) echo "no network" >&2; exit 128 ;; esac'


class Place:
    """A folder to download into, and one whose programs stand before the system's."""

    def __init__(self, root: Path) -> None:
        self.root, self.programs = root / "down loads", root / "programs"
        self.root.mkdir()
        self.programs.mkdir()
        self.target = self.root / "yolov9"

    def program(self, name: str, text: str, real: str) -> str:
        """A program that runs lines of shell, and then the real one."""
        path = self.programs / name
        path.write_text(f'#!/bin/sh\n{text}\nexec {real} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def git(self, text: str) -> None:
        self.program("git", text, str(shutil.which("git")))

    def pip_download(self, text: str) -> str:
        """A python whose `-m pip download` runs a line of shell in the folder that pip downloads to."""
        text = f'case "$*" in *"pip download"*) for folder; do :; done; cd "$folder" || exit; {text}; exit ;; esac'
        return self.program("pretended-python", text, sys.executable)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("YOLOV9_")}
        path = f"{self.programs}{os.pathsep}{kept['PATH']}"
        return kept | {"PATH": path, "PYTHON": sys.executable, "GIT_CONFIG_GLOBAL": os.devnull} | variables

    def get(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = [SCRIPT, *arguments], self.environment(**variables)
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def assert_failed(place: Place, result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It failed with that exit code and those words, and left nothing behind."""
    assert (result.returncode, "error: " in result.stderr) == (code, True), result
    assert not [word for word in words if word not in result.stderr], result.stderr
    assert not list(place.root.iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "repository", "link"])
def test_what_is_there_and_something_else_stays(place: Place, kind: str):
    if kind == "file":
        place.target.write_text("")
    elif kind == "link":
        place.target.symlink_to("nowhere")
    else:
        subprocess.run(["git", "init", "--quiet", place.target if kind == "repository" else place.root], check=True)
        place.target.mkdir(exist_ok=True)
        (place.target / "thesis.txt").touch()
    before = sorted(place.root.rglob("*"))
    result = place.get(place.target)
    assert (result.returncode, "yolov9 exists" in result.stderr) == (2, True)
    assert sorted(place.root.rglob("*")) == before


WHEEL = "yolo9-1.0.18-py3-none-any.whl"


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("copy", {"copy/models/yolo.py": "changed"}),
        ("other", {"other/.git/HEAD": "ref: refs/heads/main\n", "other/.git/objects/x": "", "other/.git/refs/x": ""}),
        (WHEEL, {WHEEL: "half"}),
        ("nowhere", {}),
    ],
)
def test_a_source_that_has_it_not(place: Place, tmp_path: Path, source: str, files: dict[str, str]):
    """No other source is tried then."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    result = place.get(place.target, YOLOV9_SOURCE=str(tmp_path / source))
    assert_failed(place, result, 1, str(tmp_path / source))
    assert "PyPI" not in result.stdout


def test_the_wheel_alone_is_asked_for_with_its_hash(place: Place, tmp_path: Path):
    place.git(NO_NETWORK)
    python = place.pip_download(
        f'cp requirements.txt {tmp_path}; echo "$*" > {tmp_path}/asked; echo no index >&2; exit 1'
    )
    result = place.get(place.target, PYTHON=python)
    assert_failed(place, result, 1, "no network", "no index", "neither from GitHub nor from PyPI")
    assert (tmp_path / "requirements.txt").read_text().split() == [
        "yolo9==1.0.18", "--hash=sha256:cea95fd0517f3e3ed7cf936669f18a39d42168dfc54509784c2e4d85a825946d",
    ]  # fmt: skip
    asked = (tmp_path / "asked").read_text().split()
    assert {"--no-deps", "--only-binary", "--require-hashes", "--ignore-requires-python"} <= {*asked}


def test_a_wheel_that_becomes_something_else(place: Place):
    """The script that turns it into a checkout may change, and what it makes of the wheel must not."""
    place.git(NO_NETWORK)
    python = place.pip_download("echo half > yolo9-1.0.18-py3-none-any.whl")
    assert_failed(place, place.get(place.target, PYTHON=python), 1, "is damaged", "neither from GitHub nor from PyPI")
    text = """case "$*" in
      *"pip download"*) exit 0 ;;
      *yolov9_from_wheel.py*) for folder; do :; done; mkdir "$folder" && echo x > "$folder/val.py"; exit ;;
    esac"""
    result = place.get(place.target, PYTHON=place.program("pretended-python", text, sys.executable))
    assert_failed(place, result, 1, "is not YOLOv9 at commit 5b1ea9a")
