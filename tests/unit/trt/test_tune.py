"""--tune on a stand-in of TensorRT whose engines take as long as the test says; builds in this process."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import onnx as onnx_library
import pytest
import torch
from builds_here import Here
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import InputError, QatError
from utils.trt import candidates, tensorrt_api, tune, turns
from utils.trt.build_apart import Outcome
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.candidates import Dimension
from utils.trt.context import Execution
from utils.trt.engine_file import EngineNote, is_current
from utils.trt.timing import TimingConfig

CONFIG = BuildConfig(tune=60, progress=False)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A file, an engine's path, and times of engines by streams and level."""
    api = stand_in(monkeypatch)
    monkeypatch.setattr(turns, "TURN", TimingConfig(1, 0, 1, cuda_graph=True, transfers=False, iterations=2))
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(Here, "now", 0.0)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: Here.now))

    def prepare(ticks, **file):
        api.module.ticks = lambda config: ticks(config.max_aux_streams, config.builder_optimization_level)
        return write_onnx(tmp_path / "a.onnx", (2, 3, 32, 32), **file), tmp_path / "a.engine"

    return prepare


def only(monkeypatch, **dimensions):
    found = [Dimension(name, values, lambda file, api: True) for name, values in dimensions.items()]
    monkeypatch.setattr(candidates, "DIMENSIONS", tuple(found))


def test_the_fastest_of_both_options_is_found_and_kept(bench, caplog):
    """Streams first, at the level that was asked for; then levels with the best number of streams."""
    caplog.set_level("INFO")
    streams = {-1: 100, 0: 100, 1: 96, 2: 90, 3: 93, 4: 99}
    onnx, engine = bench(lambda n, level: streams[n] + {2: 0, 3: 0, 4: -5, 5: 20}[level])
    builds = Here()
    note = tune.tune(onnx, engine, CONFIG, process=builds).note
    assert note == EngineNote.load(engine)
    assert note.options == {"optimization_level": 4, "max_aux_streams": 2}
    assert [len(options) for options in builds.options()[:2]] == [0, 0]  # what was asked for, and its control
    first = [options["max_aux_streams"] for options in builds.options()[2:7]]
    assert first == [2, 3, 1, 4, 0]
    assert builds.options()[7:10] == [{"max_aux_streams": 2, "optimization_level": level} for level in (2, 4, 5)]
    around = [options for options in builds.options()[10:] if options.get("optimization_level") == 4]
    assert {options.get("max_aux_streams") for options in around} == {None, 0, 1, 3, 4}  # once more, at level 4
    assert len({json.dumps(options, sort_keys=True) for options in builds.options()[1:]}) == len(builds.asked) - 1
    tuning = note.tuning
    assert tuning["complete"]
    assert (tuning["ms"], tuning["default_ms"], tuning["noise_ms"]) == (86.0, 101.0, 0.0)  # and a tick for its start
    assert tuning["against_default"] == pytest.approx(86 / 101 - 1)
    assert tuning["shapes"] == {"images": [2, 3, 32, 32]}
    by_options = {json.dumps(one["options"]): one["ms"] for one in tuning["candidates"]}
    assert by_options['{"max_aux_streams": 3}'] == 94.0
    assert "level 4, 2 streams: 14.9% less time than as asked for; the noise is 0.0%" in caplog.text
    assert sorted(path.name for path in engine.parent.iterdir() if path.name.startswith("a.")) == [
        "a.engine", "a.engine.json", "a.onnx",
    ]  # fmt: skip


def test_the_engine_that_is_kept_is_the_one_that_was_measured(bench):
    onnx, engine = bench(lambda n, level: 100 - 10 * (n == 3))
    tune.tune(onnx, engine, CONFIG, process=Here())
    api = tensorrt_api.load()
    execution = Execution(engine, api, torch.device("cpu"))
    assert execution.engine.num_aux_streams == 3
    execution.close()


