"""What is enqueued on which stream, with one context and with several, with copies and without; on a stand-in."""

from __future__ import annotations

import time

import fake_tensorrt
import pytest
import torch
from one_conv import write_onnx
from tensorrt_stand_in import stand_in

from utils.runners.base import TensorSpec
from utils.trt import timing
from utils.trt.build_config import BuildConfig
from utils.trt.builder import build
from utils.trt.context import Execution
from utils.trt.timing import TimingConfig

CPU = torch.device("cpu")


def execution(folder, monkeypatch, shape=(2, 3, 8, 8), **changes):
    api = stand_in(monkeypatch)
    path = write_onnx(folder / "a.onnx", shape)
    made = build(path, folder / "a.engine", BuildConfig(progress=False, **changes)).path
    return Execution(made, api, CPU)


@pytest.fixture
def journal(monkeypatch):
    """What happens on each stream, in order: `(stream, what)`; streams are numbered as they are made."""
    found, numbers = [], {}

    def number(stream):
        return numbers.setdefault(id(stream), (len(numbers), stream))[0]

    record, synchronize = fake_tensorrt.FakeCuda.Event.record, fake_tensorrt.FakeCuda.Event.synchronize
    names = {}

    def recorded(self, stream=None):
        found.append((number(stream), "mark"))
        names[id(self)] = (len(found), self)
        record(self, stream)

    def waited(self, event):
        assert event.tick is not None
        found.append((number(self), f"waits for {names[id(event)][0]}"))

    def synchronized(self):
        found.append(("host", f"waits for {names[id(self)][0]}"))
        synchronize(self)

    monkeypatch.setattr(fake_tensorrt.FakeCuda.Event, "record", recorded)
    monkeypatch.setattr(fake_tensorrt.FakeCuda.Event, "synchronize", synchronized)
    monkeypatch.setattr(fake_tensorrt.FakeCuda.Stream, "wait_event", waited)
    return found


def test_copies_have_streams_of_their_own_and_wait_for_what_they_need(tmp_path, monkeypatch, journal):
    lane = timing._Lane(execution(tmp_path, monkeypatch), TimingConfig())
    lane.enqueue(timing._Samples())
    assert journal == [
        (0, "mark"), (0, "mark"),  # the input is copied
        (1, "waits for 2"), (1, "mark"), (1, "mark"),  # the run
        (2, "waits for 5"), (2, "mark"), (2, "mark"),  # the outputs are copied
    ]  # fmt: skip
    lane.enqueue(timing._Samples())
    assert len(lane._waiting) == 2
    lane.wait(1)
    assert journal[-1] == ("host", "waits for 8")
    assert len(lane._waiting) == 1


def test_exposed_copies_are_on_the_stream_of_the_run(tmp_path, monkeypatch, journal):
    lane = timing._Lane(execution(tmp_path, monkeypatch), TimingConfig(overlap=False))
    lane.enqueue(timing._Samples())
    assert {stream for stream, _ in journal} == {0}


def test_contexts_side_by_side_are_fed_in_turn_and_each_has_one_query_ahead(tmp_path, monkeypatch, journal):
    one = execution(tmp_path, monkeypatch)
    other = one.sibling()
    assert other.stream is not one.stream
    samples = timing._Samples()
    config = TimingConfig(transfers=False)
    timing._run([timing._Lane(one, config), timing._Lane(other, config)], 0, 4, samples)
    streams = [stream for stream, what in journal if what == "mark"]
    assert streams == [0, 0, 1, 1, 0, 0, 1, 1]
    waits = [what for stream, what in journal if stream == "host"]
    assert waits == [f"waits for {number}" for number in (2, 4, 6, 8)]
    assert journal.index(("host", waits[0])) == 8  # both contexts have two queries before the first is waited for
    assert samples.figures().parts["compute"].count == 4


def test_throughput_is_that_of_all_contexts(tmp_path, monkeypatch):
    one = execution(tmp_path, monkeypatch)
    groups = {"one": [one], "two": [one, one.sibling()]}
    config = TimingConfig(0, 0, 1, transfers=False, iterations=10)
    ran = len(one.api.module.calls)
    found = timing.measure(groups, config)
    assert [figures.parts["compute"].count for figures in found.values()] == [10, 10]
    assert len(one.api.module.calls) - ran == 10 + 10 + 1 + 2  # and a query of each context to warm up


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sibling_has_its_own_buffers(tmp_path, monkeypatch, dynamic):
    """With dynamic shapes the engine is loaded twice: the stand-in lets nobody ask for a profile that is in use."""
    shape, changes = (("b", 3, 8, 8), {"batch": (1, 2, 2)}) if dynamic else ((2, 3, 8, 8), {})
    one = execution(tmp_path, monkeypatch, shape, **changes)
    one.set_shapes({"images": (2, 3, 8, 8)})
    other = one.sibling()
    assert (other.engine is one.engine) is not dynamic
    one.buffers["images"].fill_(1)
    other.buffers["images"].fill_(2)
    for each in (one, other):
        each.run()
    assert torch.allclose(other.buffers["output0"], 2 * one.buffers["output0"])
    assert one.buffers["output0"].abs().sum() > 0
    one.close()
    other.graph().replay()  # it does not need the first one


@pytest.mark.parametrize(("dtype", "least"), [("uint8", 0), ("int8", -128), ("float16", 0), ("float32", 0)])
def test_inputs_of_any_type_are_random_and_copied(tmp_path, monkeypatch, dtype, least):
    stand_in(monkeypatch)

    class Plain:
        inputs, outputs, device = [TensorSpec("images", (4, 3, 8, 8), dtype)], [], CPU
        stream = fake_tensorrt.FakeCuda.Stream()

        def __init__(self):
            self.buffers = {"images": torch.zeros(4, 3, 8, 8, dtype=getattr(torch, dtype))}

        def run(self):
            pass

    plain = Plain()
    lane = timing._Lane(plain, TimingConfig())
    values = plain.buffers["images"].float()
    assert values.std() > 0.2
    assert values.min() >= least
    assert bool(values.max() > 100) is (dtype in ("uint8", "int8"))
    plain.buffers["images"].zero_()
    lane.enqueue(timing._Samples())
    assert torch.equal(plain.buffers["images"], lane.memory["images"])


def test_on_a_cpu_a_run_is_timed_by_the_clock():
    class Slow:
        inputs, outputs, device, stream = [TensorSpec("images", (1,), "float32")], [], CPU, None

        def __init__(self):
            self.buffers, self.runs = {"images": torch.zeros(1)}, 0

        def run(self):
            self.runs += 1
            time.sleep(0.004)

    slow = Slow()
    figures = timing.measure({"a": slow}, TimingConfig(0, 0, 2, cuda_graph=True, iterations=6))["a"]
    assert slow.runs == 8
    assert set(figures.parts) == {"latency"}
    assert figures.parts["latency"].count == 6
    assert 4 <= figures.parts["latency"].median < 100
    assert figures.qps < 250
