"""What fills a report and its files: samples, merged runs, and the program that does both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from report_examples import example_row

from utils.core.errors import InputError
from utils.evaluation.data_yaml import load_data
from utils.jobs.visualize import collect_samples
from utils.reports.page import write_all
from utils.reports.schema import Epoch, Report
from utils.runners.base import Runner, TensorSpec

ROOT = Path(__file__).resolve().parents[3]


class OneBox(Runner):
    """Finds one object of class 1, 20 × 10 pixels around the middle of a 64 × 64 input, with a given score."""

    def __init__(self, score: float, batch: int | None = None, classes: int = 2) -> None:
        self.score, self.classes, self.fed = score, classes, []
        inputs = [TensorSpec("images", (batch, 3, None, None), "float32")]
        outputs = [TensorSpec("output0", (batch, 4 + classes, None), "float32")]
        super().__init__(inputs, outputs, {}, torch.device("cpu"), "a test")

    def _infer(self, feeds):
        self.fed.append(feeds["images"])
        rows = torch.tensor([32.0, 32.0, 20.0, 10.0, 0.0, self.score] + [0.0] * (self.classes - 2))
        return {"output0": rows.expand(len(feeds["images"]), 1, -1).transpose(1, 2)}

    def _close(self):
        pass


@pytest.fixture
def data(tmp_path):
    """Three images of 100 × 50 pixels, each with one labelled object."""
    for folder in ("images/val", "labels/val"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (100, 50), (255, number, 0)).save(tmp_path / f"images/val/{number}.png")
        (tmp_path / f"labels/val/{number}.txt").write_text("0 0.5 0.5 0.2 0.4\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\nval: images/val\nnames: [zero, one]\n")
    return load_data(tmp_path / "data.yaml")


def test_boxes_are_in_pixels_of_the_image_and_images_spread_over_the_split(data):
    float_runner = OneBox(0.5)
    runners = {"float": float_runner, "INT8": OneBox(0.75), "unsure": OneBox(0.2)}
    samples = collect_samples(runners, data, imgsz=64, count=2, confidence=0.3)
    assert [sample.image[-5:] for sample in samples] == ["0.png", "2.png"]
    assert [image.max().item() for image in float_runner.fed] == [1.0, 1.0]
    assert [len(boxes) for boxes in samples[0].predictions.values()] == [1, 1, 0]
    (box,), (truth,) = samples[0].predictions["INT8"], samples[0].truth
    assert (box.name, box.score, truth.name, truth.score, samples[0].confidence) == ("one", 0.75, "zero", None, 0.3)
    # 100 × 50 becomes 64 × 32 with 16 rows of border above: x = 22 / 0.64, y = (27 - 16) / 0.64
    assert box.xyxy == pytest.approx((34.375, 17.1875, 65.625, 32.8125), abs=1e-4)
    assert truth.xyxy == pytest.approx((40, 15, 60, 35), abs=1e-4)


def test_of_two_classes_in_one_place_the_better_is_shown(data):
    class Undecided(OneBox):
        def _infer(self, feeds):
            output = super()._infer(feeds)["output0"].clone()
            output[:, 4] = self.score - 0.1
            return {"output0": output}

    (box,) = collect_samples({"float": Undecided(0.6)}, data, imgsz=64, count=1)[0].predictions["float"]
    assert box.name == "one"


def test_a_network_of_fixed_batch_size_is_fed_what_it_takes_and_one_of_other_classes_is_refused(data):
    runner = OneBox(0.9, batch=4)
    assert len(collect_samples({"INT8": runner}, data, imgsz=64, count=1)[0].predictions["INT8"]) == 1
    assert runner.fed[0].shape == (4, 3, 64, 64)
    with pytest.raises(InputError, match=r"4 \+ 2, anchors"):
        collect_samples({"float": OneBox(0.9, classes=3)}, data, imgsz=64)


def test_all_files_of_a_report_are_written(data, tmp_path):
    report = Report(command="command", history=[Epoch(epoch=0, ap=0.5)])
    report.samples = collect_samples({"float": OneBox(0.5), "INT8": OneBox(0.75)}, data, imgsz=64, count=1)
    written = write_all(report, tmp_path / "run")
    assert [path.name for path in written] == ["report.json", "ap_per_epoch.png", "detections.png", "report.html"]
    assert sorted(written) == sorted((tmp_path / "run").iterdir())
    written = write_all(Report(command="nothing"), tmp_path / "empty")
    assert [path.name for path in written] == ["report.json", "report.html"]


def test_runs_are_put_together(tmp_path):
    def make(*words):
        command = [sys.executable, "scripts/make_report.py", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    report = Report(command="qat.py", rows=[example_row(ap=0.5), example_row("QAT")], notes=["one"])
    report.history, report.charts = [Epoch(epoch=0, ap=0.5)], {"a chart": "a.png"}
    report.save(tmp_path / "qat/report.json")
    report = Report(command="val_trt.py", rows=[example_row("ONNX"), example_row("QAT")], notes=["two", "one"])
    report.save(tmp_path / "onnx.json")
    files = (tmp_path / "qat", tmp_path / "onnx.json")
    assert "0.5000" in make(*files, "--output", tmp_path / "out", "--note", "three", "--title", "Title")
    report = Report.load(tmp_path / "out/report.json")
    assert [row.stage for row in report.rows] == ["float", "QAT", "ONNX"]
    assert (report.notes, report.title, report.command) == (["one", "two", "three"], "Title", "qat.py\nval_trt.py")
    assert (len(report.history), report.charts) == (1, {"a chart": "a.png"})
    assert [row.run for row in report.rows] == [str(tmp_path / "qat"), str(tmp_path / "qat"), str(tmp_path)]
    assert "Title" in (tmp_path / "out" / "report.html").read_text()
    for path, report.data in ((tmp_path / "out/report.json", "a.yaml"), (tmp_path / "other.json", "b.yaml")):
        report.save(path)
    both = make(tmp_path / "out", tmp_path / "other.json", "--output", tmp_path / "both")
    assert "the runs are of several datasets" in both.splitlines()[0]
