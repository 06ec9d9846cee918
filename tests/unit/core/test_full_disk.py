"""A disk that is full: the line names the file that was written, no half file stays, and an earlier one is whole.

A limit of the system on the size of files stands in for the disk: what is written ends in the same kind of error, which
names no file.
"""

from __future__ import annotations

import re
import resource
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
from matplotlib.figure import Figure

from utils.core import files
from utils.core.errors import QatError
from utils.reports import figures

LONG = "x" * 5000


@contextmanager
def small_files(size: int = 2000):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_model(path: Path) -> None:
    model = onnx.ModelProto(producer_name=LONG)
    with files.atomic_path(path) as temporary:
        onnx.save(model, temporary)


WRITERS = {
    "a.pt": lambda path: files.save_torch({"text": LONG}, path),
    "a.onnx": save_model,
    "a.png": lambda path: figures.save_figure(Figure(figsize=(8, 8)), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_file_is_named_and_nothing_half_written_stays(name, tmp_path):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    path.write_text("the earlier one")
    with small_files(), pytest.raises(QatError, match=re.escape(str(path))) as caught:
        WRITERS[name](path)
    assert caught.value.exit_code == 1
    assert [one.name for one in path.parent.iterdir()] == [name]
    assert path.read_text() == "the earlier one"
    WRITERS[name](path)
    assert path.stat().st_size > 2000


def test_another_error_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError) as missing, files.atomic_path(tmp_path / "a.txt"):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")
