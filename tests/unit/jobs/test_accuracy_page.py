"""The page of `scripts/accuracy.py`: its numbers come from the reports, and nothing private stands on it."""

from __future__ import annotations

import getpass
import json
import re
import socket
import statistics
from pathlib import Path

import pytest

from utils.core.errors import InputError
from utils.core.resampled import Resampled
from utils.jobs.accuracy import page, results, run, tables
from utils.jobs.accuracy.measure import MeasureOptions
from utils.jobs.accuracy.steps import Steps
from utils.reports.schema import Report, Row

pytest.importorskip("matplotlib")

IMAGES = "0123456789abcdef" * 2
FLOAT = {"yolov9-t": 0.60, "yolov9-s": 0.70}
INT8 = {"yolov9-t": 0.58, "yolov9-s": 0.69}
MS = {"yolov9-t": (4.0, 3.0), "yolov9-s": (8.0, 3.8)}  # of a batch of 8 in FP16 and INT8
SECRET = "mallory-of-acme"


def resampled(ap: float, wobble: float) -> tuple[float, ...]:
    return tuple(ap + wobble * (number % 5 - 2) / 100 for number in range(20))


def row(stage: str, ap: float, wobble: float, **more) -> Row:
    values = {"file": f"/home/{SECRET}/out/{stage}.pt", "ap50": 0.8, "precision": 0.8, "recall": 0.7, "seconds": 1.0,
              "device": "NVIDIA H200", "versions": {"torch": "2.9.9"}, "size_bytes": 1, "ms_per_image": 1.0,
              "measured_on": "batch 8"}  # fmt: skip
    values["ap_resampled"] = Resampled.of(IMAGES, resampled(ap, wobble)).to_text()
    return Row(stage=stage, ap=ap, **{**values, **more})


def write_report(folder: Path, *rows: Row, notes: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True)
    Report(command=f"python /home/{SECRET}/qat.py", rows=list(rows), notes=list(notes)).save(folder / "report.json")


def write_times(folder: Path, name: str) -> None:
    lines = []
    for (kind, ran_as), ms in zip((("float", "FP16"), ("int8", "INT8")), MS[name], strict=True):
        for batch in (1, 8):
            latency = ms * batch / 8
            figures = {"qps": 1000 / latency, "latency": {"median": latency, "p99": latency * 1.5}}
            lines.append({"model": f"{name}-{kind}", "batch": batch, "precision": ran_as,
                          "figures": figures, "images_per_second": 1000 * batch / latency})  # fmt: skip
    lines.append(
        {"model": f"{name}-int8", "batch": 64, "precision": "INT8", "figures": None, "images_per_second": None}
    )
    content = {"command": f"/home/{SECRET}", "device": {"Selected Device": "NVIDIA H200", "SMs": "132"},
               "software": "TensorRT 8.6.0", "rows": lines}  # fmt: skip
    folder.mkdir()
    (folder / "benchmark.json").write_text(json.dumps(content))


@pytest.fixture
def output(tmp_path) -> Path:
    """What two networks left, below a folder with a telling name."""
    output = tmp_path / SECRET / "accuracy"
    for name in FLOAT:
        folder = output / name
        sizes = {"small": 0.3, "medium": 0.5, "large": 0.9}
        write_report(folder / "eval-float", row("float", FLOAT[name], 1.0, ap_by_size=sizes))
        write_report(folder / "eval-int8-engine", row("TensorRT INT8", INT8[name], 2.0, ap_by_size={"small": 0.2}))
        write_report(folder / "eval-float-engine", row("TensorRT FP16", FLOAT[name], 1.0))
        notes = (f"no epoch of QAT beat PTQ: /home/{SECRET}/x.pt", "QAT stopped. epoch 3: it diverged")
        write_report(
            folder / "qat", row("PTQ", FLOAT[name] - 0.05, 3.0), row("QAT", FLOAT[name] - 0.01, 1.0), notes=notes
        )
        write_report(folder / "ptq-auto", row("PTQ", FLOAT[name] - 0.04, 1.0), notes=("chosen: mse, AP 0.6500",))
        write_times(folder / "times", name)
        command = ["qat.py", "eval", "--weights", str(folder / "float.pt"), "--data", f"/home/{SECRET}/data.yaml",
                   "--cfg", "models/detect/yolov9-t.yaml"]  # fmt: skip
        note = {"step": "eval float", "command": command, "seconds": 12.34}
        (folder / "steps.json").write_text(json.dumps([note]))
    return output


def test_differences_and_their_errors(output):
    table = tables.accuracy(run.found(output))
    assert table.headers == ("network", "float", "FP16 engine", "PTQ", "PTQ auto", "QAT", "INT8 engine")
    first = dict(zip(table.headers, table.rows[0], strict=True))
    assert (first["network"], first["float"]) == ("yolov9-t", "0.6000")
    assert first["FP16 engine"] == "+0.0000 ± 0.0000"
    error = statistics.stdev((number % 5 - 2) / 100 for number in range(20))  # the wobble differs by one such step
    assert first["INT8 engine"] == f"-0.0200 ± {error:.4f}"
    assert first["PTQ"] == f"-0.0500 ± {2 * error:.4f}"
    assert [row[0] for row in table.rows] == ["yolov9-t", "yolov9-s"]


def test_ap_of_other_images_is_not_compared(output):
    import shutil

    shutil.rmtree(output / "yolov9-t" / "eval-int8-engine")
    other = Resampled.of("f" * 32, resampled(0.5, 1.0)).to_text()
    write_report(output / "yolov9-t" / "eval-int8-engine", row("TensorRT INT8", 0.5, 1.0, ap_resampled=other))
    assert tables.accuracy(run.found(output)).rows[0][-1] == "0.5000, not compared"


