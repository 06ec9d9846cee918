"""No program overwrites what it reads: links, names that differ in case, run folders, records of our own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from known_images import write_set

from utils.core import files
from utils.core.errors import InputError
from utils.core.files import check_folder_name, distinct_names, refuse_overwrite
from utils.onnx_graph import deepstream

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# the comparison


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_are_seen_through_in_both_directions(here, link):
    (here / "a").write_text("content")
    link("a", "b")
    for output, source in (("b", "a"), ("a", "b")):
        with pytest.raises(InputError, match=rf"{output} is read \(as {source}\) and would be over"):
            refuse_overwrite([output], [source])
    refuse_overwrite(["c"], ["a", "b", None, "nowhere"])
    os.mkfifo("pipe")
    for path in (".", "pipe"):
        with pytest.raises(InputError, match=r"is (a folder|not a regular file); a file is to be written"):
            refuse_overwrite([path], [])


def test_a_file_system_that_ignores_case(here, monkeypatch):
    (here / "mine.onnx").write_text("")
    real = os.stat
    monkeypatch.setattr(files.os, "stat", lambda path, **more: real(str(path).lower(), **more))
    with pytest.raises(InputError, match=r"MINE\.ONNX is read \(as mine\.onnx"):
        refuse_overwrite(["MINE.ONNX"], ["mine.onnx"])


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "/tmp/x", "a\\b", "a\nb", "\udcff"])
def test_names_that_are_no_folders(name):
    with pytest.raises(InputError, match="is not the name of a folder"):
        check_folder_name(name)


def test_names_are_told_apart():
    assert [check_folder_name(name) for name in ("exp", "a b", "ä.1", "...")] == ["exp", "a b", "ä.1", "..."]
    names = distinct_names(["a.jpg", "A.jpg", "a-2.jpg", "b.jpg", "a.jpg", "c", "C"])
    assert names == ["a.jpg", "A-2.jpg", "a-2-2.jpg", "b.jpg", "a-3.jpg", "c", "C-2"]


# what DeepStream reads beside the ONNX file


def test_what_others_wrote_is_kept_beside(tmp_path):
    onnx = tmp_path / "a.onnx"
    for path in deepstream.paths(onnx):
        path.write_text("mine\n")
    labels, config, server = deepstream.write(onnx, "mine\n", ["x=1\n", "y=1\n"])
    assert [path.read_text() for path in (labels, config, server)] == ["mine\n", "x=1\n", "y=1\n"]
    assert not labels.with_name("labels.txt.bak1").exists()  # it says what it would say anyway
    deepstream.write(onnx, "mine\n", ["x=2\n", "y=1\n"])
    assert all(path.with_name(f"{path.name}.bak1").read_text() == "mine\n" for path in (config, server))
    assert config.with_name(f"{config.name}.bak2").read_text() == "x=1\n"


def test_a_name_that_would_add_lines_to_the_configuration():
    with pytest.raises(InputError, match="cannot be written on a line"):
        deepstream.check_name("a\ncustom-lib-path=x.onnx")


# arguments


@pytest.mark.parametrize(
    "words",
    [["patch_yolov9.sh"], ["patch_yolov9.sh", "a", "b"], ["patch_yolov9.sh", "--frce", "x"], ["patch_yolov9.sh", ""],
     ["scripts/get_yolov9.sh"], ["scripts/test.sh", "--nothing"], ["install_dependencies.sh", "--nothing"],
     ["scripts/val_trt.sh"], ["scripts/val_trt.sh", "none.pt", "d.yaml", "64"],
     ["scripts/val_trt.sh", "d.yaml", "d.yaml", "64"], ["scripts/benchmark_trt.sh", "none.onnx", "64"],
     ["scripts/benchmark_trt.sh", "a", "b"], ["scripts/generate_trt_engine.sh"],
     ["scripts/generate_trt_engine.sh", "", "64"], ["data/demo/train_demo.sh", "--epochs"]],
)  # fmt: skip
def test_usage_errors_of_shell_scripts_are_one_line(words):
    command = ["bash", str(ROOT / words[0]), *words[1:]]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


# what is not installed

WITHOUT = """
import atexit, importlib.util, runpy, sys, shutil
find, which = importlib.util.find_spec, shutil.which
missing = sys.argv[1].split(",")
importlib.util.find_spec = lambda name, *more: None if name in missing else find(name, *more)
shutil.which = lambda name, *more, **others: None if name in missing else which(name, *more, **others)
sys.argv = sys.argv[2:]
sys.path.insert(0, {root!r})
atexit.register(lambda: print(sorted({{"torch", "onnx", "onnxruntime", "cv2", "tensorrt"}} & set(sys.modules))))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TENSORRT = "tensorrt,tensorrt_rtx,tensorrt_rtx_bindings"
MISSING = [
    (TENSORRT, "scripts/build_engine.py", ("a.onnx",), "TensorRT is not installed"),
    (TENSORRT, "val_trt.py", ("none.engine", "--data", "data.yaml"), "none.engine does not exist"),
    (TENSORRT, "val_trt.py", ("a.onnx", "--data", "data.yaml", "--project", "a.pt"), "cannot write"),
    ("onnxruntime", "val_trt.py", ("--engine-file", "a.onnx", "--data", "data.yaml"), "this needs onnxruntime"),
    ("onnxslim", "export_qat.py", ("--weights", "a.pt", "--simplify"), "this needs onnxslim"),
    ("torch", "qat.py", ("eval", "--weights", "a.pt", "--data", "data.yaml"), "this needs torch"),
    ("tritonclient", "scripts/make_triton.py", ("a.onnx",), "this needs tritonclient"),
]  # fmt: skip


@pytest.mark.parametrize(("missing", "program", "words", "message"), MISSING)
def test_what_is_missing_is_said_before_anything_heavy_is_imported(tmp_path, missing, program, words, message):
    for name in ("m.yaml", "a.onnx", "a.engine", "a.pt"):
        (tmp_path / name).touch()
    write_set(tmp_path, 1)
    command = [sys.executable, "-c", WITHOUT.format(root=str(ROOT)), missing, str(ROOT / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert done.stdout == "[]\n"
