"""Rows of a benchmark: speed against baselines, tables, the plot."""

import re

import pytest

from utils.jobs.benchmark import benchmark_table
from utils.trt.benchmark import BenchmarkRow, compared, verdicts
from utils.trt.timing import Figures, TimeStatistics


def row(model="c", batch=8, baseline=False, ms=4.0, **more):
    one = TimeStatistics(ms, ms, ms, ms, ms, ms, ms, 10)
    figures = Figures(1000 / ms, {"latency": one, "compute": one})
    return BenchmarkRow(model, batch, baseline, figures=figures, **{"precision": "INT8", **more})


def test_speed_against_the_baseline_of_the_same_kind():
    rows = [
        row("float", baseline=True, ms=4.0, precision="FP16"),
        row("int8", ms=2.5),
        row("float-nms", baseline=True, ms=5.0, precision="FP16", nms=True),
        row("int8-nms", ms=6.0, nms=True),
    ]
    found = compared(rows)
    assert [one.gain for one in found] == [None, pytest.approx(0.6), None, pytest.approx(-1 / 6)]
    assert benchmark_table(found)[1][1] == (
        "int8", "INT8", "without", "8", "2.500 ms", "2.500 ms", "400.0", "3,200", "+60.0%",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("int8", "fp16", "expected"),  # ms of the builds, by batch size
    [
        ({1: [2.0], 8: [4.0]}, {1: [3.0], 8: [6.0]}, ["1.50 times", "batch 8", "--builds 2", "use INT8$"]),
        ({1: [1.0], 8: [4.0]}, {1: [1.01], 8: [6.0]}, ["as fast at batch 1,", "1.50", "INT8 from batch 8 on$"]),
        ({1: [1.0, 1.1]}, {1: [1.07, 1.07]}, [" as fast at batch 1 ", "2 builds is up to 10.0%", "use FP16$"]),
        ({1: [3.0]}, {1: [2.0]}, ["0.67 times", "use FP16$"]),
        ({1: [1.0], 4: [2.0], 8: [3.0]}, {1: [1.2], 4: [2.0], 8: [4.0]}, ["use INT8 at batch 1, 8$"]),
        ({1: [1.0, 1.0]}, {}, None),
    ],
)
def test_verdict(int8, fp16, expected):
    rows = []
    for name, precision, times in (("c", "INT8", int8), ("float", "FP16", fp16)):
        for batch, build, ms in [(batch, *one) for batch, of_batch in times.items() for one in enumerate(of_batch, 1)]:
            label = name + (f"-build{build}" if build > 1 else "")
            rows.append(row(label, batch, name == "float", ms, precision=precision, build=build))
    sentences = verdicts(rows)
    assert not sentences if expected is None else all(re.search(words, sentences[0]) for words in expected)


def test_verdict_of_onnx_runtime_and_of_several_files():
    assert "TensorRT only" in verdicts([row(runtime="ONNX Runtime", precision="INT8 file")])[0]
    rows = [row("a"), row("b", ms=8.0), row("float", baseline=True, ms=6.0, precision="FP16")]
    assert [text.split(":")[0] for text in verdicts([*rows, row("c", nms=True)])] == ["a", "b"]