def test_what_was_given_is_not_tried(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100)
    builds = Here()
    note = tune.tune(onnx, engine, dataclasses.replace(CONFIG, optimization_level=2), process=builds).note
    assert {options["optimization_level"] for options in builds.options()} == {2}
    assert len(builds.asked) == 2 + 5
    assert note.tuning["given"] == {"optimization_level": 2}


def test_within_the_noise_nothing_changes(bench, caplog):
    """Two builds of the same options are 6 % apart; a candidate that is 4 % faster may be just another such build."""
    caplog.set_level("INFO")
    count = iter(range(100))
    onnx, engine = bench(lambda n, level: {-1: 100 + 6 * (next(count) % 2)}.get(n, 96))
    note = tune.tune(onnx, engine, dataclasses.replace(CONFIG, optimization_level=3), process=Here()).note
    assert "max_aux_streams" not in note.options
    assert note.tuning["noise_ms"] == 6.0
    assert note.tuning["kept"] == {"optimization_level": 3}
    assert "as asked for: nothing is faster by more than the noise, 5.9%" in caplog.text


def test_the_gain_is_that_of_the_last_turns(bench, monkeypatch):
    """An engine that looked fast once is timed once more."""
    onnx, engine = bench(lambda n, level: 100)
    only(monkeypatch, max_aux_streams=(2,))
    real, calls = turns.time_in_turns, []

    def lucky(engines, *more):
        calls.append(list(engines))
        found = real(engines, *more)
        last = list(engines)[-1]
        return {**found, last: turns.Turns((50.0, 50.0))} if len(calls) == 2 else found

    monkeypatch.setattr(turns, "time_in_turns", lucky)
    note = tune.tune(onnx, engine, CONFIG, process=Here()).note
    assert [len(names) for names in calls] == [2, 3, 3]
    assert note.options == {}
    assert note.tuning["against_default"] == 0.0


def test_a_build_has_a_limit_and_the_others_go_on(bench, caplog):
    caplog.set_level("INFO")
    onnx, engine = bench(lambda n, level: 100 - n)
    builds = Here(seconds=50, endless=[{"max_aux_streams": 4}], failing=[{"max_aux_streams": 3}])
    config = dataclasses.replace(CONFIG, optimization_level=None)
    note = tune.tune(onnx, engine, config, process=builds).note
    limits = {json.dumps(options): limit for options, limit in builds.asked}
    assert limits['{"max_aux_streams": 4}'] == 200.0  # four times a build with a timing cache
    assert note.options == {"max_aux_streams": 2}
    errors = {one["options"].get("max_aux_streams"): one["error"] for one in note.tuning["candidates"] if one["error"]}
    assert errors == {4: "not built within 200 s", 3: "no engine for this"}
    assert "4 streams" in caplog.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"failing": [{"max_aux_streams": 2}]}, "no other engine could be built and timed; the table says why"),
        ({"endless": [{"max_aux_streams": 2}]}, "no other engine was built in the time; give --tune more minutes"),
    ],
)
def test_why_there_is_no_other_engine(bench, monkeypatch, caplog, more, words):
    caplog.set_level("INFO")
    onnx, engine = bench(lambda n, level: 100)
    only(monkeypatch, max_aux_streams=(2,))
    tune.tune(onnx, engine, CONFIG, process=Here(**more))
    assert f"as asked for: {words}" in caplog.text


def test_what_takes_longer_than_a_late_build_is_not_tried(bench):
    """3 streams did not end, so 4 are left out, and 1 and 0 are not; levels have three times the limit."""
    onnx, engine = bench(lambda n, level: 100 - (n == 2))
    builds = Here(seconds=150, endless=[{"max_aux_streams": 3}, {"max_aux_streams": 2, "optimization_level": 4}])
    note = tune.tune(onnx, engine, CONFIG, process=builds).note
    assert [options.get("max_aux_streams") for options in builds.options()[2:6]] == [2, 3, 1, 0]
    assert [options.get("optimization_level") for options in builds.options()[6:]] == [2, 4]
    assert [limit for _, limit in builds.asked[2:6]] == [600.0] * 4
    assert note.tuning["kept"] == {"max_aux_streams": 2}


