"""The arithmetic of `qat.py sensitive --engine` on known times, and how a curve is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from utils.jobs.sensitivity import engine_report
from utils.jobs.sensitivity.by_engine import Curve
from utils.jobs.sensitivity.engine_points import Estimates, Point, Times, choose, differs, noise_of, order_of

INT8 = Point((), "INT8", 0.0, 0.0, ap=0.60, engine="int8.engine")
FP16 = Point((), "FP16", 1.5, 0.01, ap=0.70, ap_error=0.01)
A = Point(("model.2",), cost=0.04, spread=0.002, estimate=0.01, ap=0.65, ap_error=0.02)
B = Point(("model.2", "model.3"), cost=0.3, spread=0.004, estimate=0.2, ap=0.699)
C = Point(("model.9",), cost=0.32, spread=0.004, ap=0.705)
GUESS = Point(("model.7",), cost=0.1, estimate=0.1, ap=0.70)


class TestTimes:
    def test_differences_are_taken_within_rounds(self):
        """The clocks fall by half from round to round; the difference stays what it is."""
        times = Times((3.0, 5.1, 9.0), (2.0, 4.0, 8.0), (2.1, 3.9, 8.1), 20.0)
        assert times.cost == pytest.approx(1.0)
        assert times.spread == pytest.approx(0.05)
        assert times.control == pytest.approx(0.1)
        assert Times.from_dict(json.loads(json.dumps(asdict(times)))) == times

    def test_the_largest_control_is_the_noise(self):
        one, other = Times((1.0,), (1.0,), (0.7,)), Times((1.0,), (1.0,), (1.1,))
        assert noise_of([one, other]) == pytest.approx(0.3)
        assert noise_of([]) == 0

    @pytest.mark.parametrize(
        ("cost", "spread", "noise", "expected"),
        [(0.10, 0.02, 0.05, True), (0.10, 0.12, 0.05, False), (0.10, 0.02, 0.11, False), (-0.10, 0.02, 0.05, True)],
    )
    def test_a_difference_counts_beyond_control_and_scatter(self, cost, spread, noise, expected):
        assert differs(Point(("a",), cost=cost, spread=spread), INT8, noise) is expected


class TestEstimates:
    INT8_LAYERS = (("/model.2/conv/Conv", 1.0), ("/model.3/conv/Conv + /model.3/act/Mul", 2.0), ("Reformat", 1.0))
    FP16_LAYERS = (("/model.2/conv/Conv", 2.0), ("/model.3/conv/Conv", 2.0), ("other", 4.0))

    def test_a_unit_costs_its_fp16_time_less_its_int8_time(self):
        """Of the engines' own times: the layers sum up to 4 and to 8, and the engines take 2 and 6 ms."""
        found = Estimates(self.INT8_LAYERS, self.FP16_LAYERS, 2.0, 6.0)
        costs = found.costs({"model.2": ["model.2"], "model.3": ["model.3"], "both": ["model.2", "model.3"]})
        assert costs["model.2"] == pytest.approx(2 / 8 * 6 - 1 / 4 * 2)
        assert costs["model.3"] == pytest.approx(2 / 8 * 6 - 2 / 4 * 2)
        assert costs["both"] == pytest.approx(costs["model.2"] + costs["model.3"])

    def test_the_order_is_gain_per_cost(self):
        gains = {"dear": 0.04, "cheap": 0.03, "free": 0.01, "noise": 0.0001, "worse": -0.1}
        costs = {"dear": 0.4, "cheap": 0.1, "free": -0.2, "noise": 0.001, "worse": 0.1}
        assert order_of(gains, costs, 0.005, 0.05) == ["cheap", "free", "dear"]
        assert order_of(gains, costs, 0.0, 0.001) == ["free", "cheap", "noise", "dear"]


