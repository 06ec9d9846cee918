"""The device that networks run on, and the precision in which it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from utils.core.errors import InputError

if TYPE_CHECKING:
    import torch

local_rank: int | None = None  # this process's number on its machine, while several work together (`distributed.py`)


def select_device(text: str) -> torch.device:
    """The device that `--device` names: '', 'cpu', '0', 'cuda:0'; `InputError` for one that is not here, or several.

    Each of several processes takes the GPU of its own number on its machine, or the CPU.
    """
    import torch

    name = text.strip().lower().removeprefix("cuda:")
    if name == "cpu" or (name == "" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name in ("", "cuda"):
        name = str(local_rank or 0)
    elif local_rank is not None:
        raise InputError(f"--device {text}: every process takes the GPU of its own number; give --device cpu, or none")
    if not name.isdigit():
        raise InputError(f"--device {text!r} is neither 'cpu' nor one CUDA index such as 0")
    count = torch.cuda.device_count()
    if int(name) >= count:
        raise InputError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices; --device cpu works")
    return torch.device("cuda", int(name))


def device_name(device: torch.device) -> str:
    """The device in words, such as 'NVIDIA H200' or 'CPU'."""
    import torch

    if device.type != "cuda":
        return str(device.type).upper()
    return str(torch.cuda.get_device_name(device))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to a device; from the CPU to a GPU by pinned memory, so that nothing waits for the GPU.

    A tensor that is on a GPU already cannot be pinned, and stays where it is if that is the device.
    """
    if tensor.device.type != "cpu" or device.type != "cuda" or not len(tensor):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def disable_tf32() -> Iterator[None]:
    """Compute float32 convolutions and products on a GPU in float32, within this context.

    By default convolutions round their inputs to TF32's 10 bits of mantissa, which moves ranges and AP.
    """
    import torch

    settings = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.allow_tf32 = value
