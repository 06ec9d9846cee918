"""Several processes work on one job: `torchrun --nproc-per-node 2 qat.py quantize ...`, on one machine or several.

torchrun says in the environment which of them this process is. `utils/cli.py` opens the process group with `joined`
(Gloo for what lies in memory, NCCL for what lies on a GPU). Every process runs the same program on its share of each
batch, so that all of them call the same collectives in the same order. The main process logs, and writes: jobs call the
functions of `files.py` in every process. A process by itself never touches torch.distributed.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from utils.core import device
from utils.core.errors import InputError, QatError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")

TIMEOUT = timedelta(minutes=30)  # the longest that one process may let the others wait
PATIENCE = 10.0  # seconds of waiting for other processes before a line in the log
GRACE = 1.5  # seconds in which Python has to answer a signal, or else the process ends by itself
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
WORDS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
# texts in errors of Gloo and NCCL when another process is gone, or too late
_LOST = (
    "closed by peer",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "ncclremoteerror",
)
_LIBRARIES = ("gloo", "nccl", "c10d")  # in texts of errors; Gloo raises plain RuntimeErrors
LOST = "has ended or does not answer; its own line above, or its log, has the cause"


@dataclass(frozen=True)
class World:
    """This process among several: number `rank` of `size`, and number `local_rank` of those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def share(self, count: int) -> slice:
        """This process's part of `count` things in a row; the first processes have one more if a rest is left."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        length = each + 1 if self.rank < more else each
        return slice(start, start + length)


class _State:
    world = World()  # of the process group that is open


def launched() -> World:
    """Read torchrun's environment; without it, a process by itself. `InputError` for impossible numbers."""
    if any(name not in os.environ for name in VARIABLES):
        return World()
    rank = _number("RANK")
    size = _number("WORLD_SIZE")
    local_rank = _number("LOCAL_RANK")
    if not rank < size:
        raise InputError(f"RANK={rank} with WORLD_SIZE={size}: processes have the numbers 0 to WORLD_SIZE - 1")
    return World(rank, size, local_rank)


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"the environment has {name}={text!r}; expected a number, as torchrun sets it")
    return int(text)


def world() -> World:
    """The processes that work together now."""
    return _State.world


def is_main() -> bool:
    """True for the process that writes files, logs and shows progress."""
    return _State.world.rank == 0


@contextmanager
def joined() -> Iterator[World]:
    """Work with the processes that torchrun has started, if any; `QatError` if one has ended or does not answer."""
    world = launched()
    if world.size == 1 or _State.world.size > 1:
        yield _State.world
        return
    import torch
    import torch.distributed.nn  # before the group opens: imported later, it keeps the group's threads to the end
    from torch import distributed

    on_gpu = torch.cuda.is_available() and world.local_rank < torch.cuda.device_count()
    if on_gpu:
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        with _signals_end_waits():
            with _Meeting(world) as meeting:
                store = meeting.store()
                distributed.init_process_group(
                    backend,
                    store=store,
                    rank=world.rank,
                    world_size=world.size,
                    timeout=TIMEOUT,
                )
            _State.world, device.local_rank = world, world.local_rank
            yield world
            gather(None)  # go on when every process has come here
            distributed.destroy_process_group()  # not after an error: it would wait for the others
    except RuntimeError as error:
        text = str(error).lower()
        if not (isinstance(error, distributed.DistError) or any(name in text for name in _LIBRARIES)):
            raise
        problem = "the processes of this run cannot work together"
        if any(sign in text for sign in _LOST):
            problem = f"another process of this run {LOST}"
        raise QatError(f"{problem} ({_reason(error)})") from error
    finally:
        _State.world, device.local_rank = World(), None


def _reason(error: Exception) -> str:
    """The text of an error of torch's, without its stack of C++ and the source file in front."""
    text = re.sub(r"^\[[^]]*\] ", "", str(error).partition("Exception raised from")[0])
    return " ".join(text.split())[:300]


