"""Engines of `qat.py sensitive --engine` on a stand-in of TensorRT, whose times follow from what is in float."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builds_here import Here
from one_conv import METADATA, write_onnx
from small_networks import chain
from tensorrt_stand_in import stand_in

from models.quantize import backend, calibration, placement
from models.quantize.partial_forward import State
from models.quantize.placement import scale_key
from models.quantize.recipe import Recipe
from utils.core import distributed
from utils.core.errors import DependencyError, InputError, QatError
from utils.jobs.options import SensitiveOptions
from utils.jobs.sensitivity import engine_report, engines, exporting
from utils.jobs.sensitivity.by_engine import EngineJudge
from utils.jobs.sensitivity.engines import AGAIN, FP16, INT8, Bench
from utils.jobs.sensitivity.screening import Screened
from utils.jobs.sensitivity.state import AnalysisState
from utils.trt import context, tensorrt_api, timing
from utils.trt.timing import TimingConfig

COSTS = {"model.0": 10, "model.1": 30, "model.2": -20, "model.3": 5}  # ms more in float; 2 more for each border
GAINS = {"model.0": 0.01, "model.1": 0.04, "model.2": -0.01, "model.3": 0.002}
WHOLE = 100  # ms of the INT8 engine, beside the event's own tick


def milliseconds(model):
    """Of an engine, by what its file says is in float: units cost what they cost, and 2 ms for conversions."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    if "float" not in entries:
        return WHOLE + 200
    names = json.loads(entries["float"])
    return WHOLE + sum(COSTS[name] + 2 for name in names)


class FakeExporter:
    """Writes a tiny file that says what is in float; networks in `broken` cannot be parsed."""

    def __init__(self, broken=()):
        self.inputs, self.batch = SimpleNamespace(device=torch.device("cpu"), imgsz=64), 1
        self.broken, self.written = broken, []

    def write(self, recipe, path):
        self.written.append(None if recipe is None else recipe.float)
        more = {} if recipe is None else {"float": json.dumps(recipe.float)}
        write_onnx(path, (1, 3, 8, 8), quantized=recipe is not None, metadata={**METADATA, **more})
        if recipe is not None and recipe.float in self.broken:
            path.write_bytes(b"")


@pytest.fixture
def api(monkeypatch):
    api = stand_in(monkeypatch)
    api.module.extra_ms = milliseconds
    monkeypatch.setattr(timing, "TURN", TimingConfig(0, 0, 1, cuda_graph=True, transfers=False, iterations=2))
    monkeypatch.setattr(timing, "TURNS", 3)
    return api


def bench(folder: Path, exporter=None, state=None, builds=None, **options) -> Bench:
    state = state or AnalysisState({}, {}, "00")
    exporter = exporter or FakeExporter()
    return Bench(folder, state, exporter, SensitiveOptions(engine=True, **options), builds or Here())


