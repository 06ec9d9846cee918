"""scripts/get_yolov9.sh without a network: folders, stand-ins for git and pip, and addresses that fail."""

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

    def without_network(self, text: str) -> str:
        """A python whose `-m pip download` runs a line of shell in the folder that pip downloads to; git fails."""
        self.program("git", NO_NETWORK, str(shutil.which("git")))
        text = f'case "$*" in *"pip download"*) for folder; do :; done; cd "$folder" || exit; {text}; exit ;; esac'
        return self.program("pretended-python", text, sys.executable)

    def get(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("YOLOV9_")}
        environment |= {"PATH": f"{self.programs}{os.pathsep}{environment['PATH']}", "GIT_CONFIG_GLOBAL": os.devnull}
        environment |= {"PYTHON": sys.executable, **variables}
        command = [SCRIPT, self.target]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)

    def assert_fails(self, *words: str, **variables: str) -> None:
        """It fails with these words, and leaves nothing behind."""
        result = self.get(**variables)
        assert (result.returncode, "error: " in result.stderr) == (1, True), result
        assert not [word for word in words if word not in result.stderr], result.stderr
        assert not list(self.root.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "file", "repository", "link"])
def test_what_is_there_and_something_else_stays(place, kind):
    if kind == "file":
        place.target.write_text("")
    elif kind == "link":
        place.target.symlink_to("nowhere")
    else:
        subprocess.run(["git", "init", "--quiet", place.target if kind == "repository" else place.root], check=True)
        place.target.mkdir(exist_ok=True)
        (place.target / "thesis.txt").touch()
    before = sorted(place.root.rglob("*"))
    result = place.get()
    assert (result.returncode, "yolov9 exists" in result.stderr) == (2, True)
    assert sorted(place.root.rglob("*")) == before


def test_in_a_hook_of_git_the_users_repository_stays_as_it_is(place, tmp_path):
    """Git names it there in variables, which would otherwise be the repository that upstream is fetched into."""
    subprocess.run(["git", "init", "--quiet", tmp_path / "mine"], check=True)
    place.assert_fails(YOLOV9_SOURCE=str(tmp_path / "mine"), GIT_DIR=str(tmp_path / "mine/.git"))
    assert "remote" not in (tmp_path / "mine/.git/config").read_text()


WHEEL = "yolo9-1.0.18-py3-none-any.whl"


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("copy", {"copy/models/yolo.py": "no repository"}),
        ("other", {"other/.git/HEAD": "ref: refs/heads/main\n", "other/.git/objects/x": "", "other/.git/refs/x": ""}),
        (WHEEL, {WHEEL: "half"}),
        ("nowhere", {}),
    ],
)
def test_a_source_that_has_it_not(place, tmp_path, source, files):
    """No other source is tried then."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    place.assert_fails(str(tmp_path / source), YOLOV9_SOURCE=str(tmp_path / source))


def test_the_wheel_alone_is_asked_for_with_its_hash(place, tmp_path):
    python = place.without_network(
        f'cp requirements.txt {tmp_path}; echo "$*" > {tmp_path}/asked; echo no index >&2; exit 1'
    )
    place.assert_fails("no network", "no index", "neither from GitHub nor from PyPI", PYTHON=python)
    assert (tmp_path / "requirements.txt").read_text().split() == [
        "yolo9==1.0.18", "--hash=sha256:cea95fd0517f3e3ed7cf936669f18a39d42168dfc54509784c2e4d85a825946d",
    ]  # fmt: skip
    asked = (tmp_path / "asked").read_text().split()
    assert {"--no-deps", "--only-binary", "--require-hashes", "--ignore-requires-python"} <= {*asked}


def test_a_wheel_that_becomes_something_else(place):
    """The script that turns it into a checkout may change, and what it makes of the wheel must not."""
    python = place.without_network(f"echo half > {WHEEL}")
    place.assert_fails("is damaged", "neither from GitHub nor from PyPI", PYTHON=python)
    text = """case "$*" in
      *"pip download"*) exit 0 ;;
      *yolov9_from_wheel.py*) for folder; do :; done; mkdir "$folder" && echo x > "$folder/val.py"; exit ;;
    esac"""
    python = place.program("pretended-python", text, sys.executable)
    place.assert_fails("is not YOLOv9 at commit 5b1ea9a", PYTHON=python)
