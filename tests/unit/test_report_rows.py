"""Rows of reports: what makes AP differ from the usual one is said beside it, whoever evaluated."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from known_images import SQUARE, KnowingModel, export_answers, write_set

from utils.core.errors import DataError, InputError
from utils.core.score import Difference
from utils.core.tasks import DETECT
from utils.core.weights import FLOAT_HASH
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.jobs import evaluate as job
from utils.jobs import visualize
from utils.jobs.advice import advise
from utils.jobs.evaluate import Measurer, evaluate_file, make_row
from utils.jobs.options import ValOptions
from utils.jobs.visualize import collect_samples
from utils.reports.page import merged
from utils.reports.schema import Level, Report
from utils.reports.tables import terminal_table
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import make_report

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(network, dataset, folder with a.onnx)."""
    folder = tmp_path_factory.mktemp("known")
    model = KnowingModel(write_set(folder, 12, SQUARE, splits=("train", "val")), NAMES, 64)
    export_answers(model, folder / "a.onnx")
    return model, load_data(folder / "data.yaml"), folder


def options(known, out, network="a.onnx", **changes):
    """Of val_trt.py, for a file of the folder that is known."""
    _, _, folder = known
    usual = {"engine_file": str(folder / network), "data": str(folder / "data.yaml"), "imgsz": [64], "batch_size": 8,
             "workers": 0, "device": "cpu", "project": str(out)}  # fmt: skip
    return ValOptions(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "mark"),
    [({}, ""), ({"conf_thres": 0.25}, "confidence 0.25"), ({"iou_thres": 0.5}, "NMS IoU 0.5"),
     ({"max_det": 1}, "at most 1 detection"), ({"split": "train"}, "split train"), ({"single_cls": True}, "one class"),
     ({"conf_thres": 0.25, "limit": 5}, "5 images, confidence 0.25")],
)  # fmt: skip
def test_a_network_and_its_export_are_marked_alike(known, tmp_path, changes, mark):
    model, data, folder = known
    measurer = Measurer(data, torch.device("cpu"), replace(CONFIG, **changes))
    row = measurer.row("float", folder / "a.onnx", measurer.measure(model, "a"), 1.0)
    assert row.ap_with == mark
    assert row.measured_on.endswith(f"; {mark}") == bool(mark)
    words = {{"split": "task"}.get(name, name): value for name, value in changes.items()}
    (other,) = evaluate_file(options(known, tmp_path, **words)).rows
    assert (other.stage, other.ap_with) == ("float", mark)
    assert list(other.ap_by_class) == list(row.ap_by_class) != []
    assert other.ap == pytest.approx(row.ap, abs=1e-6)
    usual = row.model_copy(update={"ap_with": ""})
    assert (other.difference(usual) is None) == bool(mark)


def test_an_earlier_report_stays_where_the_dataset_cannot_be_read(known, tmp_path):
    evaluate_file(options(known, tmp_path))
    bad = tmp_path / "bad.yaml"
    bad.write_text("names: [cat]\nval: nowhere\n")
    with pytest.raises(InputError, match="nowhere"):
        evaluate_file(options(known, tmp_path, data=str(bad), exist_ok=True))
    assert Report.load(tmp_path / "exp/report.json").rows


def test_a_network_and_its_export_have_a_standard_error_between_them(known, tmp_path):
    """Two programs, and two reports: what they have in common is in the rows."""
    model, data, folder = known
    measurer = Measurer(data, torch.device("cpu"), CONFIG)
    row = measurer.row("float", folder / "a.onnx", measurer.measure(model, "a"), 1.0)
    assert row.ap_resampled.error > 0
    evaluate_file(options(known, tmp_path, batch_size=3))
    file = tmp_path / "exp/report.json"
    both = merged({folder / "report.json": Report(command="eval", rows=[row]), file: Report.load(file)})
    both.rows[1] = both.rows[1].model_copy(update={"stage": "ONNX"})  # as if it had quantizers
    assert both.difference(both.rows[1]) == Difference(pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6), 12)
    assert "+0.0000 ± 0.0000" in terminal_table(both)


