"""Files that are none, or not what their names say: one line, and nothing waits for a pipe or reads a device."""

import os
import sys
from functools import partial

import pytest

from utils.core.errors import DataError, DependencyError, InputError
from utils.core.files import check_file, check_files, read_json, read_onnx, read_yaml
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
