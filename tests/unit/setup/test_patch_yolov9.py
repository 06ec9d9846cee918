"""patch_yolov9.sh on a small overlay and a small checkout: all or nothing, and back to exactly what was there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = (
    "patch_yolov9.sh", "scripts/lib.sh", "scripts/patch_overlay.py", "scripts/overlay_plan.py",
    "scripts/overlay_apply.py", "interrupts.py", "utils/core/console.py",
)  # fmt: skip
MANIFEST = """
qat.py  # a program
models/**/*.py
data/demo/*
utils/cli.py
"""


class Overlay:
    """A repository with the real scripts and a few small files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in SCRIPTS:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.write("VERSION", "1.0\n")
        self.write("scripts/overlay_manifest.txt", MANIFEST)
        self.write("qat.py", "import models.quantize.rules\n")
        self.write("models/quantize/rules.py", "from models import yolo\n")
        self.write("models/quantize/__pycache__/rules.cpython-311.pyc", "never copied")
        self.write("utils/cli.py", "import utils.general\n")
        self.write("data/demo/train.sh", "#!/bin/sh\n").chmod(0o755)

    def write(self, path: str, text: str) -> Path:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self.root / path

    def patch(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables
        environment["PYTHON"] = variables.get("PYTHON", sys.executable)
        command = [self.root / "patch_yolov9.sh", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path / "the overlay")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository that looks like YOLOv9, in a folder with a space in its name."""
    root = tmp_path / "a checkout"
    for path, text in {
        "models/__init__.py": "",
        "models/yolo.py": "def parse_model(d, ch): ...\n",
        "utils/__init__.py": "",
        "utils/general.py": "",
        "data/coco.yaml": "names: []\n",
        "train.py": "import models.yolo\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "-m", "upstream")
    return root


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything in a folder but .git: content or link target, kind and permissions."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] != ".git":
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
            found[name] = (content, path.lstat().st_mode)
    return found


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def run_python(code: str, folder: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


class TestPatching:
    def test_copies_what_the_manifest_lists(self, overlay: Overlay, checkout: Path):
        before = tree(checkout)
        result = overlay.patch(checkout)
        assert result.returncode == 0, result.stderr
        assert "overlay 1.0" in result.stdout
        added = {name for name, (content, _) in tree(checkout).items() if name not in before and content != "folder"}
        assert added == {
            "qat.py",
            "models/quantize/rules.py",
            "utils/cli.py",
            "data/demo/train.sh",
            ".yolov9_overlay/manifest.json",
        }
        assert (checkout / "qat.py").read_text() == (overlay.root / "qat.py").read_text()
        assert os.access(checkout / "data/demo/train.sh", os.X_OK)
        assert not os.access(checkout / "qat.py", os.X_OK)

    def test_records_the_version(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        assert json.loads((checkout / ".yolov9_overlay/manifest.json").read_text())["version"] == "1.0"

    def test_a_second_time_changes_nothing(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        before, times = tree(checkout), {p: p.stat().st_mtime_ns for p in checkout.rglob("*")}
        result = overlay.patch(checkout)
        assert result.returncode == 0
        assert "nothing to do" in result.stdout
        assert tree(checkout) == before
        assert {p: p.stat().st_mtime_ns for p in checkout.rglob("*")} == times

    def test_dry_run_changes_nothing(self, overlay: Overlay, checkout: Path):
        before = tree(checkout)
        result = overlay.patch(checkout, "--dry-run")
        assert result.returncode == 0
        assert "add     qat.py" in result.stdout
        assert tree(checkout) == before

    def test_without_git(self, overlay: Overlay, checkout: Path):
        shutil.rmtree(checkout / ".git")
        before = tree(checkout)
        assert overlay.patch(checkout).returncode == 0
        assert overlay.patch(checkout, "--revert").returncode == 0
        assert tree(checkout) == before

    def test_through_a_link_and_from_any_folder(
        self, overlay: Overlay, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "link").symlink_to(checkout)
        monkeypatch.chdir(tmp_path)
        assert overlay.patch("link").returncode == 0
        assert (checkout / "qat.py").is_file()

    def test_a_newer_overlay_updates_adds_and_removes(self, overlay: Overlay, checkout: Path):
        before = tree(checkout)
        overlay.patch(checkout)
        overlay.write("VERSION", "1.1\n")
        overlay.write("qat.py", "new\n")
        overlay.write("models/end2end.py", "added\n")
        shutil.rmtree(overlay.root / "models/quantize")
        result = overlay.patch(checkout)
        assert "1.1" in result.stdout
        assert "1 added, 1 replaced, 1 removed" in result.stdout
        assert (checkout / "qat.py").read_text() == "new\n"
        assert (checkout / "models/end2end.py").is_file()
        assert not (checkout / "models/quantize").exists()
        overlay.patch(checkout, "--revert")
        assert tree(checkout) == before

    def test_a_file_that_went_missing_comes_back(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        (checkout / "qat.py").unlink()
        assert overlay.patch(checkout).returncode == 0
        assert (checkout / "qat.py").is_file()


class TestRefusals:
    def test_no_argument(self, overlay: Overlay):
        result = overlay.patch()
        assert result.returncode == 2
        assert "DIR" in result.stderr

    def test_no_folder(self, overlay: Overlay, tmp_path: Path):
        assert_refused(overlay.patch(tmp_path / "nowhere"), "nowhere is no folder")

    def test_no_checkout(self, overlay: Overlay, tmp_path: Path):
        assert_refused(overlay.patch(tmp_path), "is no YOLOv9 checkout")

    def test_the_overlay_itself_is_no_checkout(self, overlay: Overlay):
        assert_refused(overlay.patch(overlay.root), "is no YOLOv9 checkout")

    def test_files_that_it_did_not_write(self, overlay: Overlay, checkout: Path):
        (checkout / "qat.py").write_text("mine")
        before = tree(checkout)
        assert_refused(overlay.patch(checkout), "qat.py", "--force")
        assert tree(checkout) == before

    def test_a_changed_file(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        (checkout / "qat.py").write_text("changed")
        before = tree(checkout)
        assert_refused(overlay.patch(checkout), "changed after they were copied: qat.py", "--force")
        assert tree(checkout) == before

    def test_a_folder_where_a_file_belongs(self, overlay: Overlay, checkout: Path):
        (checkout / "qat.py").mkdir()
        assert_refused(overlay.patch(checkout, "--force"), "qat.py is a folder")

    @pytest.mark.parametrize("other", ["models/quantize.py", "utils/cli/__init__.py"])
    def test_a_module_of_the_same_name(self, overlay: Overlay, checkout: Path, other: str):
        overlay.write("models/quantize/__init__.py", "")
        (checkout / other).parent.mkdir(exist_ok=True)
        (checkout / other).write_text("theirs = 1\n")
        before = tree(checkout)
        assert_refused(overlay.patch(checkout, "--force"), other, "the same module to Python")
        assert tree(checkout) == before
        shutil.move(checkout / other, checkout / "theirs.py")
        assert overlay.patch(checkout).returncode == 0

    def test_a_file_where_a_folder_belongs(self, overlay: Overlay, checkout: Path):
        (checkout / "data/demo").write_text("")
        assert_refused(overlay.patch(checkout, "--force"), "data/demo is a file")

    def test_a_link_that_leads_out_of_the_checkout(self, overlay: Overlay, checkout: Path, tmp_path: Path):
        (tmp_path / "elsewhere").mkdir()
        (checkout / "data/demo").symlink_to(tmp_path / "elsewhere")
        assert_refused(overlay.patch(checkout, "--force"), "data/demo is a symbolic link")
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_manifest_line_without_files(self, overlay: Overlay, checkout: Path):
        overlay.write("scripts/overlay_manifest.txt", "qat.py\nexport_qat.py\n")
        assert_refused(overlay.patch(checkout), "lists export_qat.py")

    def test_a_damaged_record(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        (checkout / ".yolov9_overlay/manifest.json").write_text("{")
        assert_refused(overlay.patch(checkout), "manifest.json is damaged")

    def test_an_unwritable_folder(self, checkout: Path, in_process, monkeypatch: pytest.MonkeyPatch, capsys):
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "utils")
        before = tree(checkout)
        assert in_process(checkout) == 2
        assert "utils cannot be written to" in capsys.readouterr().err
        assert tree(checkout) == before

    def test_an_old_python(self, overlay: Overlay, checkout: Path):
        old = overlay.write("old python", "#!/bin/sh\necho 3.8\n")
        old.chmod(0o755)
        assert_refused(overlay.patch(checkout, PYTHON=str(old)), "is Python 3.8", "3.10 or newer")


class TestReverting:
    def test_leaves_a_clean_checkout(self, overlay: Overlay, checkout: Path):
        before = tree(checkout)
        overlay.patch(checkout)
        assert git(checkout, "status", "--porcelain")
        run_python("import qat, utils.cli, train", checkout)
        assert list(checkout.rglob("__pycache__"))
        result = overlay.patch(checkout, "--revert")
        assert result.returncode == 0, result.stderr
        assert git(checkout, "status", "--porcelain", "--ignored") == ""
        assert tree(checkout) == before

    def test_results_of_the_user_stay(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        (checkout / "data/demo/mine.txt").write_text("")
        (checkout / "runs").mkdir()
        overlay.patch(checkout, "--revert")
        assert [p.name for p in (checkout / "data/demo").iterdir()] == ["mine.txt"]
        assert (checkout / "runs").is_dir()

    def test_what_is_not_patched(self, overlay: Overlay, checkout: Path):
        result = overlay.patch(checkout, "--revert")
        assert result.returncode == 0
        assert "nothing to revert" in result.stdout

    def test_dry_run(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        before = tree(checkout)
        result = overlay.patch(checkout, "--revert", "--dry-run")
        assert "remove  qat.py" in result.stdout
        assert tree(checkout) == before

    def test_with_a_file_gone(self, overlay: Overlay, checkout: Path):
        before = tree(checkout)
        overlay.patch(checkout)
        shutil.rmtree(checkout / "models/quantize")
        assert overlay.patch(checkout, "--revert").returncode == 0
        assert tree(checkout) == before

    @pytest.mark.parametrize("with_git", [True, False])
    def test_keeps_what_the_user_changed(self, overlay: Overlay, checkout: Path, with_git: bool):
        if not with_git:
            shutil.rmtree(checkout / ".git")
        overlay.patch(checkout)
        (checkout / "qat.py").write_text("my work")
        result = overlay.patch(checkout, "--revert")
        assert "you had changed qat.py" in result.stdout
        kept = list(checkout.rglob(".yolov9_overlay_kept/*/qat.py"))
        assert [p.read_text() for p in kept] == ["my work"]
        if with_git:
            assert git(checkout, "status", "--porcelain") == ""


