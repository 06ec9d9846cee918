"""Engines timed on a stand-in: what is enqueued and what figures come of it; rows, tables, plot."""

from __future__ import annotations

import time

import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError
from utils.jobs import benchmark_report
from utils.trt import timing, trtexec
from utils.trt.benchmark_rows import Row, compared
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.context import Execution
from utils.trt.timing import TimingConfig
from utils.trt.timing_figures import PARTS, Figures, Summary

CPU = torch.device("cpu")
QUICK = TimingConfig(warm_up=1, duration=0.02, rounds=2)


def execution(folder, monkeypatch, batch=2, name="a"):
    api = stand_in(monkeypatch)
    path = write_onnx(folder / f"{name}.onnx", (batch, 3, 8, 8))
    return Execution(build(path, folder / f"{name}.engine", BuildConfig(progress=False)).path, api, CPU)


def one(median):
    return Summary(median, median, median, median, median, median, median, 10)


def row(model="c", batch=8, baseline=False, ms=4.0, **more):
    parts = {"latency": one(ms), "compute": one(ms)}
    return Row(model, batch, baseline, figures=Figures(1000 / ms, parts), **{"precision": "INT8", **more})


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_parts_of_a_query(tmp_path, monkeypatch, cuda_graph):
    running = execution(tmp_path, monkeypatch)
    before = len(running.api.module.calls)
    config = TimingConfig(1, 0.02, 2, cuda_graph=cuda_graph)
    began = time.perf_counter()
    figures = timing.measure({"a": running}, config)["a"]
    took = time.perf_counter() - began
    assert {name: figures.parts[name].median for name in ("latency", "h2d", "compute", "d2h")} == {
        "latency": 3.0, "h2d": 1.0, "compute": 1.0, "d2h": 1.0,  # an event of the stand-in is a tick
    }  # fmt: skip
    count = figures.parts["latency"].count
    assert count == figures.parts["enqueue"].count > 5
    assert count / took < figures.qps < count / 0.02
    enqueued = len(running.api.module.calls) - before
    assert (enqueued <= 2) if cuda_graph else (enqueued > count)  # those of warming up are not counted


def test_copies_are_real_and_can_be_left_out(tmp_path, monkeypatch):
    running = execution(tmp_path, monkeypatch)
    figures = timing.measure({"a": running}, TimingConfig(0, 0.01, 1, transfers=False))["a"]
    assert set(figures.parts) == {"latency", "compute", "enqueue"}
    lane = timing._Lane(running, QUICK)
    timing._run([lane], 0.005, 1, timing._Samples())
    assert lane.memory["output0"].abs().sum() > 0
    assert torch.equal(lane.memory["output0"], running.buffers["output0"])


def test_engines_take_turns(tmp_path, monkeypatch):
    running = {name: execution(tmp_path, monkeypatch, 1, name) for name in "ab"}
    order = []
    monkeypatch.setattr(
        timing,
        "_run",
        lambda lanes, seconds, *rest: order.append((lanes[0].timed, round(seconds, 3))),
    )
    monkeypatch.setattr(timing._Samples, "figures", lambda self: None)
    timing.measure(running, TimingConfig(200, 3, 3))
    a, b = running["a"], running["b"]
    expected = [a, b, b, a, a, b]
    assert order == [(one, seconds) for one in expected for seconds in (0.2, 1.0)]


def test_so_many_queries_at_least_whatever_the_duration(tmp_path, monkeypatch):
    running = execution(tmp_path, monkeypatch)
    seen = []
    config = TimingConfig(0, 0, 3, cuda_graph=True, transfers=False, iterations=10)
    figures = timing.measure({"a": running}, config, lambda: seen.append(1))["a"]
    assert (figures.parts["compute"].count, len(seen)) == (12, 3)


def test_the_summary_has_trtexecs_lines():
    parts = {name: Summary(1.0, 9.0, 4.0, 3.0, 7.0, 8.0, 8.5, 10) for name in PARTS}
    lines = Figures(123.456, parts).lines()
    assert lines[:2] == ["=== Performance summary ===", "Throughput: 123.456 qps"]
    assert lines[2] == ("Latency: min = 1 ms, max = 9 ms, mean = 4 ms, median = 3 ms, percentile(90%) = 7 ms, "
                        "percentile(95%) = 8 ms, percentile(99%) = 8.5 ms")  # fmt: skip
    speed, figures = trtexec.parse_times("\n".join(lines))  # what reads trtexec's summary reads ours
    assert speed == 123.456
    assert {name: (figure.min, figure.p99) for name, figure in figures.items()} == dict.fromkeys(parts, (1.0, 8.5))


