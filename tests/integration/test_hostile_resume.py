"""Resuming and sharing run folders: what would mix two datasets or two programs is refused, and nothing is left out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from qat_runs import SMALL_RUN, checkpoints, quantize, report_of

import qat
from models.quantize.finetune import DivergedError, Finetuner
from utils.core.run_folder import held
from utils.evaluation.data_yaml import load_data
from utils.evaluation.images import find_images, label_file
from utils.jobs.evaluate import Measurer
from utils.reports.schema import Report

COLLECT = ("models.quantize.calibration.collect",)
QUICK = ("--ptq-only", "--no-eval-origin", "--no-eval-ptq")
STATES = {"quantize": "weights/last.pt", "sensitive": "state.json"}


class Killed(BaseException):
    """Ends the program as abruptly as this process allows."""


def die(*_: object, **__: object) -> None:
    raise Killed


def killed(run: Callable[[], object], target: tuple[Any, ...]) -> None:
    """Run something that dies where it calls `target`: a dotted name, or an owner and a name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            run()


@pytest.fixture
def data(tmp_path: Path, demo_data: Path) -> Path:
    """A dataset of a few images that a test may change."""
    demo, root = load_data(demo_data), tmp_path / "set"
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for file in find_images(demo.paths(split))[:4]:
            shutil.copy2(file, root / "images" / split)
            shutil.copy2(label_file(file), root / "labels" / split)
    content = {"path": str(root), "train": "images/train", "val": "images/val", "names": dict(demo.names)}
    (root / "data.yaml").write_text(yaml.safe_dump(content))
    return root / "data.yaml"


@pytest.fixture
def start(data: Path, small_weights: Path, tmp_path: Path) -> Callable[..., int]:
    """Start a command of qat.py in `tmp_path/exp`."""

    def run(command: str, *words: str) -> int:
        small = SMALL_RUN if command == "quantize" else SMALL_RUN[:-2]
        common = ["--weights", small_weights, "--data", data, "--project", tmp_path]
        return qat.main([command, *map(str, common), *small, *words])

    return run


def resume(command: str, run: Path) -> int:
    return qat.main([command, "--resume", str(run)])


def one_line(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.usefixtures("blank_plots")
class TestDataset:
    @pytest.mark.parametrize("command", STATES)
    def test_a_run_is_not_continued_on_other_images(self, command, start, data, tmp_path, capsys):
        killed(lambda: start(command, *(("--no-eval-origin",) if command == "quantize" else ())), COLLECT)
        image = next((data.parent / "images/val").iterdir())
        kept = image.rename(tmp_path / "kept")
        capsys.readouterr()
        assert resume(command, tmp_path / "exp") == 2
        assert "the images of val" in one_line(capsys.readouterr().err)
        kept.rename(image)
        label = data.parent / "labels/val" / f"{image.stem}.txt"
        before = label.read_text()
        label.write_text("0 0.5 0.5 0.5 0.5\n")
        assert resume(command, tmp_path / "exp") == 2
        assert "has changed: labels of val" in one_line(capsys.readouterr().err)
        label.write_text(before)
        last = [command, "--resume", "--project", str(tmp_path), "--name"]
        assert qat.main([*last, "no-run"]) == 2
        assert f"{tmp_path / 'no-run'}: no run there" in one_line(capsys.readouterr().err)
        assert qat.main([command, "--resume", str(tmp_path / "exp"), *last[2:], "b"]) == 2
        assert "are two runs" in one_line(capsys.readouterr().err)
        killed(lambda: qat.main([*last, "exp"]), COLLECT)  # it goes on


class TestTwoAtOnce:
    @pytest.mark.parametrize("command", ["quantize", "sensitive", "calibrate", "eval"])
    def test_no_command_writes_into_a_folder_that_is_in_use(
        self, command, start, data, small_weights, tmp_path, capsys
    ):
        (tmp_path / "exp").mkdir()
        words = ["eval", "--weights", str(small_weights), "--data", str(data), "--project", str(tmp_path)]
        with held(tmp_path / "exp"):
            before = sorted(tmp_path.rglob("*"))
            assert (qat.main([*words, "--exist-ok"]) if command == "eval" else start(command, "--exist-ok")) == 2
            assert sorted(tmp_path.rglob("*")) == before
        text = one_line(capsys.readouterr().err)
        assert f"{tmp_path / 'exp'} is in use" in text
        assert "choose another --name" in text

    @pytest.mark.parametrize("command", STATES)
    def test_a_run_that_lives_is_not_resumed(self, command, start, tmp_path, capsys):
        killed(lambda: start(command, *(("--no-eval-origin",) if command == "quantize" else ())), COLLECT)
        capsys.readouterr()
        with held(tmp_path / "exp"):
            assert resume(command, tmp_path / "exp") == 2
        assert "wait for it to end" in one_line(capsys.readouterr().err)


class TestNothingIsLeftOut:
    """Moments at which a kill cost something for good."""

    @pytest.mark.usefixtures("blank_plots")
    def test_notes_between_the_state_and_the_report(self, start, tmp_path, monkeypatch):
        def diverge(*_: object) -> None:
            raise DivergedError("the loss is nan")

        with monkeypatch.context() as patch:
            patch.setattr(Finetuner, "run_epoch", diverge)
            words = ("--no-eval-origin", "--no-eval-ptq", "--epochs", "1")
            killed(lambda: start("quantize", *words), (Measurer, "samples"))
        assert resume("quantize", tmp_path / "exp") == 0
        assert [note for note in report_of(tmp_path / "exp")["notes"] if "the loss is nan" in note]


@pytest.mark.usefixtures("blank_plots")
class TestAnotherRunInTheSameFolder:
    def test_its_report_does_not_go_into_the_new_one(self, start, data, small_weights, tmp_path):
        assert quantize(small_weights, data, tmp_path, "--no-eval-ptq", "--epochs", "1") == 0
        report = Report.load(tmp_path / "exp/report.json")
        report.created = "2001-01-01T00:00:00+00:00"
        report.save(tmp_path / "exp/report.json")
        killed(lambda: start("quantize", *QUICK, "--exist-ok"), COLLECT)
        assert resume("quantize", tmp_path / "exp") == 0
        assert [row["stage"] for row in report_of(tmp_path / "exp")["rows"]] == ["PTQ"]
        assert "ptq_gelan-digits.pt" in checkpoints(tmp_path / "exp")
