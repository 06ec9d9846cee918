"""A stand-in for `torch.cuda`, on the CPU: everything runs at once, and an event is a tick."""

from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace

# Its clock, the CUDAGraph that is being captured, and what happened: (handle of a stream, what, tick of an event)
gpu = SimpleNamespace(ticks=0, graph=None, journal=[])


def enqueue(work):
    """Run this, or make it part of the graph that is being captured."""
    if gpu.graph is None:
        work()
    else:
        gpu.graph.work.append(work)


class Stream:
    handles = cycle(range(1001, 1033))  # as torch gives its streams

    def __init__(self, device=None):
        self.device, self.cuda_stream = device, next(self.handles)

    def synchronize(self):
        assert gpu.graph is None, "a capture must not synchronise"

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        assert event.tick is not None, "nothing was recorded that could be waited for"
        gpu.journal.append((self.cuda_stream, "waits for", event.tick))


class Event:
    def __init__(self, enable_timing=False, blocking=False):
        self.timed, self.blocking, self.tick = enable_timing, blocking, None

    def record(self, stream=None):
        gpu.ticks += 1
        self.tick = gpu.ticks
        gpu.journal.append((stream and stream.cuda_stream, "marks", self.tick))

    def elapsed_time(self, other):
        assert self.timed
        assert other.timed
        return float(other.tick - self.tick)

    def synchronize(self):
        gpu.journal.append(("host", "waits for", self.tick))


class CUDAGraph:
    def __init__(self):
        self.work = []

    def replay(self):
        assert self.work, "an empty graph"
        for work in self.work:
            work()


@contextmanager
def graph(captured, stream=None, capture_error_mode="global"):
    assert capture_error_mode == "thread_local", "another thread may pin memory"
    gpu.graph = captured
    try:
        yield
    finally:
        gpu.graph = None


@contextmanager
def stream(stream):
    yield


def current_stream(device=None):
    return Stream(device)
