"""No program overwrites what it reads: links, names that differ in case, run folders, records of our own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from known_images import SQUARE, KnowingModel, export_answers, write_set
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

import export_qat
import export_yoloV9
import qat
import reparameterization
import val_trt
from utils.cli import run_program
from utils.core import output_paths
from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.options import DeviceOptions
from utils.core.output_paths import distinct_names, folder_name, refuse_overwrite, refuse_overwrite_in
from utils.jobs import inspect_engine
from utils.onnx_graph import deepstream_files
from utils.reports.schema import Report

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(120)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks for the types of annotations
    spec.loader.exec_module(module)
    return module


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
        with pytest.raises(InputError, match=f"{output} is the same file as {source}, which is read and would be over"):
            refuse_overwrite([output], [source])
    refuse_overwrite(["c"], ["a", "b", None, "nowhere"])


def test_other_spellings_of_one_path(here):
    (here / "x").mkdir()
    (here / "x/a").write_text("")
    (here / "y").symlink_to("x")
    for output in ("x/../x/a", here / "x/a", "y/a", "./x/a"):
        with pytest.raises(InputError, match="is read and would be overwritten"):
            refuse_overwrite([output], ["x/a"])


def test_a_file_system_that_ignores_case(here, monkeypatch):
    (here / "mine.onnx").write_text("")
    real = os.stat
    monkeypatch.setattr(output_paths.os, "stat", lambda path, **more: real(str(path).lower(), **more))
    with pytest.raises(InputError, match=r"MINE\.ONNX is the same file as mine\.onnx"):
        refuse_overwrite(["MINE.ONNX"], ["mine.onnx"])


def test_two_outputs_of_one_name(here):
    with pytest.raises(InputError, match="would be written to one file"):
        refuse_overwrite(["a.engine", "A.engine"], [])


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_an_output_that_is_no_file(here, make):
    make("a.onnx")
    with pytest.raises(InputError, match=r"a\.onnx is (a folder|not a regular file), and a file is to be written"):
        refuse_overwrite(["a.onnx"], [])


def test_a_folder_is_not_written_over(here):
    (here / "report.json").mkdir()
    with pytest.raises(InputError, match=r"cannot write report\.json: it is a folder"), atomic_path("report.json"):
        pass
    assert [path.name for path in here.iterdir()] == ["report.json"]


def test_run_folders(here):
    (here / "runs/exp/weights").mkdir(parents=True)
    (here / "runs/exp/weights/last.pt").write_text("")
    refuse_overwrite_in("runs", "exp", False, ["weights/*.pt"], ["runs/exp/weights/last.pt"])  # it will be exp2
    with pytest.raises(InputError, match="choose another --name or --project"):
        refuse_overwrite_in("runs", "exp", True, ["weights/*.pt"], ["runs/exp/weights/last.pt"])


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "/tmp/x", "a\\b", "a\nb", "\udcff"])
def test_names_that_are_no_folders(name):
    with pytest.raises(InputError, match="is not the name of a folder"):
        folder_name(name)


def test_names_are_told_apart():
    assert [folder_name(name) for name in ("exp", "a b", "ä.1", "...")] == ["exp", "a b", "ä.1", "..."]
    names = distinct_names(["a.jpg", "A.jpg", "a-2.jpg", "b.jpg", "a.jpg", "c", "C"])
    assert names == ["a.jpg", "A-3.jpg", "a-2.jpg", "b.jpg", "a-4.jpg", "c", "C-2"]


# the programs


def refused(capsys, main, *words):
    """Run a program, check that it refuses with one line, and return that; no file may have changed."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    code = main([str(word) for word in words])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1), err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return err


def engines(monkeypatch, name):
    stand_in(monkeypatch)
    return script(name).run


EXPORTERS = [
    (export_qat.main, ["--weights", "mine.onnx"], "mine.onnx"),
    (export_qat.main, ["--weights", "link.pt"], "link.onnx is the same file as link.pt, which"),
    (
        export_qat.main,
        ["--weights", "a.pt", "--data", "d.yaml", "--output", "d.onnx"],
        "d.onnx is the same file as d.yaml, which",
    ),
    (export_qat.main, ["--weights", "mine.onnx", "--include", "onnx", "onnx_end2end"], "mine.onnx"),
    (export_yoloV9.main, ["--weights", "labels.txt"], "labels.txt"),
    (export_yoloV9.main, ["--weights", "a.pt", "--output", "a.onnx"], "a.onnx is the same file as a.pt, which"),
    (export_yoloV9.main, ["--weights", "config_infer_primary_yoloV9.txt"], "config_infer_primary_yoloV9.txt"),
    (reparameterization.main, ["--weights", "a.pt", "--save", "b.pt"], "b.pt is the same file as a.pt, which"),
    (reparameterization.main, ["--weights", "a.pt", "--save", "c.pt", "--cfg", "c.pt"], "c.pt"),
]


