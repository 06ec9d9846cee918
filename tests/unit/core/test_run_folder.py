"""Two programs never share a run folder, whatever ended the one before; what was killed leaves nothing behind."""

import re

import pytest

from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.run_folder import LOCK_FILE, held, make_run_dir, new_run


def test_a_folder_belongs_to_one_program_until_that_ends(tmp_path):
    with new_run(tmp_path, "exp") as folder:
        with pytest.raises(InputError, match=re.escape(f"{folder} is in use")), held(folder):
            pass
        with pytest.raises(InputError, match="in use"), new_run(tmp_path, "exp", exist_ok=True):
            pass
        with new_run(tmp_path, "exp") as other:
            assert other == tmp_path / "exp2"
    with held(folder, lambda path: path.name) as name:
        assert name == "exp"


def test_what_is_no_run_folder_is_refused(tmp_path):
    (tmp_path / "exp" / LOCK_FILE).mkdir(parents=True)
    for folder in (tmp_path / "exp", tmp_path / "missing"):
        with pytest.raises(InputError, match=re.escape(str(folder))), held(folder):
            pass


def test_a_run_that_fails_leaves_no_empty_folder(tmp_path):
    with pytest.raises(RuntimeError), new_run(tmp_path, "exp"):
        raise RuntimeError
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), new_run(tmp_path, "mine", exist_ok=True):
        raise RuntimeError
    with pytest.raises(RuntimeError), new_run(tmp_path, "late") as folder:
        raise RuntimeError((folder / "report.json").touch())
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "late"}


def test_run_folders_are_numbered(tmp_path):
    names = [make_run_dir(tmp_path / "runs", name).name for name in ("exp", "x2") for _ in range(3)]
    assert names == ["exp", "exp2", "exp3", "x2", "x2-2", "x2-3"]


def test_a_run_that_replaces_another_removes_what_that_left_but_not_the_users_files(tmp_path):
    names = {"report.json", "weights/qat_a.pt", "weights/mine.pt"}
    for first in ("exp", "mine"):  # a run folder, and one of the user's
        (tmp_path / first / "weights").mkdir(parents=True)
        for name in names:
            (tmp_path / first / name).touch()
    (tmp_path / "exp" / LOCK_FILE).touch()
    for name, expected in (("exp", {"weights/mine.pt"}), ("mine", names)):
        with new_run(tmp_path, name, True, ("report.*", "weights/qat_*.pt")) as folder:
            found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert found == expected | {LOCK_FILE}


def test_half_written_files_are_cleared_and_nothing_else(tmp_path):
    for name in ("a.png", "weights/last.pt", "report.json"):
        with atomic_path(tmp_path / name) as temporary:
            pass
        (tmp_path / name).rename(temporary)  # as if it had been killed just before
    (tmp_path / "int8").mkdir()  # perhaps a run of its own
    kept = [".hidden.json", "a-abcdef01.part.json", "int8/.report-abcdef01.part.json"]
    for name in kept:
        (tmp_path / name).touch()
    with held(tmp_path):
        pass
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*kept, LOCK_FILE}
