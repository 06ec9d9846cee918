"""Steps: what runs again, what a failure names, and what a signal does to the program that runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.core.errors import InputError
from utils.jobs.pipeline.steps import Pipeline, RunStep, StepError

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import pathlib, sys
source, target, *words = sys.argv[1:]
with open("calls", "a") as calls:
    calls.write(" ".join(words) + chr(10))
print("printed", flush=True)
print("complained", file=sys.stderr)
pathlib.Path("begun").touch()
if "fail" in words:
    sys.exit(3)
if "nothing" not in words:
    pathlib.Path(target).write_text(pathlib.Path(source).read_text())
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "source").write_text("first")
    return tmp_path


def run(folder, *words, software=None, **options) -> list[str]:
    """Run a step with options; the options of all calls until now."""
    command = ["program.py", "source", "target", *words]
    step = RunStep("copy", command, folder / "target", resume=(folder / "begun", ["--resume"]))
    Pipeline(folder / "pipeline", folder, software or {}).run(step, **options)
    return (folder / "calls").read_text().splitlines()


def test_a_step_runs_again_where_anything_it_depends_on_has_changed(folder, caplog):
    caplog.set_level("INFO")
    assert run(folder, "--a") == run(folder, "--a") == ["--a"]
    assert run(folder, "--b") == ["--a", "--b"]
    (folder / "source").write_text("second")
    assert run(folder, "--b") == ["--a", "--b", "--b"]
    assert (folder / "target").read_text() == "second"
    (folder / "target").write_text("somebody else's")
    assert len(run(folder, "--b")) == 4
    assert len(run(folder, "--b", software={"torch": "2.9"})) == 5
    assert len(run(folder, "--b", software={"torch": "2.9"})) == 5
    (folder / "target").unlink()
    assert len(run(folder, "--b", software={"torch": "2.9"})) == 6
    said = [line for line in caplog.messages if ": runs again" in line]
    for line, name in zip(said, ["command", "source", "target", "torch", "target"], strict=True):
        assert f"{name} changed" in line


def test_an_interrupted_step_continues_only_where_nothing_has_changed(folder):
    with pytest.raises(StepError):
        run(folder, "fail")
    assert run(folder, "other")[-1] == "other", "of another command, the state in `begun` is no beginning"
    with pytest.raises(StepError):
        run(folder, "fail")
    with pytest.raises(StepError):
        run(folder, "fail")
    assert (folder / "calls").read_text().splitlines()[-1] == "fail --resume"
    assert run(folder, "third", resume=True)[-1] == "third --resume"


def test_a_failure_names_step_command_and_log(folder, capfd):
    with pytest.raises(StepError) as failed:
        run(folder, "fail")
    log = folder / "pipeline/logs/copy.log"
    assert failed.value.exit_code == 3
    for word in ("copy", "program.py source target fail", str(log), str(folder)):
        assert word in str(failed.value)
    assert sorted(log.read_text().split()) == ["complained", "printed"]
    shown = capfd.readouterr()
    assert ("printed" in shown.out, "complained" in shown.err) == (True, True)
    with pytest.raises(StepError, match="left no target"):
        run(folder, "nothing")


def test_a_step_runs_again_where_a_label_of_its_dataset_has_changed(folder):
    for split in ("train", "val"):
        for kind, name in (("images", "a.png"), ("labels", "a.txt")):
            (folder / kind / split).mkdir(parents=True)
            (folder / kind / split / name).write_text("0 0.5 0.5 0.2 0.2\n")
    text = f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"
    (folder / "data.yaml").write_text(text)
    assert len(run(folder, "--data", "data.yaml")) == len(run(folder, "--data", "data.yaml")) == 1
    (folder / "labels/val/a.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    assert len(run(folder, "--data", "data.yaml")) == 2
    (folder / "images/train/b.png").touch()
    assert len(run(folder, "--data", "data.yaml")) == 3


def test_an_output_that_is_named_in_the_command_is_not_an_input(folder, monkeypatch):
    """Also where both are relative to the folder that programs run in."""
    step = RunStep("copy", ["program.py", "source", "target"], Path("target"))
    monkeypatch.chdir(folder)
    for _ in range(2):
        Pipeline(folder / "pipeline", folder, {}).run(step)
    assert len((folder / "calls").read_text().splitlines()) == 1


def test_what_another_command_has_begun_is_not_continued(folder):
    pipeline = Pipeline(folder / "pipeline", folder, only_commands=True)
    resume = (folder / "begun", ["--resume"])
    with pytest.raises(StepError):
        pipeline.run(RunStep("copy", ["program.py", "source", "target", "fail"], folder / "target", resume=resume))
    pipeline.run(RunStep("copy", ["program.py", "source", "target", "--b"], folder / "target", resume=resume))
    assert (folder / "calls").read_text().splitlines() == ["fail", "--b"]


def test_results_of_days_are_refused_rather_than_replaced(folder):
    pipeline = Pipeline(folder / "pipeline", folder, only_commands=True)
    step = RunStep("copy", ["program.py", "source", "target"], folder / "target")
    (folder / "pipeline/done").mkdir(parents=True)
    (folder / "target").touch()
    (folder / "pipeline/done/copy").write_text("program.py source target\n")  # as records were, the command alone
    pipeline.run(step)
    assert not (folder / "calls").exists()
    with pytest.raises(InputError, match="choose another --output"):
        pipeline.run(RunStep("copy", ["program.py", "source", "target", "--b"], folder / "target"))


LONG = """
import os, signal, sys, time
heard = []
def note(number, frame):
    heard.append(str(number))
    time.sleep(0.3)  # whoever sends a second signal, sends it now
    open("heard", "w").write(" ".join(heard))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
open("ready", "w").close()
time.sleep(60)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from utils.cli import run_program
from utils.core.options import Options
from utils.jobs.pipeline.steps import Pipeline, RunStep

def work(options):
    Pipeline(Path("pipeline"), Path.cwd()).run(RunStep("long", ["long.py"], Path("never")))

sys.exit(run_program("p", (Options, work)))
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "kill"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_program_once(tmp_path, number, code, whole_group):
    (tmp_path / "long.py").write_text(LONG)
    command = [sys.executable, "-c", DRIVER, str(ROOT)]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True) as driver:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if whole_group else os.kill)(driver.pid, number)
        _, said = driver.communicate(timeout=60)
    assert (driver.returncode, said.count("\n")) == (code, 1)
    assert (tmp_path / "heard").read_text() == str(int(number))
    assert list((tmp_path / "pipeline").glob("done/*")) == []
