"""How fast a server answers: several clients side by side, each with a connection of its own and one request at a time.

That is what Triton's perf_analyzer calls concurrency. Requests of the first `warm_up` seconds do not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from utils.core.text_tables import aligned, columns
from utils.serving.protocol import Connection

if TYPE_CHECKING:
    from collections.abc import Iterable

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Load:
    """What was measured with so many clients.

    Attributes:
        concurrency: clients.
        images: in a request.
        seconds: that requests were counted for.
        latencies: milliseconds of each request that began and ended in that time, sorted.
    """

    concurrency: int
    images: int
    seconds: float
    latencies: tuple[float, ...]

    @property
    def throughput(self) -> float:
        """Images a second."""
        return len(self.latencies) * self.images / self.seconds

    def percentile(self, share: float) -> float:
        """Milliseconds that `share` percent of the requests took at most: the nearest rank. NaN without requests."""
        if not self.latencies:
            return float("nan")
        return float(np.percentile(self.latencies, share, method="inverted_cdf"))

    @property
    def mean(self) -> float:
        """Milliseconds. NaN without requests."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else float("nan")


def measure(
    connect: Callable[[], Connection], model: str, feeds: Mapping[str, np.ndarray], outputs: Sequence[str],
    *, concurrency: int, seconds: float, warm_up: float, clock: Callable[[], float] = time.perf_counter,
) -> Load:  # fmt: skip
    """Let `concurrency` clients ask the same, again and again.

    Args:
        connect: makes a client's connection.
        feeds: what is sent, a batch.

    Raises:
        QatError: what a client ran into first; the others are ended.
    """
    images = len(next(iter(feeds.values())))
    stop, failed = threading.Event(), []
    found: list[tuple[float, float]] = []
    ready = threading.Barrier(concurrency + 1)

    def ask() -> None:
        try:
            connection = connect()
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            failed.append(error)
            ready.abort()
            return
        try:
            ready.wait()
            while not stop.is_set():
                began = clock()
                connection.infer(model, feeds, outputs)
                found.append((began, clock()))
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001
            failed.append(error)
            stop.set()
        finally:
            connection.close()

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(concurrency)]
    for client in clients:
        client.start()
    try:
        ready.wait()
        since = clock() + warm_up
        stop.wait(warm_up + seconds)
    except threading.BrokenBarrierError:
        since = 0.0
    finally:
        stop.set()
    until = clock()
    for client in clients:
        client.join()
    if failed:
        raise failed[0]
    took = sorted(1000 * (ended - began) for began, ended in found if began >= since and ended <= until)
    return Load(concurrency, images, until - since, tuple(took))


def table(loads: Iterable[Load]) -> list[str]:
    """Lines: a row for each number of clients."""
    titles = (
        "clients",
        "images a request",
        "requests",
        "mean ms",
        *(f"p{share} ms" for share in PERCENTILES),
        "images/s",
    )
    rows = [
        (
            str(one.concurrency), str(one.images), str(len(one.latencies)), f"{one.mean:.2f}",
            *(f"{one.percentile(share):.2f}" for share in PERCENTILES), f"{one.throughput:.1f}",
        )
        for one in loads
    ]  # fmt: skip
    return aligned(columns(titles), rows)
