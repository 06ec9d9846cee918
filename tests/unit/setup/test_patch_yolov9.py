"""patch_yolov9.sh on a small overlay and a small checkout: all or nothing, and back to exactly what was there."""

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STATE = ".yolov9_overlay"
UPSTREAM = {
    "models/__init__.py": "",
    "models/yolo.py": "def parse_model(d, ch): ...\n",
    "utils/__init__.py": "",
    "utils/general.py": "",
    "train.py": "import models.yolo\n",
}
OVERLAY = {
    "VERSION": "2.0\n",
    "scripts/overlay_manifest.txt": "\nqat.py  # a program\nmodels/**/*.py\ndata/demo/*\nutils/cli.py\n",
    "qat.py": "import models.quantize.rules\n",
    "models/quantize/__init__.py": "",
    "models/quantize/rules.py": "from models import yolo\n",
    "models/quantize/__pycache__/rules.cpython-311.pyc": "never copied",
    "utils/cli.py": "import utils.general\n",
    "data/demo/train.sh": "#!/bin/sh\n",
}
COPIED = {"qat.py", "models/quantize/__init__.py", "models/quantize/rules.py", "utils/cli.py", "data/demo/train.sh"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything in a folder but .git: content or link target, kind and permissions."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] != ".git":
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
            found[name] = (content, path.lstat().st_mode)
    return found


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    root = write(tmp_path / "the overlay", OVERLAY)
    (root / "data/demo/train.sh").chmod(0o755)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository that looks like YOLOv9, in a folder with a space in its name."""
    root = write(tmp_path / "a checkout", UPSTREAM)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "upstream")
    return root


@pytest.fixture
def patch(overlay, checkout, monkeypatch, capsys):
    """The program's `main` on the checkout, or on another DIR that is given: exit code, and all that it says."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    def run(*arguments: str, folder: Path | str = checkout) -> tuple[int, str]:
        code = patch_overlay.main([str(folder), *arguments], root=overlay)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def assert_refused(patch, checkout: Path, *words: str, options: tuple[str, ...] = ()) -> None:
    before = tree(checkout.parent)
    code, said = patch(*options)
    assert (code, said.startswith("error: "), said.count("\n")) == (2, True, 1), said
    assert not [word for word in words if word not in said], said
    assert tree(checkout.parent) == before


def test_patching_patching_again_updating_and_reverting(patch, overlay, checkout):
    """Bytecode goes with the overlay; files that the user has deleted come back, and what the user has made stays."""
    assert "nothing to revert" in patch("--revert")[1]
    before = tree(checkout)
    assert "add     qat.py\n" in patch("--dry-run")[1]
    assert tree(checkout) == before
    assert patch()[0] == 0
    patched = tree(checkout)
    assert {name for name, (content, _) in patched.items() if name not in before and content != "folder"} == {
        *COPIED, f"{STATE}/manifest.json",
    }  # fmt: skip
    assert all((checkout / name).read_bytes() == (overlay / name).read_bytes() for name in COPIED)
    assert [os.access(checkout / name, os.X_OK) for name in ("data/demo/train.sh", "qat.py")] == [True, False]
    times = [(checkout / name).stat().st_mtime_ns for name in COPIED]
    assert "nothing to do" in patch()[1]
    assert "remove  qat.py\n" in patch("--revert", "--dry-run")[1]
    assert (tree(checkout), [(checkout / name).stat().st_mtime_ns for name in COPIED]) == (patched, times)

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", "import qat, utils.cli, train"]
    subprocess.run(command, cwd=checkout, env=environment, check=True)
    write(overlay, {"VERSION": "2.1\n", "qat.py": "new\n", "models/end2end.py": "added\n"})
    shutil.rmtree(overlay / "models/quantize")
    (checkout / "utils/cli.py").unlink()
    assert "overlay 2.1 now (add 2, update 1, remove 2)" in patch()[1]
    assert (checkout / "qat.py").read_text() == "new\n"
    assert [(checkout / name).exists() for name in ("models/end2end.py", "utils/cli.py")] == [True, True]
    assert not (checkout / "models/quantize").exists()

    (checkout / "utils/cli.py").unlink()
    write(checkout, {"data/demo/mine.txt": "", "runs/exp/best.pt": ""})
    assert patch("--revert")[0] == 0
    assert git(checkout, "status", "--porcelain", "--ignored").split() == ["??", "data/", "??", "runs/"]
    for folder in ("data", "runs"):
        shutil.rmtree(checkout / folder)
    assert tree(checkout) == before


def test_what_the_user_has_changed_is_put_aside_or_stays(patch, overlay, checkout):
    patch()
    write(checkout, {"qat.py": "my work"})
    assert_refused(patch, checkout, "changed: qat.py", "--force")
    for text in ("my work", "more work"):
        write(checkout, {"qat.py": text})
        assert "put aside" in patch("--force")[1]
        assert (checkout / "qat.py").read_text() == OVERLAY["qat.py"]
    write(checkout, {"utils/cli.py": "changed, too"})
    output = patch("--revert")[1]
    assert "except for files that you had changed" in output
    assert "not removed, since you had changed them: utils/cli.py" in output
    assert (checkout / "qat.py").read_text() == "my work"
    assert (checkout / STATE / "backup/qat.py~").read_text() == "more work"
    assert git(checkout, "status", "--porcelain", "-uall").split()[1::2] == [
        f"{STATE}/backup/qat.py~", "qat.py", "utils/cli.py",
    ]  # fmt: skip


def test_files_of_others_come_back(patch, overlay, checkout):
    write(checkout, {"qat.py": "mine", "data/demo/train.sh/of mine": "a folder"}).joinpath("qat.py").chmod(0o751)
    (checkout / "utils/cli.py").symlink_to("general.py")
    before = tree(checkout)
    assert_refused(patch, checkout, "changed: data/demo/train.sh, qat.py, utils/cli.py", "--force")
    assert "--revert brings them back" in patch("--force")[1]
    assert all((checkout / name).read_bytes() == (overlay / name).read_bytes() for name in COPIED)
    assert not (checkout / "utils/cli.py").is_symlink()
    assert "nothing to do" in patch()[1]
    write(overlay, {"scripts/overlay_manifest.txt": "qat.py\nutils/cli.py\n"})  # a newer one without data/demo
    assert patch()[0] == 0
    assert (checkout / "data/demo/train.sh/of mine").read_text() == "a folder"
    shutil.rmtree(checkout / "utils")
    write(checkout, {name: text for name, text in UPSTREAM.items() if name.startswith("utils")})
    assert patch("--revert")[0] == 0
    assert tree(checkout) == before


def test_a_checkout_that_1_0_has_patched(patch, checkout):
    before = tree(checkout)
    files = {"qat.py": "of 1.0\n", "utils/gone/in_2.py": "of 1.0\n", "utils/cli.py": OVERLAY["utils/cli.py"],
             "utils/cli/__init__.py": "a folder in 1.0\n"}  # fmt: skip
    rows = {name: {"sha256": hashlib.sha256(text.encode()).hexdigest(), "backup": False}
            for name, text in files.items()}  # fmt: skip
    record = {"version": "1.0.0", "files": rows, "folders": ["utils/gone", "utils/cli"]}
    for update in (False, True):
        write(checkout, files | {f"{STATE}/manifest.json": json.dumps(record)})
        if update:
            assert "(add 3, update 1, remove 2)" in patch()[1]
        assert patch("--revert")[0] == 0
        assert tree(checkout) == before


CHANGES = [(Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "unlink"), (shutil, "copy")]


@pytest.mark.parametrize("earlier", ["", "old"])
@pytest.mark.parametrize("revert", [False, True])
def test_a_run_that_fails_at_any_change_puts_everything_back(earlier, revert, patch, overlay, checkout, monkeypatch):
    write(checkout, {"qat.py": "of others\n"})
    # one file of each kind: what is replaced, new in a new folder, and gone after the update
    write(overlay, {"scripts/overlay_manifest.txt": "qat.py\nmodels/quantize/rules.py\ndata/demo/*\n"})
    if earlier or revert:
        patch("--force")
    if not revert:
        newer = {"VERSION": "2.1", "qat.py": "2\n", "models/new/a.py": ""}
        write(overlay, newer | {"scripts/overlay_manifest.txt": "qat.py\nmodels/new/*.py\n"})
    before, code, number = tree(checkout), 1, 0
    while code:
        number, changes = number + 1, itertools.count(1)

        def failing(change, number=number, changes=changes):
            def call(*arguments, **options):
                if next(changes) == number:
                    raise KeyboardInterrupt if number % 2 else OSError(28, "No space left on device")
                return change(*arguments, **options)

            return call

        with monkeypatch.context() as broken:
            for owner, name in CHANGES:
                broken.setattr(owner, name, failing(getattr(owner, name)))
            code = patch("--revert" if revert else "--force")[0]
        if code:
            assert (code, tree(checkout)) == (130 if number % 2 else 1, before), number
    assert number > 5, "a run makes at least so many changes"


def test_a_killed_run_leaves_no_half_file_and_is_ended_by_the_next(patch, checkout, monkeypatch):
    def killed(source, target):
        Path(target).write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        monkeypatch.setattr(shutil, "copy", killed)
        patch()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert patch()[0] == 0
    assert {*tree(checkout)} >= COPIED


def test_scripts_run_through_a_link_and_with_cdpath(checkout, tmp_path):
    (tmp_path / "link.sh").symlink_to(ROOT / "patch_yolov9.sh")
    environment = {**os.environ, "CDPATH": ".:/", "PYTHON": sys.executable}
    command = ["bash", "link.sh", checkout, "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_no_checkout_or_has_a_damaged_record(patch, overlay, checkout):
    for folder in ("", checkout / "nowhere", overlay):
        code, said = patch(folder=folder)
        assert (code, said.startswith("error: "), said.count("\n")) == (2, True, 1)
    for record in ("{", '{"files": {}}'):
        write(checkout, {f"{STATE}/manifest.json": record})
        assert_refused(patch, checkout, "manifest.json", options=("--force",))
    shutil.rmtree(checkout / STATE)
    before = tree(write(checkout, {"data": ""}))  # where a folder is needed
    code, said = patch("--force")
    assert (code, said.startswith("error: "), tree(checkout)) == (1, True, before)
