"""--tune on a stand-in of TensorRT whose engines take as long as the test says; builds in this process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.core.errors import QatError
from utils.trt import tensorrt_api, tune
from utils.trt.build import build
from utils.trt.engine_file import EngineNote, is_current
from utils.trt.preflight import BuildConfig
from utils.trt.runner import Execution

CONFIG = BuildConfig(tune=60, progress=False)


class Builds:
    """In the place of `build`: each but the first takes `seconds` on its own clock; those in `failing` fail."""

    now = 0.0

    def __init__(self, seconds=10.0, failing=(), interrupted=-1):
        self.seconds, self.failing, self.interrupted = seconds, failing, interrupted
        self.options, self.until, self.caches = [], [], set()

    def __call__(self, onnx, engine, config, api, until):
        if len(self.options) == self.interrupted:
            raise KeyboardInterrupt
        self.options.append(config.options)
        self.caches.add(config.timing_cache)
        self.until.append(until)
        Builds.now += self.seconds if len(self.options) > 1 else 20.0
        if config.options in self.failing:
            raise QatError("no engine for this")
        return build(onnx, engine, config, api)


def tuned(onnx, engine, config=CONFIG, builds=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "build", builds or Builds())
        return tune.tune(onnx, engine, config, tensorrt_api.load_tensorrt())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A file, an engine's path, and times of engines by streams and level."""
    api = stand_in(monkeypatch)
    monkeypatch.setattr(tune, "ROUND", replace(tune.ROUND, warm_up=1, duration=0, iterations=2))
    monkeypatch.setattr(Builds, "now", 0.0)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: Builds.now))

    def prepare(ticks, shape=(2, 3, 32, 32), **file):
        api.module.ticks = lambda config: ticks(config.max_aux_streams, config.builder_optimization_level)
        return write_onnx(tmp_path / "a.onnx", shape, **file), tmp_path / "a.engine"

    return prepare


def test_the_fastest_of_streams_and_levels_is_found_and_kept(bench, caplog, capsys):
    caplog.set_level("INFO")
    streams = {-1: 100, 1: 96, 2: 90, 3: 93, 4: 99}
    onnx, engine = bench(lambda n, level: streams[n] + {2: 0, 3: 0, 4: -5, 5: 20}[level])
    builds = Builds()
    note = tuned(onnx, engine, builds=builds)
    assert note == EngineNote.load(engine)
    assert note.options == {"optimization_level": 4, "max_aux_streams": 2}
    grid = [(one.get("optimization_level"), one.get("max_aux_streams")) for one in builds.options]
    assert grid[:2] == [(None, None)] * 2  # what was asked for, and its control
    assert grid[1:] == [(level, number) for level in (None, 2, 4, 5) for number in (None, 2, 3, 1, 4)]
    assert note.tuning["complete"]
    times = [one["ms"] for one in note.tuning["candidates"]]
    assert times[:3] == [[101.0] * 5, [101.0] * 5, [91.0] * 5]  # and a tick for the start
    assert builds.caches == {str(engine.with_name("Fake-GPU-TensorRT-8.6.0.timing.cache"))}
    assert "engine/s" not in capsys.readouterr().err  # no progress bar
    assert [word in caplog.text for word in ("as asked for, again", "  kept")] == [True, True]
    assert "level 4, 2 streams: 14.9% less time than as asked for; the noise is 0.0%" in caplog.text
    assert sorted(path.name for path in engine.parent.glob("*a.*")) == ["a.engine", "a.engine.json", "a.onnx"]
    execution = Execution(engine, tensorrt_api.load_tensorrt(), torch.device("cpu"))  # the one that was measured
    assert execution.engine.num_aux_streams == 2
    execution.close()


def test_within_the_noise_nothing_changes(bench, caplog):
    """Two builds of the same options are 6 % apart; a candidate that is 4 % faster may be just another such build."""
    caplog.set_level("INFO")
    count = iter(range(100))
    onnx, engine = bench(lambda n, level: {-1: 100 + 6 * (next(count) % 2)}.get(n, 96))
    note = tuned(onnx, engine, CONFIG.model_copy(update={"optimization_level": 3}))
    assert note.options == {"optimization_level": 3}
    assert "level 3: 0.0% less time than as asked for; the noise is 5.9%" in caplog.text


def test_a_build_that_fails_is_a_row_and_only_what_fits_the_time_begins(bench):
    onnx, engine = bench(lambda n, level: 100 - n)
    level = CONFIG.model_copy(update={"optimization_level": 2, "tune": 1})
    asked = {"optimization_level": 2}
    builds = Builds(seconds=12, failing=[{**asked, "max_aux_streams": 2}])
    note = tuned(onnx, engine, level, builds)
    assert builds.options == [asked, asked, {**asked, "max_aux_streams": 2}, {**asked, "max_aux_streams": 3}]
    assert builds.until == [float("inf")] * 2 + [60.0] * 2  # of the minute
    assert (note.options, note.tuning["complete"]) == ({**asked, "max_aux_streams": 3}, True)
    assert [one["error"] for one in note.tuning["candidates"]] == ["", "", "no engine for this", ""]
    with pytest.raises(QatError, match="no engine for this"):
        tuned(onnx, engine.with_name("none.engine"), level, Builds(failing=[asked]))
    assert not engine.with_name("none.engine").exists()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_ctrl_c_leaves_the_best_so_far_or_nothing(bench, at):
    onnx, engine = bench(lambda n, level: 100 - n)

    with pytest.raises(KeyboardInterrupt):
        tuned(onnx, engine, builds=Builds(interrupted=at))
    assert engine.exists() == (at > 0)
    if at:
        note = EngineNote.load(engine)
        assert (note.options, note.tuning["complete"]) == ({}, False)
        assert not is_current(engine, onnx, tensorrt_api.load_tensorrt(), tensorrt_api.gpu(), CONFIG)
    assert [path.name for path in engine.parent.iterdir() if path.name.startswith(".a")] == []


def test_an_engine_that_cannot_be_timed_is_no_candidate(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100 - n)
    real = Execution.graph

    def short_of_memory(self):
        if self.engine.num_aux_streams == 4:
            raise RuntimeError("CUDA out of\nmemory")
        return real(self)

    monkeypatch.setattr(Execution, "graph", short_of_memory)
    note = tuned(onnx, engine, CONFIG.model_copy(update={"optimization_level": 2}))
    assert note.options["max_aux_streams"] == 3
    assert "CUDA out of memory" in {one["error"] for one in note.tuning["candidates"]}


def test_engines_of_dynamic_shape_are_timed_at_the_opt_shape(bench):
    onnx, engine = bench(lambda n, level: 100, ("batch", 3, 32, 32))
    tuned(onnx, engine, CONFIG.model_copy(update={"batch": (1, 4, 8), "optimization_level": 2}))
    shapes = {item for name, item in tensorrt_api.load_tensorrt().module.calls if name == "execute"}
    assert shapes == {((4, 3, 32, 32),)}
