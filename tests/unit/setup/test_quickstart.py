"""scripts/quickstart.sh with programs that only say how they were called."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documentation
import pytest

ROOT = Path(__file__).resolve().parents[3]
LEVEL = ("--optimization-level", "2", "--batch-size", "1", "10", "10", "--check", "0")
LIBRARY = """
. {root}/scripts/lib.sh
OVERLAY_ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
YOLOV9_CHECKOUT=$OVERLAY_ROOT/build/yolov9
setup_environment() {{ PYTHON={python}; }}
setup_checkout() {{ :; }}
setup_demo_set() {{ echo "DRAWN ${{*:2}}"; DEMO_DATA=$OVERLAY_ROOT/build/digits${{1:-}}/data.yaml; }}
"""
PROGRAM = """
import os, shlex, sys
from pathlib import Path
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
print("CALLED", name, shlex.join(arguments), flush=True)
if name == os.environ.get("FAILING"):
    sys.exit(int(os.environ["STATUS"]))
if name == "reparameterization.py" and "DUAL" in os.environ:
    Path(arguments[arguments.index("--save") + 1]).touch()
if name == "qat.py":
    run = Path(arguments[arguments.index("--project") + 1]) / arguments[arguments.index("--name") + 1]
    (run / "weights").mkdir(parents=True, exist_ok=True)
    (run / "weights/last.pt").touch()
    (run / "weights/qat_best_model.pt").touch()
    (run / "report.json").touch()
if name == "export_qat.py":
    weights = Path(arguments[arguments.index("--weights") + 1])
    ending = "-int8-strong.onnx" if "strong" in arguments else "-int8.onnx"
    file = weights.with_name(weights.stem + ending)
    if "--output" in arguments:
        file = Path(arguments[arguments.index("--output") + 1])
    file.touch()