class _Meeting:
    """Meeting of a run's processes at MASTER_ADDR:MASTER_PORT; after 10 s the log names those that are missing.

    Raises `InputError` for a port that cannot be taken, `QatError` where processes do not come within `TIMEOUT`.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._host = os.environ["MASTER_ADDR"]
        self._port = _number("MASTER_PORT")
        if not 0 < self._port < 1 << 16:
            raise InputError(f"the environment has MASTER_PORT={self._port}; expected a port from 1 to 65535")
        self._place = f"{self._host}:{self._port}"
        self._missing = "process 0"
        self._reached = False
        self._until = time.monotonic() + TIMEOUT.total_seconds()
        self._timer = threading.Timer(PATIENCE, self._log_missing)  # a thread: torch waits outside Python
        self._timer.daemon = True

    def __enter__(self) -> _Meeting:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _log_missing(self) -> None:
        """Log what is missing: once on each machine, and in each process that has not reached the main process."""
        if self._world.local_rank == 0 or not self._reached:
            level = logging.INFO if self._world.rank == 0 else logging.WARNING  # others than the main one show warnings
            logger.log(level, "waiting for %s at %s", self._missing, self._place)

    def store(self) -> Store:
        """The store in which the processes find each other, when all of them are there."""
        from torch.distributed import PrefixStore, TCPStore

        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself listens at the port
        listens = self._world.rank == 0 and not agent
        if not listens:
            self._reach()
        self._reached = True
        host = "127.0.0.1" if listens else self._host
        try:
            tcp = TCPStore(host, self._port, is_master=listens, timeout=TIMEOUT, wait_for_workers=False)
        except RuntimeError as error:
            text = str(error)
            if listens and "EADDRINUSE" in text:
                raise InputError(
                    f"port {self._port} is in use; give torchrun another --master-port (without torchrun, set "
                    "MASTER_PORT)"
                ) from error
            raise InputError(f"the processes cannot meet at {self._place}: {_reason(error)}") from error
        # processes that torchrun starts again find the numbers of their predecessors in its store
        store = PrefixStore(f"overlay/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
        present = store.add("present", 1)
        while present < self._world.size:
            self._missing = f"{self._world.size - present} of {self._world.size} processes"
            self._pause()
            present = store.add("present", 0)
        self._missing = f"the connections of {self._world.size} processes"
        return store

    def _reach(self) -> None:
        """Wait until something listens at the port; torch's own client would fill the log meanwhile."""
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=5).close()
                return
            except OSError as error:
                self._missing = f"process 0 ({error.strerror or error})"
            self._pause()

    def _pause(self) -> None:
        if time.monotonic() > self._until:
            minutes = TIMEOUT.total_seconds() / 60
            raise QatError(f"{self._missing} did not come to {self._place} within {minutes:g} minutes")
        time.sleep(0.1)


@contextmanager
def _signals_end_waits() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process also while it waits for others outside Python, in Gloo or NCCL.

    Python's handlers run in the main thread when that returns to Python. The system's own handler writes a byte at
    once, and a thread reads it: where Python does not answer within `GRACE`, the thread ends the process.
    """
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in WORDS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return
    answered = threading.Event()

    def answer(number: int, frame: Any) -> None:
        answered.set()
        handlers[number](number, frame)

    def watch() -> None:
        while number := os.read(reader, 1)[0]:
            if number in handlers and not answered.wait(GRACE):
                os.write(2, f"{WORDS[signal.Signals(number)]}\n".encode())
                os._exit(128 + number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in handlers:
        signal.signal(number, answer)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")  # the end of the thread
        watcher.join()
        os.close(reader)
        os.close(writer)


def all_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all processes, the same in each of them; the given tensor may be changed."""
    if _State.world.size > 1:
        import torch
        from torch import distributed

        with torch.inference_mode(False):  # in torch 2.4 a collective cannot change a tensor of inference mode
            values = values.clone() if values.is_inference() else values
            distributed.all_reduce(values)
    return values


def gather(thing: Thing) -> list[Thing]:
    """Give the values of all processes, by rank, to each of them."""
    if _State.world.size == 1:
        return [thing]
    import torch
    from torch import distributed

    things: list[Any] = [None] * _State.world.size
    with torch.inference_mode(False):  # as in `all_sum`
        distributed.all_gather_object(things, thing)
    return things


def from_main(work: Callable[[], Thing]) -> Thing:
    """Let the main process do the work by itself, and give its result to all, or the `QatError` that it raised.

    Inside `work` the main process counts as the only one, so that `work` may call what all processes call elsewhere.
    """
    if _State.world.size == 1:
        return work()
    import torch
    from torch import distributed

    box: list[Any] = [None, None]
    if is_main():
        together, _State.world = _State.world, World()
        try:
            box[0] = work()
        except QatError as error:
            box[1] = error
        finally:
            _State.world = together
    distributed.broadcast_object_list(box, device=torch.device("cpu"))
    if box[1] is not None:
        raise box[1]
    result: Thing = box[0]
    return result
