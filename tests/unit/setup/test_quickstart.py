"""scripts/quickstart.sh with programs that only say how they were called."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LEVEL = ("--optimization-level", "2", "--check", "0")
LIBRARY = """
. {root}/scripts/lib.sh
OVERLAY_ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
YOLOV9_CHECKOUT=$OVERLAY_ROOT/build/yolov9
setup_environment() {{ PYTHON={python}; }}
setup_checkout() {{ :; }}
setup_demo_set() {{ echo "DRAWN ${{*:2}}"; DEMO_DATA=$OVERLAY_ROOT/build/digits${{1:-}}/data.yaml; }}
"""
PROGRAM = """
import os, sys, time
from pathlib import Path
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
print("CALLED", name, *arguments, flush=True)
if name == os.environ.get("SLEEPING"):
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
if name == os.environ.get("FAILING"):
    sys.exit(int(os.environ["STATUS"]))
if name == "qat.py":
    run = Path(arguments[arguments.index("--project") + 1]) / arguments[arguments.index("--name") + 1]
    (run / "weights").mkdir(parents=True, exist_ok=True)
    (run / "weights/last.pt").touch()
    (run / "weights/qat_best_model.pt").touch()
"""


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "a repository"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/quickstart.sh", root / "scripts")
    (root / "scripts/lib.sh").write_text(LIBRARY.format(root=ROOT, python=sys.executable))
    (root / "build/yolov9/scripts").mkdir(parents=True)
    for name in ("qat.py", "export_qat.py", "val_trt.py", "scripts/make_report.py"):
        (root / "build/yolov9" / name).write_text(PROGRAM)
    return root


def quickstart(folder, *arguments, cwd=None, **environment):
    command = ["bash", folder / "scripts/quickstart.sh", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env={"PATH": "/usr/bin:/bin", **environment}
    )


def calls(done) -> dict[str, list[str]]:
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("CALLED")]
    return {name: arguments for _, name, *arguments in lines}


def value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_the_demo_goes_through_all_programs(folder):
    called = calls(quickstart(folder))
    assert list(called) == ["qat.py", "export_qat.py", "val_trt.py", "make_report.py"]
    assert value(called["qat.py"], "--weights") == "data/demo/gelan-digits.pt"
    assert value(called["qat.py"], "--imgsz") == value(called["export_qat.py"], "--imgsz") == "320"
    assert {value(arguments, "--data") for arguments in called.values()} == {"build/digits/data.yaml"}
    assert value(called["val_trt.py"], "--engine-file") == "runs/quickstart/weights/qat_best_model.onnx"
    assert called["make_report.py"][:2] == ["runs/quickstart", "runs/quickstart/onnx"]


def test_the_demo_with_masks_has_a_set_and_weights_of_its_own(folder):
    done = quickstart(folder, "--segments", "--epochs", 2)
    assert "DRAWN --segments\n" in done.stdout
    called = calls(done)
    assert value(called["qat.py"], "--weights") == "data/demo/gelan-digits-seg.pt"
    assert [value(called["qat.py"], name) for name in ("--imgsz", "--epochs", "--iters")] == ["320", "2", "60"]
    assert {value(arguments, "--data") for arguments in called.values()} == {"build/digits-segments/data.yaml"}
    assert value(calls(quickstart(folder))["qat.py"], "--iters") == "30"
    assert value(calls(quickstart(folder, "--segments", "--iters", 7))["qat.py"], "--iters") == "7"


def test_a_file_for_each_typing_is_exported(folder):
    lines = [line.split() for line in quickstart(folder).stdout.splitlines() if line.startswith("CALLED export_qat.py")]
    strong, weak = lines
    assert (value(strong, "--typing"), value(weak, "--typing")) == ("strong", "weak")
    assert value(strong, "--output") == "runs/quickstart/weights/qat_best_model-strong.onnx"
    assert "--output" not in weak  # beside the weights: the file that is evaluated


@pytest.fixture
def with_tensorrt(folder):
    """The folder, and a function that says how TensorRT wants files to be typed."""

    def typed(typing):
        check = f"import sys\nprint('a warning')\nprint('{typing}')\nprint('late words', sys.argv, file=sys.stderr)\n"
        (folder / "build/yolov9/scripts/check_engine_setup.py").write_text(check)
        (folder / "build/yolov9/scripts/build_engine.py").write_text(PROGRAM)
        return folder

    return typed


@pytest.mark.parametrize(("typing", "ending"), [("weak", ""), ("strong", "-strong")])
def test_engines_are_built_and_evaluated_where_tensorrt_is(with_tensorrt, typing, ending):
    done = quickstart(with_tensorrt(typing), "--device", "1")
    assert done.returncode == 0, done.stderr
    assert "quickstart: done in" in done.stdout
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CALLED")]
    weights = "runs/quickstart/weights"
    assert [words for name, *words in lines if name == "build_engine.py"] == [
        [f"{weights}/float.onnx", "--output", f"{weights}/fp16.engine", *LEVEL, "--device", "1"],
        [f"{weights}/qat_best_model{ending}.onnx", "--output", f"{weights}/int8.engine", *LEVEL, "--device", "1"],
    ]
    exports = [words for name, *words in lines if name == "export_qat.py"]
    float_export = next(words for words in exports if value(words, "--weights") == "data/demo/gelan-digits.pt")
    assert (value(float_export, "--typing"), value(float_export, "--batch-size")) == (typing, "10")
    assert [Path(value(words, "--engine-file")).name for name, *words in lines if name == "val_trt.py"] == [
        "qat_best_model.onnx", "fp16.engine", "int8.engine"
    ]  # fmt: skip
    report = lines[-1]
    assert report[:5] == ["make_report.py", *(f"runs/quickstart{part}" for part in ("", "/onnx", "/fp16", "/int8"))]


def test_why_there_are_no_engines_is_said(folder):
    refusal = (
        "import sys; sys.exit('error: TensorRT is not installed: ./install_dependencies.sh --tensorrt; what else')"
    )
    (folder / "build/yolov9/scripts/check_engine_setup.py").write_text(refusal)
    done = quickstart(folder)
    assert done.returncode == 0
    assert "== no engines: TensorRT is not installed: ./install_dependencies.sh --tensorrt\n" in done.stdout
    assert "== no engines: --device is cpu\n" in quickstart(folder, "--device", "cpu").stdout


def test_the_report_is_written_though_an_engine_fails(with_tensorrt):
    done = quickstart(with_tensorrt("weak"), FAILING="build_engine.py", STATUS="1")
    assert done.returncode == 1
    assert "CALLED make_report.py runs/quickstart runs/quickstart/onnx --title" in done.stdout
    assert "== quickstart: the engines failed, see above" in done.stdout
    assert "quickstart: done" not in done.stdout
    assert quickstart(with_tensorrt("weak"), FAILING="build_engine.py", STATUS="130").returncode == 130


def test_ctrl_c_while_it_looks_for_tensorrt_ends_it(folder):
    (folder / "build/yolov9/scripts/check_engine_setup.py").write_text("import sys; sys.exit(130)")
    done = quickstart(folder)
    assert (done.returncode, "CALLED make_report.py" in done.stdout) == (130, False)


def test_tensorrt_is_installed_where_it_is_wanted(folder, tmp_path):
    library = folder / "scripts/lib.sh"
    library.write_text(library.read_text().replace("setup_environment() {", 'setup_environment() { echo "SET $*";'))
    assert "SET --tensorrt\n" in quickstart(folder).stdout
    assert "SET \n" in quickstart(folder, "--device", "cpu").stdout
    assert "SET \n" in quickstart(folder, ENGINE_PYTHON=sys.executable).stdout


def test_own_models_options_and_folders_are_passed_on(folder, tmp_path):
    for name in ("my.pt", "my.yaml"):
        (tmp_path / name).touch()
    options = [
        "--weights",
        "my.pt",
        "--data=my.yaml",
        "--device",
        "cpu",
        "--epochs=3",
        "--iters",
        "7",
        "--batch-size",
        "4",
    ]
    called = calls(quickstart(folder, *options, "--output", "out", cwd=tmp_path))
    assert value(called["qat.py"], "--weights") == str(tmp_path / "my.pt")
    assert value(called["qat.py"], "--imgsz") == "640"
    assert [value(called["qat.py"], f"--{name}") for name in ("epochs", "iters", "batch-size")] == ["3", "7", "4"]
    assert {value(arguments, "--device") for arguments in called.values()} == {"cpu"}
    assert called["make_report.py"][0] == str(tmp_path / "out")


def test_an_earlier_run_is_replaced_or_resumed(folder):
    first = calls(quickstart(folder))
    old = folder / "runs/quickstart/weights/old.pt"
    old.touch()
    assert calls(quickstart(folder, "--resume"))["qat.py"] == [
        *first["qat.py"][:-1], "--resume", "runs/quickstart", "--device"
    ]  # fmt: skip
    assert old.exists()
    assert calls(quickstart(folder))["qat.py"] == first["qat.py"]
    assert not old.exists()


def test_a_folder_of_somebody_else_is_left_alone(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    done = quickstart(folder, "--output", precious)
    assert (done.returncode, "CALLED" in done.stdout) == (2, False)
    assert "choose another --output" in done.stderr
    assert (precious / "file").exists()


def test_a_folder_whose_name_begins_with_a_dash(folder):
    (folder / "file").touch()
    called = calls(quickstart(folder, "--output=-delete", cwd=folder))
    assert value(called["qat.py"], "--project") == "."
    assert (folder / "-delete/weights/last.pt").exists()
    assert (folder / "file").exists()


def test_a_training_is_no_earlier_run(folder, tmp_path):
    """Upstream's train.py leaves weights/last.pt, too. Nor is anything emptied that the weights or the data lie in."""
    training = tmp_path / "exp"
    (training / "weights").mkdir(parents=True)
    (training / "weights/last.pt").touch()
    (training / "weights/best.pt").touch()
    (tmp_path / "data.yaml").touch()
    done = quickstart(folder, "--output", training)
    assert (done.returncode, "CALLED" in done.stdout) == (2, False)
    assert "holds files that are no quickstart's; choose another --output" in done.stderr
    (training / ".quickstart").touch()
    words = ("--weights", training / "weights/best.pt", "--data", tmp_path / "data.yaml", "--output", training)
    done = quickstart(folder, *words)
    assert (done.returncode, "CALLED" in done.stdout) == (2, False)
    assert "best.pt lies in" in done.stderr
    assert len(list(training.rglob("*.pt"))) == 2