@pytest.mark.parametrize(("main", "words", "start"), EXPORTERS)
def test_exporters(here, capsys, main, words, start):
    for name in ("mine.onnx", "a.pt", "c.pt", "labels.txt", "d.yaml", "config_infer_primary_yoloV9.txt", "link.pt"):
        (here / name).write_text(name)
    os.link("a.pt", "b.pt")
    os.link("a.pt", "a.onnx")
    (here / "link.onnx").symlink_to("link.pt")
    (here / "d.onnx").symlink_to("d.yaml")
    assert refused(capsys, main, *words).startswith(f"error: {start} is read and would be overwritten; choose another")


QAT = [
    ("quantize", "runs/exp/weights/last.pt", ()),
    ("quantize", "runs/exp/weights/qat_best_x.pt", ()),
    ("sensitive", "w.pt", ("--recipe", "runs/exp/recipe.yaml")),
    ("sensitive", "w.pt", ("--profile", "runs/exp/state.json")),
    ("calibrate", "w.pt", ("--recipe", "runs/exp/recipe.yaml")),
    ("calibrate", "w.pt", ("--hyp", "runs/exp/calibration.json")),
    ("eval", "runs/exp/report.json", ()),
]


@pytest.mark.parametrize(("command", "weights", "more"), QAT)
def test_qat(here, capsys, command, weights, more):
    for name in ("weights", "engines"):
        (here / "runs/exp" / name).mkdir(parents=True)
    for name in ("engines/int8.engine.json", "weights/last.pt", "weights/qat_best_x.pt", "recipe.yaml", "state.json",
                 "report.json", "calibration.json"):  # fmt: skip
        (here / "runs/exp" / name).write_text(name)
    (here / "w.pt").write_text("")
    (here / "d.yaml").write_text("")
    words = [command, "--weights", weights, "--data", "d.yaml", "--project", "runs", "--exist-ok", *more]
    err = refused(capsys, qat.main, *words)
    assert (
        err
        == f"error: {(more or (weights,))[-1]} is read and would be overwritten; choose another --name or --project\n"
    )


def test_build_engine(here, monkeypatch, capsys):
    run = engines(monkeypatch, "build_engine")
    write_onnx(here / "a.onnx")
    write_onnx(here / "a.svg")
    for words in (("--output", "a.onnx"), ("--timing-cache", "a.onnx"), ("--output", "A.engine", "--timing-cache",
                  "A.engine"), ("--output", "b.engine", "--timing-cache", "b.engine.json")):  # fmt: skip
        assert "choose another --output" in refused(capsys, run, "a.onnx", *words)
    assert "a.svg is read" in refused(capsys, run, "a.svg", "--generate-graph")


def test_benchmark(here, monkeypatch, capsys):
    run = engines(monkeypatch, "benchmark_trt")
    (here / "a-b1.engine").write_text("an engine that is older than the file")
    write_onnx(here / "a.onnx", quantized=True)
    os.utime("a-b1.engine", (1, 1))
    assert "a-b1.engine is read" in refused(capsys, run, "a.onnx", "a-b1.engine", "--batch-size", 1)
    (here / "runs/exp").mkdir(parents=True)
    (here / "runs/exp/benchmark.onnx").write_bytes((here / "a.onnx").read_bytes())
    (here / "runs/exp/benchmark.json").symlink_to("benchmark.onnx")
    words = ("runs/exp/benchmark.onnx", "--project", "runs", "--exist-ok", "--batch-size", 1)
    assert "choose another --name or --project" in refused(capsys, run, *words)


def test_inspect_engine(here):
    (here / "a.layers.json").write_text('{"Layers": []}')
    with pytest.raises(InputError, match=r"a\.layers\.json is read and would be overwritten; rename the file"):
        inspect_engine.look_at_record(here / "a.layers.json")
    (here / "a.svg").write_text("an engine")
    with pytest.raises(InputError, match=r"a\.svg is read and would be overwritten"):
        inspect_engine.look_inside(Path("a.svg"), draw=True)