def test_the_limit_without_a_timing_cache(bench, monkeypatch):
    """The first build takes 400 s, the second one 20: levels may take 1200 s, streams 400."""
    onnx, engine = bench(lambda n, level: 100)

    class Cold(Here):
        def build(self, *words):
            self.seconds = 20 if self.asked else 400
            return super().build(*words)

    builds = Cold()
    tune.tune(onnx, engine, CONFIG, process=builds)
    assert [limit for options, limit in builds.asked if "max_aux_streams" in options] == [400.0] * 5
    assert [limit for options, limit in builds.asked if "optimization_level" in options] == [1200.0] * 3


def test_only_what_fits_the_time_is_built(bench):
    """Both builds of what was asked for took longer than what is left of the minute."""
    onnx, engine = bench(lambda n, level: 100 - n)
    builds = Here(seconds=25)
    note = tune.tune(onnx, engine, dataclasses.replace(CONFIG, tune=1), process=builds).note
    assert builds.options() == [{}, {}]
    assert note.tuning["complete"]
    late = Here(seconds=61)
    said = r"a.onnx, as asked for or with level 2: not built within 30 s; give --tune more minutes$"
    with pytest.raises(QatError, match=said) as raised:
        tune.tune(onnx, engine.with_name("late.engine"), dataclasses.replace(CONFIG, tune=1), process=late)
    assert raised.value.exit_code == 1
    assert not engine.with_name("late.engine").exists()


def test_a_lower_level_takes_the_place_of_what_takes_more_than_half_of_the_time(bench, caplog):
    caplog.set_level("INFO")
    onnx, engine = bench(lambda n, level: 100 - 10 * (n == 2))

    class Slow(Here):
        def build(self, *words):
            self.seconds = 10 if words[2].optimization_level == 2 else 1000
            return super().build(*words)

    builds = Slow()
    note = tune.tune(onnx, engine, dataclasses.replace(CONFIG, tune=10), process=builds).note
    assert builds.asked[0] == ({}, 300.0)
    assert builds.options()[1:4] == [
        {"optimization_level": 2}, {"optimization_level": 2}, {"optimization_level": 2, "max_aux_streams": 2},
    ]  # fmt: skip
    assert {options["optimization_level"] for options in builds.options()[1:]} == {2}  # the others would be late, too
    assert note.options == {"optimization_level": 2, "max_aux_streams": 2}
    assert note.tuning["given"] == {}
    assert "instead of what was asked for, which took too long" in caplog.text
    assert "level 2, 2 streams: 9.9% less time than level 2; the noise is 0.0%" in caplog.text


def test_a_level_that_was_given_has_all_the_time(bench):
    onnx, engine = bench(lambda n, level: 100)
    builds = Here(seconds=40)
    note = tune.tune(onnx, engine, dataclasses.replace(CONFIG, tune=1, optimization_level=5), process=builds).note
    assert builds.asked == [({"optimization_level": 5}, 60.0), ({"optimization_level": 5}, 20.0)]
    assert note.options == {"optimization_level": 5}


def test_without_a_control_the_noise_is_that_of_the_turns(bench):
    onnx, engine = bench(lambda n, level: 100)

    class Once(Here):
        def build(self, *words):
            found = super().build(*words)
            return found if len(self.asked) == 1 else Outcome(30, "no second time", 1)

    note = tune.tune(onnx, engine, CONFIG, process=Once()).note
    assert (note.options, note.tuning["complete"]) == ({}, True)
    assert note.tuning["candidates"][1]["error"] == "no second time"