class TestChoice:
    def test_the_fastest_within_the_ap(self):
        chosen, why = choose([INT8, FP16, A, B, C, GUESS], 0.70, 0.01, 0.005)
        assert chosen is B
        assert why == "it is the fastest engine that loses at most 0.01 AP"

    def test_of_those_that_are_as_fast_the_most_accurate(self):
        chosen, why = choose([INT8, FP16, A, B, C], 0.70, 0.01, 0.05)
        assert chosen is C
        assert "most AP of the fastest" in why

    def test_int8_itself_if_it_loses_little(self):
        assert choose([INT8, FP16, A, B, C], 0.70, 0.2, 0.001)[0] is INT8

    def test_a_mixed_engine_that_is_faster_than_int8(self):
        faster = replace(A, cost=-0.1)
        assert choose([INT8, FP16, faster, B], 0.70, 0.2, 0.001)[0] is faster

    def test_the_most_ap_if_none_is_within(self):
        slow = replace(C, cost=1.6)
        chosen, why = choose([INT8, FP16, A, B, slow], 0.75, 0.01, 0.005)
        assert chosen is B
        assert "faster than FP16" in why

    def test_int8_where_nothing_is_faster_than_fp16(self):
        slow = replace(FP16, cost=-0.5)
        assert choose([INT8, slow, A], 0.75, 0.01, 0.005)[0] is INT8

    def test_without_ap_or_engine_a_point_is_not_chosen(self):
        assert choose([INT8, FP16, GUESS, replace(C, ap=None)], 0.70, 0.01, 0.005)[0] is INT8


class TestReport:
    @pytest.fixture
    def content(self):
        curve = Curve(
            (INT8, FP16, A, GUESS, B), B, "it is the fastest", 2.0, 0.05, "TensorRT 8.6.0, batch 8", ("a note",)
        )
        return engine_report.to_dict(curve, 0.01)

    def test_json(self, content):
        assert json.loads(json.dumps(content)) == content
        assert content["target_ap"] == pytest.approx(0.69)
        assert content["chosen"] == ["model.2", "model.3"]
        rows = {row["name"]: row for row in content["points"]}
        assert rows["model.2"]["ms"] == pytest.approx(2.04)
        assert [row["measured"] for row in content["points"]] == [True, True, True, False, True]
        assert [row["differs_from_int8"] for row in content["points"]] == [False, True, False, None, True]
        assert [row["chosen"] for row in content["points"]] == [False, False, False, False, True]

    def test_lines(self, content):
        lines = engine_report.lines(content, 0.60)
        found = {line.split("  ")[0]: line for line in lines}
        assert "2.000" in found["nothing (INT8)"]
        assert "+0.0" not in found["nothing (INT8)"]
        assert "3.500  +1.500 ± 0.010" in found["everything (FP16)"]
        assert "2.040  +0.040 ± 0.002     +0.010  0.6500  +0.0500 ± 0.0200  as fast as INT8" in found["model.2"]
        assert "~2.100         ~+0.100" in found["model.7"]
        assert found["model.7"].endswith("estimated")
        assert found["model.2, model.3"].endswith("chosen")
        assert "differs by 0.050 ms" in lines[-2]
        assert lines[-1] == "chosen: model.2, model.3, because it is the fastest"

    def test_the_chart_shows_what_was_measured_and_what_was_not(self, content):
        (axes,) = engine_report.chart(content).axes
        fills = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() in "sDo"]
        assert fills.count("white") == 1  # the estimate
        assert fills.count("none") == 1  # the ring around the chosen one
        assert {text.get_text() for text in axes.texts} == {"INT8", "FP16", "2", "2, 3"}  # not the estimate
        line = next(line for line in axes.lines if line.get_marker() == "None" and len(line.get_xdata()) > 2)
        assert list(line.get_xdata()) == pytest.approx([2.0, 2.04, 2.3, 3.5])
        assert list(line.get_ydata()) == [0.60, 0.65, 0.699, 0.70]
