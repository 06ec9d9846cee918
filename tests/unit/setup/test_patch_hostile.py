"""patch_yolov9.sh on a stranger's checkout: its folder .yolov9_overlay leads the patch to no file outside."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str]]
ROOT = Path(__file__).resolve().parents[3]
STATE = ".yolov9_overlay"
MINE = "what the user has elsewhere\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without git, and the user's files beside it."""
    for name, text in {"models/yolo.py": "def parse_model(d, ch): ...\n", "utils/general.py": ""}.items():
        write(tmp_path / "checkout" / name, text)
    for name in ("victim.txt", "Documents/victim.txt", "Documents/new/victim.txt", "Documents/rules.cpython-311.pyc"):
        write(tmp_path / name, MINE)
    return tmp_path / "checkout"


def outside(checkout: Path) -> dict[str, str]:
    paths = [path for path in checkout.parent.rglob("*") if path.is_file() and not path.is_relative_to(checkout)]
    return {str(path): path.read_text(encoding="utf-8") for path in paths}


def row(text: str = MINE, backup: bool = False) -> dict[str, object]:
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "backup": backup}


def record(checkout: Path, files: object, **other: object) -> None:
    content = {"version": "1.0", "files": files, "folders": [], **other}
    write(checkout / STATE / "manifest.json", json.dumps(content))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The program's `main`: its exit code, and what it says to standard error."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import patch_overlay

    return lambda *arguments: (patch_overlay.main([str(a) for a in arguments]), capsys.readouterr().err)


