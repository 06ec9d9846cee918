"""scripts/compare_placement.py from ONNX files on, on a stand-in of TensorRT; exporting: tests/integration."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builds_here import Here
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.jobs.compare_placement import engines, table
from utils.jobs.compare_placement.variants import is_fresh, jobs
from utils.trt import tensorrt_api, timing
from utils.trt.timing import TimingConfig

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("compare_placement", ROOT / "scripts/compare_placement.py")
program = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(program)


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Run the program on ONNX files of two batches, as --onnx-only leaves them."""
    api = stand_in(monkeypatch)
    for job in jobs([Path("net.yaml")], [1, 2], ["fp16", "int8-convs", "int8"], 64, tmp_path):
        write_onnx(job.onnx, (job.batch, 3, 64, 64), quantized=job.variant != "fp16")

    def run(*words):
        fixed = ["net.yaml", "--imgsz", "64", "--batch-size", "1", "2", "--output", str(tmp_path), "--workers", "1"]
        api.module.calls.clear()
        code = program.run([*fixed, "--from-onnx", "--iterations", "6", "--rounds", "2", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, [item for name, item in api.module.calls if name == "build"]

    return run


def test_builds_times_and_writes_tables(compare, tmp_path):
    code, out, _, builds = compare()
    assert code == 0
    assert builds == [["FP16"], ["FP16", "INT8"], ["FP16", "INT8"]] * 2
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["measured_on"]["gpu"] == "Fake GPU"
    rows = content["rows"]
    assert [(row["batch"], row["variant"]) for row in rows] == [
        (batch, variant) for batch in (1, 2) for variant in ("fp16", "int8-convs", "int8")
    ]
    assert {row["ms"] for row in rows} == {1.0}
    assert {row["ratio"] for row in rows} == {1.0}
    assert [row["images_per_second"] for row in rows] == [1000.0] * 3 + [2000.0] * 3
    assert rows[0]["profile_ms"] == 1.0  # two layers of 0.5 ms
    assert rows[0]["layers"] == {"FP32": 2}
    text = (tmp_path / "comparison.md").read_text()
    assert "| net | 2 | int8 | 1.000 | 1.000 | 2,000 | 1.00x |" in text
    assert "Slowest layers of net, batch 1, int8:" in text
    assert "TensorRT 8.6.0" in out
    assert len(list(tmp_path.glob("*.timing.cache"))) == 1  # one for the model


def test_networks_with_prototypes_are_timed_with_both_outputs(compare, tmp_path):
    for job in jobs([Path("net.yaml")], [1, 2], ["fp16", "int8-convs", "int8"], 64, tmp_path):
        write_onnx(job.onnx, (job.batch, 3, 64, 64), quantized=job.variant != "fp16", prototypes=True)
    code, _, _, builds = compare()
    assert (code, len(builds)) == (0, 6)
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["profile_ms"] for row in rows[:2]] == [1.5, 2.5]  # half a millisecond a layer; Q and DQ are two
    assert {row["ratio"] for row in rows} == {1.0}


def test_options_reach_every_engine_and_the_table(compare, tmp_path):
    words = ("--variants", "fp16", "int8", "--optimization-level", "2", "--max-aux-streams", "3")
    code, out, _, builds = compare(*words, "--tactic-sources-off", "CUDNN", "--timing-cache", str(tmp_path / "cache"))
    assert (code, len(builds)) == (0, 4)
    content = json.loads((tmp_path / "comparison.json").read_text())
    options = {"optimization_level": 2, "max_aux_streams": 3, "tactic_sources_off": ["CUDNN"]}
    assert [row["options"] for row in content["rows"]] == [options] * 4
    assert {row["streams"] for row in content["rows"]} == {3}
    assert content["measured_on"]["tensorrt"] == "TensorRT 8.6.0 without CUDNN"
    assert out.count("level 2, 3 streams") == 8  # after each batch, and at the end
    assert (tmp_path / "cache").read_bytes().count(b"measured") == 4
    assert len(compare(*words, "--tactic-sources-off", "CUDNN")[3]) == 0
    assert len(compare(*words)[3]) == 4  # engines of other options are not used


def test_every_engine_is_tuned_with_the_same_options(compare, tmp_path, monkeypatch):
    """FP16 too, so that the ratio is fair: here both gain."""
    processes = []
    monkeypatch.setattr(engines, "BuildProcess", lambda device: processes.append(Here()) or processes[-1])
    monkeypatch.setattr(timing, "TURN", TimingConfig(1, 0, 1, cuda_graph=True, transfers=False, iterations=2))
    api = tensorrt_api.load()
    api.module.ticks = lambda config: (100 if "INT8" in str(config.flags) else 160) - 5 * config.max_aux_streams
    words = ("--variants", "fp16", "int8", "--optimization-level", "2", "--tune", "30")
    code, out, _, builds = compare(*words)
    assert (code, len(builds), len(processes)) == (0, 4 * 6, 1)  # which loads TensorRT once
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [row["ms"] for row in rows] == [141.0, 81.0] * 2
    assert {row["options"]["max_aux_streams"] for row in rows} == {4}
    assert rows[0]["tuning"]["candidates"][0]["ms"] == [166.0] * 5
    assert rows[1]["ratio"] == pytest.approx(141 / 81)
    assert "less time than as asked for" in out
    assert compare(*words)[3] == []
    code, _, err, _ = compare(*words, "--workers", "2")
    assert (code, "--tune times engines between builds, and 2 --workers would disturb that" in err) == (2, True)


def test_engines_are_used_again_unless_their_onnx_is_newer(compare, tmp_path):
    compare()
    assert compare()[3] == []
    changed = tmp_path / "net-64-b2-int8.onnx"
    later = changed.stat().st_mtime + 100
    os.utime(changed, (later, later))
    assert compare()[3] == [["FP16", "INT8"]]


def test_one_engine_that_cannot_be_built_leaves_the_others(compare, tmp_path):
    write_onnx(tmp_path / "net-64-b1-int8.onnx", (1, 3, 64, 64), quantized=True, opset=19)
    code, out, _, builds = compare()
    assert (code, len(builds)) == (1, 5)
    assert "has opset 19" in out
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--imgsz", "32"), "net-32-b1-fp16.onnx does not exist; run the same command with --onnx-only first"),
        (("--device", "none"), "is neither 'cpu' nor one CUDA index"),
        (("--device", "7"), "--device 7: torch"),
    ],
)
def test_bad_input_is_one_line(compare, words, message):
    code, _, err, _ = compare(*words)
    assert code == 2
    assert message in err


