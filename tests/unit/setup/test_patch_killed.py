"""The patch, killed before each single change that it makes to the file system, and then run again or reverted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[3]
DYING = ROOT / "tests/support/dying_patch.py"
FILES = {
    "models/__init__.py": "",
    "models/yolo.py": "def parse_model(d, ch): ...\n",
    "utils/__init__.py": "",
    "utils/general.py": "",
    "train.py": "",
    "qat.py": "of others\n",
    "same.py": "the same in both\n",
}
OLD = {"qat.py": "1\n", "same.py": "the same in both\n", "models/quantize/rules.py": "1\n", "data/demo/old.sh": ""}
NEW = {"qat.py": "2\n", "same.py": "the same in both\n", "models/quantize/rules.py": "2\n", "utils/new/deep/a.py": ""}
WARM = f"import sys; sys.path.append({str(ROOT / 'scripts')!r}); import patch_overlay"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def overlay(root: Path, files: dict[str, str]) -> Path:
    write(root, files)
    return write(root, {"scripts/overlay_manifest.txt": "\n".join(files), "VERSION": f"{root.name}\n"})


def tree(root: Path) -> dict[str, object]:
    """Everything in a folder but .git, with content and permissions."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes() if path.is_file() else None, path.stat().st_mode)
        for path in sorted(root.rglob("*"))
        if path.relative_to(root).parts[0] != ".git"
    }


@pytest.fixture
def patch_overlay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    return patch_overlay


@pytest.fixture(scope="module")
def server():
    with ForkServer(ROOT / "scripts", WARM) as started:
        yield started


class Scene:
    """A checkout, two versions of an overlay, and how a run is started: in a process of its own, which can die."""

    def __init__(self, program, root: Path, server: ForkServer | None = None) -> None:
        self.program, self.server, self.root, self.checkout = program, server, root, root / "checkout"
        self.overlays = {"1.0": overlay(root / "1.0", OLD), "2.0": overlay(root / "2.0", NEW)}

    def fresh(self, template: Path | None = None) -> None:
        shutil.rmtree(self.checkout, ignore_errors=True)
        if template is None:
            write(self.checkout, FILES)
        else:
            shutil.copytree(template, self.checkout, symlinks=True)

    def run(self, version: str, *arguments: str) -> None:
        """Run the patch; it ends well."""
        assert self._main(version, *arguments) == 0

    def _main(self, version: str, *arguments: str) -> int:
        return self.program.main([str(self.checkout), *arguments], root=self.overlays[version])

    def run_and_kill(self, version: str, *arguments: str, kill_at: int) -> bool:
        """Run the patch in a process that dies before its n-th change; returns whether it lived."""
        assert self.server is not None
        words = [DYING, self.overlays[version], kill_at, self.checkout, *arguments]
        code = self.server.run(words, self.root).returncode
        assert code in (0, 9), f"{version} {arguments} ends with {code}"
        return code == 0


SCENES = {
    "a first time": ([], ("1.0", "--force")),
    "an update": ([("1.0", "--force")], ("2.0", "--force")),
    "a step back": ([("2.0", "--force")], ("1.0", "--force")),
    "a revert": ([("1.0", "--force")], ("1.0", "--revert")),
    "a revert after an update": ([("1.0", "--force"), ("2.0", "--force")], ("2.0", "--revert")),
}


@pytest.mark.parametrize("name", SCENES)
def test_killed_before_any_change_and_run_again_or_reverted(name, server, patch_overlay, tmp_path):
    scene = Scene(patch_overlay, tmp_path, server)
    before, last = SCENES[name]
    scene.fresh()
    clean = tree(scene.checkout)
    for arguments in before:
        scene.run(*arguments)
    template = shutil.copytree(scene.checkout, tmp_path / "template", symlinks=True)
    scene.run(*last)
    done = tree(scene.checkout)
    other = "1.0" if last[0] == "2.0" else "2.0"
    for number in range(1, 200):
        scene.fresh(template)
        lived = scene.run_and_kill(*last, kill_at=number)
        killed = shutil.copytree(scene.checkout, tmp_path / "killed", symlinks=True)
        for then in ([last, (last[0], "--revert")], [(other, "--revert")], [(other, "--force"), (other, "--revert")]):
            scene.fresh(killed)
            scene.run(*then[0])
            if then[0] == last:
                assert tree(scene.checkout) == done, f"killed before change {number} and run again"
            scene.run(*then[-1])
            assert tree(scene.checkout) == clean, f"killed before change {number}, then {then}"
        shutil.rmtree(killed)
        if lived:
            assert number > 10, "a run makes at least so many changes"
            return
    pytest.fail("a run makes more than 200 changes")


@pytest.mark.parametrize("number", range(2, 40, 7))
def test_killed_twice(number, server, patch_overlay, tmp_path):
    scene = Scene(patch_overlay, tmp_path, server)
    for second in range(1, 40, 6):
        scene.fresh()
        clean = tree(scene.checkout)
        scene.run_and_kill("1.0", "--force", kill_at=number)
        scene.run_and_kill("2.0", "--force", kill_at=second)
        scene.run_and_kill("1.0", "--revert", kill_at=second)
        scene.run("2.0", "--revert")
        assert tree(scene.checkout) == clean


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout


@pytest.mark.parametrize("kind", ["clone", "worktree", "submodule", "read-only"])
def test_what_the_user_changed_is_kept_where_git_status_does_not_show_it(kind, patch_overlay, tmp_path, monkeypatch):
    scene = Scene(patch_overlay, tmp_path)
    origin = write(tmp_path / "origin", FILES)
    git(origin, "init", "--quiet")
    git(origin, "add", "--all")
    git(origin, "commit", "--quiet", "-m", "upstream")
    if kind == "worktree":
        git(origin, "worktree", "add", "--quiet", str(scene.checkout))
    elif kind == "submodule":
        above = write(tmp_path / "above", {"README": ""})
        git(above, "init", "--quiet")
        git(above, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(origin), "yolov9")
        scene.checkout = above / "yolov9"
    else:
        git(tmp_path, "clone", "--quiet", str(origin), str(scene.checkout))
    if kind == "read-only":
        allowed = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != ".git" and allowed(path, mode))
    scene.run("1.0", "--force")
    (scene.checkout / "models/quantize/rules.py").write_text("my work", encoding="utf-8")
    scene.run("1.0", "--revert")
    assert git(scene.checkout, "status", "--porcelain", "--untracked-files=all") == ""
    kept = list(tmp_path.rglob(".yolov9_overlay_kept/*/models/quantize/rules.py"))
    assert [path.read_text(encoding="utf-8") for path in kept] == ["my work"]
