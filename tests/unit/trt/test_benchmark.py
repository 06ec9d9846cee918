"""Rows of a benchmark and their verdict; `scripts/benchmark_trt.py` on a stand-in for TensorRT."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.jobs import benchmark as job
from utils.jobs.benchmark import benchmark_table
from utils.trt.benchmark import BenchmarkRow, Entry, compared, planned, verdicts
from utils.trt.build import build
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig
from utils.trt.runner import Execution
from utils.trt.timing import Figures, TimeStatistics

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark_trt

TIMED = " queries/s, latency "


def row(model="c", batch=8, baseline=False, ms=4.0, **more):
    one = TimeStatistics(ms, ms, ms, ms, ms, ms, ms, 10)
    figures = Figures(1000 / ms, {"latency": one, "compute": one})
    return BenchmarkRow(model, batch, baseline, figures=figures, **{"precision": "INT8", **more})


def test_speed_against_the_baseline_of_the_same_kind():
    rows = [
        row("int8", ms=2.5),
        row("float", baseline=True, ms=4.0, precision="FP16"),
        row("float-nms", baseline=True, ms=5.0, precision="FP16", nms=True),
        row("int8-nms", ms=6.0, nms=True),
    ]
    found = compared(rows)
    assert [one.gain for one in found] == [pytest.approx(0.6), None, None, pytest.approx(-1 / 6)]
    assert benchmark_table(found)[1][0] == (
        "int8", "INT8", "without", "8", "2.500 ms", "2.500 ms", "400.0", "3,200", "+60.0%",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("int8", "fp16", "expected"),  # ms of the builds, by batch size
    [
        ({1: [2.0], 8: [4.0]}, {1: [3.0], 8: [6.0]}, ["1.50 times", "batch 8", "--builds 2", "use INT8$"]),
        ({1: [1.0], 8: [4.0]}, {1: [1.01], 8: [6.0]}, ["as fast at batch 1,", "1.50", "INT8 from batch 8 on$"]),
        ({1: [1.0, 1.1]}, {1: [1.07, 1.07]}, [" as fast at batch 1 ", "2 builds is up to 10.0%", "use FP16$"]),
        ({1: [3.0]}, {1: [2.0]}, ["0.67 times", "use FP16$"]),
        ({1: [1.02], 8: [1.0]}, {1: [1.0], 8: [1.02]}, [": as fast at batch 1, as fast at batch 8 ", "use FP16$"]),
        ({1: [1.0], 4: [2.0], 8: [3.0]}, {1: [1.2], 4: [2.0], 8: [4.0]}, ["use INT8 at batch 1, 8$"]),
        ({1: [1.0, 1.0]}, {}, None),
    ],
)
def test_verdict(int8, fp16, expected):
    rows = []
    for name, precision, times in (("c", "INT8", int8), ("float", "FP16", fp16)):
        for batch, number, ms in [(batch, *one) for batch, of_batch in times.items() for one in enumerate(of_batch, 1)]:
            label = name + (f"-build{number}" if number > 1 else "")
            rows.append(row(label, batch, name == "float", ms, precision=precision, build=number))
    sentences = verdicts(rows)
    assert not sentences if expected is None else all(re.search(words, sentences[0]) for words in expected)


def test_verdict_of_onnx_runtime_and_of_several_files():
    assert "TensorRT only" in verdicts([row(runtime="ONNX Runtime", precision="INT8 file")])[0]
    kinds = {"": {}, "-nms": {"nms": True}, "-masks": {"masks": True}}
    rows = [row(f"a{name}", ms=4.0, **kind) for name, kind in kinds.items()]
    rows += [row("float", ms=6.0 + len(name), baseline=True, precision="FP16", **kind)
             for name, kind in kinds.items() if name != "-masks"]  # fmt: skip
    rows += [row("other", ms=99.0, baseline=True, precision="FP16"), row("b", ms=8.0)]
    assert [text.split(" times")[0] for text in verdicts(rows)] == [
        "a: INT8 against FP16: 1.50", "a-nms: INT8 against FP16: 2.50", "b: INT8 against FP16: 0.75"
    ]  # fmt: skip


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """The program on a float and a quantized file of dynamic batch; returns (code, output, errors, builds)."""
    api = stand_in(monkeypatch)
    monkeypatch.setattr(job, "device_information", lambda index=None: {"Selected Device": "Fake GPU"})
    write_onnx(tmp_path / "float.onnx", ("b", 3, 32, 32))
    write_onnx(tmp_path / "int8.onnx", ("b", 3, 32, 32), quantized=True)

    def run(*words, files=("int8.onnx",)):
        fixed = [*(tmp_path / name for name in files), "--baseline", tmp_path / "float.onnx"]
        timing = ["--warmUp", 0, "--duration", 0.02, "--rounds", 2, "--batch-size", 1, 4]
        api.module.calls.clear()
        argv = [*map(str, [*fixed, "--project", tmp_path / "runs", *timing, *words])]
        code = benchmark_trt.run(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err, [item for name, item in api.module.calls if name == "build"]

    return run


def test_int8_against_fp16_over_batches(program, tmp_path):
    code, out, _, builds = program("--useCudaGraph", "--noDataTransfers")
    assert code == 0
    assert builds == [["FP16"], ["FP16", "INT8"]] * 2
    content = json.loads((tmp_path / "runs/exp/benchmark.json").read_text())
    assert [(one["model"], one["batch"], one["precision"]) for one in content["rows"]] == [
        ("float", 1, "FP16"), ("int8", 1, "INT8"), ("float", 4, "FP16"), ("int8", 4, "INT8"),
    ]  # fmt: skip
    assert [one["gain"] is None for one in content["rows"]] == [True, False] * 2
    for one in content["rows"]:
        assert one["images_per_second"] == pytest.approx(one["batch"] * one["figures"]["qps"])
        assert set(one["figures"]) == {"qps", "latency", "compute", "enqueue"}
    assert "CUDA graph, without data transfers, 0.02 s in 2 rounds" in content["method"]
    assert out.count(TIMED) == 4
    assert "Selected Device: Fake GPU" in out
    assert "mostly not INT8" in out  # the stand-in's inspector says FP32
    assert "timed without a CUDA graph" not in out
    assert re.search(r"\| int8 \| INT8 \| without \| 4 \|", (tmp_path / "runs/exp/benchmark.md").read_text())
    note = tmp_path / "int8-b4.engine.json"
    note.write_text(note.read_text().replace('"data_dependent": false', '"data_dependent": true'))
    (tmp_path / "float-b4.engine").rename(tmp_path / "plain.engine")  # as trtexec builds them, without a note
    files = ("int8-b4.engine", "plain.engine")
    code, out, _, _ = program("--useCudaGraph", "--batch-size", 4, "--imgsz", 32, files=files)
    assert (code, out.count("batch 4: timed without a CUDA graph")) == (0, 1)
    rows = json.loads((tmp_path / "runs/exp2/benchmark.json").read_text())["rows"]
    assert [one["precision"] for one in rows] == ["FP16", "INT8", "FP16"]


def test_which_engines_are_used_again(program, tmp_path):
    assert len(program()[3]) == 4
    assert program()[3] == []
    note = tmp_path / "int8-b4.engine.json"
    note.write_text(note.read_text().replace("TensorRT 8.6.0", "TensorRT 8.6.1"))
    assert program()[3] == [["FP16", "INT8"]]
    assert len(program("--imgsz", 32)[3]) == 4  # they may be of another size
    words = ("--optimization-level", 2, "--max-aux-streams", 2)
    assert len(program(*words)[3]) == 4
    notes = [EngineNote.load(tmp_path / f"{name}-b{batch}.engine") for name in ("float", "int8") for batch in (1, 4)]
    assert [one.options for one in notes] == [{"optimization_level": 2, "max_aux_streams": 2}] * 4
    assert program(*words)[3] == []
    assert len(program("--max-aux-streams", 2, "--batch-size", 4)[3]) == 2
    config = BuildConfig(batch=(4, 4, 4), precision="fp32", progress=False)
    build(tmp_path / "float.onnx", tmp_path / "float-b4.engine", config)
    assert program("--batch-size", 4)[3] == [["FP16"], ["FP16", "INT8"]]  # FP32 is no baseline in FP16
    both = ("int8.onnx", "int8-b4.engine")
    code, _, err, builds = program("--batch-size", 4, "--max-aux-streams", 1, files=both)
    assert (code, builds) == (2, [])
    assert "int8-b4.engine" in err  # is read, and would be overwritten


def test_a_second_build_does_not_use_the_cache_of_the_first(program, tmp_path):
    caches = [planned(Entry(tmp_path / "a.onnx", build=number), 4, None, BuildConfig()) for number in (1, 2)]
    assert [(engine.name, config.timing_cache) for engine, config in caches] == [
        ("a-b4.engine", None), ("a-build2-b4.engine", "")
    ]  # fmt: skip
    code, out, _, builds = program("--builds", 2)
    assert (code, len(builds), "the spread of 2 builds" in out) == (0, 8, True)
    assert program("--builds", 2)[3] == []  # both are used again


def test_what_cannot_be_captured_is_a_row(program, monkeypatch):
    real = Execution.graph

    def graph(self):
        if "int8-b1" in self.path.name:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")
        if "int8-b4" in self.path.name:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self)

    monkeypatch.setattr(Execution, "graph", graph)
    code, out, _, _ = program("--useCudaGraph")
    assert (code, out.count(TIMED)) == (1, 2)
    assert out.count("no figures: CUDA error: operation not permitted when stream is capturing\n") == 1
    assert out.count("no figures: CUDA out of memory\n") == 1
    code, out, _, builds = program("--tactic-sources-off", "NOPE")
    assert (code, builds, out.count("no figures: TensorRT 8.6.0 has no tactic source NOPE")) == (1, [], 4)