@pytest.fixture(scope="module")
def int8(known):
    """a.onnx with a quantizer, which says that it was made for images of 64 pixels."""
    graph = onnx.load(known[2] / "a.onnx")
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1), "scale"))
    graph.graph.node.append(onnx.helper.make_node("QuantizeLinear", [graph.graph.input[0].name, "scale"], ["unused"]))
    onnx.helper.set_model_props(graph, {"imgsz": "[64, 64]", "names": json.dumps(dict(enumerate(NAMES)))})
    onnx.save(graph, known[2] / "int8.onnx")
    return known[2] / "int8.onnx"


@pytest.mark.parametrize(
    ("files", "headings"),
    [
        (("a.onnx", "int8.onnx"), ["FP32: a.onnx", "ONNX: int8.onnx"]),
        (("int8.onnx", "int8.onnx"), ["ONNX: int8.onnx", "ONNX: int8-2.onnx"]),
    ],
)
def test_compared_files_stand_under_their_names_at_the_size_they_know(int8, tmp_path, files, headings, monkeypatch):
    Report(command="x", samples_are="The images of a run").save(tmp_path / "report.json")
    paths = [str(int8.with_name(name)) for name in files]
    words = ["--data", str(int8.with_name("data.yaml")), "--samples", "1", "--device", "cpu"]
    sizes, collect = [], visualize.collect_samples
    monkeypatch.setattr(visualize, "collect_samples", lambda *a, **b: sizes.append(b["imgsz"]) or collect(*a, **b))
    assert make_report.main([str(tmp_path), "--compare", *paths, *words]) == 0
    report = Report.load(tmp_path / "report-merged.json")
    assert [list(sample.predictions) for sample in report.samples] == [headings]
    assert report.samples_are == "", "these images are others than the run's"
    assert sizes == [64]


@pytest.mark.parametrize(
    ("extra", "expected"), [(None, "float"), ({"stage": "PTQ"}, "PTQ"), ({"stage": "QAT"}, "QAT"), ({}, "PyTorch")]
)
def test_a_file_is_called_what_it_is(int8, tmp_path, extra, expected):
    content = {"epoch": 3} if extra is None else {"format": "yolov9-quantized", "format_version": 1, "extra": extra}
    torch.save(content, tmp_path / "a.pt")
    assert job.stage(tmp_path / "a.pt") == expected
    assert (job.stage(int8), job.stage(int8.with_name("a.onnx"))) == ("ONNX", "float")


def test_nms_in_the_file_and_what_is_not_evaluated(known):
    model, data, folder = known
    with TorchRunner(model, "cpu") as runner:
        result = evaluate(runner, data, CONFIG, progress=False)
        runner.outputs = tuple(TensorSpec(name, (None,), "float32") for name in DETECT.detections)
        for kind, words in {"onnx": "NMS in the file", "none": "top-k without NMS in the file"}.items():
            runner.metadata["nms"] = json.dumps({"kind": kind, "iou_thres": 0.7, "conf_thres": 0.001})
            assert make_row("ONNX", folder / "a.onnx", result, CONFIG, runner.device, 1.0, runner).ap_with == words
    row = make_row("PTQ", folder / "a.onnx", None, replace(CONFIG, limit=3), torch.device("cpu"), 1.0)
    assert (row.ap, row.ap_with, row.measured_on, row.device) == (None, "", "not evaluated", "CPU")


def test_samples_of_a_run_are_those_of_the_report_page(known):
    """The same images, thresholds and NMS, whoever draws them; AP's NMS keeps boxes that a reader sees twice."""
    model, data, _ = known
    found = Measurer(data, torch.device("cpu"), CONFIG).samples({"float": model, "PTQ": model})
    with TorchRunner(model, "cpu") as runner:
        expected = collect_samples({"float": runner, "PTQ": runner}, data, imgsz=64)
    assert found == expected
    assert len(found) == 4
    assert Report(command="command", samples=found).samples[0].predictions["float"]


