"""A quantize run that is killed at any moment continues to what it would have been; so does one of two processes under
torchrun, which is the run of one process."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from qat_runs import SMALL_RUN, checkpoints, killed, quantize, report_of, write_small_set

import qat
from models.quantize import calibration
from models.quantize.finetune import DivergedError, Finetuner
from utils.core.errors import InputError
from utils.core.run_folder import held
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.labels import label_file
from utils.jobs.evaluate import Measurer
from utils.jobs.run_state import RunState
from utils.upstream import load_float

pytestmark = pytest.mark.usefixtures("blank_plots")
LONGER = ("--epochs", "2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, small_weights):
    """A run that was never interrupted."""
    project = tmp_path_factory.mktemp("whole")
    assert quantize(small_weights, data, project, *LONGER) == 0
    report = report_of(project / "exp")
    found = [*(row["ap"] for row in report["rows"][:2]), *(entry["held_out"] for entry in report["history"])]
    assert len({*found, 0.0}) == 5  # so that a comparison with it can fail
    return project / "exp"


def resume(run: Path, *words: str) -> int:
    return qat.main(["quantize", "--resume", str(run), *words])


def test_the_state_of_a_run_is_no_checkpoint(whole):
    with pytest.raises(InputError, match="what --resume continues from; give qat_best"):
        load_float(whole / "weights/last.pt")


def assert_equal_runs(run: Path, whole: Path) -> None:
    """Same files with the same content, same results; only times differ."""
    assert checkpoints(run) == checkpoints(whole)
    for name in checkpoints(run):
        if name != "last.pt":
            ours, theirs = (torch.load(folder / "weights" / name, weights_only=True) for folder in (run, whole))
            assert ours["quantized_state"].keys() == theirs["quantized_state"].keys()
            for key, value in ours["quantized_state"].items():
                assert torch.equal(value, theirs["quantized_state"][key]), (name, key)
    ours, theirs = report_of(run), report_of(whole)
    for entry, other in zip(ours["history"], theirs["history"], strict=True):
        assert entry | {"seconds": 0} == other | {"seconds": 0}
    for row, other in zip(ours["rows"], theirs["rows"], strict=True):
        for key in ("stage", "ap", "ap50", "precision", "recall", "measured_on"):
            assert row[key] == other[key], (row["stage"], key)


def test_a_run_that_dies_between_a_checkpoint_and_its_state_continues_to_the_same_end(
    whole, data, small_weights, tmp_path
):
    """Steps save in this order: the start; float row; PTQ's checkpoint, state, report; each epoch's in the same way."""
    killed(lambda: quantize(small_weights, data, tmp_path, *LONGER), RunState, "save", 4)
    assert resume(tmp_path / "exp") == 0
    assert_equal_runs(tmp_path / "exp", whole)


def test_ctrl_c_says_how_to_resume(data, small_weights, tmp_path, checkout):
    log, deadline = tmp_path / "log", time.monotonic() + 200
    command = ["qat.py", "quantize", "--weights", small_weights, "--data", data, "--project", tmp_path, *SMALL_RUN]
    command += ["--workers", "1", "--epochs", "1000"]  # a worker process, since the signal reaches those too
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *map(str, command)], cwd=checkout, stdout=out, stderr=out,
                                   start_new_session=True)  # fmt: skip
    while "QAT epoch 0" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    for _ in range(10):  # Python drops one that arrives while it forks a worker, so a user would press it again
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
            break
        if "interrupted" in log.read_text():  # it heard, and is still on its way out
            break
    assert process.wait(30) == 130, log.read_text()
    text = log.read_text()
    assert f"--resume {tmp_path / 'exp'}" in text
    ignored = "Exception ignored in" in text  # Python's own words when Ctrl-C hits one of its fork handlers
    assert ignored or "Traceback" not in text
    assert not [name for name in checkpoints(tmp_path / "exp") if name.startswith((".", "qat_best"))]


def test_a_finished_run_is_only_shown_again(whole, capsys):
    before = {name: (whole / "weights" / name).stat().st_mtime_ns for name in checkpoints(whole)}
    assert resume(whole) == 0
    out = capsys.readouterr().out
    assert "the run is finished" in out
    assert "best: " in out
    assert qat.main(["quantize", "--resume", "--project", str(whole.parent)]) == 0  # the last one there
    assert str(whole) in capsys.readouterr().out
    assert {name: (whole / "weights" / name).stat().st_mtime_ns for name in checkpoints(whole)} == before


def test_files_that_are_gone_or_have_changed_are_named(data, small_weights, tmp_path, capsys):
    weights, quantized = tmp_path / "gelan-digits.pt", tmp_path / "exp/weights/ptq_gelan-digits.pt"
    weights.write_bytes(small_weights.read_bytes())
    assert quantize(weights, data, tmp_path, "--ptq-only", "--no-eval-origin", "--no-eval-ptq") == 0
    content = quantized.rename(tmp_path / "aside.pt")
    assert resume(tmp_path / "exp") == 2
    assert str(quantized) in capsys.readouterr().err
    content.rename(quantized)
    torch.save({**torch.load(weights, weights_only=False), "epoch": 12345}, weights)
    assert resume(tmp_path / "exp") == 2
    assert str(weights) in capsys.readouterr().err


@pytest.fixture
def start(data, small_weights, tmp_path):
    """Start a command of qat.py in `tmp_path/exp`, on a dataset that a test may change."""
    demo = load_data(data)
    for split in ("train", "val"):
        folders = [tmp_path / "set" / kind / split for kind in ("images", "labels")]
        for file in find_images(demo.paths(split)):
            for source, folder in zip((file, label_file(file)), folders, strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder)
    own = {"path": str(tmp_path / "set"), "train": "images/train", "val": "images/val", "names": dict(demo.names)}
    (tmp_path / "set/data.yaml").write_text(yaml.safe_dump(own))

    def run(command: str, *words: str) -> int:
        small = [*SMALL_RUN, "--no-eval-origin"] if command == "quantize" else SMALL_RUN[:-2]
        common = ["--weights", small_weights, "--data", tmp_path / "set/data.yaml", "--project", tmp_path]
        return qat.main([command, *map(str, common), *small, *words])

    return run


@pytest.mark.parametrize("command", ["quantize", "sensitive"])
def test_a_run_is_not_continued_on_other_images_or_by_two_programs(command, start, tmp_path, capsys):
    killed(lambda: start(command), calibration, "collect")
    image = next((tmp_path / "set/images/val").iterdir())
    label = tmp_path / "set/labels/val" / f"{image.stem}.txt"
    go_on = [command, "--resume", str(tmp_path / "exp")]
    capsys.readouterr()

    def refused(words: list[str], named: str) -> None:
        assert qat.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert named in line

    kept = image.rename(tmp_path / "kept")
    refused(go_on, "the images of val")
    kept.rename(image)
    before = label.read_text()
    label.write_text("0 0.5 0.5 0.5 0.5\n")
    refused(go_on, ": labels of val")
    label.write_text(before)
    last = [command, "--resume", "--project", str(tmp_path), "--name"]
    refused([*last, "no-run"], f"{tmp_path / 'no-run'}: there is no run")
    with held(tmp_path / "exp"):
        refused(go_on, "wait for it to end")
    killed(lambda: qat.main([*last, "exp"]), calibration, "collect")  # it goes on


def test_notes_between_the_state_and_the_report_are_not_lost(start, tmp_path, monkeypatch):
    def diverge(*_: object) -> None:
        raise DivergedError("the loss is nan")

    with monkeypatch.context() as patch:
        patch.setattr(Finetuner, "run_epoch", diverge)
        killed(lambda: start("quantize", "--no-eval-ptq", "--epochs", "1"), Measurer, "samples")
    assert resume(tmp_path / "exp") == 0
    assert [note for note in report_of(tmp_path / "exp")["notes"] if "the loss is nan" in note]


# After three steps, sums in another order have moved nothing visible. After four, INT8 values that they turn over have
# moved a loss by 20 % on some CPUs; without the sum of gradients it moves by 25 % after one.
THREE = ("--epochs", "3", "--iters", "1", "--batch-size", "5", "--calib-images", "10")


@pytest.fixture(scope="module")
def more(tmp_path_factory, demo_data):
    return write_small_set(tmp_path_factory.mktemp("set"), demo_data, 24, 12)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, more, demo_weights):
    project = tmp_path_factory.mktemp("alone")
    assert quantize(demo_weights, more, project, *THREE) == 0
    return project / "exp"


def torchrun(weights: Path, data: Path, project: Path, *words: str) -> subprocess.Popen[bytes]:
    """Two processes of `qat.py`; what each says goes to files below `project/logs`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    logs = ("--redirects", "3", "--log-dir", str(project / "logs"))
    own = ("--weights", weights, "--data", data, "--project", project, "--device", "cpu", "--workers", "0")
    return subprocess.Popen(
        [sys.executable, *launcher, *logs, "qat.py", words[0], *map(str, own), "--imgsz", "96", *words[1:]],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def said(project: Path, rank: int) -> tuple[str, str]:
    """What a rank wrote to standard output and standard error."""
    (folder,) = project.glob(f"logs/*/attempt_0/{rank}")
    return (folder / "stdout.log").read_text(), (folder / "stderr.log").read_text()


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Ranges to the last bit, training as near as sums in another order are."""
    states = [
        torch.load(next(run.glob("weights/ptq_*")), weights_only=True)["quantized_state"] for run in (ours, theirs)
    ]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    reports = [report_of(run) for run in (ours, theirs)]
    for one, other in zip(*(report["rows"] for report in reports), strict=True):
        assert one["stage"] == other["stage"]
        assert one["ap"] == pytest.approx(other["ap"], abs=0 if one["stage"] != "QAT" else 0.01)
    for one, other in zip(*(report["history"] for report in reports), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
        assert one["held_out"] == pytest.approx(other["held_out"], rel=0.1)
        assert one["lr"] == other["lr"]


def test_quantize_by_two_is_quantize_by_one(alone, more, demo_weights, tmp_path):
    assert torchrun(demo_weights, more, tmp_path, "quantize", *THREE).wait() == 0, said(tmp_path, 0)
    assert_same_run(tmp_path / "exp", alone)
    assert [name[:8] for name in checkpoints(tmp_path / "exp")] == [name[:8] for name in checkpoints(alone)]
    assert sorted(os.listdir(tmp_path / "exp")) == sorted(os.listdir(alone))
    output, errors = said(tmp_path, 0)
    assert len(re.findall(r"^epoch \d: ", output, re.MULTILINE)) == 3
    assert "2 processes" in output
    assert "rank" not in errors
    assert said(tmp_path, 1) == ("", "")


def test_when_one_dies_the_other_ends_in_one_line_and_one_process_continues(alone, more, demo_weights, tmp_path):
    process = torchrun(demo_weights, more, tmp_path, "quantize", *THREE)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("exp/weights/qat_ep_0*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    os.kill(worker(process.pid, rank=1), signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    _, errors = said(tmp_path, 0)
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last == "terminated" or last.startswith("error: another process of this run has ended")
    assert not list(tmp_path.glob("exp/weights/qat_best*"))
    assert resume(tmp_path / "exp") == 0
    assert_same_run(tmp_path / "exp", alone)


def worker(launcher: int, rank: int) -> int:
    """The process of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(one) for one in children if f"RANK={rank}" in Path(f"/proc/{one}/environ").read_text().split("\0"))


def test_sensitive_is_one_process(more, demo_weights, tmp_path):
    assert torchrun(demo_weights, more, tmp_path / "two", "sensitive").wait() != 0
    assert not (tmp_path / "two/exp").exists()
