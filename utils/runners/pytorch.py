"""Runs a PyTorch network: float, or with fake quantizers."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from utils.core.device import device_name, full_float32
from utils.core.errors import InputError
from utils.core.tasks import DETECT, IMAGES
from utils.runners.base import Runner, TensorSpec


class TorchRunner(Runner):
    """A detector called as upstream calls it: `model(images)` gives the predictions, alone or first in a tuple.

    It is used in evaluation mode where it is, without a copy; closing puts the mode back.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, half: bool = False) -> None:
        """Move `model` to `device`.

        Args:
            model: with `names` and `stride`, as upstream's have them.
            half: run a float16 copy of it; on CUDA only.
        """
        device = torch.device(device)
        if half and device.type != "cuda":
            raise InputError(f"half precision needs a CUDA device, this is {device.type}; use float32")
        self._mode = model.training
        self._model = (deepcopy(model).half() if half else model).to(device).eval()
        names = _names(model)
        stride = getattr(model, "stride", 32)
        metadata = {"stride": str(max(int(torch.as_tensor(stride).max()), 32)), "task": DETECT.name}
        if names is not None:
            metadata["names"] = json.dumps(names)
        dtype = "float16" if half else "float32"
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        rows = None if names is None else 4 + len(names)
        super().__init__(
            inputs=[TensorSpec(IMAGES, (None, 3, None, None), dtype)],
            outputs=[TensorSpec(DETECT.prediction, (None, rows, None), dtype)],
            metadata=metadata,
            device=device,
            description=f"PyTorch {torch.__version__.split('+')[0]}, {device_name(device)}{threads}, {dtype}",
        )

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode(), full_float32():
            result: Any = self._model(feeds[IMAGES])
        while isinstance(result, (tuple, list)):
            result = result[0]
        return {DETECT.prediction: result}

    def _close(self) -> None:
        self._model.train(self._mode)
        del self._model


def _names(model: nn.Module) -> dict[int, str] | None:
    names = getattr(model, "names", None)
    if isinstance(names, (list, tuple)):
        names = dict(enumerate(names))
    return {int(key): str(name) for key, name in names.items()} if isinstance(names, dict) else None