@pytest.mark.parametrize("at", [0, 1, 3])
def test_ctrl_c_leaves_the_best_so_far_or_nothing(bench, at, caplog):
    caplog.set_level("INFO")
    onnx, engine = bench(lambda n, level: 100 - n)

    class Interrupted(Here):
        def build(self, *words):
            if len(self.asked) == at:
                raise KeyboardInterrupt
            return super().build(*words)

    with pytest.raises(KeyboardInterrupt):
        tune.tune(onnx, engine, CONFIG, process=Interrupted())
    assert engine.exists() == (at > 0)
    if at:
        note = EngineNote.load(engine)
        assert (note.options, note.tuning["complete"]) == ({}, False)
        assert "a.engine is the best so far: TensorRT's own" in caplog.text
        assert not is_current(engine, onnx, tensorrt_api.load(), tensorrt_api.gpu(), CONFIG)
    assert [path.name for path in engine.parent.iterdir() if path.name.startswith(".a")] == []


def test_an_engine_is_used_again_if_it_was_asked_for_the_same(bench):
    onnx, engine = bench(lambda n, level: 100 - n)
    api, gpu = tensorrt_api.load(), tensorrt_api.gpu()
    level = dataclasses.replace(CONFIG, optimization_level=2)
    tune.build_or_tune(onnx, engine, dataclasses.replace(level, tune=None))
    plain = BuildConfig(optimization_level=2)
    assert is_current(engine, onnx, api, gpu, plain)
    for change in ({"optimization_level": 3}, {"max_aux_streams": 0}, {"tactic_sources_off": ("CUDNN",)}, {"tune": 1}):
        assert not is_current(engine, onnx, api, gpu, dataclasses.replace(plain, **change))
    tune.tune(onnx, engine, level, process=Here())
    assert not is_current(engine, onnx, api, gpu, plain)
    assert is_current(engine, onnx, api, gpu, level)
    assert is_current(engine, onnx, api, gpu, dataclasses.replace(level, tune=10))
    for change in ({"tune": 61}, {"optimization_level": None}):
        assert not is_current(engine, onnx, api, gpu, dataclasses.replace(level, **change))


def test_a_build_without_tuning_has_the_limit_that_was_given(bench):
    onnx, engine = bench(lambda n, level: 100)
    config = dataclasses.replace(CONFIG, tune=None, build_limit=2)
    builds = Here()
    assert tune.build_or_tune(onnx, engine, config, process=builds).note == EngineNote.load(engine)
    assert builds.asked == [({}, 120)]
    assert engine.stat().st_size > 100
    with pytest.raises(QatError, match=r"a.onnx: not built within 120 s"):
        tune.build_or_tune(onnx, engine.with_name("b.engine"), config, process=Here(seconds=121))
    with pytest.raises(InputError, match=r"^[^:]*a.onnx has a static batch of 2"):
        tune.build_or_tune(onnx, engine, dataclasses.replace(config, batch=(1, 2, 4)), process=Here())
    builds = Here()
    tune.tune(onnx, engine, dataclasses.replace(CONFIG, build_limit=3), process=builds)
    assert {limit for _, limit in builds.asked} == {180}
    with pytest.raises(QatError, match=r"a.onnx, as asked for or with level 2: not built within 180 s$"):
        tune.tune(onnx, engine.with_name("c.engine"), dataclasses.replace(CONFIG, build_limit=3),
                  process=Here(seconds=181))  # fmt: skip


def test_options_that_this_tensorrt_lacks_are_not_tried(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100)
    api = tensorrt_api.load()
    old = type("IBuilderConfig", (), {"builder_optimization_level": 3})
    monkeypatch.setattr(api.module, "IBuilderConfig", old)
    builds = Here()
    tune.tune(onnx, engine, CONFIG, process=builds)
    assert builds.options() == [{}, {}, *({"optimization_level": level} for level in (2, 4, 5))]
    with pytest.raises(InputError, match=r"TensorRT 8.6.0 has no max_aux_streams; leave out --max-aux-streams"):
        build(onnx, engine, BuildConfig(max_aux_streams=2, progress=False))


