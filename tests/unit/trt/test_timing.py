"""What is enqueued on which stream, with copies and without; and the figures."""

import time

import fake_cuda
import numpy as np
import pytest
import torch
from tensorrt_stand_in import CPU, build_engine, stand_in

from utils.trt import timing
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


def test_so_many_queries_at_least_whatever_the_duration(execution):
    config = TimingConfig(0, 0, 3, cuda_graph=True, transfers=False, iterations=10)
    figures = timing.time_interleaved({"a": execution}, config)["a"]
    assert set(figures.parts) == {"latency", "compute", "enqueue"}
    assert figures.parts["compute"].count == 12


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
def test_a_wait_sleeps_unless_it_is_to_spin(execution, monkeypatch, spin):
    seen = set()
    monkeypatch.setattr(fake_cuda.Event, "synchronize", lambda self: seen.add(self.blocking))
    timing.time_interleaved({"a": execution}, TimingConfig(0, 0, 1, spin_wait=spin, iterations=2))
    assert seen == {not spin}


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