def test_val_trt_draws_into_another_folder(here, capsys):
    export_answers(KnowingModel(write_set(here, 2, SQUARE), ("cat", "dog", "owl"), 64), here / "a.onnx", 1, 64)

    def run(words):
        return val_trt.main(words)

    fixed = ("--engine-file", "a.onnx", "--device", "cpu", "--exist-ok")
    err = refused(capsys, run, *fixed, "--source", "images/val", "--project", "images", "--name", "val")
    assert "images/val/000000000001.png is read and would be overwritten; choose another --name" in err
    (here / "runs/exp").mkdir(parents=True)
    (here / "data.yaml").rename("runs/exp/report.json")
    words = ("--data", "runs/exp/report.json", "--project", "runs", "--workers", 0)
    assert "runs/exp/report.json is read and would be overwritten" in refused(capsys, run, *fixed, *words)


def test_make_report_leaves_the_runs_json_alone(here, capsys):
    run = script("make_report").run
    for name in ("one", "two"):
        Report(command=name, title=name).save(here / name / "report.json")
    before = {name: (here / name / "report.json").read_bytes() for name in ("one", "two")}
    assert run(["one", "two"]) == 0
    assert before == {name: (here / name / "report.json").read_bytes() for name in ("one", "two")}
    assert json.loads((here / "one/report-merged.json").read_text())["command"] == "one\ntwo"
    assert (here / "one/report.html").is_file()
    capsys.readouterr()
    err = refused(capsys, run, "one", "one/report-merged.json")
    assert err == "error: one/report-merged.json is read and would be overwritten; choose another --output\n"
    (here / "report.html").write_bytes(before["one"])
    assert "report.html is read" in refused(capsys, run, "report.html")


# what DeepStream reads beside the ONNX file


@pytest.fixture
def onnx(tmp_path):
    return tmp_path / "a.onnx"


def allowed(onnx, labels):
    deepstream_files.check_config(onnx)
    deepstream_files.check_labels(onnx, labels)


def test_our_own_files_are_replaced(onnx):
    allowed(onnx, "cat\n")
    labels, config = deepstream_files.write(onnx, "cat\n", "[property]\n")
    assert labels.read_text() == "cat\n"
    assert config.read_text().startswith("[property]\n# export_yoloV9.py wrote this file (sha256 ")
    allowed(onnx, "dog\n")
    deepstream_files.write(onnx, "dog\n", "[property]\nother=1\n")
    assert labels.read_text() == "dog\n"


def test_labels_of_others_stay_unless_they_are_the_same(onnx):
    labels, config = deepstream_files.paths(onnx)
    labels.write_text("mine\n")
    allowed(onnx, "mine\n")
    with pytest.raises(InputError, match=r"labels\.txt holds other classes than this network, .*rename or remove it"):
        allowed(onnx, "cat\n")
    deepstream_files.write(onnx, "cat\n", "x\n")
    labels.write_text("changed\n")
    with pytest.raises(InputError, match="or has been changed since"):
        allowed(onnx, "cat2\n")
    assert config.is_file()


CHANGES = [
    lambda text: text.replace("x=1", "x=2"),
    lambda text: text + "y=1\n",
    lambda text: "[property]\n",
    lambda text: text.replace("sha256 ", "sha256 0", 1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_configuration_of_others_or_a_changed_one_stays(onnx, change):
    _, config = deepstream_files.write(onnx, "cat\n", "[property]\nx=1\n")
    config.write_text(change(config.read_text()))
    with pytest.raises(InputError, match=r"was not written by export_yoloV9\.py, or has been changed since; rename"):
        allowed(onnx, "cat\n")


def test_a_folder_or_a_dead_link_there(onnx):
    labels, config = deepstream_files.paths(onnx)
    labels.mkdir()
    config.symlink_to("nowhere")
    with pytest.raises(InputError, match="is a folder"):
        deepstream_files.check_labels(onnx, "cat\n")
    with pytest.raises(InputError, match="is a link to a file that does not exist"):
        deepstream_files.check_config(onnx)


def test_a_name_that_would_add_lines_to_the_configuration(tmp_path):
    with pytest.raises(InputError, match="cannot be written on a line"):
        deepstream_files.check_name(tmp_path / "a\ncustom-lib-path=x.onnx")


def test_the_configuration_is_checked_before_anything_is_loaded(here, capsys):
    (here / "a.pt").write_text("no checkpoint")
    (here / "config_infer_primary_yoloV9.txt").write_text("[property]\n")
    err = refused(capsys, export_yoloV9.main, "--weights", "a.pt")
    assert "config_infer_primary_yoloV9.txt was not written by export_yoloV9.py" in err


# arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "../../x"], "argument --name: '../../x' is not the name of a folder"),
        (["--name", ""], "argument --name: it is empty; give a value, or leave it out"),
        (["--name="], "argument --name: it is empty"),
        (["--name", "."], "argument --name: '.' is not the name of a folder"),
        (["--project", ""], "argument --project: it is empty"),
        (["--source", ""], "argument --source: it is empty"),
        (["--engine-file="], "argument --engine-file: it is empty"),
        ([""], "an argument is empty"),
    ],
)
def test_arguments_that_are_empty_or_lead_elsewhere(here, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        val_trt.main(["--engine-file", "a.onnx", *words])
    err = capsys.readouterr().err
    assert (stopped.value.code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message}")
    assert not list(here.iterdir())


@pytest.mark.parametrize("command", ["quantize", "sensitive", "calibrate", "eval"])
def test_qat_takes_no_name_that_is_a_path(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        qat.main([command, "--weights", "w.pt", "--name", "../x"])
    assert stopped.value.code == 2
    assert "'../x' is not the name of a folder" in capsys.readouterr().err


def test_some_arguments_may_be_empty():
    assert run_program("p", (DeviceOptions, lambda options: 0), ["--device", ""]) == 0


@pytest.mark.parametrize(
    "words",
    [["patch_yolov9.sh"], ["patch_yolov9.sh", "a", "b"], ["patch_yolov9.sh", "--frce", "x"], ["patch_yolov9.sh", ""],
     ["scripts/quickstart.sh", "--imgsz", "abc"], ["scripts/quickstart.sh", "--nothing"],
     ["scripts/get_yolov9.sh"], ["scripts/test.sh", "--nothing"], ["install_dependencies.sh", "--nothing"],
     ["scripts/val_trt.sh"], ["scripts/benchmark_trt.sh", "a"], ["scripts/generate_trt_engine.sh"],
     ["scripts/generate_trt_engine.sh", "", "64"], ["data/demo/train_demo.sh", "--epochs"]],
)  # fmt: skip
def test_usage_errors_of_shell_scripts_are_one_line(words):
    command = ["bash", str(ROOT / words[0]), *words[1:]]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["run_upstream.py"], ["run_upstream.py", ""]])
