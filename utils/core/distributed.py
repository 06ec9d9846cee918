"""Several processes work on one job: `torchrun --nproc-per-node 2 qat.py quantize ...`, on one machine or several.

torchrun says in the environment which of them this process is. `utils/cli.py` opens the process group with `joined`
(Gloo for what lies in memory, NCCL for what lies on a GPU). Every process runs the same program on its share of each
batch, so that all of them call the same collectives in the same order. The main process logs, and writes: jobs call the
functions of `files.py` in every process. A process by itself never touches torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from utils.core import device
from utils.core.errors import QatError

if TYPE_CHECKING:
    from torch import Tensor

Thing = TypeVar("Thing")

TIMEOUT = timedelta(minutes=30)  # the longest that one process may let the others wait
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
LOST = "another process of this run has ended or does not answer; what it says above, or its log, says why"
# what Gloo and NCCL say when another process is gone, or too late
_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "timed out", "broken pipe")


@dataclass(frozen=True)
class World:
    """Which process this is: number `rank` of `size`, and number `local_rank` of those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def share(self, count: int) -> slice:
        """This process's part of `count` things: neighbours; the first processes have one more where they must."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))


class _State:
    world = World()  # of the process group that is open


def launched() -> World:
    """What torchrun's environment says; a process by itself without it."""
    if any(name not in os.environ for name in VARIABLES):
        return World()
    return World(*(int(os.environ[name]) for name in VARIABLES[:3]))


def world() -> World:
    """The processes that work together now."""
    return _State.world


def is_main() -> bool:
    """Is this the process that writes files, logs and shows progress?"""
    return _State.world.rank == 0


@contextmanager
def joined() -> Iterator[World]:
    """Work with the processes that torchrun has started, if any; `QatError` if one has ended or does not answer."""
    world = launched()
    if world.size == 1 or _State.world.size > 1:
        yield _State.world
        return
    import torch
    import torch.distributed.nn  # before the group: later, it would hold the group, and its threads, to the end
    from torch import distributed

    on_gpu = torch.cuda.is_available() and world.local_rank < torch.cuda.device_count()
    if on_gpu:
        torch.cuda.set_device(world.local_rank)
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
        _State.world, device.local_rank = world, world.local_rank
        yield world
        gather(None)  # go on when every process has come here
        distributed.destroy_process_group()  # not after an error: it would wait for the others
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or any(sign in str(error).lower() for sign in _SIGNS):
            raise QatError(LOST) from error
        raise
    finally:
        _State.world, device.local_rank = World(), None


def all_sum(values: Tensor) -> Tensor:
    """The sum over all processes, the same in each of them; the given tensor may be changed."""
    if _State.world.size > 1:
        import torch
        from torch import distributed

        with torch.inference_mode(False):  # torch 2.4 changes no tensor of inference mode in a collective
            values = values.clone() if values.is_inference() else values
            distributed.all_reduce(values)
    return values


def gather(thing: Thing) -> list[Thing]:
    """What every process has, by rank, in each of them."""
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
    return box[0]
