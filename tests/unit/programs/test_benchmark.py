"""Which networks take part, which rows they have, and what is said of those that cannot run."""

import json

import pytest
from boxes_graph import write_boxes
from one_conv import METADATA, write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.jobs import benchmark
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings
from utils.trt.benchmark import Entry
from utils.trt.engine_file import EngineNote


@pytest.mark.parametrize(
    ("given", "sweep", "expected"),
    [(None, None, [1, 4, 8, 12]), ([3], None, [3]), (None, 64, [1, 2, 4, 8, 16, 32, 64]), (None, 1, [1]),
     (None, 12, [1, 2, 4, 8, 12]), ([8, 8, 4], None, [8, 4])],
)  # fmt: skip
def test_batch_sizes(given, sweep, expected):
    assert benchmark.batch_sizes(given, sweep) == expected


PROGRAM = "scripts/benchmark_trt.py"
TIMING = ["--warmUp", "0", "--duration", "0.02", "--rounds", "2", "--imgsz", "32"]


def rows_of(folder):
    return json.loads((folder / "runs/benchmark_trt/exp/benchmark.json").read_text())["rows"]


def test_on_a_cpu_onnx_files_run_in_onnx_runtime(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_onnx(tmp_path / "int8.onnx", ("b", 3, "h", "w"), quantized=True)
    write_onnx(tmp_path / "float.onnx", ("b", 3, "h", "w"))
    write_onnx(tmp_path / "static.onnx", (2, 3, 32, 32))
    words = ("int8.onnx", "static.onnx", "--baseline", "float.onnx", "--device", "cpu", "--batch-size", 1, 2)
    code, out, err = start(PROGRAM, *words, *TIMING)
    assert (code, err) == (1, [])  # of a static batch size, the other
    rows = rows_of(tmp_path)
    assert [(one["model"], one["runtime"], one["precision"]) for one in rows[:3]] == [
        ("float", "ONNX Runtime", "FP32"),
        ("int8", "ONNX Runtime", "INT8 file"), ("static", "ONNX Runtime", "FP32"),
    ]  # fmt: skip
    assert [bool(one["error"]) for one in rows] == [False] * 2 + [True] + [False] * 3
    assert rows[1]["gain"] is not None
    for words in ("against the baseline", "INT8's speed shows in TensorRT and OpenVINO"):
        assert words in "\n".join(out)
    assert "ONNX Runtime" in (tmp_path / "runs/benchmark_trt/exp/benchmark.md").read_text()
    assert list((tmp_path).glob("*.engine")) == []


def test_on_a_cpu_a_file_is_compared_with_the_baseline_of_its_form(start, tmp_path, monkeypatch):
    """Each form has a quantized file; a float file of the same form is there for all but the last."""
    monkeypatch.chdir(tmp_path)
    forms = {
        "plain": (output_formats.plain(), False),
        "nms": (output_formats.end2end(NmsSettings("onnx", 10)), False),
        "masks": (output_formats.plain(), True),
        "nms-masks": (output_formats.end2end(NmsSettings("onnx", 10), 8), True),
    }
    for name, (form, masks) in forms.items():
        write_boxes(tmp_path / f"{name}-int8.onnx", form, masks=masks, quantized=True)
        write_boxes(tmp_path / f"{name}.onnx", form, masks=masks)
    files = [f"{name}-int8.onnx" for name in forms]
    baselines = ["plain.onnx", "nms.onnx", "masks.onnx"]
    timing = [*TIMING[:-2], "--device", "cpu", "--batch-size", 2]
    code, out, err = start(PROGRAM, *files, "--baseline", *baselines, *timing)
    assert (code, err) == (0, [])
    rows = {row["model"]: row for row in rows_of(tmp_path)}
    assert {name: (rows[f"{name}-int8"]["nms"], rows[f"{name}-int8"]["masks"]) for name in forms} == {
        "plain": (False, False), "nms": (True, False), "masks": (False, True), "nms-masks": (True, True)
    }  # fmt: skip
    for name in ("plain", "nms", "masks"):
        speeds = [rows[model]["figures"]["qps"] for model in (f"{name}-int8", name)]
        assert rows[f"{name}-int8"]["gain"] == pytest.approx(speeds[0] / speeds[1] - 1)
    assert rows["nms-masks-int8"]["gain"] is None
    columns = {line.split()[0]: line for line in out if line.split()[:1] and line.split()[0] in rows}
    assert "inside" in columns["nms"]
    assert "without" in columns["plain"]


def test_files_of_different_sizes_are_not_compared(tmp_path):
    for name, shape in (("a", (1, 3, 32, 64)), ("b", ("b", 3, 32, 64)), ("c", (1, 3, 64, 64))):
        write_onnx(tmp_path / f"{name}.onnx", shape)
    dynamic = EngineNote(profile={"images": [[1, 3, 32, 32], [1, 3, 32, 32], [8, 3, 32, 64]]}, metadata=METADATA)
    for name, note in (("static", EngineNote(metadata=METADATA)), ("d", dynamic)):
        note.save(tmp_path / f"{name}.engine")
    a, b, c, d, static, foreign = (
        Entry(tmp_path / name) for name in ("a.onnx", "b.onnx", "c.onnx", "d.engine", "static.engine", "foreign.engine")
    )
    assert benchmark.common_size([a, b, d]) == (32, 64)
    assert benchmark.common_size([static]) == (64, 96)  # as its note says
    assert benchmark.common_size([foreign]) is None
    for entries in ([a, c], [d, static], [a, foreign]):
        with pytest.raises(InputError, match="--imgsz"):
            benchmark.common_size(entries)


def test_engines_with_copies(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch)
    monkeypatch.setattr(benchmark, "device_information", lambda index=None: {"Selected Device": "Fake GPU"})
    write_onnx(tmp_path / "int8.onnx", ("b", 3, 32, 32), quantized=True)
    write_onnx(tmp_path / "float.onnx", (4, 3, 32, 32))
    words = ("int8.onnx", "--baseline", "float.onnx", "--batch-size", 4, 4, "--useCudaGraph")
    code, out, _ = start(PROGRAM, *words, *TIMING)
    assert code == 0
    rows = rows_of(tmp_path)
    assert [(one["model"], one["runtime"]) for one in rows] == [("float", "TensorRT"), ("int8", "TensorRT")]
    assert [one["gain"] is None for one in rows] == [True, False]
    assert all({"h2d", "d2h"} <= set(one["figures"]) for one in rows)
    header = next(line for line in out if line.startswith("model "))
    assert header.split()[:3] == ["model", "precision", "NMS"]
    assert all(title in header for title in ("H2D", "compute", "D2H", "against FP16"))
    assert "int8, batch 4: " in "\n".join(out)