@pytest.mark.parametrize("changes", [{"warm_up": -1}, {"duration": -1}, {"rounds": 0}, {"iterations": 0}])
def test_times_that_mean_nothing(changes):
    with pytest.raises(InputError, match="must not be negative"):
        TimingConfig(**changes)


def test_speed_against_the_baseline_of_the_same_kind():
    rows = [
        row("float", baseline=True, ms=4.0, precision="FP16"),
        row("int8", ms=2.5),
        row("float-nms", baseline=True, ms=5.0, precision="FP16", nms=True),
        row("int8-nms", ms=6.0, nms=True),
    ]
    found = compared(rows)
    assert [one.gain for one in found] == [None, pytest.approx(0.6), None, pytest.approx(-1 / 6)]
    assert [len(one.notes) for one in found] == [0, 0, 0, 1]
    assert (
        "int8-nms, batch 8: INT8 is not faster than FP16 here, 6.000 ms against 5.000 ms (0.83x)" in found[3].notes[0]
    )
    assert benchmark_report.table(found)[1][1] == (
        "int8", "INT8", "without", "8", "2.500 ms", "2.500 ms", "400.0", "3,200", "+60.0%",
    )  # fmt: skip


def test_an_engine_that_is_not_faster_than_another_int8_engine_is_not_told_of_fp16():
    assert compared([row("before", baseline=True), row("after", ms=5.0)])[1].notes == ()


def test_networks_with_masks_have_a_baseline_and_a_column_of_their_own():
    rows = [
        row("seg-fp16", baseline=True, ms=5.0, precision="FP16", masks=True),
        row("fp16", baseline=True, ms=4.0, precision="FP16"),
        row("seg-int8", ms=2.5, masks=True),
        row("int8", ms=2.0),
        row("seg-nms", ms=3.0, masks=True, nms=True),
    ]
    found = compared(rows)
    assert [one.gain for one in found] == [None, None, pytest.approx(1.0), pytest.approx(1.0), None]
    lines = benchmark_report.text(found).splitlines()
    assert lines[0].split()[:5] == ["model", "precision", "NMS", "masks", "batch"]
    assert [line.split()[2:4] for line in lines[3:]] == [
        ["without", "with"],
        ["without", "without"],
        ["inside", "with"],
    ]
    assert "masks" not in benchmark_report.text([found[1], found[3]])


def test_table_with_an_engine_that_has_no_figures():
    rows = [row(), Row("d", 12, False, error="takes batches of 1 to 8")]
    lines = benchmark_report.text(rows).splitlines()
    assert lines[2].endswith("takes batches of 1 to 8")
    text = benchmark_report.markdown(rows, "on a GPU", "the command")
    assert text.splitlines()[3].startswith("| d |  | without | 12 |")
    assert "on a GPU" in text


def test_plot_has_a_line_for_each_model_and_a_point_for_each_batch():
    rows = [row(model, batch, ms=batch / 2) for model in ("a", "b") for batch in (1, 4, 8)]
    (axes,) = benchmark_report.plot(rows, "GPU").axes
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert axes.get_lines()[0].get_xydata().tolist() == [[2000.0, 0.5], [2000.0, 2.0], [2000.0, 4.0]]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "1", "4", "4", "8", "8"]


def test_both_outputs_are_copied(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    path = write_onnx(tmp_path / "a.onnx", (2, 3, 8, 8), prototypes=True)
    engine = build(path, tmp_path / "a.engine", BuildConfig(progress=False)).path
    running = Execution(engine, api, CPU)
    lane = timing._Lane(running, QUICK)
    timing._run([lane], 0.005, 1, timing._Samples())
    for name in ("output0", "output1"):
        assert lane.memory[name].abs().sum() > 0
        assert torch.equal(lane.memory[name], running.buffers[name])