def test_usage_errors_of_helpers_are_one_line(words):
    command = [sys.executable, str(ROOT / "scripts" / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")


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
    (TENSORRT, "scripts/benchmark_trt.py", ("a.onnx",), "TensorRT is not installed"),
    (TENSORRT, "scripts/inspect_engine.py", ("a.engine",), "TensorRT is not installed"),
    (TENSORRT, "scripts/check_engine_setup.py", ("data.yaml",), "TensorRT is not installed"),
    (TENSORRT, "val_trt.py", ("--engine-file", "a.engine", "--data", "data.yaml"), "TensorRT is not installed"),
    (TENSORRT, "scripts/make_report.py", ("run", "--compare", "a.onnx", "a.engine", "--data", "data.yaml"),
     "TensorRT is not installed"),
    ("dot", "scripts/inspect_engine.py", ("a.json", "--generate-graph"), "drawing needs graphviz"),
    ("dot", "scripts/check_engine_setup.py", ("data.yaml", "--generate-graph"), "drawing needs graphviz"),
    ("dot", "scripts/build_engine.py", ("a.onnx", "--generate-graph"), "drawing needs graphviz"),
    ("onnxruntime", "val_trt.py", ("--engine-file", "a.onnx", "--data", "data.yaml"), "this needs onnxruntime"),
    ("onnxruntime", "export_qat.py", ("--weights", "a.pt"), "this needs onnxruntime"),
    ("onnxruntime", "export_yoloV9.py", ("--weights", "a.pt"), "this needs onnxruntime"),
    ("onnxslim", "export_qat.py", ("--weights", "a.pt", "--simplify"), "this needs onnxslim"),
    ("onnx", "export_qat.py", ("--verify", "a.onnx"), "this needs onnx"),
    ("torch", "qat.py", ("eval", "--weights", "a.pt", "--data", "data.yaml"), "this needs torch"),
    ("tritonclient", "scripts/make_triton.py", ("a.onnx",), "this needs tritonclient"),
    ("geventhttpclient", "scripts/triton_client.py", ("m", "--source", "a.png"), "this needs geventhttpclient"),
    ("torch", "reparameterization.py", ("--weights", "a.pt"), "this needs torch"),
]  # fmt: skip


@pytest.mark.parametrize(("missing", "program", "words", "message"), MISSING)
def test_what_is_missing_is_said_before_anything_heavy_is_imported(tmp_path, missing, program, words, message):
    for name in ("m.yaml", "a.onnx", "a.engine", "a.pt"):
        (tmp_path / name).touch()
    (tmp_path / "a.json").write_text("[]")
    write_set(tmp_path, 1)
    Report(command="run").save(tmp_path / "run/report.json")
    command = [sys.executable, "-c", WITHOUT.format(root=str(ROOT)), missing, str(ROOT / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert done.stdout == "[]\n"
