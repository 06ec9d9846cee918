"""Run a function in several processes that work together through Gloo, as torchrun would start them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def together(work: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns in each of `size` processes, by rank; `folder` is for their results.

    They are forked of a server that has imported torch, which takes each of them seconds otherwise; of this process
    they could inherit a lock that another thread held.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.get_context("forkserver").set_forkserver_preload(["torch", "torchvision", "cv2"])
    mp.start_processes(_work, (size, port, folder, work, arguments), nprocs=size, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _work(rank: int, size: int, port: int, folder: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    mp.set_start_method("fork", force=True)  # of data loaders' workers, as in programs that torchrun starts
    from utils.core import distributed

    with distributed.joined():
        torch.save(work(*arguments), folder / f"{rank}.pt")