def start(*arguments: str | Path) -> tuple[int, str]:
    """The same in a process of its own, which can hang."""
    command = [sys.executable, "-B", ROOT / "scripts/patch_overlay.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=20)
    return result.returncode, result.stderr


def assert_refused(run: Run, checkout: Path, *words: str) -> None:
    """Patching and reverting say the same in one line, and do nothing."""
    before = outside(checkout)
    for arguments in (["--dry-run"], ["--revert"], []):
        code, error = run(checkout, *arguments)
        assert (code, error.startswith("error: "), error.count("\n")) == (2, True, 1), error
        assert not [word for word in words if word not in error], error
        assert outside(checkout) == before
    assert not (checkout / "qat.py").exists()


@pytest.mark.parametrize("link", [STATE, f"{STATE}/backup", f"{STATE}/new"])
def test_a_link_in_place_of_a_folder_of_ours(link: str, checkout: Path, run: Run):
    if link != STATE:
        (checkout / STATE).mkdir()
    (checkout / link).symlink_to(checkout.parent / "Documents")
    assert_refused(run, checkout, f"{link} is a symbolic link")


@pytest.mark.parametrize("link", ["extra", f"{STATE}/backup/extra"])
def test_a_link_on_the_way_to_a_file_or_to_its_backup(link: str, checkout: Path, run: Run):
    record(checkout, {"extra": row(backup=True), "extra/victim.txt": row(backup=True)})
    (checkout / link).parent.mkdir(exist_ok=True, parents=True)
    (checkout / link).symlink_to(checkout.parent / "Documents")
    assert_refused(run, checkout, f"{link} is a symbolic link")


def test_a_link_among_backups_that_are_not_listed_goes_alone(checkout: Path, run: Run):
    write(checkout / STATE / "backup/a.txt", "")
    (checkout / STATE / "backup/models").symlink_to(checkout.parent / "Documents")
    before = outside(checkout)
    assert run(checkout, "--revert") == (0, "")
    assert outside(checkout) == before
    assert not (checkout / STATE).exists()


def test_upstreams_folders_are_no_links(checkout: Path, run: Run):
    (checkout / "models").rename(checkout.parent / "elsewhere")
    (checkout / "models").symlink_to("../elsewhere")
    write(checkout.parent / "elsewhere/__pycache__/yolo.cpython-311.pyc", MINE)
    record(checkout, {"victim.txt": row()})
    assert_refused(run, checkout, "models is a symbolic link")


@pytest.mark.parametrize(
    "name",
    ["../victim.txt", "models/../../victim.txt", "ABSOLUTE", ".", "..", "", "models//a.py", "models/", "./qat.py",
     "a\0b", "a\nb", "\x1b[31m", "\ud800", ".git/config", "models/.GIT/config", f"{STATE}/manifest.json"],
)  # fmt: skip
def test_a_name_that_is_no_file_in_the_checkout(name: str, checkout: Path, run: Run):
    name = str(checkout.parent / "victim.txt") if name == "ABSOLUTE" else name
    record(checkout, {name: row()})
    assert_refused(run, checkout, "manifest.json is damaged", "cannot be a file of the overlay")


def test_a_backup_does_not_replace_a_file_outside(checkout: Path, run: Run):
    record(checkout, {"../victim.txt": row(backup=True), "a.txt": row(backup=True)})
    write(checkout / STATE / "victim.txt", "of the attacker")
    write(checkout / STATE / "backup/a.txt", "")
    assert_refused(run, checkout, "cannot be a file of the overlay")


@pytest.mark.parametrize(
    "other",
    [{"version": 1}, {"version": "1\n2"}, {"folders": [1, "a"]}, {"folders": "a"}, {"unfinished": "yes"},
     {"files": []}, {"files": {"a": []}}, {"files": {"a": {}}}, {"files": {"a": {"sha256": 1, "backup": True}}},
     {"files": {"a": {"sha256": "1", "backup": 1}}}, {"files": {"a": {**row(), "before": "12"}}},
     {"files": {"a": {**row(), "before": [[]]}}}],
)  # fmt: skip
def test_a_field_of_another_type(other: dict[str, object], checkout: Path, run: Run):
    record(checkout, **{"files": {"a": row()}, **other})
    assert_refused(run, checkout, "manifest.json is damaged")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"files": {}}', '{"a": 1' + "0" * 5000 + "}"])
def test_a_record_that_is_none(text: str, checkout: Path, run: Run):
    write(checkout / STATE / "manifest.json", text)
    assert_refused(run, checkout, "manifest.json is damaged")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_record_that_is_no_regular_file(kind: str, checkout: Path):
    (checkout / STATE).mkdir()
    path = checkout / STATE / "manifest.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert_refused(start, checkout, "manifest.json is no regular file")


def test_a_file_of_ours_that_became_a_pipe(checkout: Path):
    record(checkout, {"a.txt": row()})
    os.mkfifo(checkout / "a.txt")
    assert_refused(start, checkout, "a.txt is neither a file nor a link")


@pytest.mark.parametrize("name", ["models/quantize/rules.py", "models/quantize/**.py"])
def test_bytecode_behind_a_link_stays(name: str, checkout: Path, run: Run):
    write(checkout / name, MINE)
    (checkout / "models/quantize/__pycache__").symlink_to(checkout.parent / "Documents")
    record(checkout, {name: row()})
    before = outside(checkout)
    assert run(checkout, "--revert") == (0, "")
    assert outside(checkout) == before
    assert not (checkout / name).exists()


def test_bytecode_goes_by_its_whole_name(checkout: Path, run: Run):
    for name in ("*.py", "other.py", "__pycache__/*.cpython-311.pyc", "__pycache__/other.cpython-311.pyc"):
        write(checkout / "models/quantize" / name, MINE)
    record(checkout, {"models/quantize/*.py": row()})
    assert run(checkout, "--revert") == (0, "")
    assert [path.name for path in (checkout / "models/quantize").rglob("*.p*")] == ["other.py"], "all bytecode goes"


@pytest.mark.parametrize("link", [".yolov9_overlay_kept", ".yolov9_overlay_kept/.gitignore"])
def test_what_the_user_changed_is_not_kept_behind_a_link(link: str, checkout: Path, run: Run):
    record(checkout, {"a.txt": row()})
    write(checkout / "a.txt", "changed")
    (checkout / link).parent.mkdir(exist_ok=True)
    (checkout / link).symlink_to(checkout.parent / ("victim.txt" if link.endswith("ignore") else "Documents"))
    before = outside(checkout)
    code, error = run(checkout, "--revert")
    assert outside(checkout) == before
    if link.endswith("ignore"):
        assert [path.read_text(encoding="utf-8") for path in checkout.rglob("a.txt")] == ["changed"]
    else:
        assert code == 2
        assert "yolov9_overlay_kept is a symbolic link" in error