def with_hash(file, folder, value):
    """A copy of an ONNX file that was made from FP32 weights with this hash."""
    content = onnx.load(file)
    content.metadata_props.add(key=FLOAT_HASH, value=value)
    onnx.save(content, folder / f"{value}-{file.name}")
    return str(folder / f"{value}-{file.name}")


def test_a_reference_with_other_weights_is_refused_or_the_row_says_so(known, int8, tmp_path, caplog):
    folder = int8.parent
    one, other = (with_hash(folder / "a.onnx", folder, name) for name in ("one", "two"))
    own = with_hash(int8, folder, "one")
    row = evaluate_file(options(known, tmp_path, engine_file=own, reference=one)).rows[1]
    assert row.caveat == ""
    assert "was not made from" not in caplog.text
    assert "does not record its FP32 weights" not in caplog.text
    files = {"engine_file": own, "reference": other}
    with pytest.raises(InputError, match=rf"{own} was not made from the weights of --reference {other} .*--force"):
        evaluate_file(options(known, tmp_path, **files))
    report = evaluate_file(options(known, tmp_path, force=True, **files))
    assert report.rows[1].caveat == f"it was not made from the weights of {other}"
    assert Report.load(tmp_path / "exp2/report.json").rows[1].caveat == report.rows[1].caveat
    assert advise(report).level is not Level.OK
    evaluate_file(options(known, tmp_path, engine_file=str(int8), reference=one))
    assert f"{int8} does not record its FP32 weights" in caplog.text


def test_a_set_of_which_much_is_left_out_is_not_evaluated(known, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(known[2], folder)
    next((folder / "images/val").iterdir()).write_bytes(b"no image")
    content = (folder / "data.yaml").read_text().replace(str(known[2]), str(folder))
    (folder / "data.yaml").write_text(content)
    with pytest.raises(DataError, match=r"^1 of 12 images of val are left out .*--force"):
        evaluate_file(options(known, tmp_path / "runs", data=str(folder / "data.yaml")))
    assert not (tmp_path / "runs").exists()
    report = evaluate_file(options(known, tmp_path / "runs", data=str(folder / "data.yaml"), force=True))
    assert report.rows[0].images == 11


def test_a_reference_is_evaluated_first_and_at_the_same_size(known, int8, tmp_path, caplog, monkeypatch):
    """The other file holds a QuantizeLinear, and finds what the reference finds."""
    folder = int8.parent
    files = {"engine_file": str(int8), "reference": str(folder / "a.onnx")}
    base, row = evaluate_file(options(known, tmp_path, groups=r"\d{11}", **files)).rows
    assert (base.stage, row.stage, base.input_size) == ("float", "ONNX", row.input_size)
    assert row.agreement > 0.99
    assert (base.agreement, base.resampled_over) == (None, "2 groups")
    assert row.at_threshold == base.at_threshold
    assert row.at_threshold.threshold == base.best_threshold
    swapped = options(known, tmp_path, reference=files["engine_file"])
    with pytest.raises(InputError, match=r"--reference .*int8\.onnx is quantized .*; expected the FP32 model"):
        evaluate_file(swapped)
    monkeypatch.setattr(job, "LOW_AP", 0.5)
    report = evaluate_file(options(known, tmp_path, reference=files["reference"]))
    assert (report.rows[1].stage, report.difference(report.rows[1]).value) == ("float (onnx)", 0)
    text = advise(report).sentence
    assert "all 12 images of val are training images" in text, "the set's train and val are one folder"
    assert "the FP32 model has AP 0.4600, so that INT8 cannot be judged" in caplog.text
    other = onnx.load(folder / "a.onnx")
    next(entry for entry in other.metadata_props if entry.key == "names").value = '{"0": "cat", "1": "dog"}'
    onnx.save(other, tmp_path / "other.onnx")
    files["reference"] = str(tmp_path / "other.onnx")
    with pytest.raises(InputError, match=r"--reference .*other\.onnx detects \['cat', 'dog'\] and .*int8\.onnx "):
        evaluate_file(options(known, tmp_path, **files))
