"""The memory in which loading processes hand their batches over, of which a container often has 64 MB only."""

from __future__ import annotations

import logging
import multiprocessing.queues
import os
import signal
import traceback
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

FOLDER = "/dev/shm"
AHEAD = 2  # batches that each process reads ahead, torch's default
IN_USE = 2  # of all processes, that are computed with or on their way to a GPU
USABLE = 0.8  # of what is free: labels and other programs take some, too
ADVICE = "give the container more (docker run --shm-size=8g)"


def loading_processes(workers: int, batch: int, sharing: int = 1) -> tuple[int, int]:
    """How many processes can read ahead, and how many batches each, in the shared memory that is free.

    Args:
        workers: at most so many.
        batch: bytes of a batch.
        sharing: so many programs share the memory.

    Returns:
        No process and no batch where there is not enough for one of each.
    """
    free = _free()
    if free is None or not workers:
        return workers, AHEAD if workers else 0
    room = int(USABLE * free / sharing) // max(batch, 1) - IN_USE
    fitting = max(min(workers, room), 0)
    if fitting < workers:
        needed = (workers * AHEAD + IN_USE) * batch * sharing / USABLE
        _tell(
            f"shared memory ({FOLDER}) has {free / 1e6:.0f} MB free, and {workers} loading processes need "
            f"{needed / 1e6:.0f} MB: {fitting or 'none'} will read images, which takes longer; {ADVICE}"
        )
    return fitting, min(AHEAD, room // fitting) if fitting else 0


def end_when_it_is_full() -> None:
    """In a loading process: end where a batch cannot be handed over, as when the kernel ends it for that.

    The main process then says so. Python by itself drops the batch, for which the main process waits for ever.
    """
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # torch's prints a line of its own
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]


def explained(error: BaseException) -> str | None:
    """What to tell the user if a loading process has ended since shared memory was full; otherwise None."""
    reasons = (error, error.__cause__)  # torch raises one error from the other
    if not any(isinstance(one, RuntimeError) and "Bus error" in str(one) for one in reasons):
        return None
    return f"a loading process ended, since shared memory ({FOLDER}) was full; {ADVICE}, or take fewer --workers"


def _end(error: BaseException, _: Any) -> None:
    if isinstance(error, (ConnectionError, EOFError)):  # the main process has gone, and says why
        os._exit(1)
    text = str(error)
    if "shared memory" in text and "open files" not in text:
        signal.raise_signal(signal.SIGBUS)  # to this thread: by os.kill another one gets it, later
    traceback.print_exception(error)
    os._exit(1)


def _free() -> int | None:
    """Bytes that are free; None where the system has no such folder, and so no such limit."""
    try:
        found = os.statvfs(FOLDER)
    except (OSError, AttributeError):
        return None
    return found.f_bavail * found.f_frsize


@cache
def _tell(line: str) -> None:
    logger.warning(line)
