"""A disk that is full: the line names the file that was written, no half file stays, and an earlier one is whole.

A limit of the system on the size of files stands in for the disk: what is written ends in the same kind of error, which
names no file.
"""

from __future__ import annotations

import re
import resource

import onnx
import pytest

from utils.core import files
from utils.core.errors import QatError

LONG = "x" * 5000


def save_model(path):
    with files.atomic_path(path) as temporary:
        onnx.save(onnx.ModelProto(producer_name=LONG), temporary)


@pytest.mark.parametrize("save", [save_model, lambda path: files.save_torch({"text": LONG}, path)])
def test_the_file_is_named_and_nothing_half_written_stays(save, tmp_path):
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
    with pytest.raises(FileNotFoundError), files.atomic_path(tmp_path / "a.txt"):
        (tmp_path / "none").read_text()
