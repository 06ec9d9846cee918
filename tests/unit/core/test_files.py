"""Files that are none, a disk that is full, and run folders, which no two programs share."""

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import onnx
import pytest

from utils.core import logging as logging_of_ours
from utils.core.errors import DataError, DependencyError, InputError, QatError
from utils.core.files import atomic_path, check_file, check_files, read_json, read_onnx, read_yaml, save_torch
from utils.core.run_folder import LOCK_FILE, LOG_FILE, held, make_run_dir, new_run
from utils.evaluation.data_yaml import load_data

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is a folder"),
        (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
        (lambda path: os.symlink("nowhere", path), "does not exist"),
    ],
)
@pytest.mark.parametrize("read", [check_file, read_yaml, read_json])
def test_what_is_no_regular_file_is_not_opened(tmp_path, make, message, read):
    make(tmp_path / "x")
    with pytest.raises(InputError) as caught:
        read(tmp_path / "x", "expected a file")
    assert str(caught.value) == f"{tmp_path / 'x'} {message}; expected a file"


def test_options_that_were_not_given_are_not_looked_at(tmp_path):
    (tmp_path / "w.pt").touch()
    check_files(weights=tmp_path / "w.pt", recipe=None, hyp="")
    with pytest.raises(InputError, match=r"--recipe .*none\.yaml does not exist"):
        check_files(weights=tmp_path / "w.pt", recipe=tmp_path / "none.yaml")


HOSTILE_YAML = ["[" * 1000, "a: !!int ''", "a: !!bool maybe", "a: 2001-13-45", "a: !!timestamp x", "a: &b [*c]",
                "{[1]: 2}", "!!python/object/apply:os.system [true]", "a: \x00", "? ? ?"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_YAML)
def test_yaml_that_breaks_its_parser_is_one_line(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (partial(read_yaml, expected="expected a file", error=DataError), load_data):
        with pytest.raises(DataError) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(DependencyError, match="pip install onnx"):
        read_onnx("a.onnx")


LONG = "x" * 5000


def save_model(path):
    with atomic_path(path) as temporary:
        onnx.save(onnx.ModelProto(producer_name=LONG), temporary)


@pytest.mark.parametrize("save", [save_model, lambda path: save_torch({"text": LONG}, path)])
def test_of_a_full_disk_the_file_is_named_and_nothing_half_written_stays(save, tmp_path):
    """A limit on the size of files stands in for the disk: the error is of the same kind, and names no file."""
    path = tmp_path / "a.onnx"
    path.write_text("the earlier one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(QatError, match=re.escape(str(path))) as caught:
            save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.exit_code == 1
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "the earlier one")
    save(path)
    assert path.stat().st_size > 2000
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a.txt"):  # another error stays what it is
        (tmp_path / "none").read_text()


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


NO_LOCKS = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO, 524]  # ENOTSUPP, of Linux itself


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_file_system_without_locks_costs_one_warning(tmp_path, monkeypatch, caplog, number):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(logging_of_ours._memory, "said_once", set())
    with new_run(tmp_path, "exp") as folder:
        (folder / "report.json").write_text("{}")
    for _ in range(2):
        with held(folder, lambda path: path.name) as name:
            assert name == "exp"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder) in line
    assert os.strerror(number) in line
    assert (folder / "report.json").read_text() == "{}"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_of_another_program_is_told_from_no_locks(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(InputError, match="is in use by another program"), new_run(tmp_path, "exp"):
        pass


def test_a_forked_worker_does_not_hold_the_lock_of_a_program_that_was_killed(tmp_path):
    """The program is killed while its worker lives on."""
    reader, writer = os.pipe()
    program = os.fork()
    if not program:
        with new_run(tmp_path, "exp"):
            if not os.fork():
                time.sleep(5)
                os._exit(0)
            os.write(writer, b"x")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.read(reader, 1) == b"x"
    os.waitpid(program, 0)
    with held(tmp_path / "exp"):
        pass


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
        assert found == expected | {LOCK_FILE, LOG_FILE}


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


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("file", "package"), [("yaml.py", "yaml"), ("numpy.py", "numpy"), ("cv2.py", "cv2")])
def test_a_file_that_hides_a_package_is_named_and_not_the_users_data(tmp_path, file, package):
    (tmp_path / file).write_text("raise SystemExit('imported')")
    run = subprocess.run(
        [sys.executable, ROOT / "val_trt.py", "x.onnx", "--data", "data.yaml"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert f"{tmp_path / file} hides the package {package}" in run.stderr


def test_a_package_of_that_name_without_a_reader_is_named_as_well(tmp_path, monkeypatch):
    other = ModuleType("yaml")
    other.__file__ = "/somewhere/yaml/__init__.py"
    monkeypatch.setitem(sys.modules, "yaml", other)
    (tmp_path / "data.yaml").write_text("val: a")
    with pytest.raises(DependencyError, match=r"^/somewhere/yaml/__init__\.py hides"):
        read_yaml(tmp_path / "data.yaml", "")