class TestForce:
    def test_backups_come_back(self, overlay: Overlay, checkout: Path):
        (checkout / "qat.py").write_text("mine")
        (checkout / "qat.py").chmod(0o751)
        (checkout / "utils/cli.py").symlink_to("general.py")
        before = tree(checkout)
        result = overlay.patch(checkout, "--force")
        assert "put aside" in result.stdout
        assert (checkout / "qat.py").read_text() == (overlay.root / "qat.py").read_text()
        assert not (checkout / "utils/cli.py").is_symlink()
        assert overlay.patch(checkout).returncode == 0
        assert overlay.patch(checkout, "--revert").returncode == 0
        assert tree(checkout) == before

    def test_backups_come_back_when_a_newer_overlay_lacks_the_file(self, overlay: Overlay, checkout: Path):
        (checkout / "qat.py").write_text("mine")
        overlay.patch(checkout, "--force")
        overlay.write("scripts/overlay_manifest.txt", "utils/cli.py\n")
        overlay.patch(checkout)
        assert (checkout / "qat.py").read_text() == "mine"
        assert not (checkout / ".yolov9_overlay/backup").exists()

    def test_a_backup_comes_back_although_its_folder_is_gone(self, overlay: Overlay, checkout: Path):
        (checkout / "data/demo").mkdir()
        (checkout / "data/demo/train.sh").write_text("mine")
        before = tree(checkout)
        overlay.patch(checkout, "--force")
        shutil.rmtree(checkout / "data/demo")
        result = overlay.patch(checkout, "--revert")
        assert result.returncode == 0, result.stderr
        assert tree(checkout) == before

    def test_a_changed_file_is_kept(self, overlay: Overlay, checkout: Path):
        overlay.patch(checkout)
        (checkout / "qat.py").write_text("my work")
        assert overlay.patch(checkout, "--force").returncode == 0
        assert [p.read_text() for p in checkout.rglob(".yolov9_overlay_kept/*/qat.py")] == ["my work"]


