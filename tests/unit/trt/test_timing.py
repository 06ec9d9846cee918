"""Timing on a stand-in of TensorRT: what is enqueued on which stream, the figures, `--tune`, rows of a benchmark."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import CPU, build_engine, stand_in

from utils.core.errors import QatError
from utils.jobs import benchmark as job
from utils.jobs.benchmark import benchmark_table
from utils.trt import tensorrt_api, timing, tune
from utils.trt.benchmark import BenchmarkRow, Entry, compared, planned, verdicts
from utils.trt.build import build
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote, is_current
from utils.trt.runner import Execution
from utils.trt.timing import Figures, TimeStatistics, TimingConfig

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
import benchmark_trt


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
    found, ordered = TimeStatistics.of(list(values)), np.sort(values)
    assert (found.min, found.max, found.median, found.count) == (ordered[0], ordered[-1], ordered[150], 301)
    assert found.mean == pytest.approx(values.mean())
    assert [found.p90, found.p95, found.p99] == [ordered[270], ordered[285], ordered[297]]
    assert Figures.of([{"latency": 1.0}] * 3, 2.0).qps == 1.5


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
    streams = {0: 100, 1: 90, 2: 96, 3: 93, 4: 99}
    onnx, engine = bench(lambda n, level: streams[n] + {2: 0, 3: 0, 4: -5, 5: 20}[level])
    builds = Builds()
    note = tuned(onnx, engine, builds=builds)
    assert note == EngineNote.load(engine)
    assert note.options == {"optimization_level": 4, "max_aux_streams": 1}
    grid = [(one.get("optimization_level"), one.get("max_aux_streams")) for one in builds.options]
    assert grid[:2] == [(None, 2)] * 2  # what was asked for, and its control
    assert grid[1:] == [(level, number) for level in (None, 2, 4, 5) for number in (2, 3, 1, 0)]
    assert note.tuning["complete"]
    here = (tensorrt_api.load_tensorrt(), tensorrt_api.gpu())
    for changes, current in [
        ({}, True),
        ({"optimization_level": 4}, False),
        ({"tune": 61}, False),
        ({"tune": 5}, True),
    ]:
        assert is_current(engine, onnx, *here, CONFIG.model_copy(update=changes)) == current
    times = [one["ms"] for one in note.tuning["candidates"]]
    assert times[:3] == [[97.0] * 5, [97.0] * 5, [94.0] * 5]  # and a tick for the start
    assert builds.caches == {str(engine.with_name("Fake-GPU-TensorRT-8.6.0.timing.cache"))}
    assert "engine/s" not in capsys.readouterr().err  # no progress bar
    assert [word in caplog.text for word in ("as requested, again", "  kept")] == [True, True]
    assert (
        "level 4, 1 auxiliary stream: 11.3% less time than with the requested options; the noise is 0.0%" in caplog.text
    )
    assert sorted(path.name for path in engine.parent.glob("*a.*")) == ["a.engine", "a.engine.json", "a.onnx"]
    execution = Execution(engine, tensorrt_api.load_tensorrt(), CPU)  # the one that was measured
    assert execution.engine.num_aux_streams == 1
    execution.close()


@pytest.mark.parametrize(("version", "streams"), [("8.6.0", {0, 1, 2, 3}), ("10.3.0", {0, 1, 2, 3, 4})])
def test_builds_that_may_not_end_are_tried_only_where_they_can_be_stopped(bench, monkeypatch, version, streams):
    onnx, engine = bench(lambda n, level: 100)
    stand_in(monkeypatch, version).module.ticks = lambda config: 100
    builds = Builds()
    tuned(onnx, engine, CONFIG.model_copy(update={"optimization_level": 2}), builds)
    assert {one.get("max_aux_streams") for one in builds.options} == streams


def test_tensorrt_rtx_chooses_streams_by_itself_in_one_candidate_of_each_level(bench, monkeypatch):
    onnx, engine = bench(lambda n, level: 100)
    monkeypatch.setattr(tensorrt_api.Api, "is_rtx", True)
    builds = Builds()
    tuned(onnx, engine, CONFIG.model_copy(update={"optimization_level": 2}), builds)
    assert [one.get("max_aux_streams") for one in builds.options] == [None, None, 2, 3, 1, 0]


def test_within_the_noise_nothing_changes(bench, caplog):
    """Two builds of the same options are 6 % apart; a candidate that is 4 % faster may be just another such build."""
    caplog.set_level("INFO")
    count = iter(range(100))
    onnx, engine = bench(lambda n, level: {2: 100 + 6 * (next(count) % 2)}.get(n, 96))
    note = tuned(onnx, engine, CONFIG.model_copy(update={"optimization_level": 3}))
    assert note.options == {"optimization_level": 3, "max_aux_streams": 2}
    assert (
        "level 3, 2 auxiliary streams: 0.0% less time than with the requested options; the noise is 5.9%" in caplog.text
    )


def test_a_build_that_fails_is_a_row_and_only_what_fits_the_time_begins(bench):
    onnx, engine = bench(lambda n, level: 100 + n)
    level = CONFIG.model_copy(update={"optimization_level": 2, "tune": 1})
    asked = {"optimization_level": 2, "max_aux_streams": 2}
    builds = Builds(seconds=12, failing=[{**asked, "max_aux_streams": 3}])
    note = tuned(onnx, engine, level, builds)
    assert builds.options == [asked, asked, {**asked, "max_aux_streams": 3}, {**asked, "max_aux_streams": 1}]
    assert builds.until == [float("inf")] * 2 + [60.0] * 2  # of the minute
    assert (note.options, note.tuning["complete"]) == ({**asked, "max_aux_streams": 1}, True)
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
        assert (note.options, note.tuning["complete"]) == ({"max_aux_streams": 2}, False)
        assert not is_current(engine, onnx, tensorrt_api.load_tensorrt(), tensorrt_api.gpu(), CONFIG)
    assert [path.name for path in engine.parent.iterdir() if path.name.startswith(".a")] == []


def test_an_engine_that_cannot_be_timed_is_no_candidate(bench, monkeypatch):
    """Engines of dynamic shape run at the opt shape."""
    onnx, engine = bench(lambda n, level: 100 - n, ("batch", 3, 32, 32))
    real = Execution.graph

    def short_of_memory(self):
        if self.engine.num_aux_streams == 3:
            raise RuntimeError("CUDA out of\nmemory")
        return real(self)

    monkeypatch.setattr(Execution, "graph", short_of_memory)
    note = tuned(onnx, engine, CONFIG.model_copy(update={"batch": (1, 4, 8), "optimization_level": 2}))
    assert note.options["max_aux_streams"] == 2
    assert "CUDA out of memory" in {one["error"] for one in note.tuning["candidates"]}
    shapes = {item for name, item in tensorrt_api.load_tensorrt().module.calls if name == "execute"}
    assert shapes == {((4, 3, 32, 32),)}


# rows of a benchmark, their verdict, and the program

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


def test_a_row_is_called_by_its_runtime_where_that_is_not_tensorrt():
    assert row().title == "c, batch 8"
    assert row(runtime="OpenVINO").title == "c, OpenVINO INT8, batch 8"


def test_the_verdict_of_one_file_does_not_name_it():
    assert verdicts([row(), row("float", baseline=True, ms=6.0, precision="FP16")])[0].startswith("INT8 against FP16: ")


def test_verdict_of_onnx_runtime_and_of_several_files():
    assert "ONNX Runtime" in verdicts([row(runtime="ONNX Runtime", precision="INT8 file")])[0]
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
        code = benchmark_trt.main(argv)
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
    assert len(program("--max-aux-streams", 3, "--batch-size", 4)[3]) == 2
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