class TestBench:
    def test_an_engine_is_timed_in_turns_with_two_int8_engines(self, api, tmp_path):
        one = bench(tmp_path)
        one.compare_with(Recipe())
        times = one.measure("model.1", Recipe(float=("model.1",)))
        assert (times.cost, times.spread, times.control) == (32, 0, 0)
        assert len(times.ms) == len(times.int8) == len(times.again) == timing.TURNS
        assert one.ms() == WHOLE + 1  # an event is a tick
        built = [flags for item, flags in api.module.calls if item == "build"]
        assert built == [["FP16", "INT8"]] * 3
        assert one.measure(FP16, None).cost == 200
        assert [flags for item, flags in api.module.calls if item == "build"][3:] == [["FP16"]]

    def test_files(self, api, tmp_path):
        one = bench(tmp_path)
        one.compare_with(Recipe())
        one.measure("model.1+model.2", Recipe(float=("model.1", "model.2")))
        names = {path.name for path in (tmp_path / "engines").iterdir()}
        assert {"int8.engine", "int8-again.engine", one.path("model.1+model.2").name} <= names
        assert not [name for name in names if name.endswith(".onnx")]
        assert len([name for name in names if name.endswith(".timing.cache")]) == 1

    def test_what_is_measured_is_kept_in_the_state_and_not_built_again(self, api, tmp_path):
        state = AnalysisState(SensitiveOptions(engine=True).to_dict(), Recipe().to_dict(), "00")
        one = bench(tmp_path, state=state)
        one.compare_with(Recipe())
        found = one.measure("model.1", Recipe(float=("model.1",)))
        exporter = FakeExporter()
        again = bench(tmp_path, exporter, AnalysisState.load(tmp_path))
        assert again.times == {"model.1": found}
        assert again.measure("model.1", Recipe(float=("model.1",))) == found
        again.compare_with(Recipe())
        again.measure("model.0", Recipe(float=("model.0",)))
        assert exporter.written == [("model.0",)]

    def test_an_engine_that_a_killed_run_had_not_timed_is_not_built_again(self, api, tmp_path, monkeypatch):
        one = bench(tmp_path)
        one.compare_with(Recipe())
        with monkeypatch.context() as patch:
            patch.setattr(Bench, "_in_turns", lambda self, name: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                one.measure("model.1", Recipe(float=("model.1",)))
        exporter = FakeExporter()
        again = bench(tmp_path, exporter)
        again.compare_with(Recipe())
        assert again.measure("model.1", Recipe(float=("model.1",))).cost == 32
        assert exporter.written == []

    def test_another_gpu_measures_anew(self, api, tmp_path, monkeypatch):
        state = AnalysisState({}, {}, "00")
        one = bench(tmp_path, state=state)
        one.compare_with(Recipe())
        one.measure("model.1", Recipe(float=("model.1",)))
        other = tensorrt_api.Gpu("Other GPU", "SM90", 8 << 30)
        monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: other)
        exporter = FakeExporter()
        moved = bench(tmp_path, exporter, state)
        assert moved.times == {}
        moved.compare_with(Recipe())
        assert exporter.written == [(), ()]

    def test_one_that_cannot_be_built_is_left_out(self, api, tmp_path):
        one = bench(tmp_path, FakeExporter(broken=(("model.1",),)))
        one.compare_with(Recipe())
        assert one.measure("model.1", Recipe(float=("model.1",))) is None
        assert list(one.failed) == ["model.1"]
        assert one.measure("model.0", Recipe(float=("model.0",))).cost == 12

    def test_a_new_run_in_an_old_folder_takes_no_engine_of_the_old_one(self, api, tmp_path):
        one = bench(tmp_path)
        one.compare_with(Recipe())
        one.profile(INT8)
        engines.forget_engines(tmp_path)
        assert not [path for path in (tmp_path / "engines").iterdir() if "int8" in path.name]
        assert list((tmp_path / "engines").glob("*.timing.cache"))
        exporter = FakeExporter()
        bench(tmp_path, exporter).compare_with(Recipe())
        assert exporter.written == [(), ()]

    def test_without_a_control_the_int8_engine_is_timed_twice(self, api, tmp_path):
        class OneBuild(Here):
            def build(self, onnx, engine, config, limit, on_wait=lambda: None):
                self.failing = () if engine.stem != "int8-again" else (config.options,)
                return super().build(onnx, engine, config, limit, on_wait)

        exporter = FakeExporter()
        one = bench(tmp_path, exporter, builds=OneBuild())
        for _ in range(2):
            one.compare_with(Recipe())
        assert one.failed == {AGAIN: "no engine for this"}
        assert one.measure("model.1", Recipe(float=("model.1",))).control == 0
        assert exporter.written == [(), (), ("model.1",)]

    def test_without_an_int8_engine_there_is_nothing_to_compare_with(self, api, tmp_path):
        with pytest.raises(QatError):
            bench(tmp_path, FakeExporter(broken=((),))).compare_with(Recipe())

    def test_without_time_for_a_control_the_int8_engine_is_timed_twice(self, api, tmp_path):
        exporter = FakeExporter()
        one = bench(tmp_path, exporter, engine_minutes=1e-9)
        one.compare_with(Recipe())
        times = one.measure("model.1", Recipe(float=("model.1",)))
        assert exporter.written == [(), ("model.1",)]
        assert (times.cost, times.control) == (32, 0)

    def test_the_time_that_a_build_takes_has_to_be_left(self, api, tmp_path, monkeypatch):
        one = bench(tmp_path, engine_minutes=2)
        assert one.has_time()
        one.compare_with(Recipe())
        one._seconds = {INT8: 600.0, FP16: 900.0, AGAIN: 30.0}
        assert one.has_time()
        one._seconds["model.1"] = 121.0
        assert not one.has_time()

    def test_every_build_has_a_limit(self, api, tmp_path):
        here = Here(seconds=50.0)
        one = bench(tmp_path, builds=here, max_aux_streams=2)
        one.compare_with(Recipe())
        one.measure(FP16, None)
        one.measure("model.1", Recipe(float=("model.1",)))
        options = {"max_aux_streams": 2}
        assert here.asked == [(options, 1800.0), (options, 200.0), (options, 1800.0), (options, 200.0)]
        assert one.measured_on == "TensorRT 8.6.0, Fake GPU, batch 1, 64x64, 2 streams"

    def test_a_build_that_does_not_end_is_left_out(self, api, tmp_path):
        one = bench(tmp_path)
        one.compare_with(Recipe())
        one._builds = Here(seconds=1000.0)
        assert one.measure("model.1", Recipe(float=("model.1",))) is None
        assert one.failed == {"model.1": "not built within 120 s"}

    def test_layers_are_measured_once(self, api, tmp_path, monkeypatch):
        one = bench(tmp_path)
        assert one.profile(INT8) is None
        one.compare_with(Recipe())
        found = one.profile(INT8)
        assert sum(ms for _, ms in found) == 2.0  # four layers of 0.5 ms
        monkeypatch.setattr(context, "Execution", lambda *_: pytest.fail("opened"))
        assert bench(tmp_path).profile(INT8) == found