def test_builds_side_by_side_use_the_gpu_that_was_named(compare, monkeypatch):
    """Each worker is a process, and its first GPU is the one it starts with."""
    used, pools = [], []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers, start, initializer, arguments):
            pools.append((workers, start.get_start_method()))
            super().__init__(1, initializer=initializer, initargs=arguments)

    def use(text):
        used.append(text)
        return torch.device("cpu")

    monkeypatch.setattr(engines, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(engines, "select_device", lambda text: torch.device("cpu"))
    monkeypatch.setattr(tensorrt_api, "use_device", use)
    code, _, _, builds = compare("--workers", "3", "--device", "2")
    assert (code, len(builds), pools) == (0, 6, [(3, "spawn")])
    assert used == ["2"] * 3  # the program, before it looks what is missing, and the worker


def test_the_cpu_beside_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match="--device cpu: engines are built and run on a GPU"):
        tensorrt_api.engine_device("cpu")


def test_freshness(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    assert not is_fresh(new)
    for number, path in enumerate((old, new)):
        path.write_text("")
        os.utime(path, (1000 + number, 1000 + number))
    assert is_fresh(new, old, None, tmp_path / "missing")
    assert not is_fresh(old, new)


def test_two_models_of_one_name(tmp_path):
    with pytest.raises(InputError, match="same name"):
        jobs([Path("a/x.yaml"), Path("b/x.pt")], [1], ["fp16"], 640, tmp_path)


def test_a_row_with_everything(tmp_path):
    row = engines.Row("c", 8, "int8", ms=4.0, p90=4.2, ratio=1.5, layers={"INT8": 150, "FP16": 9},
                      reformats={"copy": 30, "dequantize": 2}, reformat_ms={"copy": 0.5, "dequantize": 0.1},
                      profile_ms=6.0, int8_time=0.8, options={"optimization_level": 2, "max_aux_streams": 4},
                      streams=3)  # fmt: skip
    assert table.cells(row) == (
        "c", "8", "int8", "4.000", "4.200", "2,000", "1.50x", "level 2, 4 streams (3 streams)", "80%",
        "150 INT8 + 9 FP16", "30 copy 0.50 ms, 2 dequantize 0.10 ms, 10% of the time",
    )  # fmt: skip