@pytest.mark.parametrize("program", ["qat.py", "export_qat.py", "val_trt.py", "make_report.py"])
@pytest.mark.parametrize("status", [1, 2, 130])
def test_a_failing_program_ends_it_with_its_exit_code(folder, program, status):
    done = quickstart(folder, FAILING=program, STATUS=str(status))
    assert done.returncode == status
    called = [line for line in done.stdout.splitlines() if line.startswith("CALLED")]
    assert called[-1].split()[1] == program
    assert ("--resume continues" in done.stdout) == (program != "qat.py")  # which has left no state here


def test_ctrl_c_ends_it(folder):
    command = ["bash", folder / "scripts/quickstart.sh"]
    environment = {"PATH": "/usr/bin:/bin", "SLEEPING": "export_qat.py"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    lines = []
    while not lines or "CALLED export_qat.py" not in lines[-1]:
        lines.append(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    assert "val_trt.py" not in process.communicate(timeout=20)[0]
    assert process.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--surprise"], "unknown argument --surprise"),
        (["demo"], "unknown argument demo"),
        (["--weights"], "--weights needs a value"),
        (["--weights", "missing.pt"], "missing.pt does not exist"),
        (["--weights", __file__], "--weights needs --data"),
        (["--segments", "--data", __file__], "--segments is the demo with masks; leave --weights and --data out"),
        (["--resume"], "no run to resume"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(folder, arguments, says):
    done = quickstart(folder, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "CALLED" not in done.stdout


def test_help_names_every_option(folder):
    done = quickstart(folder, "--help")
    assert done.returncode == 0
    names = (
        "--weights",
        "--data",
        "--imgsz",
        "--batch-size",
        "--epochs",
        "--iters",
        "--device",
        "--output",
        "--resume",
    )
    assert all(f"  {name} " in done.stdout for name in names)