def test_sizes_and_times(output):
    found = run.found(output)
    assert tables.by_size(found).rows[:2] == [
        ("yolov9-t", "float", "0.3000", "0.5000", "0.9000"),
        ("yolov9-t", "INT8 engine", "0.2000", "-", "-"),
    ]
    table = tables.times(found)
    assert table.headers[2:6] == ("FP16, ms", "p99", "INT8, ms", "p99")
    assert table.rows[1] == ("yolov9-t", "8", "4.00", "6.00", "3.00", "4.50", "2,000", "2,667", "+33%")
    assert "NVIDIA H200, TensorRT 8.6.0" in table.remarks[0]


def test_engines_that_lie_there_are_not_denied(output, tmp_path):
    """The page may be written again where there is no GPU."""
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "1.jpg").touch()
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: val\nval: val\nnames: [a, b]\n")
    options = MeasureOptions(tmp_path / "data.yaml", 640, 0, False, None, None, None, "weak", "engines need a GPU")
    assert list(run._about(options, run.found(output))) == ["data", "size"]
    assert run._about(options, [])["engines"] == "no engines: engines need a GPU"


def test_a_larger_network_in_int8_that_beats_a_smaller_one_in_fp16(output):
    (sentence,) = tables.outdone(run.found(output))
    error = statistics.stdev(a - b for a, b in zip(resampled(0.69, 2.0), resampled(0.60, 1.0), strict=True))
    scores = f"AP 0.6900 against 0.6000 (+0.0900 ± {error:.4f})"
    assert sentence.startswith(f"yolov9-s in INT8 beats yolov9-t in FP16: {scores}, ")
    assert sentence.endswith(" 3.80 ms against 4.00 ms at batch size 8.")


@pytest.mark.parametrize(("ap", "size"), [(0.605, "640x640"), (0.69, "320x320")])
def test_what_may_be_chance_or_does_not_compare_is_no_victory(output, ap, size):
    folder = output / "yolov9-s" / "eval-int8-engine"
    (folder / "report.json").unlink()
    folder.rmdir()
    write_report(folder, row("TensorRT INT8", ap, 2.0, input_size=size))
    folder = output / "yolov9-t" / "eval-float-engine"
    (folder / "report.json").unlink()
    folder.rmdir()
    write_report(folder, row("TensorRT FP16", 0.6, 1.0, input_size="640x640"))
    assert tables.outdone(run.found(output)) == []


def test_the_plot_has_a_line_for_each_precision(output):
    (axes,) = tables.ap_against_latency(run.found(output)).axes
    drawn = {line.get_label(): [list(values) for values in line.get_data()] for line in axes.lines}
    assert drawn == {"FP16": [[0.5, 1.0], [0.60, 0.70]], "INT8": [[0.375, 0.475], [0.58, 0.69]]}
    assert tables.ap_against_latency([]) is None


def test_the_page_names_nothing_private(output, monkeypatch):
    monkeypatch.setattr(page, "gpus", lambda field: [["550.90"]])
    monkeypatch.setenv("HOME", f"/home/{SECRET}")
    written = page.write(run.found(output), output, {"data": "coco.yaml: 5,000 validation images"})
    assert [path.name for path in written] == ["accuracy.html", "accuracy.png", "accuracy.md", "accuracy.json"]
    for path in written[:1] + written[2:]:
        text = path.read_text()
        assert SECRET not in text, path.name
        assert str(Path(page.__file__).parents[3]) not in text
        assert not re.search(r"(^|[\s\"'=])/[A-Za-z]+/", re.sub(r"data:image/[^\"]*", "", text)), path.name
        assert socket.gethostname() not in text.split("<style>")[0]
        for word in ("550.90", "NVIDIA H200", "2.9.9", "OUTPUT/yolov9-t/float.pt", "models/detect/yolov9-t.yaml",
                     "QAT stopped", "mse, AP 0.6500"):  # fmt: skip
            assert word in text, (path.name, word)
    assert getpass.getuser() not in re.findall(r"\w+", " ".join(page._commands(run.found(output)[0], output)))


def test_json_has_the_same_numbers(output):
    page.write(run.found(output), output, {})
    network = json.loads((output / "accuracy.json").read_text())["networks"][0]
    assert network["rows"]["QAT"]["ap"] == 0.59
    assert network["rows"]["QAT"]["file"] == "QAT.pt"
    assert network["rows"]["QAT"]["ap_difference"] == pytest.approx(-0.01)
    assert network["times"][1] == {"kind": "float", "ran_as": "FP16", "batch": 8, "latency": 4.0, "p99": 6.0,
                                   "images_per_second": 2000.0}  # fmt: skip


def test_notes_are_those_of_their_stage(output):
    assert results.load(Steps(output / "yolov9-t", "yolov9-t")).notes == (
        "PTQ auto: mse, AP 0.6500", "QAT: QAT stopped. epoch 3: it diverged",
    )  # fmt: skip


def test_what_is_not_there_is_a_dash(output):
    import shutil

    for name in ("eval-float-engine", "times"):
        shutil.rmtree(output / "yolov9-t" / name)
    found = run.found(output)
    assert tables.accuracy(found).rows[0][2] == "-"
    assert [row[0] for row in tables.times(found).rows] == ["yolov9-s", "yolov9-s"]
    assert tables.outdone(found) == []
    written = page.write(found[:1], output, {})
    assert "accuracy.png" not in [path.name for path in written]


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": [{}]}', '{"rows": [], "software": ""}'])
def test_damaged_times_are_refused(output, content):
    (output / "yolov9-t" / "times" / "benchmark.json").write_text(content)
    with pytest.raises(InputError, match=r"benchmark\.json is damaged"):
        results.load(Steps(output / "yolov9-t", "yolov9-t"))
