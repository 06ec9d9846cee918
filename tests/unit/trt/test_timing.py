"""Timing on a stand-in of TensorRT: what is enqueued on which stream, the figures, and `--tune`."""

import time
from dataclasses import replace
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import CPU, build_engine, stand_in

from utils.core.errors import QatError
from utils.trt import tensorrt_api, timing, tune
from utils.trt.build import build
from utils.trt.engine_file import EngineNote, is_current
from utils.trt.preflight import BuildConfig
from utils.trt.runner import Execution
from utils.trt.timing import TimingConfig


@pytest.fixture
def execution(tmp_path, monkeypatch):
    api = stand_in(monkeypatch)
    return Execution(build_engine(tmp_path), api, CPU)


@pytest.fixture
def journal(monkeypatch):
    """What happens on each stream, in order: numbers of streams and of marks in the order in which they appear."""
    monkeypatch.setattr(fake_cuda.gpu, "journal", [])

    def found():
        first = min(tick for *_, tick in fake_cuda.gpu.journal)
        streams = list(dict.fromkeys(stream for stream, *_ in fake_cuda.gpu.journal if stream != "host"))
        return [f"{stream if stream == 'host' else streams.index(stream)} {what} {tick - first}"
                for stream, what, tick in fake_cuda.gpu.journal]  # fmt: skip

    return found


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_parts_of_a_query(execution, cuda_graph):
    running = execution
    before, began = len(running.api.module.calls), time.perf_counter()
    figures = timing.time_interleaved({"a": running}, TimingConfig(1, 0.02, 2, cuda_graph=cuda_graph))["a"]
    took = time.perf_counter() - began
    assert {name: figures.parts[name].median for name in ("latency", "h2d", "compute", "d2h")} == {
        "latency": 3.0, "h2d": 1.0, "compute": 1.0, "d2h": 1.0,  # an event of the stand-in is a tick
    }  # fmt: skip
    count = figures.parts["latency"].count
    assert count == figures.parts["enqueue"].count > 5
    assert count / took < figures.qps < count / 0.02
    enqueued = len(running.api.module.calls) - before
    assert (enqueued <= 2) if cuda_graph else (enqueued > count)  # those of warming up are not counted


def test_copies_have_streams_of_their_own_and_wait_for_what_they_need(execution, journal):
    lane = timing._Lane(one := execution, TimingConfig())
    one.buffers["images"].zero_()
    lane.start().wait()
    assert all(torch.equal(lane.memory[name], buffer) and buffer.any() for name, buffer in one.buffers.items())
    assert journal() == [
        "0 marks 0", "0 marks 1",  # the input is copied
        "1 waits for 1", "1 marks 2", "1 marks 3",  # the run
        "2 waits for 3", "2 marks 4", "2 marks 5",  # the outputs are copied
        "host waits for 5",
    ]  # fmt: skip


def test_one_query_is_ahead_and_none_is_left(execution, journal):
    config = TimingConfig(0, 0, 1, transfers=False, iterations=3)
    assert timing.time_interleaved({"a": execution}, config)["a"].parts["compute"].count == 3
    assert journal()[3:] == [  # of the three, after warming up
        "0 marks 2", "0 marks 3", "0 marks 4", "0 marks 5", "host waits for 3", "0 marks 6", "0 marks 7",
        "host waits for 5", "host waits for 7",
    ]  # fmt: skip


@pytest.mark.parametrize("spin", [False, True])
def test_a_wait_sleeps_unless_it_is_to_spin_and_there_are_so_many_queries_at_least(execution, monkeypatch, spin):
    seen = set()
    monkeypatch.setattr(fake_cuda.Event, "synchronize", lambda self: seen.add(self.blocking))
    config = TimingConfig(0, 0, 3, cuda_graph=True, spin_wait=spin, transfers=False, iterations=10)
    figures = timing.time_interleaved({"a": execution}, config)["a"]
    assert seen == {not spin}
    assert {name: part.count for name, part in figures.parts.items()} == dict.fromkeys(figures.parts, 12)
    assert set(figures.parts) == {"latency", "compute", "enqueue"}


def test_every_other_round_is_backwards():
    assert "".join(timing.interleaved("abc", 3)) == "abccbaabc"


@pytest.mark.parametrize(("dtype", "most"), [(torch.uint8, 255), (torch.float16, 1), (torch.float32, 1)])
def test_inputs_of_any_type_are_random(dtype, most):
    values = timing.random_input((4, 3, 8, 8), dtype).float()
    assert len(values.unique()) > 50
    assert 0.9 * most < values.max() <= most


def test_on_a_cpu_a_run_is_timed_by_the_clock():
    runs = []
    figures = timing.time_interleaved(
        {"a": lambda: runs.append(time.sleep(0.004))}, TimingConfig(0, 0, 2, cuda_graph=True, iterations=6)
    )["a"]
    assert (len(runs), set(figures.parts), figures.parts["latency"].count) == (8, {"latency"}, 6)
    assert 4 <= figures.parts["latency"].median < 100
    assert figures.qps < 250


def test_summary_against_numpy():
    values = np.random.default_rng(0).gamma(2.0, size=301)
    found, ordered = timing.TimeStatistics.of(list(values)), np.sort(values)
    assert (found.min, found.max, found.median, found.count) == (ordered[0], ordered[-1], ordered[150], 301)
    assert found.mean == pytest.approx(values.mean())
    assert [found.p90, found.p95, found.p99] == [ordered[270], ordered[285], ordered[297]]
    assert timing.Figures.of([{"latency": 1.0}] * 3, 2.0).qps == 1.5


# --tune, with builds in this process whose engines take as long as the test says

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
        return tune.tune(onnx, engine, config)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A file, an engine's path, and times of engines by streams and level."""
    api = stand_in(monkeypatch)
    monkeypatch.setattr(tune, "ROUND", replace(tune.ROUND, warm_up=1, duration=0, iterations=2))
    monkeypatch.setattr(Builds, "now", 0.0)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: Builds.now))

    def prepare(ticks, shape=(2, 3, 32, 32)):
        api.module.ticks = lambda config: ticks(config.max_aux_streams, config.builder_optimization_level)
        return write_onnx(tmp_path / "a.onnx", shape), tmp_path / "a.engine"

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
    execution = Execution(engine, tensorrt_api.load_tensorrt(), CPU)  # the one that was measured
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
    """Engines of dynamic shape run at the opt shape."""
    onnx, engine = bench(lambda n, level: 100 - n, ("batch", 3, 32, 32))
    real = Execution.graph

    def short_of_memory(self):
        if self.engine.num_aux_streams == 4:
            raise RuntimeError("CUDA out of\nmemory")
        return real(self)

    monkeypatch.setattr(Execution, "graph", short_of_memory)
    note = tuned(onnx, engine, CONFIG.model_copy(update={"batch": (1, 4, 8), "optimization_level": 2}))
    assert note.options["max_aux_streams"] == 3
    assert "CUDA out of memory" in {one["error"] for one in note.tuning["candidates"]}
    shapes = {item for name, item in tensorrt_api.load_tensorrt().module.calls if name == "execute"}
    assert shapes == {((4, 3, 32, 32),)}