def search(ap=GAINS, screened=()):
    """What a search has found in a network of four units."""
    units = {name: SimpleNamespace(name=name, patterns=(name,), convolutions=(name,)) for name in COSTS}
    scores = {name: Screened(1, 0.5, 0.5 - score, 0.1) for name, score in screened}
    return SimpleNamespace(
        units=units, screened=scores, resampled={}, costs={name: {"macs": 0.25, "engine_time": None} for name in units},
        ap={"float": 0.7, "INT8": 0.65, **{name: 0.65 + gain for name, gain in ap.items()}},
        patterns=lambda names: list(names),
        state_with=lambda names: State(weights=frozenset(COSTS) - frozenset(names)),
    )  # fmt: skip


def judged(found, one: Bench, chosen=(), measured=None):
    def recipe_with(patterns):
        return Recipe(float=tuple(patterns))

    def measure_ap(states):
        asked.update(states)
        ap = {name: 0.65 + sum(GAINS[part] for part in name.split("+")) for name in states}
        return {name: value for name, value in ap.items() if measured is None or name in measured}, {}

    asked = {}
    judge = EngineJudge(SensitiveOptions(engine=True, target_drop=0.003), found, one, recipe_with)
    judge.build(chosen)
    return judge.curve(measure_ap), asked


class TestJudge:
    def test_all_of_a_small_network(self, api, tmp_path):
        curve, asked = judged(search(), bench(tmp_path))
        points = {point.name: point for point in curve.points}
        assert [point.kind for point in curve.points[:2]] == ["INT8", "FP16"]
        assert points["everything (FP16)"].cost == 200
        for name, cost in COSTS.items():
            assert points[name].cost == cost + 2
            assert points[name].ap == pytest.approx(0.65 + GAINS[name])
        assert [one.cost for one in curve.points[2:]] == sorted(one.cost for one in curve.points[2:])
        assert curve.ms == WHOLE + 1
        # with the two that gain most AP per cost the loss is zero
        assert curve.chosen.units == ("model.0", "model.1")
        assert curve.chosen.cost == 44
        assert "model.0+model.1" in asked
        assert not set(COSTS) & set(asked)  # the search has measured these

    def test_what_is_no_faster_in_int8_is_tried_together_with_the_choice(self, api, tmp_path):
        one = bench(tmp_path)
        judged(search(), one, ("model.0", "model.1"))
        assert one.times["model.0+model.1+model.2"].cost == 44 - 18
        assert one.times["model.2"].cost == -18

    def test_the_first_candidate_is_what_the_search_chose(self, api, tmp_path):
        exporter = FakeExporter()
        judged(search(), bench(tmp_path, exporter), ("model.3",))
        assert exporter.written[:5] == [(), (), None, ("model.3",), ("model.1",)]

    def test_nothing_is_built_twice_and_nothing_without_int8(self, api, tmp_path):
        exporter = FakeExporter()
        everything = search(dict.fromkeys(COSTS, 0.01), [(name, 0.1) for name in COSTS])
        judged(everything, bench(tmp_path, exporter), ("model.3",))
        sets = [frozenset(names) for names in exporter.written[3:]]
        assert len(set(sets)) == len(sets)
        assert frozenset(COSTS) not in sets

    def test_scores_lead_on_where_ap_says_nothing(self, api, tmp_path):
        """As with random weights, whose AP is zero."""
        exporter = FakeExporter()
        scores = [("model.0", 0.3), ("model.1", 0.2), ("model.2", 0.1)]
        curve, _ = judged(search({}, scores), bench(tmp_path, exporter))
        assert exporter.written[3:6] == [("model.0",), ("model.0", "model.1"), ("model.1",)]
        assert curve.chosen.kind == "INT8" or curve.chosen.ap is not None

    def test_without_time_the_rest_is_estimated(self, api, tmp_path):
        curve, asked = judged(search(), bench(tmp_path, engine_minutes=1e-9))
        measured = [point for point in curve.points if point.measured]
        assert [point.kind for point in measured] == ["INT8", "FP16"]
        assert curve.chosen.kind == "INT8"
        assert any("--resume with more --engine-minutes" in note for note in curve.notes)
        assert "model.0+model.1" in asked  # which gives the estimate an AP

    def test_where_layers_are_not_measured_nothing_is_estimated(self, api, tmp_path, monkeypatch):
        """As with TensorRT-RTX; the order is then that of multiply-adds."""
        monkeypatch.setattr(Bench, "profile", lambda self, name: None)
        exporter = FakeExporter()
        curve, _ = judged(search(), bench(tmp_path, exporter, engine_minutes=1e-9))
        assert exporter.written == [(), None]
        assert {point.cost for point in curve.points[2:]} == {None}
        curve, _ = judged(search(), bench(tmp_path / "more", exporter))
        assert [point.units for point in curve.points if point.cost == 32] == [("model.1",)]

    def test_a_control_that_cannot_be_built_is_told(self, api, tmp_path):
        one = bench(tmp_path)
        one.failed[AGAIN] = "not built within 120 s"
        curve, _ = judged(search(), one)
        assert "the INT8 engine was timed twice, for its control was not built: not built within 120 s" in curve.notes

    def test_a_control_for_which_there_was_no_time_is_told(self, api, tmp_path):
        """Also when the run goes on; once it is built there is nothing to tell."""
        state = AnalysisState(SensitiveOptions(engine=True).to_dict(), Recipe().to_dict(), "00")
        short, _ = judged(search(), bench(tmp_path, state=state, engine_minutes=1e-9))
        resumed, _ = judged(search(), bench(tmp_path, state=AnalysisState.load(tmp_path), engine_minutes=1e-9))
        for curve in (short, resumed):
            assert [note for note in curve.notes if note.startswith("the INT8 engine was timed twice, for its")]
            content = engine_report.to_dict(curve, 0.01)
            control = next(line for line in engine_report.lines(content, 0.6) if line.startswith("control: "))
            assert control.startswith("control: none (there was no time for it): the INT8 engine timed twice differs")
        curve, _ = judged(search(), bench(tmp_path, state=AnalysisState.load(tmp_path)))
        assert curve.no_control == ""
        assert not [note for note in curve.notes if "timed twice" in note]

    def test_a_failure_is_told(self, api, tmp_path):
        curve, _ = judged(search(), bench(tmp_path, FakeExporter(broken=(("model.1",),))))
        assert any(note.startswith("no engine with model.1 in float: ") for note in curve.notes)
        assert not next(point for point in curve.points if point.name == "model.1").measured

    def test_what_has_no_ap_is_not_chosen(self, api, tmp_path):
        curve, _ = judged(search(), bench(tmp_path), measured=())
        assert curve.chosen.units == ("model.1",)

    def test_fp16_that_is_as_fast_is_told(self, api, tmp_path):
        api.module.extra_ms = lambda model: WHOLE
        curve, _ = judged(search(), bench(tmp_path))
        assert "all in INT8 is not faster than FP16 on this GPU at this batch size" in curve.notes