@pytest.fixture
def in_process(overlay: Overlay, monkeypatch: pytest.MonkeyPatch):
    """The program's `main`, so that a failure can be placed inside it."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    return lambda *arguments: patch_overlay.main([str(a) for a in arguments], root=overlay.root)


class TestInterruptions:
    @pytest.mark.parametrize("copies", range(5))
    @pytest.mark.parametrize("arguments", [(), ("--force",)])
    def test_a_failure_while_copying_changes_nothing(
        self, overlay, checkout, in_process, monkeypatch, capsys, copies: int, arguments: tuple[str, ...]
    ):
        if "--force" in arguments:
            (checkout / "qat.py").write_text("mine")
        before = tree(checkout)
        fail_after(copies, monkeypatch, shutil, "copyfile")
        code = in_process(checkout, *arguments)
        assert (code, tree(checkout) == before) in ((1, True), (0, False))
        if code == 1:
            error = capsys.readouterr().err
            assert "No space left on device" in error
            assert "was left as it was" in error
        else:
            assert copies >= 4, "a run copies at least four files"

    @pytest.mark.parametrize("renames", range(8))
    @pytest.mark.parametrize("arguments", [("--force",), ("--revert",)])
    def test_after_a_failure_half_way_the_same_again_or_the_opposite_ends_well(
        self, overlay, checkout, in_process, monkeypatch, capsys, renames: int, arguments: tuple[str, ...]
    ):
        (checkout / "qat.py").write_text("mine")
        before = tree(checkout)
        assert overlay.patch(checkout, "--force").returncode == 0
        patched = tree(checkout)
        if "--revert" not in arguments:
            assert overlay.patch(checkout, "--revert").returncode == 0
        fail_after(renames, monkeypatch, os, "replace")
        code = in_process(checkout, *arguments)
        monkeypatch.undo()
        if code == 1:
            error = capsys.readouterr().err
            assert ("run this again" in error) != ("was left as it was" in error)
            assert overlay.patch(checkout, *arguments).returncode == 0
        assert tree(checkout) == (before if "--revert" in arguments else patched)
        assert overlay.patch(checkout, "--revert").returncode == 0
        assert tree(checkout) == before

    def test_ctrl_c_while_copying(self, checkout: Path, in_process, monkeypatch: pytest.MonkeyPatch, capsys):
        before = tree(checkout)
        copy = shutil.copyfile

        def copy_and_interrupt(*arguments, **options):
            copy(*arguments, **options)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(shutil, "copyfile", copy_and_interrupt)
        assert in_process(checkout) == 130
        assert "interrupted" in capsys.readouterr().err
        assert tree(checkout) == before

    def test_a_signal_at_any_time_leaves_all_or_nothing(self, overlay: Overlay, checkout: Path, tmp_path: Path):
        before = tree(checkout)
        assert overlay.patch(checkout).returncode == 0
        patched = tree(checkout)
        overlay.patch(checkout, "--revert")
        for delay in (0.05, 0.1, 0.13, 0.16, 0.2, 0.3):
            process = subprocess.Popen(
                [sys.executable, overlay.root / "scripts/patch_overlay.py", checkout],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
            assert tree(checkout) in (before, patched)
            overlay.patch(checkout, "--revert")

    def test_two_at_the_same_time(self, overlay: Overlay, checkout: Path):
        import fcntl

        descriptor = os.open(checkout, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            assert_refused(overlay.patch(checkout), "being patched by another process")
        finally:
            os.close(descriptor)


def fail_after(calls: int, monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
    """Let a function of the file system succeed that many times and then fail once."""
    function, count = getattr(module, name), [0]

    def fail_once(*arguments, **options):
        count[0] += 1
        if count[0] == calls + 1:
            raise OSError(28, "No space left on device")
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, fail_once)
