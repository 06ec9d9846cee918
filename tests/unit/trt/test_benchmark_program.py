"""`scripts/benchmark_trt.py` over batch sizes, on a stand-in for TensorRT: rows, builds, bad input."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.jobs import benchmark as job
from utils.reports import figures
from utils.trt import benchmark
from utils.trt.build import build
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig
from utils.trt.runner import Execution

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark_trt

RENDER = figures.render
TIMED = " queries/s, latency "


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """The program on a float and a quantized file of dynamic batch; returns (code, output, errors, builds).

    Its charts are made, and not rendered, which takes 0.3 s each: `test_int8_against_fp16_over_batches` does that.
    """
    api = stand_in(monkeypatch)
    monkeypatch.setattr(figures, "render", lambda *_: b"not rendered")
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


def test_int8_against_fp16_over_batches(program, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "render", RENDER)
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
    assert (tmp_path / "runs/exp/benchmark.png").stat().st_size > 1000
    assert re.search(r"\| int8 \| INT8 \| without \| 4 \|", (tmp_path / "runs/exp/benchmark.md").read_text())


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


def test_a_second_build_does_not_use_the_cache_of_the_first(program, tmp_path, monkeypatch):
    caches = {}

    def building(onnx, engine, config, api):
        caches[engine.name] = config.timing_cache
        return build(onnx, engine, config, api)

    monkeypatch.setattr(benchmark, "build_or_tune", building)
    code, out, _, builds = program("--builds", 2)
    assert (code, len(builds)) == (0, 8)
    assert {name: cache for name, cache in caches.items() if name.endswith("-b4.engine")} == {
        "float-b4.engine": None, "int8-b4.engine": None, "float-build2-b4.engine": "", "int8-build2-b4.engine": "",
    }  # fmt: skip
    assert "the spread of 2 builds" in out
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