if name == "val_trt.py":
    folder = Path(arguments[arguments.index("--project") + 1]) / arguments[arguments.index("--name") + 1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").touch()
if name == "build_engine.py":
    Path(arguments[arguments.index("--output") + 1]).touch()
if name == "cpu_speed.py":
    print("gelan-s with random weights. INT8 against FP32 in OpenVINO: 2 times as fast at batch 1; use INT8")
if name == "benchmark_trt.py":
    folder = Path(arguments[arguments.index("--project") + 1], "benchmark")
    folder.mkdir(exist_ok=True)
    base = "FP32" if "openvino" in arguments else "FP16"
    text = f"| a table |\\n\\nINT8 against {base}: 2 times as fast at batch 1; use INT8\\n"
    (folder / "benchmark.md").write_text(text)
"""


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "a repository"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/quickstart.sh", root / "scripts")
    (root / "scripts/lib.sh").write_text(LIBRARY.format(root=ROOT, python=sys.executable))
    (root / "build/yolov9/scripts").mkdir(parents=True)
    for name in (
        "reparameterization",
        "qat",
        "export_qat",
        "val_trt",
        "scripts/make_report",
        "scripts/cpu_speed",
        "scripts/benchmark_trt",
    ):
        (root / "build/yolov9" / f"{name}.py").write_text(PROGRAM)
    (root / "build/yolov9/scripts/quickstart.py").symlink_to(ROOT / "scripts/quickstart.py")
    return root


def quickstart(folder, *arguments, cwd=None, **environment):
    command = ["bash", folder / "scripts/quickstart.sh", *map(str, arguments)]
    environment = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def calls(done) -> list[list[str]]:
    """Name and arguments of each program that was called."""
    assert done.returncode == 0, done.stderr
    return [shlex.split(line)[1:] for line in done.stdout.splitlines() if line.startswith("CALLED")]


def call(done, name: str) -> list[str]:
    return next(words for words in calls(done) if words[0] == name)


def values(arguments: list[str], *options: str) -> list[str]:
    return [arguments[arguments.index(option) + 1] for option in options]


def assert_refused(done, *words) -> None:
    assert (done.returncode, "CALLED" in done.stdout, done.stderr.count("\n")) == (2, False, 1)
    assert [word for word in words if word not in done.stderr] == []


def test_the_demo_goes_through_all_programs(folder):
    called = calls(quickstart(folder))
    assert [words[0] for words in called] == [
        "qat.py", "export_qat.py", "export_qat.py", "val_trt.py",
        "export_qat.py", "val_trt.py", "cpu_speed.py", "make_report.py",  # INT8 and FP32 on this CPU
    ]  # fmt: skip
    quantize, strong, weak, evaluate, plain, on_cpu, _, report = called
    assert " ".join(report).count("2 times as fast") == 1
    int8, float_file = (f"{folder}/runs/quickstart/weights/{name}.onnx" for name in ("qat_best_model-int8", "float"))
    assert values(plain, "--weights", "--output") == [f"{folder}/data/demo/gelan-digits.pt", float_file]
    assert values(on_cpu, "--engine-file", "--reference", "--runtime") == [int8, float_file, "openvino"]
    assert values(quantize, "--weights", "--imgsz") == [f"{folder}/data/demo/gelan-digits.pt", "320"]
    assert values(strong, "--typing", "--dynamic", "--imgsz") == ["strong", "batch", "320"]
    assert values(weak, "--typing", "--dynamic", "--imgsz") == ["weak", "batch", "320"]
    assert "--output" not in strong + weak  # beside the weights: the weakly typed file is evaluated
    assert {values(words, "--data")[0] for words in called if "--data" in words} == {f"{folder}/build/digits/data.yaml"}
    assert values(evaluate, "--engine-file", "--reference") == [
        f"{folder}/runs/quickstart/weights/qat_best_model-int8.onnx", f"{folder}/data/demo/gelan-digits.pt",
    ]  # fmt: skip
    assert report[1:4] == [f"{folder}/runs/quickstart{name}" for name in ("", "/onnx", "/openvino")]


def test_the_speed_of_own_weights_on_a_cpu_is_that_of_the_own_model(folder, tmp_path):
    weights, data = tmp_path / "my.pt", tmp_path / "my.yaml"
    for file in (weights, data):
        file.touch()
    called = calls(quickstart(folder, "--weights", weights, "--data", data, "--device", "cpu"))
    benchmark = next(words for words in called if words[0] == "benchmark_trt.py")
    assert values(benchmark, "--runtime", "--baseline") == ["openvino", f"{folder}/runs/quickstart/weights/float.onnx"]
    assert "cpu_speed.py" not in [words[0] for words in called]
    assert "INT8 against FP32: 2 times as fast" in " ".join(called[-1])


def test_without_openvino_a_line_names_the_command(folder, tmp_path):
    (tmp_path / "openvino.py").write_text("raise ImportError")
    done = quickstart(folder, PYTHONPATH=str(tmp_path))
    assert "./install_dependencies.sh --openvino" in done.stdout
    assert [words[0] for words in calls(done)][-2:] == ["val_trt.py", "make_report.py"]
    assert "INT8's speed shows in TensorRT and in OpenVINO" in " ".join(calls(done)[-1])


def test_the_demo_with_masks_has_a_set_and_weights_of_its_own(folder):
    done = quickstart(folder, "--segments", "--epochs", 2)
    assert "DRAWN --segments\n" in done.stdout
    assert values(call(done, "qat.py"), "--weights", "--imgsz", "--epochs", "--iters", "--data") == [
        f"{folder}/data/demo/gelan-digits-seg.pt", "320", "2", "60", f"{folder}/build/digits-segments/data.yaml",
    ]  # fmt: skip


@pytest.fixture
def with_tensorrt(folder):
    """The folder, and a function that says how TensorRT wants files to be typed."""

    def typed(typing):
        check = f"import sys\nprint('a warning')\nprint('{typing}')\nprint('late words', sys.argv, file=sys.stderr)\n"
        (folder / "build/yolov9/scripts/check_engine_setup.py").write_text(check)
        for name in ("build_engine.py", "benchmark_trt.py"):
            (folder / "build/yolov9/scripts" / name).write_text(PROGRAM)
        return folder

    return typed


@pytest.mark.parametrize(("typing", "ending"), [("weak", "-int8"), ("strong", "-int8-strong")])
def test_engines_are_built_and_evaluated_where_tensorrt_is(with_tensorrt, typing, ending):
    root = with_tensorrt(typing)
    done = quickstart(root, "--device", "1")
    called = calls(done)
    weights = f"{root}/runs/quickstart/weights"
    assert [words for name, *words in called if name == "build_engine.py"] == [
        [f"{weights}/float.onnx", "--output", f"{weights}/fp16.engine", *LEVEL, "--device", "1"],
        [f"{weights}/qat_best_model{ending}.onnx", "--output", f"{weights}/int8.engine", *LEVEL, "--device", "1"],
    ]
    exports = [words for name, *words in called if name == "export_qat.py"]
    (float_export,) = [
        words for words in exports if values(words, "--weights") == [f"{root}/data/demo/gelan-digits.pt"]
    ]
    assert values(float_export, "--typing", "--dynamic") == [typing, "batch"]
    evaluated = [Path(*values(words, "--engine-file")).name for name, *words in called if name == "val_trt.py"]
    assert evaluated == ["qat_best_model-int8.onnx", "fp16.engine", "int8.engine"]
    assert called[-1][1:5] == [f"{root}/runs/quickstart{part}" for part in ("", "/onnx", "/fp16", "/int8")]
    assert call(done, "benchmark_trt.py")[1:8] == [
        f"{weights}/qat_best_model{ending}.onnx", "--baseline", f"{weights}/float.onnx", "--batch-size", "1", "10",
        "--builds",
    ]  # fmt: skip
    assert done.stdout.splitlines()[-2].endswith("INT8 against FP16: 2 times as fast at batch 1; use INT8")


def test_the_report_is_written_though_an_engine_fails(with_tensorrt):
    done = quickstart(with_tensorrt("weak"), FAILING="build_engine.py", STATUS="1")
    assert (done.returncode, "quickstart: done" in done.stdout) == (1, False)
    (report,) = [shlex.split(line)[2:5] for line in done.stdout.splitlines() if "CALLED make_report.py" in line]
    assert [Path(word).name for word in report] == ["quickstart", "onnx", "--title"]
    assert quickstart(with_tensorrt("weak"), FAILING="build_engine.py", STATUS="130").returncode == 130


def test_own_models_options_and_folders_are_passed_on(folder, tmp_path):
    """What train_dual.py wrote is converted first, as below; the programs know the image size of the training."""
    for name in ("my own.pt", "my.yaml"):
        (tmp_path / name).touch()
    words = "--data=my.yaml --device cpu --epochs=3 --iters 7 --batch-size 4 --output out"
    done = quickstart(folder, "--weights", "my own.pt", *words.split(), cwd=tmp_path)
    convert, quantize, *_, report = calls(done)
    assert (convert[0], convert[2]) == ("reparameterization.py", str(tmp_path / "my own.pt"))
    assert values(quantize, "--weights") == [str(tmp_path / "my own.pt")]
    assert values(quantize, "--epochs", "--iters", "--batch-size", "--device") == ["3", "7", "4", "cpu"]
    assert not [words for words in calls(done) if "--imgsz" in words]
    assert report[1] == str(tmp_path / "out")


def test_it_ends_with_the_commands_of_the_documents_for_this_model(folder, tmp_path):
    """Each runs as it is printed, in the checkout: what one writes is what the next one reads."""
    assert "to go on with" not in quickstart(folder).stdout
    weights, data = tmp_path / "my own.pt", tmp_path / "data.yaml"
    weights.touch(), data.touch()
    done = quickstart(folder, "--weights", weights, "--data", data, DUAL="1")
    lines = done.stdout.partition("to go on with")[2].splitlines()
    enter, activate, *five = [shlex.split(line) for line in lines[1:-1]]
    assert (enter, activate[0]) == (["cd", str(folder / "build/yolov9")], ".")
    convert, quantize, export, build, evaluate = five
    page = (ROOT / "docs/your-model.md").read_text(encoding="utf-8")
    documented = documentation.commands(page)
    programs = [[word for word in words[:2] if ".onnx" not in word] for words in (*documented, *five)]
    start = programs.index(["python", "reparameterization.py"])
    assert programs[-5:] == programs[start : start + 5]
    assert values(convert, "--save") == values(quantize, "--weights") == [str(tmp_path / "my own-converted.pt")]
    assert values(export, "--weights") == [f"runs/qat/{values(quantize, '--name')[0]}/weights/qat_best_model.pt"]
    assert values(export, "--typing") == ["strong"]
    assert build[1] == values(export, "--weights")[0].replace(".pt", "-int8-strong.onnx")
    assert values(evaluate, "--engine-file") == [str(Path(build[1]).with_suffix(".engine"))]
    assert values(quantize, "--data") == values(evaluate, "--data") == [str(data)]
    assert values(evaluate, "--reference") == values(quantize, "--weights")
    assert [documentation.refusal(words[1], words[2:]) for words in five if words[0] == "python"] == [""] * 4


def test_the_commands_for_this_model_name_the_file_that_tensorrt_here_reads(with_tensorrt, tmp_path):
    weights, data = tmp_path / "my.pt", tmp_path / "data.yaml"
    weights.touch(), data.touch()
    done = quickstart(with_tensorrt("weak"), "--weights", weights, "--data", data, "--device", "1")
    commands = done.stdout.partition("to go on with")[2]
    assert "--typing weak" in commands
    assert "generate_trt_engine.sh runs/qat/my/weights/qat_best_model-int8.onnx" in commands


def test_weights_without_a_name_of_their_own_take_that_of_the_run(folder, tmp_path):
    """As `stem_of` does, so that the folder and the file of the second command are those that the first one writes."""
    weights, data = tmp_path / "best.pt", tmp_path / "data.yaml"
    weights.touch(), data.touch()
    done = quickstart(folder, "--weights", weights, "--data", data, "--output", tmp_path / "mine")
    commands = done.stdout.partition("to go on with")[2]
    assert "--name mine" in commands
    assert "--weights runs/qat/mine/weights/qat_best_model.pt" in commands


def names(done) -> list[str]:
    """The programs that were called."""
    return [words[0] for words in calls(done)]


def test_a_second_call_reuses_what_has_ended_and_says_so(folder):
    first = quickstart(folder)
    again = quickstart(folder)
    assert names(again) == ["make_report.py"]
    assert call(again, "make_report.py") == call(first, "make_report.py")
    reused = [line for line in again.stdout.splitlines() if ": reused" in line]
    assert len(reused) == len(calls(first)) - 1
    assert f"{folder}/runs/quickstart/report.json" in reused[0]
    assert [line for line in again.stdout.splitlines() if line.startswith("== 2 times")] == []
    assert first.stdout.splitlines()[-2] == again.stdout.splitlines()[-2]  # the speed of INT8


def test_what_has_changed_runs_again_and_is_named(folder, tmp_path):
    weights, data = tmp_path / "my.pt", tmp_path / "my.yaml"
    weights.write_text("first"), data.touch()
    own = ("--weights", weights, "--data", data, "--device", "cpu")
    quickstart(folder, *own)
    other = quickstart(folder, *own, "--epochs", "7")
    assert call(other, "qat.py")[-2:] == ["--device", "cpu"], "not --resume: it is another run"
    assert values(call(other, "qat.py"), "--epochs") == ["7"]
    assert "1/4 quantize: FP32, PTQ, QAT: runs again, since command changed" in other.stdout
    assert "export_qat.py" not in names(other), "its checkpoint is as it was"
    weights.write_text("second")
    changed = quickstart(folder, *own, "--epochs", "7")
    assert "qat.py" in names(changed)
    assert f"{weights} changed" in changed.stdout
    (folder / "runs/quickstart/weights/float.onnx").unlink()
    assert "export_qat.py" in names(quickstart(folder, *own, "--epochs", "7"))
    (folder / "build/yolov9/val_trt.py").write_text(f"{PROGRAM}\n")
    updated = quickstart(folder, *own, "--epochs", "7")
    assert "the programs changed" in updated.stdout
    assert "qat.py" in names(updated)


def test_an_interrupted_qat_is_continued(folder):
    quickstart(folder, FAILING="qat.py", STATUS="1")
    state = folder / "runs/quickstart/weights/last.pt"
    state.parent.mkdir()
    state.touch()
    assert call(quickstart(folder), "qat.py")[-2:] == ["--resume", f"{folder}/runs/quickstart"]


def test_resume_continues_a_run_whose_options_have_changed(folder):
    first = call(quickstart(folder), "qat.py")
    again = call(quickstart(folder, "--resume", "--epochs", "7"), "qat.py")
    assert again[-2:] == ["--resume", f"{folder}/runs/quickstart"]
    assert call(quickstart(folder), "qat.py") == first
    assert "--exist-ok" in first  # with which qat.py replaces what an earlier run has left, if it is there


def test_a_converted_file_of_another_model_is_not_taken(folder, tmp_path):
    (other := tmp_path / "out/best-converted.pt").parent.mkdir()
    for file in (tmp_path / "best.pt", other, tmp_path / "out/.quickstart"):
        file.touch()
    own = ("--weights", tmp_path / "best.pt", "--data", __file__, "--output", other.parent)
    assert str(other) not in call(quickstart(folder, *own), "qat.py")
    assert call(quickstart(folder, *own, "--epochs", "7", DUAL="1"), "qat.py").count(str(other)) == 0, "reused"


def test_a_folder_of_somebody_else_is_left_alone(folder, tmp_path):
    training = tmp_path / "exp/weights/last.pt"
    training.parent.mkdir(parents=True)
    training.touch()
    assert_refused(quickstart(folder, "--output", tmp_path / "exp"), "choose another --output")
    assert len(list((tmp_path / "exp").rglob("*"))) == 2


@pytest.mark.parametrize(
    ("program", "status"), [("qat.py", 1), ("export_qat.py", 2), ("val_trt.py", 130), ("make_report.py", 1)]
)
def test_a_failing_program_ends_it_with_its_exit_code_and_the_next_call_goes_on_there(folder, program, status):
    done = quickstart(folder, FAILING=program, STATUS=str(status))
    called = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("CALLED")]
    assert (done.returncode, called[-1], done.stderr.count("\n")) == (status, program, 1)
    if status != 130:
        log = re.search(r"see (\S.*\.log);", done.stderr)[1]
        assert f"CALLED {program}" in Path(log).read_text()
        assert f"/build/yolov9/{program}" in done.stderr.partition("its command was")[2].replace("scripts/", "")
    assert names(quickstart(folder))[0] == program


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--surprise"], "--surprise"),
        (["--weights"], "--weights"),
        (["--weights", "missing.pt"], "missing.pt"),
        (["--weights", __file__], "--data"),
        (["--segments", "--data", __file__], "--segments"),
        (["--resume"], "no run to resume"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(folder, arguments, named):
    assert_refused(quickstart(folder, *arguments), named)
