"""Runs a PyTorch network: float, or with fake quantizers."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from utils.core.device import device_name, disable_tf32
from utils.core.input_spec import channels_of
from utils.core.tasks import BOX, IMAGES, predicted, task_of_head
from utils.core.text import plural
from utils.core.weights import FLOAT_HASH
from utils.runners.base import Runner, TensorSpec


class TorchRunner(Runner):
    """A network called as upstream calls it: `model(images)` gives what `Task.named` takes apart.

    It is used in evaluation mode where it is, without a copy; closing puts the mode back.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        *,
        imgsz: int | tuple[int, int] | None = None,
        data: str | None = None,
        float_hash: str = "",
    ) -> None:
        """Move `model` to `device`; it has `names` and `stride`, as upstream's have, and its last layer is the head.

        `imgsz`, side or (height, width) in pixels, `data`, the dataset's YAML, and `float_hash`, that of the FP32
        weights that it was made from, go into its metadata.
        """
        device = torch.device(device)
        self._mode = model.training
        self.model = model.to(device).eval()
        names = getattr(model, "names", None)
        if isinstance(names, (list, tuple)):
            names = dict(enumerate(names))
        stride = int(torch.as_tensor(getattr(model, "stride", 32)).max())
        head = last_layer(model)
        self._task = task_of_head(head)
        nm = int(getattr(head, "nm", 0))
        metadata = {"stride": str(max(stride, 32)), "task": self._task.name}
        rows = None
        if isinstance(names, dict):
            metadata["names"] = json.dumps({int(key): str(name) for key, name in names.items()})
            rows = BOX + len(names) + nm
        for name, value in (("imgsz", imgsz), ("data", data), (FLOAT_HASH, float_hash)):
            if value:
                metadata[name] = str(value)
        words = [f"PyTorch {torch.__version__.split('+')[0]}", device_name(device)]
        if device.type == "cpu":
            words.append(plural(torch.get_num_threads(), "thread"))
        words.append("float32")
        shapes = ((None, rows, None), (None, nm, None, None))  # predictions, and prototypes if there are masks
        outputs = []
        for name, shape in zip(self._task.outputs, shapes, strict=False):
            outputs.append(TensorSpec(name, shape, "float32"))
        super().__init__(
            inputs=[TensorSpec(IMAGES, (None, channels_of(model), None, None), "float32")],
            outputs=outputs,
            metadata=metadata,
            device=device,
            description=", ".join(words),
        )

    def _infer(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode(), disable_tf32():
            result: Any = self.model(feeds[IMAGES])
        return dict(zip(self._task.outputs, predicted(result), strict=True))

    def _close(self) -> None:
        self.model.train(self._mode)
        del self.model


def last_layer(model: Any) -> Any:
    """The last of a network's layers; the network itself if it is not a sequence of layers."""
    layers = getattr(model, "model", None)
    if isinstance(layers, nn.Sequential):
        return layers[-1]
    return model