def test_ranges_are_those_of_the_whole_network():
    """A network with parts in float, whose scales are others', has the ranges that its tensors have in the INT8 one."""
    torch.manual_seed(0)
    network, images = chain(), torch.rand(2, 3, 32, 32)
    whole = placement.plan(network, Recipe())
    placement.apply(network, whole)
    calibration.calibrate(network, [images], Recipe().calibration, progress=False)
    amax = {name: float(backend.get_amax(one)) for name, one in network.activation_quantizers.items()}
    of_tensor = {tensor.name: amax[scale_key(tensor.scale)] for tensor in whole.tensors}
    compared = 0
    for path in whole.convolutions:
        other = chain()
        plan = placement.plan(other, Recipe(float=(path.removesuffix(".conv"),)))
        placement.apply(other, plan)
        calibration.load_all(other, exporting.ranges_in(plan, whole, amax))
        for tensor in plan.tensors:
            found = backend.get_amax(other.activation_quantizers[scale_key(tensor.scale)])
            assert float(found) == pytest.approx(of_tensor[tensor.name])
            compared += 1
    assert compared > 20
    assert len(set(amax.values())) > 3  # so that the comparison can fail


class TestCheck:
    def test_all_is_there(self, api):
        engines.check(SensitiveOptions(engine=True))

    def test_without_a_gpu(self, api, monkeypatch):
        monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
        with pytest.raises(InputError, match="torch sees no NVIDIA GPU here; leave it out"):
            engines.check(SensitiveOptions(engine=True))

    def test_without_tensorrt(self, monkeypatch):
        monkeypatch.setattr(tensorrt_api, "installed", lambda: None)
        with pytest.raises(DependencyError, match="TensorRT is not installed"):
            engines.check(SensitiveOptions(engine=True))

    def test_a_timing_cache_that_is_read(self, api, tmp_path):
        (tmp_path / "w.pt").write_text("")
        with pytest.raises(InputError, match="is read and would be overwritten; choose another --timing-cache"):
            engines.check(SensitiveOptions(engine=True, weights=f"{tmp_path}/w.pt", timing_cache=f"{tmp_path}/w.pt"))

    def test_several_processes(self, api, monkeypatch):
        monkeypatch.setattr(distributed, "world", lambda: distributed.World(1, 2, 1))
        with pytest.raises(InputError, match="start it without torchrun"):
            engines.check(SensitiveOptions(engine=True))

    def test_options_of_engines_without_them(self):
        with pytest.raises(InputError, match="--engine-minutes does nothing without --engine"):
            SensitiveOptions(engine_minutes=3)
        with pytest.raises(InputError, match="choose layer or module"):
            SensitiveOptions(engine=True, granularity="quantizer")