def test_a_shared_timing_cache_or_none(bench, tmp_path):
    onnx, engine = bench(lambda n, level: 100)
    tune.tune(onnx, engine, dataclasses.replace(CONFIG, timing_cache=""), process=Here())
    assert not list(tmp_path.glob("*.cache"))
    tune.tune(onnx, engine, CONFIG, process=Here())
    assert [path.name for path in tmp_path.glob("*.cache")] == ["Fake-GPU-TensorRT-8.6.0.timing.cache"]
    tune.tune(onnx, engine, dataclasses.replace(CONFIG, timing_cache=tmp_path / "b/own"), process=Here())
    assert (tmp_path / "b/own").read_bytes().count(b"measured") >= 7


@pytest.mark.parametrize(
    ("changes", "gpu", "message"),
    [
        ({"targets": ("SM89",)}, True, "--tune times engines, and those of --target are for GPUs elsewhere"),
        ({}, False, "torch sees no NVIDIA GPU"),
        ({"batch": (1, 2, 4)}, True, "has a static batch of 2"),
        ({"max_aux_streams": 2, "optimization_level": 2}, True, "nothing left to try; leave out --max-aux-streams or"),
        ({"precision": "fp16"}, True, "holds quantizers, so its engine is INT8"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_build(bench, monkeypatch, changes, gpu, message):
    onnx, engine = bench(lambda n, level: 100, quantized=True)
    if not gpu:
        monkeypatch.setattr(tensorrt_api, "gpu", lambda index=None: None)
    builds = Here()
    with pytest.raises(InputError, match=message):
        tune.tune(onnx, engine, dataclasses.replace(CONFIG, **changes), process=builds)
    assert builds.asked == []
    assert not engine.exists()


def test_a_file_that_the_parser_refuses_is_bad_input(bench, tmp_path):
    onnx, engine = bench(lambda n, level: 100)
    model = onnx_library.load(onnx)
    model.graph.node[0].op_type = "Unknown"
    onnx_library.save(model, onnx)
    with pytest.raises(InputError, match=r"as asked for: TensorRT 8.6.0 cannot parse"):
        tune.tune(onnx, engine, CONFIG, process=Here())


def test_engines_of_dynamic_shape_are_timed_at_the_opt_shape(bench, tmp_path):
    bench(lambda n, level: 100)
    onnx = write_onnx(tmp_path / "d.onnx", ("batch", 3, 32, 32))
    note = tune.tune(onnx, tmp_path / "d.engine", dataclasses.replace(CONFIG, batch=(1, 4, 8)), process=Here()).note
    assert note.tuning["shapes"] == {"images": [4, 3, 32, 32]}
    shapes = {item for name, item in tensorrt_api.load().module.calls if name == "execute"}
    assert shapes == {((4, 3, 32, 32),)}


def test_an_engine_that_cannot_be_timed_is_no_candidate(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100 - n)
    real = Execution.graph

    def short_of_memory(self):
        if self.engine.num_aux_streams == 4:
            raise RuntimeError("CUDA out of\nmemory")
        return real(self)

    monkeypatch.setattr(Execution, "graph", short_of_memory)
    note = tune.tune(onnx, engine, CONFIG, process=Here()).note
    assert note.options == {"max_aux_streams": 3}
    assert "CUDA out of memory" in {one["error"] for one in note.tuning["candidates"]}


def test_engines_that_no_graph_can_hold_are_timed_without(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100 - 10 * (n == 3))
    model = onnx_library.load(onnx)
    model.graph.node.append(onnx_library.helper.make_node("NonZero", ["raw"], ["unread"]))
    onnx_library.save(model, onnx)
    only(monkeypatch, max_aux_streams=(2, 3))
    monkeypatch.delattr(turns.timing.cuda, "graph")
    note = tune.tune(onnx, engine, CONFIG, process=Here()).note
    assert note.options == {"max_aux_streams": 3}
    assert {one["error"] for one in note.tuning["candidates"]} == {""}


def test_a_folder_that_cannot_be_written_to(bench, tmp_path):
    onnx, _ = bench(lambda n, level: 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write beside"):
        tune.tune(onnx, tmp_path / "file" / "a.engine", CONFIG, process=Here())
