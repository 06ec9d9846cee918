"""Latency and throughput: figures from known times, and clients that fail."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from utils.core.errors import InputError
from utils.serving.load import Load, measure, table
from utils.serving.protocol import ServerError

FEEDS = {"images": np.zeros((2, 3, 4, 4), np.float32)}


def test_percentiles_are_nearest_ranks():
    load = Load(1, 2, 10.0, tuple(float(value) for value in range(1, 201)))
    assert [load.percentile(share) for share in (50, 90, 95, 99, 100)] == [100, 180, 190, 198, 200]
    assert load.mean == pytest.approx(100.5)
    assert load.throughput == 40.0
    one = Load(1, 1, 1.0, (3.0,))
    assert [one.percentile(share) for share in (50, 99)] == [3.0, 3.0]
    values = sorted(np.random.default_rng(0).exponential(size=57))
    many = Load(1, 1, 1.0, tuple(values))
    for share in (50, 90, 95, 99):
        assert many.percentile(share) == np.percentile(values, share, method="inverted_cdf")


def test_no_requests_are_said():
    lines = table([Load(4, 1, 1.0, ())])
    assert lines[1].split() == ["4", "1", "0", "nan", "nan", "nan", "nan", "nan", "0.0"]


class Slow:
    """A connection whose server takes 10 ms."""

    made: list[Slow]
    lock = threading.Lock()

    def __init__(self) -> None:
        self.asked, self.closed = 0, False
        with Slow.lock:
            Slow.made.append(self)

    def infer(self, model, feeds, outputs):
        assert (model, set(feeds), outputs) == ("m", {"images"}, ["a"])
        assert not self.closed
        self.asked += 1
        time.sleep(0.01)
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _fresh():
    Slow.made = []


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_ask_side_by_side(clients):
    found = measure(Slow, "m", FEEDS, ["a"], concurrency=clients, seconds=0.2, warm_up=0.05)
    assert (found.concurrency, found.images) == (clients, 2)
    assert 0.15 < found.seconds < 2
    assert found.latencies == tuple(sorted(found.latencies))
    assert found.latencies[0] >= 10
    assert len(found.latencies) < sum(one.asked for one in Slow.made)  # those of the warm-up do not count
    assert found.throughput == pytest.approx(2 * len(found.latencies) / found.seconds)
    assert len(Slow.made) == clients
    assert all(one.closed and one.asked for one in Slow.made)


def test_what_a_client_runs_into_is_raised_and_all_end():
    class Failing(Slow):
        def infer(self, model, feeds, outputs):
            super().infer(model, feeds, outputs)
            if self is Slow.made[1] and self.asked == 3:
                raise ServerError("out of memory")
            return {}

    began = time.perf_counter()
    with pytest.raises(ServerError, match="out of memory"):
        measure(Failing, "m", FEEDS, ["a"], concurrency=3, seconds=20, warm_up=0)
    assert time.perf_counter() - began < 10
    assert all(one.closed for one in Slow.made)


def test_a_client_that_cannot_connect_ends_all():
    number = itertools.count()

    def connect() -> Slow:
        if next(number) == 1:
            raise InputError("no server answers")
        return Slow()

    with pytest.raises(InputError, match="no server answers"):
        measure(connect, "m", FEEDS, ["a"], concurrency=3, seconds=20, warm_up=0)
    assert all(one.closed and not one.asked for one in Slow.made)
