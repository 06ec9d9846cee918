"""What fills a report and its files: samples, merged runs, and the program that does both."""

import subprocess
import sys
from pathlib import Path

from report_examples import example_row

from utils.reports.page import write_all
from utils.reports.schema import Epoch, Report

ROOT = Path(__file__).resolve().parents[3]


def test_all_files_of_a_report_are_written(report, tmp_path):
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
