"""Files that are none, or not what their names say: one line, and nothing waits for a pipe; and a disk that is full."""

import os
import re
import resource
import sys
from functools import partial

import onnx
import pytest

from utils.core.errors import DataError, DependencyError, InputError, QatError
from utils.core.files import atomic_path, check_file, check_files, read_json, read_onnx, read_yaml, save_torch
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


def test_another_error_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a.txt"):
        (tmp_path / "none").read_text()
