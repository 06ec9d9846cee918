"""The device that networks run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.core.errors import InputError

if TYPE_CHECKING:
    import torch


def select_device(text: str) -> torch.device:
    """The device that `--device` names.

    Args:
        text: '', 'cpu', a CUDA index such as '0', or 'cuda:0'.
    Raises:
        InputError: the device does not exist here, or several were named.
    """
    import torch

    name = text.strip().lower().removeprefix("cuda:")
    if name == "cuda":
        name = "0"
    if name == "cpu" or (name == "" and not torch.cuda.is_available()):
        return torch.device("cpu")
    name = name or "0"
    if not name.isdigit():
        raise InputError(f"--device {text!r} is neither 'cpu' nor one CUDA index such as 0")
    if int(name) >= torch.cuda.device_count():
        found = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise InputError(f"--device {text}: {found}; --device cpu works")
    return torch.device("cuda", int(name))


def device_name(device: torch.device) -> str:
    """The device in words, such as 'NVIDIA H200' or 'CPU'."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type.upper()
